"""Cost of beams: the time of a step and the KV blocks of a search beside those of a single text.

    python benchmarks/beam_search.py --model BUNDLE [--beams 2 4 8] [--prompt 1024] [--tokens 64] [--output FILE]

In one process, in turns: a greedy text, then a search with each number of beams, all after the same prompt, which is
computed once. A step is one pass over a token of each beam and the choice of the next beams; the time outside the
forward pass is told apart. KV blocks are counted at every forward pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import calm_rounds, in_turns, machine, publish, row, spread, table
from edgeinfer.llm.api import LLM
from edgeinfer.memory_planner import shared_blocks


class Counter:
    """Wraps a session's forward passes: their times, and the most KV blocks that are held in one."""

    def __init__(self, llm: LLM):
        self._session, self._run = llm.session, llm.session._run
        self.blocks, self.inside = 0, 0.0
        self._session._run = self._counted  # type: ignore[method-assign]

    def _counted(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._run(*arguments)
        finally:
            self.inside += time.perf_counter() - start
            self.blocks = max(self.blocks, self._session.plan.kv_blocks - self._session.kv.pool.n_free)

    def reset(self) -> None:
        self.blocks, self.inside = 0, 0.0


def measure(llm: LLM, counter: Counter, prompt: list[int], tokens: int, beams: int) -> tuple[float, float, int]:
    """Milliseconds of a step, of it outside the forward pass; most blocks."""
    options: dict[str, Any] = {"beams": beams} if beams > 1 else {"temperature": 0, "speculate": "off"}
    counter.reset()
    done = llm.complete(prompt, max_tokens=tokens, ignore_eos=True, reuse=True, **options)
    whole = done.ttft_ms + (tokens - 1) * done.tpot_ms
    return done.tpot_ms, (whole - 1000 * counter.inside) / tokens, counter.blocks


def rows_of(given: argparse.Namespace) -> tuple[list[str], str]:
    """Rows of the table for one model, and of which rounds they are."""
    most, order = max(given.beams), [1, *given.beams]
    with LLM(given.model, ctx=given.prompt + given.tokens, beams=most, own_tokens=given.tokens,
             threads=given.threads) as llm:
        prompt = [(37 * i) % 1000 + 3 for i in range(given.prompt)]
        counter = Counter(llm)

        sides, turns = {beams: partial(measure, llm, counter, prompt, given.tokens, beams) for beams in order}, count()
        in_turns(sides, next(turns))  # warms up
        done = calm_rounds(lambda: in_turns(sides, next(turns)), given.rounds, given.patience)
    found = {beams: [each[beams] for each in done.results] for beams in sorted(order)}
    single = [one[0] for one in found[1]]
    alone = max(one[2] for one in found[1])
    rows = []
    for beams, measured in found.items():
        step, outside = (statistics.median(column) for column in list(zip(*measured, strict=True))[:2])
        ratios = [one[0] / base for one, base in zip(measured, single, strict=True)]
        blocks = max(one[2] for one in measured)
        rows.append(row(given.name, f"{given.prompt} + {given.tokens}", beams, f"{step:.2f}", f"{outside:.2f}",
                        spread(ratios), blocks, f"{blocks / alone:.2f}",
                        shared_blocks(given.prompt, given.tokens, beams)))
        print(rows[-1], flush=True)
    return rows, str(done)


def main() -> None:
    """Measure and write the section of the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="bundle or known name")
    parser.add_argument("--name", help="in the table; default: the model's")
    parser.add_argument("--beams", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for calm rounds")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced; none prints only")
    given = parser.parse_args()
    given.name = given.name or Path(given.model).name
    rows, rounds = rows_of(given)
    head = f"`benchmarks/beam_search.py`, {machine()}, {time.strftime('%Y-%m-%d')}; medians of {rounds}, in turns."
    found = table("model | prompt + tokens | beams | a step, ms | of it choosing, ms | beside one text | KV blocks | "
                  "beside one text | planned", rows)
    publish(f"{head}\n\n{found}", given.output, f"beams {given.name}")


if __name__ == "__main__":
    main()
