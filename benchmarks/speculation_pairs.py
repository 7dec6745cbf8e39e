"""Compare `--speculate auto` with `off` in interleaved pairs, and the stated gain with the measured one.

    python benchmarks/speculation_pairs.py demo PATH --output docs/measurements/speculation.md

Each model runs 4 prompts with 3 settings. A pair is one request with speculation and one without, in either order by
turns; the ratio is that of their decoding speeds, and of a case the median of its pairs. "First" pairs forget costs
that earlier requests have measured, as the only request of a process does; "later" pairs keep them. Both texts of a
pair must be equal. The stated gain is the median of `Completion.speculation.gain`, 1 if it is None: no pass verified a
draft.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import machine, publish, row, table
from edgeinfer.engine import Times
from edgeinfer.llm.api import LLM

PROMPTS = {
    "a tale": "Once upon a time there was a fox who",
    "a list": "1. The fox ran. 2. The fox ran. 3. The fox ran. 4. The fox ran. 5.",
    "a refrain": "The crow sang to the lion. The lion said: sing again. The crow sang to the lion. The lion said:",
    "a copy": ("A wolf met a lamb by the river and looked for a reason to eat him. "
               "A wolf met a lamb by the river and looked"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy, 256": {"temperature": 0.0, "max_tokens": 256},
    "T 0.8, 128": {"temperature": 0.8, "max_tokens": 128},
    "greedy, 20": {"temperature": 0.0, "max_tokens": 20},
}
TURN = 4
"""Pairs of a case before the next case's turn; even, so that both orders count alike."""


def pairs(llm: LLM, prompt: str, options: dict[str, Any], mode: Any, first: bool,
          numbers: range) -> list[tuple[float, float]]:
    """Return the measured ratio of `mode` to off, and the stated one, of the pairs with these numbers."""
    found: list[tuple[float, float]] = []
    for i in numbers:
        if first:
            llm._times = Times()
        done = {}
        for on in (False, True) if i % 2 else (True, False):
            done[on] = llm.complete(prompt, speculate=mode if on else "off", seed=i, ignore_eos=True, **options)
        if done[True].token_ids != done[False].token_ids:
            raise SystemExit(f"{prompt!r}, seed {i}: the text depends on speculation.")
        report = done[True].speculation
        found.append(((done[True].tok_per_s or 0.0) / (done[False].tok_per_s or 1.0),
                      report.gain if report and report.gain else 1.0))
    return found


def measure(model: str, mode: Any, count: int) -> dict[tuple[str, str, bool], tuple[float, float]]:
    """Return the medians of the measured and the stated ratios of each prompt, setting and kind of pair.

    All cases take turns of a few pairs, so that a disturbance of some seconds hits no case alone.
    """
    cases = [(name, setting, first) for name in PROMPTS for setting in SETTINGS for first in (True, False)]
    found: dict[tuple[str, str, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    with LLM(model, speculate=mode, ctx=512) as llm:
        for prompt in PROMPTS.values():  # the first pages and calls of a process
            llm.complete(prompt, max_tokens=32, speculate="off")
        for begin in range(0, count, TURN):
            numbers = range(begin, min(count, begin + TURN))
            for name, setting, first in cases:
                found[name, setting, first] += pairs(llm, PROMPTS[name], SETTINGS[setting], mode, first, numbers)
    return {case: (statistics.median(one for one, _ in values), statistics.median(other for _, other in values))
            for case, values in found.items()}


def main() -> None:
    """Measure and print, or write a section of a document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", help="names or paths")
    parser.add_argument("--mode", default="auto", help="auto, lookup, self, or off (how far two equal runs differ)")
    parser.add_argument("--pairs", type=int, default=20, help="of each case")
    parser.add_argument("--output", type=Path, help="a Markdown file whose section is replaced")
    options = parser.parse_args()
    lines: list[str] = []
    found: list[tuple[float, float]] = []
    for model in options.models:
        medians = measure(model, options.mode, options.pairs)
        found += medians.values()
        for name in PROMPTS:
            for setting in SETTINGS:
                case = [medians[name, setting, first] for first in (True, False)]
                lines.append(row(Path(model).stem, name, setting, *(f"{value:.3f}" for pair in case for value in pair)))
    off = max(abs(stated / measured - 1) for measured, stated in found)
    command = f"python benchmarks/speculation_pairs.py {' '.join(Path(model).name for model in options.models)}"
    head = (f"{machine()}, {date.today()}, `{command} --pairs {options.pairs} --mode {options.mode}`; least measured "
            f"ratio {min(pair[0] for pair in found):.3f}, largest difference between stated and measured "
            f"{100 * off:.1f} %.")
    publish(f"{head}\n\n" + table("model | prompt | setting, tokens | first: measured | stated | later: measured | "
                                  "stated", lines), options.output, f"speculation-pairs-{options.mode}")


if __name__ == "__main__":
    main()
