"""Hot and cold neurons against budgets: tokens/s beside streaming of the same bundle, bytes per token, hit rate.

    python benchmarks/offload.py BUNDLE [--shares 0.3,0.5,0.7,1] [--tokens 24] [--rounds 3]

BUNDLE has a predictor, such as converters/random_bundle.py writes with --density, --skew and --predictor. A share is
that of the FFNs' bytes that the budget allows beside everything else. Storage is read past the page cache. Predicted is
what `offload.predict` says, from the time of a token with all in memory and from the speed of reads of a cluster's
size, both measured here, in the same minute. docs/offload.md has the outcome.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from storage_reads import kernel_threads

from edgeinfer.bundle import Bundle, read_statistics
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.offload import placer, predict
from edgeinfer.runtime import Session
from edgeinfer.runtime.slots import READERS

CTX, PROMPT, WARM_UP = 512, 32, 16


def config(threads: int, budget: int | None = None, mode: str = "predict") -> RuntimeConfig:
    """Return the settings of one program."""
    return RuntimeConfig(ctx=CTX, prefill_chunk=PROMPT, threads=threads, budget_bytes=budget,
                         recipe=Recipe().sparse(mode))


class Reading(NamedTuple):
    """Seconds, medians of rounds."""

    prompt: float
    """Of a token of a prompt."""
    token: float
    """Of a decoded one."""
    empty: float
    """Of one that finds an empty cache; nan without one."""


def measure(session: Session, tokens: int, rounds: int, warm_up: int = WARM_UP) -> Reading:
    """Take the time of prompts and tokens; each round begins where the last one ended."""
    ids = iter(np.random.default_rng(1).integers(3, session.model.vocab_size, 10 * CTX).tolist())
    sequence, found = session.new_sequence(), []

    def seconds(work: Callable[[], object], n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            work()
        return (time.perf_counter() - began) / n

    def step() -> None:
        session.decode([sequence], [next(ids)])

    for _ in range(rounds):
        session.truncate(sequence, 0)
        prompt = seconds(lambda: session.prefill(sequence, [next(ids) for _ in range(PROMPT)]), 1) / PROMPT
        seconds(step, warm_up)
        token, empty = seconds(step, tokens), []
        for _ in range(tokens if session.plan.cold else 0):
            session.executor.stream.forget()
            empty.append(seconds(step, 1))
        found.append((prompt, token, median(empty) if empty else np.nan))
    session.release(sequence)
    return Reading(*map(median, zip(*found, strict=True)))


def scattered(session: Session, path: Path, nbytes: int, seconds: float = 0.5) -> float:
    """Return GB/s of the readers' threads on their own, at places of the file in no order."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    order = np.random.default_rng(2).permutation(os.fstat(file).st_size // nbytes - 1) * nbytes
    found = kernel_threads(session.executor.kernels, session.executor.pool)(file, READERS, order, nbytes, seconds)
    os.close(file)
    return found


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser()
    options.add_argument("bundle", type=Path)
    options.add_argument("--shares", default="0.3,0.5,0.7")
    options.add_argument("--tokens", type=int, default=24)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    asked = options.parse_args()
    bundle = Bundle.open(asked.bundle)
    statistics = read_statistics(bundle)
    ffn = sum(entry.nbytes for entry in bundle.tensors.values() if entry.type.layout == "neuron")
    with closing(Session(Bundle.open(asked.bundle), config(asked.threads))) as session:
        needs, whole = session.plan.total_bytes, measure(session, asked.tokens, asked.rounds)
    print(f"all in memory: {1 / whole.token:.1f} tokens/s, {1000 * whole.token:.1f} ms, prompt {1 / whole.prompt:.0f} "
          f"tokens/s; plan {needs / 1e6:.0f} MB, of it FFNs {ffn / 1e6:.0f}")
    print("| FFN bytes | plan, MB | hot | slots | hit rate | MB a token | tokens/s | waiting | no cache: MB a token | "
          "GB/s | tokens/s | predicted | prompt, tokens/s | streamed: MB a token | tokens/s | prompt | ratio | "
          "empty cache |\n" + "|---" * 18 + "|")
    for share in map(float, asked.shares.split(",")):
        budget = needs - round((1 - share) * ffn)
        with closing(Session(Bundle.open(asked.bundle), config(asked.threads, budget, "exact"))) as session:
            streamed, walk = measure(session, 2, 1 + asked.rounds // 2, 1), session.executor.stream.bytes_per_walk
        limited = config(asked.threads, budget)
        with closing(Session(Bundle.open(asked.bundle), limited, place=placer(bundle))) as session:
            plan = session.plan.cold
            assert plan and statistics
            gbs = scattered(session, asked.bundle / "cold.bin", plan.cluster_bytes)
            took = measure(session, asked.tokens, asked.rounds)
            nbytes, hit_rate, waited = watch(session, asked.tokens)
            expected = predict(plan, statistics, whole.token, lambda _, gbs=gbs: gbs, hit_rate=0.0)
            row = [f"{share:.0%}", f"{session.plan.total_bytes / 1e6:.0f}",
                   f"{sum(plan.hot) / plan.neurons / len(plan.hot):.0%}", str(plan.slots), f"{hit_rate:.0%}",
                   f"{nbytes / 1e6:.1f}", f"{1 / took.token:.1f}", f"{waited / took.token:.0%}",
                   f"{expected.flash_bytes / 1e6:.1f}", f"{gbs:.2f}", f"{1 / took.empty:.1f}",
                   f"{1 / expected.seconds:.1f}", f"{1 / took.prompt:.0f}", f"{walk / 1e6:.0f}",
                   f"{1 / streamed.token:.2f}", f"{1 / streamed.prompt:.0f}", f"{streamed.token / took.token:.1f}",
                   f"{streamed.token / took.empty:.1f}"]
        print("| " + " | ".join(row) + " |", flush=True)


def watch(session: Session, tokens: int) -> tuple[float, float, float]:
    """Return for a token with a warm cache bytes read, hit rate and seconds spent waiting."""
    ids, sequence, reading = np.random.default_rng(3), session.new_sequence(), session.executor.stream
    session.prefill(sequence, [3, 4, 5])
    for i in range(WARM_UP + tokens):
        if i == WARM_UP:
            before, waited = reading.hits, session.executor.waited_ns
        session.decode([sequence], [int(ids.integers(3, session.model.vocab_size))])
    _, hits, misses = (b - a for a, b in zip(before, reading.hits, strict=True))
    waited = (session.executor.waited_ns - waited) / 1e9
    session.release(sequence)
    return misses * session.plan.cold.cluster_bytes / tokens, hits / (hits + misses), waited / tokens


if __name__ == "__main__":
    main()
