"""Hot and cold neurons against budgets: tokens/s beside streaming of the same bundle, bytes per token, hit rate.

    python benchmarks/offload.py BUNDLE [--shares 0.3,0.5,0.7,1] [--tokens 24] [--rounds 3]

BUNDLE has a predictor, such as converters/synthetic/random_bundle.py writes with --density, --skew and --predictor. A
share is that of the FFNs' bytes that the budget allows beside everything else. Storage is read past the page cache.
Predicted is by `offload.predict`, from the time of a token with all in memory and from the speed of reads of a
cluster's size, both measured here, in the same minute. docs/explanation/offload.md has the outcome.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from readers import kernel_threads

from edgeinfer.bundle import Bundle, Statistics, read_statistics
from edgeinfer.config import RuntimeConfig
from edgeinfer.devices import estimate, local_profile
from edgeinfer.errors import BudgetError
from edgeinfer.memory_planner import READ_BYTES, MemoryPlan
from edgeinfer.models.describe import describe
from edgeinfer.offload import predict
from edgeinfer.registry import placer, recipe_with
from edgeinfer.runtime import Session
from edgeinfer.runtime.weights.slots import READERS as SCATTERED_READERS
from edgeinfer.runtime.weights.stream import READERS

CTX, PROMPT, WARM_UP = 512, 32, 8


def config(threads: int, budget: int | None = None, mode: str = "predict") -> RuntimeConfig:
    """Return the settings of one program."""
    return RuntimeConfig(ctx=CTX, prefill_chunk=PROMPT, threads=threads, budget_bytes=budget,
                         recipe=recipe_with(sparse=mode))


class Reading(NamedTuple):
    """Times of tokens, medians of rounds."""

    prompt: float
    """Seconds of one of a prompt."""
    token: float
    """Seconds of a decoded token."""
    empty: float
    """Seconds of a token that finds an empty cache; nan without one."""
    waited: float
    """Seconds of `token` spent waiting for storage."""
    missed: float
    """Clusters read for a decoded one, and"""
    wanted: float
    """those that it wanted."""


def measure(session: Session, tokens: int, rounds: int, warm_up: int = WARM_UP) -> Reading:
    """Take the time of prompts and tokens, of which none comes again; each round begins where the last one ended."""
    ids, executor = iter(np.random.default_rng(1).integers(3, session.model.vocab_size, 10 * CTX).tolist()), \
        session.executor
    sequence, found = session.new_sequence(), []

    def seconds(work: Callable[[], object], n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            work()
        return (time.perf_counter() - began) / n

    def step() -> None:
        session.decode([sequence], [next(ids)])

    def counts() -> NDArray[np.int64]:
        return np.array([executor.waited_ns, *(executor.stream.hits[:0:-1] if session.plan.cold else (0, 0))])

    for _ in range(rounds):
        session.truncate(sequence, 0)
        prompt = seconds(lambda: session.prefill(sequence, [next(ids) for _ in range(PROMPT)]), 1) / PROMPT
        seconds(step, warm_up)
        before = counts()
        token, empty, own = seconds(step, tokens), [], (counts() - before) / tokens
        for _ in range(tokens if session.plan.cold else 0):
            executor.stream.forget()
            empty.append(seconds(step, 1))
        found.append((prompt, token, median(empty) if empty else np.nan, own[0] / 1e9, own[1], own[1] + own[2]))
    session.release(sequence)
    return Reading(*map(median, zip(*found, strict=True)))


def disk(session: Session, path: Path, nbytes: int, seconds: float = 0.5) -> tuple[float, float]:
    """Return GB/s of the readers' threads on their own: at places of a file in no order, and in order."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size, read = os.fstat(file).st_size, kernel_threads(session.executor.kernels, session.executor.pool)
    order = np.random.default_rng(2).permutation(size // nbytes - 1) * nbytes
    found = (read(file, SCATTERED_READERS, order, nbytes, seconds),
             read(file, READERS, np.arange(0, size - READ_BYTES + 1, READ_BYTES), READ_BYTES, seconds))
    os.close(file)
    return found


class Machine(NamedTuple):
    """Basis of the predictions."""

    seconds: float
    """Seconds of a token with all in memory, with the predictor."""
    dense: float
    """The same without, all neurons computed as exact runs do."""
    storage: Callable[[float], float]
    """GB/s of scattered reads of so many bytes."""
    in_order: float


def predicted(plan: MemoryPlan, statistics: Statistics | None, machine: Machine) -> tuple[float, float, float]:
    """Return tokens/s of a plan: with an empty cache, with one of independent tokens, with all in memory."""
    if not plan.cold:
        own = max(machine.dense, plan.streamed_bytes / machine.in_order / 1e9)
        return (1 / own,) * 3
    assert statistics
    empty, alone = (predict(plan.cold, statistics, machine.seconds, machine.storage, hits) for hits in (0.0, None))
    return 1 / empty.seconds, 1 / alone.seconds, 1 / machine.seconds


def profiled(path: Path) -> Machine | None:
    """Return the inputs of `run`'s prediction: this machine's profile, at the beginning of a context."""
    profile = local_profile()
    if profile is None or not profile.storage_random or not profile.storage_sequential_gbs:
        return None
    found = [1 / estimate(profile, describe(path, recipe=recipe_with(sparse=mode)).traffic("int8")).decode_tok_per_s
             for mode in ("predict", "exact")]
    return Machine(*found, lambda nbytes: profile.storage_random.at(round(nbytes)), profile.storage_sequential_gbs)


def speeds(found: Sequence[float]) -> str:
    return " / ".join(f"{speed:.2f}" for speed in dict.fromkeys(found))


def row(asked: argparse.Namespace, bundle: Bundle, budget: int, whole: Machine) -> Iterator[str]:
    """Measure a budget: streamed by an exact run, and hot and cold, where these fit."""
    statistics, known = read_statistics(bundle), profiled(asked.bundle)

    def expected(plan: MemoryPlan, gbs: tuple[float, float]) -> Iterator[str]:
        yield speeds(predicted(plan, statistics, whole._replace(storage=lambda _: gbs[0], in_order=gbs[1])))
        yield speeds(predicted(plan, statistics, known)) if known else "-"

    for mode in asked.modes.split(","):
        try:
            session = Session(Bundle.open(asked.bundle), config(asked.threads, budget, mode),
                              placer=placer(bundle.config, bundle))
        except BudgetError:
            yield f"{mode}: does not fit"
            continue
        with closing(session):
            plan, cold = session.plan, session.plan.cold
            if (mode == "exact") != bool(plan.parts):
                yield f"{mode}: {'streamed' if plan.parts else 'all in memory'}"
                continue
            file, size = ("cold.bin", cold.cluster_bytes) if cold else ("weights.bin", 1 << 13)
            gbs = disk(session, asked.bundle / file, size)
            if plan.parts:
                took, nbytes = measure(session, 2, asked.rounds, 1), session.executor.stream.bytes_per_pass
                own = [f"{len(plan.parts)} layers streamed", f"{nbytes / 1e6:.0f}", f"{1 / took.token:.2f}"]
            else:
                took = measure(session, asked.tokens, asked.rounds)
                own = [f"hot {sum(cold.hot) / cold.neurons / len(cold.hot):.0%}, slots {cold.slots}",
                       f"{took.missed * cold.cluster_bytes / 1e6:.1f}", f"{1 / took.token:.2f}",
                       f"hits {1 - took.missed / took.wanted:.0%}, "
                       f"independent {predict(cold, statistics, 1, lambda _: 1).hit_rate:.0%}",
                       f"waiting {took.waited / took.token:.0%}", f"cache emptied: {1 / took.empty:.2f}, "
                       f"{predict(cold, statistics, 1, lambda _: 1, 0.0).flash_bytes / 1e6:.0f} MB"]
            again = disk(session, asked.bundle / file, size)
            gbs = ((gbs[0] + again[0]) / 2, (gbs[1] + again[1]) / 2)
            beside, before = expected(plan, gbs)
            yield " | ".join([*own, f"prompt {1 / took.prompt:.0f}", f"disk {gbs[0]:.3f}, {gbs[1]:.3f}",
                              f"predicted {beside}", f"by profile {before}"])


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser()
    options.add_argument("bundle", type=Path)
    options.add_argument("--shares", default="0.3,0.5,0.7")
    options.add_argument("--of", choices=("ffn", "model"), default="ffn")
    options.add_argument("--modes", default="predict,exact")
    options.add_argument("--tokens", type=int, default=24)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    asked = options.parse_args()
    bundle = Bundle.open(asked.bundle)
    ffn = sum(entry.nbytes for entry in bundle.tensors.values() if entry.type.layout == "neuron")
    times = {}
    for mode in ("predict", "exact"):
        with closing(Session(Bundle.open(asked.bundle), config(asked.threads, None, mode))) as session:
            if mode == "predict":
                needs = session.plan.total_bytes
            times[mode] = measure(session, 6, 2, 1)
            print(f"all in memory, {mode}: {1 / times[mode].token:.2f} tokens/s, prompt {1 / times[mode].prompt:.0f}, "
                  f"plan {session.plan.total_bytes / 1e6:.0f} MB, of it FFNs {ffn / 1e6:.0f}", flush=True)
    whole = Machine(times["predict"].token, times["exact"].token, lambda _: 1.0, 1.0)
    if known := profiled(asked.bundle):
        print(f"by profile: {1 / known.seconds:.2f}, {1 / known.dense:.2f}")
    for share in map(float, asked.shares.split(",")):
        budget = round(share * needs) if asked.of == "model" else needs - round((1 - share) * ffn)
        for line in row(asked, bundle, budget, whole):
            print(f"| {share:.0%} | {budget / 1e6:.0f} | {line} |", flush=True)


if __name__ == "__main__":
    main()
