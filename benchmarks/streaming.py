"""Streaming against the disk: GB/s of tokens whose layers are streamed, beside the same file read in order.

    python benchmarks/streaming.py BUNDLE [--shares 1,0.75,0.5] [--tokens 12] [--rounds 5]

Both are measured in turns in one process, past the page cache: weights.bin in order by as many reader threads, with
reads of the same size and nobody waiting for them, and by one thread with os.preadv of 4 MiB; then some tokens.
Medians of the
rounds. The speed with all weights in memory is measured first. docs/explanation/streaming.md has the outcome.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from readers import kernel_threads, python_threads

from edgeinfer.base.process import peak_rss_bytes
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.memory_planner import READ_BYTES, Planner, resolve, stream, to_request
from edgeinfer.runtime import Session
from edgeinfer.runtime.weights.stream import READERS

CTX = 512


def budgets(path: Path, config: RuntimeConfig) -> tuple[int, dict[int, int]]:
    """Return the plan's bytes with all weights in memory, and with so many streamed layers."""
    with Bundle.open(path) as bundle:
        graph = build_graph(bundle.config, expected_types(bundle.types))
        planner = Planner(graph, bundle.weights_bytes, {name: row.offset for name, row in bundle.tensors.items()})
        request = to_request(resolve(config, bundle.config))
    whole, found = planner.plan(request).total_bytes, {}
    limit = whole - 1
    while plan := stream(planner, request, limit):
        found[len(plan.parts)], limit = plan.total_bytes, plan.total_bytes - 1
    return whole, found


def seconds_per_token(session: Session, tokens: int) -> float:
    """Return the time of a token after a short prompt."""
    sequence = session.new_sequence()
    session.prefill(sequence, [1, 2, 3])
    began = time.perf_counter()
    for _ in range(tokens):
        session.decode([sequence], [5])
    took = (time.perf_counter() - began) / tokens
    session.release(sequence)
    return took


def disk(session: Session, path: Path, seconds: float) -> tuple[float, float]:
    """Return GB/s of reading weights.bin in order: by reader threads, and by one thread of Python."""
    file = os.open(path / "weights.bin", os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(file).st_size
    readers = kernel_threads(session.executor.kernels, session.executor.pool)
    orders = [np.arange(0, size - piece + 1, piece) for piece in (READ_BYTES, 4 << 20)]
    found = (readers(file, READERS, orders[0], READ_BYTES, seconds),
             python_threads(file, 1, orders[1], 4 << 20, seconds))
    os.close(file)
    return found


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser()
    options.add_argument("bundle", type=Path)
    options.add_argument("--shares", default="1")
    options.add_argument("--tokens", type=int, default=12)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=0.7)
    asked = options.parse_args()
    config = RuntimeConfig(ctx=CTX, prefill_chunk=64)
    whole, found = budgets(asked.bundle, config)
    with Bundle.open(asked.bundle) as bundle, closing(Session(bundle, config)) as session:
        print(f"all in memory: {1000 * seconds_per_token(session, 20):.1f} ms a token, plan {whole / 1e6:.0f} MB")
    print("| layers streamed | plan, MB | peak, MB | MB a token | ms a token | waiting | GB/s | readers alone, GB/s | "
          "one thread, 4 MiB, GB/s | share of readers alone |\n" + "|---" * 10 + "|")
    for share in map(float, asked.shares.split(",")):
        layers = min(found, key=lambda n: abs(n - share * max(found)))
        limited = RuntimeConfig(ctx=CTX, prefill_chunk=64, budget_bytes=found[layers])
        with Bundle.open(asked.bundle) as bundle, closing(Session(bundle, limited)) as session:
            reading, rounds = session.executor.stream, []
            for _ in range(asked.rounds):
                alone, single = disk(session, asked.bundle, asked.seconds)
                waited = session.executor.waited_ns
                took = seconds_per_token(session, asked.tokens)
                waited = (session.executor.waited_ns - waited) / 1e9 / (asked.tokens + 1) / took
                gbs = reading.bytes_per_pass / took / 1e9
                rounds.append((1000 * took, waited, gbs, alone, single, gbs / alone))
            ms, waited, gbs, alone, single, part = map(statistics.median, zip(*rounds, strict=True))
            print(f"| {layers} | {session.plan.total_bytes / 1e6:.0f} | {(peak_rss_bytes() or 0) / 1e6:.0f} | "
                  f"{reading.bytes_per_pass / 1e6:.0f} | {ms:.1f} | {waited:.0%} | {gbs:.3f} | {alone:.3f} | "
                  f"{single:.3f} | {part:.0%} |", flush=True)


if __name__ == "__main__":
    main()
