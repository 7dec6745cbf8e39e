"""Models of the check, runners of them, and the answers that a machine without a GPU has prepared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends import PROVIDERS, OnnxRunner, Provider
from edgeinfer.base.cache_dir import cache_root
from edgeinfer.bench import token_ids
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.graph import ModelConfig
from edgeinfer.memory_planner import default_threads
from edgeinfer.runner import Runner, Sequence

PROMPT, NEW = 32, 24
"""Tokens of the prompt of a golden answer, and of its greedy continuation."""
CHUNK = 512
"""Tokens of a prompt in one forward pass."""
LAYERS, WORDS = 2, 2048
"""Of a family's small shape, by the name of a shape and ``:small``; hybrids have more layers."""


class Golden(NamedTuple):
    """Greedy answer of a model on onnxruntime's CPU provider in f32."""

    ids: NDArray[np.int64]
    """Prompt and continuation, PROMPT + NEW."""
    logits: NDArray[np.float32]
    """After each token that was fed from the prompt's last on, (NEW, vocabulary)."""
    rounding: float
    """Largest difference of the CPU provider's f16 from `logits`, as a share of the largest logit."""


def bundle_of(name: str) -> Path:
    """Return a bundle, or one with random weights of a shape, which is written into the cache once."""
    from edgeinfer.cli.commands.bench_run import find_bundle
    from edgeinfer.cli.progress import ProgressLine
    from edgeinfer.converters import SHAPES

    with ProgressLine() as progress:
        if name.endswith(":small"):
            return _small(name.removesuffix(":small"), progress)
        shape = name if name in SHAPES else None
        return find_bundle(None if shape else name, shape, "q4", 32, progress)


def _small(name: str, progress: Any) -> Path:
    from edgeinfer.converters import SHAPES, write_random_bundle
    from edgeinfer.models import cached_bundle

    whole = SHAPES[name]
    layers = _layers(whole)
    layered: dict[str, Any] = {one.name: value[:layers] for one in fields(whole)
               if isinstance(value := getattr(whole, one.name), tuple) and len(value) == whole.num_hidden_layers}
    if r := whole.recurrent:
        layered["recurrent"] = replace(r, layers=tuple(i for i in r.layers if i < layers))
    config = replace(whole, **layered, num_hidden_layers=layers, vocab_size=WORDS, max_position_embeddings=1024)
    return cached_bundle(f"{layers} layers of {name}", f"small-{name}", lambda target: write_random_bundle(
        config, target, "q4", 32, overwrite=True), progress=progress)


def _layers(config: ModelConfig) -> int:
    """Number of the first layers that a small shape has: of a hybrid up to the first with attention."""
    if not config.recurrent:
        return LAYERS
    attends = [i for i in range(config.num_hidden_layers) if i not in config.recurrent.layers]
    return max(LAYERS, attends[0] + 1 if attends else 0)


@contextmanager
def opened(path: Path, provider: Provider, **options: Any) -> Iterator[OnnxRunner]:
    """Open a runner with KV of its device's first type."""
    config = RuntimeConfig(**{"kv": provider.kv[0], "prefill_chunk": CHUNK, **options})
    runner = OnnxRunner(Bundle.open(path), config, provider)
    try:
        yield runner
    finally:
        runner.close()


def prompt_of(runner: Runner, n_tokens: int) -> list[int]:
    """Return the first ids of a fixed sequence without visible order."""
    return list(islice(token_ids(runner.model.vocab_size), n_tokens))


def filled(runner: Runner, n: int, depth: int) -> list[Sequence]:
    """Return n sequences of this depth, the first of which is read and the others forked."""
    first = runner.new_sequence()
    runner.prefill(first, prompt_of(runner, max(depth, 1)))
    return [first, *(runner.fork(first) for _ in range(n - 1))]


def median_step(runner: Runner, held: list[Sequence], n: int) -> float:
    """Return the median seconds of n decode steps, of which the first record graphs and are not counted."""
    ids, times = token_ids(runner.model.vocab_size), list[float]()
    for _ in range(n + 3):
        began = time.perf_counter()
        runner.decode(held, [next(ids) for _ in held])
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def followed(runner: Runner, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Feed a golden answer and return the logits after each of its tokens, from the prompt's last on."""
    sequence = runner.new_sequence()
    rows = [runner.prefill(sequence, ids[:PROMPT].tolist()).copy()]
    rows += [runner.decode([sequence], [int(token)])[0].copy() for token in ids[PROMPT:-1]]
    runner.release(sequence)
    return np.stack(rows)


def golden(name: str, path: Path) -> Golden:
    """Return the prepared answer of a model, which is computed on the CPU provider unless the cache has it."""
    kept = cache_root() / "gpu-check" / f"{name.replace(':', '-')}-{Bundle.open(path).identity[:16]}.npz"
    if kept.exists():
        with np.load(kept, allow_pickle=False) as found:
            return Golden(found["ids"], found["logits"], float(found["rounding"]))
    here, options = PROVIDERS["onnx-cpu"], {"ctx": 64, "threads": default_threads()}
    with opened(path, here, **options, kv="f32") as runner:
        sequence, ids = runner.new_sequence(), prompt_of(runner, PROMPT)
        rows = [runner.prefill(sequence, ids).copy()]
        for _ in range(NEW - 1):
            ids.append(int(rows[-1].argmax()))
            rows.append(runner.decode([sequence], [ids[-1]])[0].copy())
    answer, logits = np.array([*ids, rows[-1].argmax()], np.int64), np.stack(rows)
    with opened(path, here, **options, kv="f16") as runner:
        rounding = difference(followed(runner, answer), logits)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("wb") as file:
        np.savez(file, ids=answer, logits=logits, rounding=rounding)
    return Golden(answer, logits, rounding)


def difference(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Return the largest difference as a share of the largest logit; infinite where something is not finite."""
    worst = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return worst if np.isfinite(worst) else float("inf")
