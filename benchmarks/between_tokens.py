"""Time of a token outside the kernels, and the cost of sampling, measured in a run of the engine.

    python benchmarks/between_tokens.py --output docs/measurements/speed.md

For each vocabulary a model of smollm2-135m's shape with random weights generates texts with
each setting in turns, round by round, in one process. Of every token two times are taken: all of it, from one forward
pass to the next, and the part outside the executor, which is all that Python does. The executor's own time is
added to the latter as far as it is Python: the time of a pass over no instruction. Medians count; ratios are those of
neighbouring turns. A forward pass of several steps counts for each of its tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import machine, publish, row, table
from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import builtin_shapes, read_config
from edgeinfer.llm.api import LLM

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "default": {},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "flat nucleus": {"top_k": 0, "min_p": 0.0, "top_p": 0.9},
}
"""The last one keeps thousands of tokens, because random weights give flat logits: far more than are sorted."""


def write_model(directory: Path, vocab_size: int) -> Path:
    """A bundle with random weights, and with the tokenizer that such bundles have."""
    path = directory / str(vocab_size)
    write_random_bundle(read_config({**builtin_shapes()["smollm2-135m"].config, "vocab_size": vocab_size}), path)
    return path


class Pass(NamedTuple):
    """A forward pass: when it began and ended, and the tokens that the first sequence had before."""

    start: float
    end: float
    length: int


class Clock:
    """Times of the tokens of one model, and the executor's part of them."""

    def __init__(self, llm: LLM):
        self.llm, self._executor = llm, llm.session.executor
        self._run, self._task, self._passes = self._executor.run, None, list[Pass]()
        self._executor.run = self._timed  # type: ignore[method-assign]

    def _timed(self, *arguments: Any, **options: Any) -> None:
        length, start = len(self._task.sequence), time.perf_counter()
        self._run(*arguments, **options)
        self._passes.append(Pass(start, time.perf_counter(), length))

    def empty_pass(self) -> float:
        """Seconds of a forward pass over no instruction: Python's part of the executor."""
        times = []
        for _ in range(200):
            start = time.perf_counter()
            self._run(0, 0)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def text(self, n: int, n_samples: int, python: float, options: dict[str, Any]) -> tuple[float, float]:
        """Generate; return the medians of a token's seconds: all of it, and the part outside the executor."""
        prompt = [(37 * i) % 1000 + 3 for i in range(16)]
        request = self.llm.request(prompt, {"max_tokens": n, "seed": 1, "n": n_samples, "ignore_eos": True, **options})
        self._task, self._passes, times = request.task, [], []
        request.finish()
        for this, following in pairwise(self._passes[1:]):
            passed, steps = following.start - this.start, following.length - this.length
            times += [(passed / steps, (passed - (this.end - this.start) + python) / steps)] * steps
        whole, outside = zip(*times, strict=True)
        return statistics.median(whole), statistics.median(outside)


def measure(path: Path, rounds: int, n_tokens: int, n_samples: int, threads: int | None) -> list[str]:
    """Rows of the table for one model."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    with LLM(path, ctx=1024, max_sequences=n_samples, threads=threads) as llm:
        clock, vocab_size = Clock(llm), llm.session.model.vocab_size
        python = clock.empty_pass()
        for number in range(rounds + 1):
            names = list(SETTINGS) if number % 2 else list(SETTINGS)[::-1]
            for name in names:
                whole, outside = clock.text(n_tokens, n_samples, python, SETTINGS[name])
                if number:  # the first round warms up
                    found[name].append((whole, outside))
    rows = []
    for name, pairs in found.items():
        whole, outside = (statistics.median(values) * 1e6 for values in zip(*pairs, strict=True))
        shares = [greedy[0] / own[0] for greedy, own in zip(found["greedy"], pairs, strict=True)]
        rows.append(row(f"{vocab_size:,}", n_samples, name, f"{whole:.0f}", f"{outside:.0f}",
                        f"{statistics.median(shares):.3f}", f"{min(shares):.2f} to {max(shares):.2f}"))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and write the section of the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced; none prints only")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for vocab_size in arguments.vocabularies:
            path = write_model(Path(directory), vocab_size)
            for n_samples in arguments.samples:
                rows += measure(path, arguments.rounds, arguments.tokens, n_samples, arguments.threads)
    head = f"{machine()}, {time.strftime('%Y-%m-%d')}; {arguments.rounds} rounds of {arguments.tokens} tokens in turns"
    found = table("vocabulary | sequences | setting | a token, us | of it outside the kernels, us | "
                  "speed beside greedy | least and most", rows)
    publish(f"Measured on {head}.\n\n{found}", arguments.output, "between tokens")


if __name__ == "__main__":
    main()
