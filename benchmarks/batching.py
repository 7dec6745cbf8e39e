"""Many requests at once: tokens per second by sequences, mixes of prompts and answers, waits, and the prefix cache.

    python benchmarks/batching.py --shapes smollm2-135m,tinyllama-1.1b --rounds 3 --document docs/measurements/speed.md

All figures are ratios of one run. Weights are random, so speculation is off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, spread, table, wait_for_calm
from edgeinfer.bench import Load, RequestLength, measure_serving, token_ids
from edgeinfer.bundle import Bundle
from edgeinfer.cli.commands.bench_run import find_bundle
from edgeinfer.cli.progress import ProgressLine
from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.engine import Engine, Generation, Request
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runtime import Session

SEQUENCES = (1, 4, 8, 16)
PROMPT, ANSWER = 256, 128
MAX_ITL = 0.2


@contextmanager
def session(path: Path, **options: Any) -> Iterator[Session]:
    """Open a model."""
    opened = Session(Bundle.open(path), RuntimeConfig(**options))
    try:
        yield opened
    finally:
        opened.close()


def engine_steps(path: Path, rounds: int) -> dict[int, float]:
    """Return tokens per second of the engine by the number of sequences that decode together, after short prompts."""
    with session(path, ctx=ANSWER + 16, max_sequences=max(SEQUENCES)) as opened:
        found: dict[int, list[float]] = {n: [] for n in SEQUENCES}
        for _ in range(rounds + 1):
            for n, speeds in found.items():
                load = Load([RequestLength(8, ANSWER)] * n, n)
                row = next(measure_serving(opened, [load], MAX_ITL))
                speeds.append(row.output_tokens / row.seconds)
    return {n: statistics.median(speeds[1:]) for n, speeds in found.items()}


def parts(path: Path, rounds: int, clients: int) -> tuple[float, float]:
    """Return the seconds of all clients' requests together, and the sum of their parts.

    The parts: each prompt at the speed of a prompt alone, and as many steps of so many sequences as an answer has.
    """
    with session(path, ctx=PROMPT + ANSWER, max_sequences=clients) as opened:
        ids = token_ids(opened.model.vocab_size)
        together, prompts, steps = [], [], []
        for _ in range(rounds + 1):
            row = next(measure_serving(opened, [Load([RequestLength(PROMPT, ANSWER)] * clients, clients)], MAX_ITL))
            together.append(row.seconds)
            sequences = [opened.new_sequence() for _ in range(clients)]
            began = time.perf_counter()
            opened.prefill(sequences[0], [next(ids) for _ in range(PROMPT)])
            prompts.append(time.perf_counter() - began)
            for sequence in sequences[1:]:
                opened.prefill(sequence, [next(ids) for _ in range(PROMPT)])
            began = time.perf_counter()
            for _ in range(16):
                opened.decode(sequences, [next(ids) for _ in sequences])
            steps.append((time.perf_counter() - began) / 16)
            for sequence in sequences:
                opened.release(sequence)
    whole = statistics.median(together[1:])
    return whole, clients * statistics.median(prompts[1:]) + ANSWER * statistics.median(steps[1:])


def waits(path: Path, rounds: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of ITL, of all rounds together: see `gaps_beside_prompt`."""
    gaps = [gap for _ in range(rounds) for gap in gaps_beside_prompt(path)]
    return float(np.median(gaps)), float(np.percentile(gaps, 99))


def gaps_beside_prompt(path: Path) -> list[float]:
    """Return the ITL in ms of four texts at depth 2048 while a prompt of 2000 comes in."""
    config = GenerationConfig(max_tokens=200, seed=1, ignore_eos=True)
    with session(path, ctx=2400, max_sequences=5) as opened:
        engine, ids = Engine(opened, MAX_ITL), token_ids(opened.model.vocab_size)
        texts = [Request(engine, Generation(opened, None, [next(ids) for _ in range(2048)], config)) for _ in range(4)]
        for request in texts:
            request.start_whole()
        while any(len(one.task.token_times) < 20 for one in texts):
            time.sleep(0.01)
        long = Request(engine, Generation(opened, None, [next(ids) for _ in range(2000)],
                                          replace(config, max_tokens=2)))
        began = time.perf_counter()
        long.finish()
        ended = time.perf_counter()
        for request in texts:
            request.finish()
        engine.close()
    return [1000 * (after - before) for one in texts
            for before, after in zip(one.task.token_times[1:], one.task.token_times[2:], strict=False)
            if began <= after <= ended]


def prefixes(path: Path, rounds: int) -> list[float]:
    """Return the times to first token of the second of two requests with 1024 common tokens, over the first's."""
    with session(path, ctx=1100, max_sequences=2) as opened:
        engine, ids, found = Engine(opened, MAX_ITL), token_ids(opened.model.vocab_size), []
        config = GenerationConfig(max_tokens=1, seed=1, ignore_eos=True)
        for _ in range(rounds + 1):
            common = [next(ids) for _ in range(1024)]
            first, second = (Request(engine, Generation(opened, None, [*common, next(ids), next(ids)], config), True)
                             for _ in range(2))
            found.append((first.finish().ttft_ms or 0.0, second.finish().ttft_ms or 0.0))
        engine.close()
    return [second / first for first, second in found[1:]]


def python_share(path: Path) -> float:
    """Return the share of steps of 16 sequences in which no forward pass runs."""
    with session(path, ctx=ANSWER + 16, max_sequences=16, outputs=16) as opened:
        busy, forward = [0.0], opened.executor.run

        def timed(*given: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return forward(*given, **more)
            finally:
                busy[0] += time.perf_counter() - began

        opened.executor.run = timed  # type: ignore[method-assign]
        load = Load([RequestLength(8, ANSWER)] * 16, 16)
        next(measure_serving(opened, [load], MAX_ITL))
        busy[0] = 0.0
        row = next(measure_serving(opened, [load], MAX_ITL))
    return 1 - busy[0] / row.seconds


def pass_ratio(path: Path, n: int, rounds: int) -> float:
    """Return the time of a forward pass over n sequences over that of one."""
    with session(path, ctx=256, max_sequences=n) as opened:
        ids, sequences = token_ids(opened.model.vocab_size), [opened.new_sequence() for _ in range(n)]
        for sequence in sequences:
            opened.prefill(sequence, [next(ids) for _ in range(32)])
        times: dict[int, list[float]] = {1: [], n: []}
        for _ in range(rounds * 8):
            for count, own in times.items():
                began = time.perf_counter()
                opened.forward([Segment(one, [next(ids)], (0,), DECODE) for one in sequences[:count]])
                own.append(time.perf_counter() - began)
    return statistics.median(times[n]) / statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", default="smollm2-135m,tinyllama-1.1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="4,8,16")
    parser.add_argument("--document", type=Path)
    given = parser.parse_args()
    wait_for_calm(60, 0.3)
    out = [f"{machine()}.", ""]
    with ProgressLine() as progress:
        paths = {shape: find_bundle(None, shape, None, None, progress) for shape in given.shapes.split(",")}
    rows = []
    for shape, path in paths.items():
        speeds = engine_steps(path, given.rounds)
        rows.append(f"| {shape} | {speeds[1]:.1f} | " + " | ".join(
            f"{speeds[n] / speeds[1]:.2f}" for n in SEQUENCES[1:]) + f" | {pass_ratio(path, 8, given.rounds):.2f} | "
            f"{100 * python_share(path):.1f} % |")
    heads = " | ".join(f"{n} sequences" for n in SEQUENCES[1:])
    out += [table(f"shape | tokens/s of one | {heads} | pass over 8 | outside passes, 16", rows), ""]
    rows = []
    for shape, path in paths.items():
        for clients in map(int, given.clients.split(",")):
            whole, sum_of_parts = parts(path, given.rounds, clients)
            rows.append(f"| {shape} | {clients} | {whole:.2f} s | {sum_of_parts:.2f} s | {whole / sum_of_parts:.2f} |")
    out += [table("shape | clients | together | sum of the parts | ratio", rows), ""]
    rows = []
    for shape, path in paths.items():
        median, p99 = waits(path, given.rounds)
        rows.append(f"| {shape} | {median:.0f} ms | {p99:.0f} ms | {p99 / 1000 / MAX_ITL:.2f} | "
                    f"{spread(prefixes(path, given.rounds))} |")
    out += [table("shape | ITL beside a prompt | 99th percentile | over max_itl | TTFT with a cached prefix", rows)]
    publish("\n".join(out), given.document, "batching")


if __name__ == "__main__":
    main()
