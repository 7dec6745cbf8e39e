"""A model's layers in two processes of this machine beside one process: tokens per second, memory, predictions.

    python benchmarks/pipeline.py --shape llama-2-7b --document docs/measurements/several-machines.md

Both sides take turns, so that the weights are in memory once. Weights are random. Both stages share the cores of this
machine, so the prediction is the time of one process, and beside it that of a message for each token, step or chunk, as
`plan --nodes` counts it; two machines would run two chunks or sequences at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, row, spread, table, wait_for_calm
from edgeinfer.bench import token_ids
from edgeinfer.bundle import Bundle
from edgeinfer.cli.commands.bench_run import find_bundle
from edgeinfer.cli.progress import ProgressLine
from edgeinfer.config import RuntimeConfig
from edgeinfer.pipeline import open_pipeline, split_of
from edgeinfer.runner import Runner
from edgeinfer.runtime import Session

PROMPT, DECODED, SEQUENCES, REPEATS = 256, 12, 4, 2
TESTS = {"one sequence": 1, f"{SEQUENCES} sequences": SEQUENCES, f"prompt of {PROMPT}": 0}
"""Sequences that decode; 0 is a prompt."""


@contextmanager
def whole(path: Path, config: RuntimeConfig) -> Iterator[Runner]:
    """Open a model in this process."""
    opened = Session(Bundle.open(path), config)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def divided(path: Path, config: RuntimeConfig) -> Iterator[Runner]:
    """Open a model in two processes."""
    bundle = Bundle.open(path)
    opened = open_pipeline(bundle, config, split_of("auto", bundle))
    try:
        yield opened
    finally:
        opened.close()


def speed(runner: Runner, sequences: int) -> float:
    """Return tokens per second of sequences that decode together after short prompts, or of a prompt."""
    ids = token_ids(runner.model.vocab_size)
    opened = [runner.new_sequence() for _ in range(sequences or 1)]
    chunk = min(int(runner.config.prefill_chunk), PROMPT)
    if not sequences:
        began = time.perf_counter()
        for _ in range(0, PROMPT, chunk):
            runner.prefill(opened[0], [next(ids) for _ in range(chunk)])
        n = PROMPT
    else:
        for one in opened:
            runner.prefill(one, [next(ids) for _ in range(8)])
        began, n = time.perf_counter(), DECODED * sequences
        for _ in range(DECODED):
            runner.decode(opened, [next(ids) for _ in opened])
    seconds = time.perf_counter() - began
    for one in opened:
        runner.release(one)
    return n / seconds


def message_seconds(runner: Runner) -> float:
    """Return the least time of a message to a stage, one way."""
    def once() -> float:
        began = time.perf_counter()
        runner.stages[0].ask("blocks")
        return (time.perf_counter() - began) / 2

    return statistics.median(once() for _ in range(300))


def held(runner: Runner) -> list[str]:
    """Return the planned and the held megabytes of each stage."""
    found = []
    for stage in runner.stages:
        pid = stage._process.pid if stage.apart else None
        rss = psutil.Process(pid).memory_info().rss
        found.append(f"layers {stage.info.first}-{stage.info.last}: {stage.info.total_bytes / 1e6:.0f} MB planned, "
                     f"{rss / 1e6:.0f} MB held")
    return found


def measure(path: Path, config: RuntimeConfig, rounds: int, patience: float) -> tuple[dict[str, Any], list[str], float]:
    """Return the speeds of both sides by test, the memory of stages, and the delay of a message."""
    found: dict[str, Any] = {test: ([], []) for test in TESTS}
    stages, delay = [""], 0.0
    for _ in range(rounds):
        for side, opening in enumerate((whole, divided)):
            wait_for_calm(patience, 0.2)
            with opening(path, config) as runner:
                speed(runner, 0)  # maps the weights
                for test, sequences in TESTS.items():
                    speed(runner, sequences)  # tries other numbers of parts
                    found[test][side].append(max(speed(runner, sequences) for _ in range(REPEATS)))
                    print(f"{test}: {found[test]}", file=sys.stderr)
                if side:
                    stages, delay = held(runner), message_seconds(runner)
    return found, stages, delay


def _predicted(one: float, tokens: int, delay: float) -> float:
    """Return tokens per second of two processes: a message there and one back for so many tokens."""
    return tokens / (tokens / one + 2 * delay)


def main() -> None:
    """Measure, and print or publish a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--document", type=Path)
    asked = parser.parse_args()
    with ProgressLine() as progress:
        path = find_bundle(None, asked.shape, None, None, progress)
    config = RuntimeConfig(ctx=asked.ctx, max_sequences=SEQUENCES, kv_tokens=2 * asked.ctx, outputs=SEQUENCES)
    speeds, stages, delay = measure(path, config, asked.rounds, asked.patience)
    rows = []
    for test, (one, two) in speeds.items():
        predicted = _predicted(statistics.median(one), TESTS[test] or PROMPT, delay)
        ratios = spread([b / a for a, b in zip(one, two, strict=True)])
        rows.append(row(test, spread(one, ".2f"), spread(two, ".2f"), ratios, f"{predicted:.2f}",
                        f"{statistics.median(two) / predicted:.2f}"))
    text = table("tokens/s | one process | two processes | ratio | predicted for two | measured / predicted", rows)
    publish(f"{asked.shape}, {asked.rounds} rounds in turns, {machine()}; `python benchmarks/pipeline.py --shape "
            f"{asked.shape} --rounds {asked.rounds}`. {'; '.join(stages)}; a message takes {1000 * delay:.2f} ms.\n\n"
            f"{text}", asked.document, "pipeline")


if __name__ == "__main__":
    main()
