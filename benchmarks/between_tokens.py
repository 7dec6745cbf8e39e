"""What a token costs outside the kernels, and what sampling costs: in place, in a run of the engine.

    python benchmarks/between_tokens.py --output docs/performance.md

For each vocabulary a model of smollm2-135m's shape with random weights generates texts with
each setting in turns, round by round, in one process. Of every token two times are taken: all of it, from one piece of
text to the next, and the part outside the executor, which is all that Python does. What the executor itself takes is
added to the latter as far as it is Python: the time of a walk over no record. Medians count; ratios are those of
neighbouring turns. A walk of several steps counts for each of its tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.machine import describe
from benchmarks.sections import replace_section
from edgeinfer import LLM, __version__
from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import builtin_shapes, read_config

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


class Clock:
    """Times of the tokens of one model, and what of them the executor took."""

    def __init__(self, llm: LLM):
        self.llm, self._executor = llm, llm.session.executor
        self._run, self._inside, self._walks = self._executor.run, 0.0, 0
        self._executor.run = self._timed  # type: ignore[method-assign]

    def _timed(self, *arguments: Any, **options: Any) -> None:
        start = time.perf_counter()
        self._run(*arguments, **options)
        self._inside += time.perf_counter() - start
        self._walks += 1

    def empty_walk(self) -> float:
        """Seconds of a walk over no record: what of the executor is Python."""
        times = []
        for _ in range(200):
            start = time.perf_counter()
            self._run(0, 0)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def text(self, n: int, n_samples: int, python: float, options: dict[str, Any]) -> tuple[float, float]:
        """Generate; return the medians of a token's seconds: all of it, and what passed outside the executor."""
        prompt = [(37 * i) % 1000 + 3 for i in range(16)]
        request = self.llm._request(prompt, {"max_tokens": n, "seed": 1, "n": n_samples, "ignore_eos": True, **options})
        times = []
        request.next_piece()
        sequence = request.generation.sequence
        while True:
            self._inside, self._walks, before, start = 0.0, 0, len(sequence), time.perf_counter()
            if request.next_piece() is None:
                break
            passed, steps = time.perf_counter() - start, len(sequence) - before
            times += [(passed / steps, (passed - self._inside + self._walks * python) / steps)] * steps
        whole, outside = zip(*times, strict=True)
        return statistics.median(whole), statistics.median(outside)


def measure(path: Path, rounds: int, n_tokens: int, n_samples: int, threads: int | None) -> list[str]:
    """Rows of the table for one model."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    with LLM(path, ctx=1024, max_sequences=n_samples, threads=threads) as llm:
        clock, vocab_size = Clock(llm), llm.session.model.vocab_size
        python = clock.empty_walk()
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
        rows.append(f"| {vocab_size:,} | {n_samples} | {name} | {whole:.0f} | {outside:.0f} | "
                    f"{statistics.median(shares):.3f} | {min(shares):.2f} to {max(shares):.2f} |")
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
    machine = describe()
    head = (f"{machine['processor']}, {machine['cores']}, {machine['system']}, {machine['python']}, NumPy "
            f"{np.__version__}, edgeinfer {__version__}, {time.strftime('%Y-%m-%d')}; {arguments.rounds} rounds of "
            f"{arguments.tokens} tokens in turns")
    table = ["| vocabulary | sequences | setting | a token, us | of it outside the kernels, us | speed beside greedy | "
             "least and most |", "|---|---|---|---|---|---|---|", *rows]
    if arguments.output:
        replace_section(arguments.output, "between tokens", f"Measured on {head}.\n\n" + "\n".join(table))


if __name__ == "__main__":
    main()
