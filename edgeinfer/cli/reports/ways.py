"""Ways to run a model on several machines: one alone, the layers split, or the prompt on one and tokens on another."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...errors import printable
from ..output import folded, print_table, speed
from .nodes import nodes_object

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

    from ...config import RuntimeConfig
    from ...models.description import ModelDescription
    from ...pipeline import Link

ALONE, SPLIT, APART = "alone", "split", "apart"
ROW_BYTES, NAME = 4, 23
FIELD = ("with --nodes: `link`, `nodes` as in `plan --nodes`, `answer` tokens, and `ways`, the fastest first: `kind` "
         "(alone, split, or apart: the prompt on one node and tokens on another), `nodes`, `layers` of each in a "
         "split, `fits`, `ttft_ms`, `decode_tok_per_s` with the context full and its band `low`, `high`, `total_ms` of "
         "the prompt and the answer, `link_bytes` of a token, and `prompt_link_bytes` of the prompt")


def ways_object(model: ModelDescription, config: RuntimeConfig, profiles: list[DeviceProfile], link: Link,
                prompt: int, n: int) -> dict[str, Any]:
    """Return the JSON object of a model on several machines.

    Parameters
    ----------
    model : ModelDescription
    config : RuntimeConfig
        With a context.
    profiles : list of DeviceProfile
        In the order of the layers.
    link : Link
        Between any two of them.
    prompt, n : int
        Tokens of the prompt and of the answer.

    Raises
    ------
    UsageError, UnsupportedModelError
        As `nodes_object`.
    """
    report = nodes_object(model, config, profiles, link, prompt)
    ways = [*_alone(model, config, profiles, report), _split(model, config, profiles, report),
            *_apart(model, config, profiles, report, link)]
    for way in ways:
        first, token = way["ttft_ms"], 1000 / way["decode_tok_per_s"]
        way["total_ms"] = None if first is None else first + token * (n - 1)
    ways.sort(key=lambda way: (not way["fits"], way["total_ms"] or 1000 * n / way["decode_tok_per_s"]))
    return {"model": model.name, "ctx": report["ctx"], "kv": report["kv"], "prompt": report["prompt"], "answer": n,
            "link": report["link"], "nodes": report["nodes"], "unlike": report["unlike"], "ways": ways}


def _found(profile: DeviceProfile, model: ModelDescription, config: RuntimeConfig, prompt: int) -> dict[str, Any]:
    from edgeinfer.devices import estimate

    traffic = model.traffic(config.kv)
    full, empty = (estimate(profile, traffic, depth, prompt) for depth in (int(config.ctx or 0), 0))
    return {"ttft_ms": empty.ttft_ms, "decode_tok_per_s": full.decode_tok_per_s, "low": full.low, "high": full.high,
            "error": full.error}


def _alone(model: ModelDescription, config: RuntimeConfig, profiles: list[DeviceProfile], report: dict[str, Any]
           ) -> Iterator[dict[str, Any]]:
    """Yield each node alone, those of one kind once."""
    seen = set[str]()
    for profile, node in zip(profiles, report["nodes"], strict=True):
        if node["title"] not in seen:
            seen.add(node["title"])
            yield {"kind": ALONE, "nodes": [node["name"]], "layers": None, "fits": node["alone_fits"],
                   **_found(profile, model, config, report["prompt"]), "link_bytes": 0, "prompt_link_bytes": 0}


def _split(model: ModelDescription, config: RuntimeConfig, profiles: list[DeviceProfile], report: dict[str, Any]
           ) -> dict[str, Any]:
    value, hops = report["decode_tok_per_s"], 2 * (len(profiles) - 1) - 1  # the first node gets ids alone
    error = max(_found(profile, model, config, 1)["error"] for profile in profiles)
    rows = ROW_BYTES * model.config.hidden_size * hops
    return {"kind": SPLIT, "nodes": [node["name"] for node in report["nodes"]],
            "layers": [node["layers"] for node in report["nodes"]], "fits": report["fits"],
            "ttft_ms": report["ttft_ms"], "decode_tok_per_s": value, "low": value * (1 - error),
            "high": value * (1 + error), "error": error, "link_bytes": rows,
            "prompt_link_bytes": rows * report["prompt"]}


def _apart(model: ModelDescription, config: RuntimeConfig, profiles: list[DeviceProfile], report: dict[str, Any],
           link: Link) -> Iterator[dict[str, Any]]:
    """Yield the prompt on one node and tokens on another, whose memory the keys and values are sent to."""
    nbytes = round(model.traffic(config.kv).sequence_bytes_at(report["prompt"]))
    seen = set[tuple[str, str]]()
    for (first, one), (second, other) in permutations(zip(profiles, report["nodes"], strict=True), 2):
        if one["title"] == other["title"] or (one["title"], other["title"]) in seen:
            continue
        seen.add((one["title"], other["title"]))
        here, there = (_found(profile, model, config, report["prompt"]) for profile in (first, second))
        sent = 1000 * (link.seconds + nbytes / link.bytes_per_s)
        yield {"kind": APART, "nodes": [one["name"], other["name"]], "layers": None,
               "fits": one["alone_fits"] and other["alone_fits"], **there,
               "ttft_ms": None if here["ttft_ms"] is None else here["ttft_ms"] + sent, "link_bytes": 0,
               "prompt_link_bytes": nbytes}


def print_ways(out: dict[str, Any]) -> None:
    """Print the object for people, the answer first."""
    link, ways = out["link"], out["ways"]
    print("\n".join(folded(_verdict(ways))) + "\n")
    rows = [("way", "fits", "first", "tok/s", "80 % band", f"all {out['answer']}", "link")]
    for way in ways:
        first, total = way["ttft_ms"], way["total_ms"]
        sent = way["link_bytes"] or way["prompt_link_bytes"]
        rows.append((_short(way), "yes" if way["fits"] else "no", "" if first is None else f"{first / 1000:.2f} s",
                     speed(way["decode_tok_per_s"]), f"{speed(way['low'])}-{speed(way['high'])}",
                     "" if total is None else f"{total / 1000:.1f} s", format_size(sent) if sent else ""))
    print_table(rows, right=[2, 3, 5, 6])
    print()
    for line in _remarks(out, link):
        print("\n".join(folded(line)))


def _name(way: dict[str, Any]) -> str:
    if way["kind"] == APART:
        return f"prompt {way['nodes'][0]}, rest {way['nodes'][1]}"
    return "+".join(way["nodes"]) if way["kind"] == SPLIT else f"{way['nodes'][0]} alone"


def _short(way: dict[str, Any]) -> str:
    """Return the name of a way for the table, of long names the first letters."""
    mark = {APART: " > ", SPLIT: "+", ALONE: ""}[way["kind"]]
    room = NAME - len(mark) * (len(way["nodes"]) - 1)
    full = mark.join(way["nodes"])
    return full if len(full) <= NAME else mark.join(name[: room // len(way["nodes"])] for name in way["nodes"])


def _verdict(ways: list[dict[str, Any]]) -> str:
    """Return the answer: the fastest way, and splitting the layers compared with one machine."""
    if not (fitting := [way for way in ways if way["fits"]]):
        return "It does not fit, neither on one node nor split; add a node, or choose a smaller model or --ctx."
    top = fitting[0]
    first = "" if top["ttft_ms"] is None else f"first word after {top['ttft_ms'] / 1000:.2f} s, then "
    said = f"{_name(top)} is the fastest: {first}{speed(top['decode_tok_per_s'])} tokens/s."
    split = next(way for way in ways if way["kind"] == SPLIT)
    alone = [way for way in fitting if way["kind"] == ALONE]
    if not alone:
        return f"{said} No node has memory for the whole model."
    best = max(alone, key=lambda way: way["decode_tok_per_s"])
    share = split["decode_tok_per_s"] / best["decode_tok_per_s"]
    return (f"{said} Splitting the layers gives {speed(split['decode_tok_per_s'])}, {share:.2f} x {best['nodes'][0]} "
            "alone.")


def _remarks(out: dict[str, Any], link: dict[str, Any]) -> Iterator[str]:
    split = next(way for way in out["ways"] if way["kind"] == SPLIT)
    layers = ", ".join(f"{name} {first}-{last}" for name, (first, last) in zip(split["nodes"], split["layers"],
                                                                               strict=True))
    yield (f"Split: layers {layers}, as many as take the same time; {format_size(split['link_bytes'])} go over "
           f"{printable(link['name'])} for a token ({format_size(round(link['bytes_per_s']))} a second, "
           f"{link['latency_ms']:g} ms a message) and {format_size(split['prompt_link_bytes'])} for the prompt of "
           f"{out['prompt']}.")
    yield (f"'all {out['answer']}' is the time of an answer of so many tokens after the prompt. 'a > b' has the prompt "
           "on a and tokens on b: keys and values go over the link once.")
    yield ("Tokens of one sequence go through one node after the other, so a split gains memory, and speed for several "
           "sequences and long prompts alone.")
    yield from out["notes"]
    if out["unlike"]:
        yield "The nodes' instruction sets compute different bits, so 'serve --split' refuses them together."
