"""What prompt lookup gains on real texts: they are replayed with and without guesses, by a model of any weights.

    python benchmarks/speculation.py BUNDLE --output docs/speculative.md
    python benchmarks/speculation.py BUNDLE --tokenizer tokenizer.model --questions DIR

Texts: source files of this project that were edited (from its history: the file before, then the file after), prose of
which nothing repeats, and, with a folder that has them, GSM8K (`gsm8k_test.jsonl`: eight answered questions, then a
ninth and its answer) and Spec-Bench (`spec_bench_question.jsonl`: the second half of each context behind the first).
Each text is written twice, in turns: single tokens, and prompt lookup under the controller, again if the host's other
guests took more than 3 % of the processors' time meanwhile. All tokens are those of the
text, whatever the model computes (edgeinfer/bench/speculation.py). The gain is beside that of the arithmetic: tokens
times t(1) over the sum of t(n) of the walks that there were, with t measured before at the same depth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.machine import CALM, calm_rounds, describe
from benchmarks.sections import replace_section
from edgeinfer import __version__
from edgeinfer.bench import Replayed, walk_times
from edgeinfer.bundle import Bundle
from edgeinfer.config import DEFAULT_DRAFT_TOKENS, RuntimeConfig
from edgeinfer.engine import PromptLookup, Speculation, Times
from edgeinfer.runtime import Session
from edgeinfer.text import Tokenizer

ROOT = Path(__file__).parents[1]
Text = tuple[str, str]
"""What is read, and what is written."""
PROSE = ROOT / "tests" / "data" / "box_of_robbers.txt"
PROMPT = 1500
"""Most tokens of a prompt; the last ones count."""
COUNTS = (1, 2, 3, 4, 6, 8)
EDITED = ("edgeinfer", "kernels", "memory_planner", "converters")


def edited_files() -> Iterator[Text]:
    """Files of 1.5 to 4 kB, each at its latest change."""
    log = git("log", "--format=%H", "--diff-filter=M", "--name-only", "--", *EDITED)
    commit, seen = "", set[str]()
    for line in log.split("\n"):
        if len(line) == 40 and "/" not in line:
            commit = line
        elif line.endswith(".py") and line not in seen:
            seen.add(line)
            before, after = (git("show", f"{of}:{line}") for of in (f"{commit}~", commit))
            if 1500 < len(before) < 4000 and before != after:
                yield f"The file:\n{before}\nThe file after the change:\n", after


def git(*arguments: str) -> str:
    """What git prints; empty where there is no history."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False).stdout


def prose() -> Iterator[Text]:
    """Pieces of a tale."""
    text = PROSE.read_text(encoding="utf-8")
    for start in range(0, len(text) - 3500, 3500):
        yield text[start : start + 2000], text[start + 2000 : start + 3500]


def examples(rows: list[Any]) -> Iterator[Text]:
    """Questions behind eight others with their answers."""
    shots = [f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows[:8]]
    for row in rows[8:]:
        yield "".join(shots) + f"Question: {row['question']}\nAnswer:", f" {row['answer']}\n\n"


def contexts(rows: list[Any], category: str) -> Iterator[Text]:
    """Halves of contexts."""
    for row in rows:
        if row["category"] == category:
            text = row["turns"][0]
            yield text[: len(text) // 2], text[len(text) // 2 :]


def kinds(questions: Path | None) -> dict[str, Callable[[], Iterator[Text]]]:
    """The texts by what they are."""
    found: dict[str, Callable[[], Iterator[Text]]] = {"edited code": edited_files, "a tale": prose}
    if questions:
        gsm8k, bench = ([json.loads(line) for line in (questions / name).open(encoding="utf-8")]
                        for name in ("gsm8k_test.jsonl", "spec_bench_question.jsonl"))
        found["GSM8K, eight examples"] = lambda: examples(gsm8k)
        for category in ("summarization", "rag"):
            found[f"Spec-Bench, {category}"] = lambda category=category: contexts(bench, category)
    return found


class Counting:
    """A runner that counts its walks by their tokens."""

    def __init__(self, runner: Session):
        self.runner, self.walks = runner, Counter[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def walk(self, segments: Any, cancel: Any = None) -> Any:
        """Walk and count."""
        self.walks[sum(len(segment.ids) for segment in segments)] += 1
        return self.runner.walk(segments, cancel)

    def decode(self, *arguments: Any) -> Any:
        """Walk over one token and count."""
        self.walks[1] += 1
        return self.runner.decode(*arguments)


@dataclass
class Written:
    """A text written both ways: seconds, tokens behind the first, walks by their tokens, gain by the arithmetic."""

    plain: float
    guessing: float
    tokens: int
    walks: Counter[int]
    predicted: float


def write(session: Session, prompt: list[int], text: list[int], times: Times) -> Written:
    """Write a text with single tokens and with guesses, in turns."""
    counting, spent = Counting(session), dict[bool, float]()
    t = walk_times(session, prompt, 2, COUNTS)
    walks = Counter[int]()
    for guessing in (False, True) if len(text) % 2 else (True, False):
        counting.walks.clear()
        speculation = Speculation(PromptLookup(), times, DEFAULT_DRAFT_TOKENS, session.config.outputs)
        done = Replayed(counting, prompt, text, speculation if guessing else None).run()
        spent[guessing] = (done.tpot_ms or 0) / 1000 * (len(text) - 1)
        if guessing:
            walks = Counter({n: count for n, count in counting.walks.items() if n <= COUNTS[-1]})
    predicted = (len(text) - 1) * t[1] / sum(count * between(t, n) for n, count in walks.items())
    return Written(spent[False], spent[True], len(text), walks, predicted)


def measure(session: Session, texts: list[tuple[list[int], list[int]]], times: Times, patience: float) -> list[str]:
    """Write all texts both ways; returns the cells of a row."""
    found, calm = list[Written](), 0
    for prompt, text in texts:
        done = calm_rounds(lambda prompt=prompt, text=text: write(session, prompt, text, times), 1, patience)
        found += done.results
        calm += done.taken <= CALM
    tokens, walks = sum(each.tokens for each in found), sum((each.walks for each in found), Counter[int]())
    gain = sum(each.plain for each in found) / sum(each.guessing for each in found)
    least = min(each.plain / each.guessing for each in found)
    predicted = statistics.median(each.predicted for each in found)
    return [str(len(found)), str(calm), str(tokens), *(f"{value:.2f}" for value in (
        tokens / sum(walks.values()), gain, least, predicted))]


def between(t: dict[int, float], n: int) -> float:
    """The time of a walk over n tokens, between those measured."""
    below, above = max(m for m in t if m <= n), min(m for m in t if m >= n)
    return t[below] if below == above else t[below] + (n - below) / (above - below) * (t[above] - t[below])


def main() -> None:
    """Measure and print, or write a section of a document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="SentencePiece model; by default the bundle's tokenizer")
    parser.add_argument("--questions", type=Path, help="folder with gsm8k_test.jsonl and spec_bench_question.jsonl")
    parser.add_argument("--kinds", help="some of the kinds of texts, separated by semicolons")
    parser.add_argument("--texts", type=int, default=3, help="of each kind")
    parser.add_argument("--tokens", type=int, default=120, help="most tokens of each that are written")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait until a text is left undisturbed")
    parser.add_argument("--output", type=Path, help="a Markdown file whose section is replaced")
    parser.add_argument("--name", default="speculation-texts", help="of the section")
    options = parser.parse_args()
    with Bundle.open(options.bundle) as bundle:
        if options.tokenizer:
            import sentencepiece

            encode = sentencepiece.SentencePieceProcessor(model_file=str(options.tokenizer)).encode
        else:
            encode = Tokenizer.of_model(options.bundle, bundle.files, bundle.config).encode
        session = Session(bundle, RuntimeConfig(ctx=2048, draft_tokens=DEFAULT_DRAFT_TOKENS))
        times, lines = Times(), []
        for name, texts in kinds(options.questions).items():
            if options.kinds and name not in options.kinds.split(";"):
                continue
            ids = [(encode(read)[-PROMPT:], encode(written)[: options.tokens]) for read, written in
                   islice(texts(), options.texts)]
            lines.append(f"| {name} | {' | '.join(measure(session, ids, times, options.patience))} |")
            print(lines[-1], flush=True)
    table = "\n".join([
        "| texts | how many | undisturbed | tokens | tokens a walk | gain | least of a text | by arithmetic |",
        "|---|---|---|---|---|---|---|---|", *lines])
    page = f"{options.bundle.name}, {describe()}, edgeinfer {__version__}:\n\n{table}"
    if options.output:
        replace_section(options.output, options.name, page)
    else:
        print(page)


if __name__ == "__main__":
    main()
