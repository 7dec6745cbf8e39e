"""Answers of `plan` and `run` to the same question, over models of every kind and random options."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from edgeinfer.cli.commands import run as command
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import UsageError
from edgeinfer.graph import ModelConfig, read_config
from edgeinfer.runtime import plan_run
from tests.helpers import golden_cases
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import OF_256, write_gguf
from tests.helpers.offloaded import CONFIG, made
from tests.helpers.sessions import TINY, WINDOWED

BYTES = 300
"""Vocabulary of models that draft for each other."""
PLAIN = {
    "plain": replace(TINY, vocab_size=BYTES),
    "deep": replace(TINY, num_hidden_layers=4, hidden_size=128, intermediate_size=2048, vocab_size=BYTES),
    "wide": replace(TINY, num_hidden_layers=3, hidden_size=256, intermediate_size=4096),
}
ONNX, NO_GPU = "edgeinfer.backends.onnx", "There is no GPU."


class Case(NamedTuple):
    """One model with options."""

    model: str
    flags: tuple[str, ...]
    memory: int
    """Bytes that the machine can give."""
    card: int
    """Free memory of its GPU; 0 for none."""


class Answer(NamedTuple):
    """The common part of the answers of `plan` and `run`."""

    code: int
    sentence: str
    """Why it is refused."""
    mode: str = ""
    total: int = 0
    on_device: int = 0
    budget: int = 0


def of_family(name: str, **sizes: object) -> ModelConfig:
    """The config of a golden case, with other sizes."""
    return read_config({**golden_cases.config_of(name), "max_position_embeddings": 256, **sizes})


def models(folder: Path) -> dict[str, Path]:
    """Models of each kind that plans tell apart: streamed by layers or experts, windows, shared and latent KV, sparse
    FFNs, checkpoints and GGUF files that are converted first."""
    found = {name: folder / name for name in ("experts", "more-experts", "windows", "shared", "latent", "sparse",
                                              "neurons")}
    for name, config in PLAIN.items():
        for kind in ("q4", "f16"):
            found[f"{name}-{kind}"] = path = folder / f"{name}-{kind}"
            write_random_bundle(replace(config, windows=(0,) * config.num_hidden_layers), path, kind, 32)
    write_random_bundle(of_family("qwen3-moe", hidden_size=128, moe_intermediate_size=256, num_hidden_layers=3,
                                  num_experts=16), found["experts"])
    write_random_bundle(of_family("gpt-oss"), found["more-experts"])
    write_random_bundle(replace(WINDOWED, intermediate_size=1024), found["windows"])
    write_random_bundle(of_family("gemma4"), found["shared"])
    write_random_bundle(of_family("deepseek-v2"), found["latent"])
    made(found["sparse"], replace(CONFIG, vocab_size=BYTES))
    write_random_bundle(replace(CONFIG, vocab_size=BYTES, hidden_act="relu"), found["neurons"], ffn_layout="neuron")
    found["checkpoint"] = make_checkpoint(folder / "source", **OF_256 | {"num_hidden_layers": 3})
    for kind in ("Q4_K", "Q6_K", "Q8_0"):
        found[kind] = folder / f"{kind}.gguf"
        write_gguf(found[kind], found["checkpoint"], {"blk": kind, "token_embd": "Q8_0", "output": "F16"})
    return found


def options(chance: random.Random, name: str, paths: dict[str, Path]) -> Iterator[tuple[object, ...]]:
    """Random options of a run, of which most runs have few."""
    yield "-c", chance.choice([16, 64, 100, 256])
    yield "-t", chance.choice([1, 2, 3])
    yield from [("--prefill-chunk", chance.choice([8, 64, 256]))] * (chance.random() < 0.5)
    yield from [("--kv-memory", f"{chance.uniform(2, 400):.3f}kB")] * (chance.random() < 0.2)
    yield from [("-n", chance.choice([1, 8, 40]))] * (chance.random() < 0.3)
    kind = chance.random()
    if kind < 0.2:
        yield "--samples", chance.choice([2, 5])
    elif kind < 0.35:
        yield "--beams", chance.choice([2, 4])
    elif kind < 0.6:
        yield from speculation(chance, name, paths)
    if name in ("sparse", "neurons") and chance.random() < 0.7:
        yield "--sparse", chance.choice(["exact", "off", *["predict"] * (4 if name == "sparse" else 1)])
    yield from [chance.choice([("--attention", "top:4"), ("--attention", "eps:0.01"), ("--lazy", "keep=0.7,0.5"),
                               ("--recipe", "none"), ("--max-kld", 0), ("--head", "screened"),
                               ("--mlock",)])] * (chance.random() < 0.2)
    if name in ("checkpoint", "Q4_K"):
        yield from [("--weights", "int8" if name == "Q4_K" else "f16")] * (chance.random() < 0.4)
        yield from [("--group-size", 64)] * (chance.random() < 0.2)
    device = chance.choice(["auto", "cuda", "onnx-cpu"]) if chance.random() < 0.25 else ""
    yield from [("--device", device)] * bool(device)
    yield from [("--no-mmap",)] * (chance.random() < (0.05 if device else 0.3))
    kinds = {"": ["int8", "f16", "f32"], "onnx-cpu": ["f16", "f32"]}.get(device, ["f16"])
    yield from [("--kv", chance.choice(kinds if chance.random() < 0.95 else ["int8"]))] * (chance.random() < 0.7)
    if device and chance.random() < 0.4:
        yield "--kv-layout", chance.choice(["pages", "slots"])


def speculation(chance: random.Random, name: str, paths: dict[str, Path]) -> Iterator[tuple[object, ...]]:
    """Options of drafting."""
    drafts = {"deep-q4": ["plain-q4", "plain-f16", "deep-q4"], "deep-f16": ["plain-q4", "deep-q4", "windows"],
              "Q6_K": ["Q4_K", "Q8_0"]}
    if name in drafts and chance.random() < 0.8:
        yield "--draft", paths[chance.choice(drafts[name])]
    else:
        yield "--speculate", chance.choice(["off", "lookup", "self", "self"])
    yield from [("--draft-tokens", chance.choice([1, 3, 8]))] * (chance.random() < 0.4)


BUDGETS = 3
"""Of each combination of a model with options."""


def cases(paths: dict[str, Path], n: int, seed: int) -> Iterator[Case]:
    """Random models, options and budgets, of which most lie where the answer changes."""
    chance = random.Random(seed)
    while n > 0:
        name = chance.choice([*sorted(paths), *["sparse"] * 2])  # which runs in more ways than others
        flags = [str(word) for option in options(chance, name, paths) for word in option]
        card = 0 if "--device" not in flags or chance.random() < 0.2 else 1 << 40
        case = Case(str(paths[name]), tuple(flags), 1 << 40, card)
        whole = planned(case)
        found = [case] if not whole.total else [within(case, whole, chance, size(paths[name])) for _ in range(BUDGETS)]
        yield from found[:n]
        n -= len(found)


def size(path: Path) -> int:
    """Bytes of a model."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def within(case: Case, whole: Answer, chance: random.Random, spread: int) -> Case:
    """Return a case with less memory or little more than all of it takes, as a budget or as the machine's memory."""
    least = whole.total + chance.randint(-max(spread, 100_000) // 2, max(spread, 100_000) // 4)
    if whole.on_device:
        case = case._replace(card=case.card and whole.on_device + chance.randint(-spread, spread // 2))
        least = least if chance.random() < 0.2 else max(least, whole.total)
    if chance.random() < 0.2:
        return case._replace(memory=least)
    spelled = chance.choice([str(least), f"{least / 1e6:.3f}MB", f"{least / 2**20:.4f}MiB"])
    return case._replace(flags=(*case.flags, "--budget", spelled))


@contextmanager
def machine(case: Case) -> Iterator[None]:
    """A machine with this memory and this GPU, on which onnxruntime opens nothing."""
    def gpu(*_: object) -> int:
        if not case.card:
            raise UsageError(NO_GPU)
        return case.card

    with ExitStack() as patched:
        for name in ("fitting.gpu_free_bytes", "runner.gpu_free_bytes", "devices.check_cuda"):
            patched.enter_context(mock.patch(f"{ONNX}.{name}", gpu))
        for name in ("Slabs", "Sessions", "model_folder"):
            patched.enter_context(mock.patch(f"{ONNX}.runner.{name}"))
        patched.enter_context(
            mock.patch("edgeinfer.memory_planner.request.process_budget", lambda: case.memory))
        yield


def planned(case: Case) -> Answer:
    """Return the answer of `edgeinfer plan`."""
    with machine(case):
        done = edgeinfer("plan", case.model, *case.flags, "--json")
    said = done.json
    if "total_bytes" not in said or "mode" not in said:
        return Answer(done.code, said["error"]["message"])
    return Answer(done.code, said.get("error", {}).get("message", ""), said["mode"], said["total_bytes"],
                  said.get("device_bytes") or 0, said["budget_bytes"])


def run(case: Case, whole: bool = False) -> Answer:
    """Return the decision of `edgeinfer run`; it ends when the model is planned, or when the `whole` of it is open."""
    found: list[Answer] = []

    def opened(runner: Any, *_: object, **__: object) -> None:
        plan, config = runner.plan, runner.config
        budget = runner.budget_bytes if runner.device == "cpu" else config.budget_bytes or case.memory
        found.append(Answer(0, "", plan.mode, plan.total_bytes, plan.device_bytes, budget))
        raise SystemExit(0)

    def planned(*given: Any) -> None:
        run = plan_run(*given)
        found.append(Answer(0, "", run.plan.mode, run.plan.total_bytes, 0, run.budget_bytes))
        raise SystemExit(0)

    with machine(case), mock.patch.object(command, "announce", opened), \
            mock.patch("edgeinfer.runtime.session.plan_run", plan_run if whole else planned):
        done = edgeinfer("run", case.model, "a", *case.flags, "--json")
    if found:
        return found[0]
    said = done.json
    if "total_bytes" not in said:
        return Answer(done.code, said["error"]["message"])
    return Answer(done.code, said["error"]["message"], "refused", said["total_bytes"],
                  said.get("device_bytes", 0), said["budget_bytes"])


def agree(case: Case, said: Answer, decided: Answer) -> bool:
    """Return whether both are the same answer.

    On a machine without a GPU `plan --device cuda` is for one that has it, and says that `run` refuses here.
    """
    return said == decided or (decided == Answer(2, NO_GPU) and not case.card and "cuda" in case.flags)
