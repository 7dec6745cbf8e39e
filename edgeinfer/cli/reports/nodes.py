"""Plan of a model whose layers are on several machines: memory of each, the speed, and one machine alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from edgeinfer import devices

from ... import pipeline
from ...base.units import format_size
from ...config import RuntimeConfig, Step
from ...errors import UsageError
from ..output import folded, print_table, speed
from .plan_object import MAX_THREADS

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Traffic
    from edgeinfer.memory_planner import MemoryPlan

    from ...models.description import ModelDescription
    from ...pipeline import Link, Split

PROMPT = 512
DEFAULT_LINK = "1GbE"
FIELDS = {
    "nodes": "with --nodes, instead of the others except `model`, `fits`, `ctx` and `kv`: per node, in the order of "
    "their layers, `name`, `title`, `layers` (first and last), `weight_bytes`, `kv_bytes`, `total_bytes`, "
    "`budget_bytes`, `fits`, `token_ms` (its layers), `link_ms` (its messages for a token), and of the whole model on "
    "it `alone_fits`, `alone_tok_per_s`",
    "link": "with --nodes: `name`, `bytes_per_s`, `latency_ms` of a message one way",
    "decode_tok_per_s": "with --nodes: of one sequence, with the context full; with `prompt`, tokens, and `ttft_ms`, "
    "null where a peak is not known",
    "alone": "with --nodes: the fastest node that holds the whole model, its `decode_tok_per_s`, and whether it is "
    "`faster` than all together; null where none does",
    "unlike": "with --nodes: whether the nodes have different arithmetic, so that 'serve --split' refuses them",
}
"""Fields of the JSON object."""


class Stage(NamedTuple):
    """One node with its layers."""

    profile: DeviceProfile
    layers: tuple[int, int]
    traffic: Traffic
    """Traffic of its layers alone, like the plan."""
    plan: MemoryPlan
    budget: int


def nodes_object(model: ModelDescription, config: RuntimeConfig, profiles: list[DeviceProfile], link: Link,
                 prompt: int = PROMPT) -> dict[str, Any]:
    """Return the JSON object of a model on these machines, in the order of its layers; for a prompt of so many tokens.

    Raises
    ------
    UsageError, UnsupportedModelError
        A machine's profile is that of a GPU, or the model cannot be split between so many.
    """
    from edgeinfer.memory_planner import resolve

    for profile in profiles:
        _check(profile)
    config = resolve(config, model.config)
    depth, hidden, traffic = int(config.ctx or 0), model.config.hidden_size, model.traffic(config.kv)
    stages = _placed(model, config, profiles, traffic)
    alone = [_alone(model, config, profile, traffic) for profile in profiles]
    nodes = [_node(stage, depth) | {"link_ms": 1000 * seconds} | one for stage, seconds, one in zip(
        stages, _waits(link, len(stages), 1, hidden), alone, strict=True)]
    token = math.fsum(node["token_ms"] + node["link_ms"] for node in nodes) / 1000
    prompt = min(prompt, depth)
    best = max((node for node in nodes if node["alone_fits"]), key=lambda node: node["alone_tok_per_s"], default=None)
    return {
        "model": model.name, "fits": all(node["fits"] for node in nodes), "ctx": depth, "kv": config.kv, "nodes": nodes,
        "link": {"name": link.name, "bytes_per_s": link.bytes_per_s, "latency_ms": 1000 * link.seconds},
        "decode_tok_per_s": 1 / token, "prompt": prompt,
        "ttft_ms": _first_word(stages, prompt, config.prefill_chunk, link, hidden),
        "alone": best and {"node": best["name"], "decode_tok_per_s": best["alone_tok_per_s"],
                           "faster": best["alone_tok_per_s"] > 1 / token},
        "unlike": len({_arithmetic(profile) for profile in profiles}) > 1,
    }


def _check(profile: DeviceProfile) -> None:
    """Refuse a machine on which none of our kernels runs."""
    from edgeinfer.kernels import ISA_LEVELS

    if profile.isa not in {isa.name for isa in ISA_LEVELS}:
        raise UsageError(f"--nodes names {profile.name}, whose profile is of {profile.isa}, and the layers of a split "
                         "model run on processors; name a processor ('edgeinfer devices' lists them).")


def _arithmetic(profile: DeviceProfile) -> str:
    from edgeinfer.kernels import ISA_LEVELS, Kernels

    return Kernels(next(isa for isa in ISA_LEVELS if isa.name == profile.isa)).arithmetic


def _budget(profile: DeviceProfile, config: RuntimeConfig) -> int:
    """Return the memory of a node: --budget, else the available memory of this machine, or the memory in a profile."""
    from edgeinfer.memory_planner import budget_of

    here = config.budget_bytes is not None or profile.name == "local"
    return budget_of(config) if here else profile.usable_bytes


def _placed(model: ModelDescription, config: RuntimeConfig, profiles: list[DeviceProfile], traffic: Traffic
            ) -> list[Stage]:
    """Give each machine as many layers as take the same time on all, of which it has room for."""
    depth = int(config.ctx or 0)
    speeds = [devices.estimate(profile, traffic, depth).decode_tok_per_s for profile in profiles]
    sizes = pipeline.layer_sizes(model.graph, config.kv, depth * config.max_sequences)
    stages = _stages(model, config, profiles, pipeline.auto_split(model.graph, speeds))
    if any(stage.plan.total_bytes > stage.budget for stage in stages):
        rooms = [stage.budget - stage.plan.total_bytes + sum(sizes[stage.layers[0] : stage.layers[1] + 1])
                 for stage in stages]
        stages = _stages(model, config, profiles, pipeline.auto_split(model.graph, speeds, sizes, rooms))
    return stages


def _stages(model: ModelDescription, config: RuntimeConfig, profiles: list[DeviceProfile], split: Split
            ) -> list[Stage]:
    from edgeinfer.graph import LAYER_RANGE, build_graph, expected_types

    found = []
    for profile, layers in zip(profiles, split, strict=True):
        step = Step(LAYER_RANGE, tuple(zip(("first", "last"), layers, strict=True)))
        recipe = model.recipe.replacing(LAYER_RANGE, step)
        graph = build_graph(model.config, expected_types(model.graph.types), recipe)
        part = replace(model, graph=graph, recipe=recipe)
        plan = _plan(part, model, config, profile)
        found.append(Stage(profile, layers, part.traffic(config.kv), plan, _budget(profile, config)))
    return found


def _plan(part: ModelDescription, whole: ModelDescription, config: RuntimeConfig, profile: DeviceProfile
          ) -> MemoryPlan:
    from edgeinfer.bundle import file_offsets
    from edgeinfer.memory_planner import Planner, to_request

    threads = min(profile.cores, MAX_THREADS)
    planner = Planner(part.graph, whole.weight_bytes, file_offsets(whole.graph))
    return planner.plan(to_request(replace(config, threads=threads)))


def _node(stage: Stage, depth: int) -> dict[str, Any]:
    profile, plan = stage.profile, stage.plan
    regions = {region.name: region.nbytes for region in plan.regions}
    token = 1000 / devices.estimate(profile, stage.traffic, depth).decode_tok_per_s
    return {
        "name": profile.name, "title": profile.titled, "layers": list(stage.layers),
        "weight_bytes": sum(regions.get(name, 0) for name in ("weights", "rows", "resident")),
        "kv_bytes": regions.get("kv", 0), "total_bytes": plan.total_bytes, "budget_bytes": stage.budget,
        "fits": plan.total_bytes <= stage.budget, "token_ms": token,
    }


def _alone(model: ModelDescription, config: RuntimeConfig, profile: DeviceProfile, traffic: Traffic
           ) -> dict[str, Any]:
    fits = _plan(model, model, config, profile).total_bytes <= _budget(profile, config)
    found = devices.estimate(profile, traffic, int(config.ctx or 0))
    return {"alone_fits": fits, "alone_tok_per_s": found.decode_tok_per_s}


def _waits(link: Link, stages: int, n_tokens: int, hidden: int) -> list[float]:
    return [pipeline.link_seconds(link, i, stages, n_tokens, hidden) for i in range(stages)]


def _first_word(stages: list[Stage], prompt: int, chunk: int, link: Link, hidden: int) -> float | None:
    """Return the milliseconds of a prompt, each of whose passes goes through in as many parts as are fastest."""
    total = 0.0
    for start in range(0, prompt, chunk):
        n = min(chunk, prompt - start)
        times = [_in_parts(stages, start, n, parts, link, hidden)
                 for parts in pipeline.PartCounts(len(stages)).choices(n, n, prompt=True)]
        if None in times:
            return None
        total += min(time for time in times if time is not None)
    return 1000 * total


def _in_parts(stages: list[Stage], depth: int, n: int, parts: int, link: Link, hidden: int) -> float | None:
    """Return the seconds of a pass over n tokens of a prompt in some parts; None where a peak is not known."""
    size = -(-n // parts)
    found = [devices.estimate(stage.profile, stage.traffic, depth, size).ttft_ms for stage in stages]
    if None in found:
        return None
    waits = _waits(link, len(stages), size, hidden)
    return pipeline.pass_seconds([(ms or 0) / 1000 + wait for ms, wait in zip(found, waits, strict=True)], parts)


def print_nodes(report: dict[str, Any]) -> None:
    """Print the object for people."""
    wait = "" if report["ttft_ms"] is None else \
        f", {report['prompt']}-token prompt in {speed(report['ttft_ms'] / 1000)} s"
    fits = "It fits" if report["fits"] else "It does not fit"
    print(f"{fits} on {len(report['nodes'])} nodes; {speed(report['decode_tok_per_s'])} tok/s{wait}\n")
    print_table([("node", "layers", "weights", "KV", "in all", "of", "a token", "link"), *_rows(report["nodes"])],
                right=[2, 3, 4, 5, 6, 7])
    print()
    for line in _remarks(report):
        print("\n".join(folded(line)))


def _rows(nodes: Iterable[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for node in nodes:
        sizes = (format_size(node[name]) for name in ("weight_bytes", "kv_bytes", "total_bytes", "budget_bytes"))
        yield (node["name"], "{}-{}".format(*node["layers"]), *sizes, f"{node['token_ms']:.1f} ms",
               f"{node['link_ms']:.1f} ms")


def _remarks(report: dict[str, Any]) -> Iterator[str]:
    link, alone = report["link"], report["alone"]
    yield (f"The link {link['name']} carries {format_size(round(link['bytes_per_s']))} a second and delays a message "
           f"by {link['latency_ms']:g} ms; the server runs on the last node.")
    if alone is None:
        yield "No node has memory for the whole model."
    elif alone["faster"]:
        yield (f"{alone['node']} alone holds the model and is faster: {speed(alone['decode_tok_per_s'])} tok/s. Use it "
               "alone.")
    else:
        yield f"{alone['node']} alone holds the model too, at {speed(alone['decode_tok_per_s'])} tok/s."
    yield ("One sequence gains memory, not speed, because its tokens go through one node after the other; several "
           "sequences and long prompts keep all nodes busy.")
    for node in report["nodes"]:
        if not node["fits"]:
            yield (f"{node['name']} lacks {format_size(node['total_bytes'] - node['budget_bytes'])}; add a node, or "
                   "lower --ctx.")
    yield from report["notes"]
    if report["unlike"]:
        yield ("The nodes' instruction sets compute different bits, so 'serve --split' refuses them together; use "
               "nodes of one kind.")
