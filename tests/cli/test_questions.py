"""The fifteen questions of docs/how-to/before-you-buy.md: one command each, answered in three lines of 80 columns."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers.command_line import ROOT, edgeinfer, relative_cost

PAGE = ROOT / "docs" / "how-to" / "before-you-buy.md"
ALL = re.findall(r"^\| ([^|]+\?) \| `edgeinfer ([^`]+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
ROWS, ASKED = ALL[:15], ALL[15:]
ANSWERS = {
    "Does it fit?": r"^It fits: .* of .*tok/s",
    "How fast is it?": r"decode +\d+ tokens/s .*\(\d+(\.\d)? to \d+\)",
    "Which quantisation?": r"^int8 is the most exact that fits Apple M4, 16 GB: .* of .*tokens/s",
    "Which model for what I have?": r"tokens/s in .* the largest for chat on Apple M4 Pro, 24 GB",
    "Which board or card, the cheapest memory?": r"^The least memory is \d+ GB: .* tokens/s \(\S+ on the \w+\)",
    "How long do I wait for an answer?": r"answer +first word after \d+\.\d+ s, then \d+ ms a token; 500 tokens after",
    "Does my long document fit?": r"^It fits: .* of |^It does not fit",
    "How many users does it serve?": r"8 users +\d+\.\d tokens/s each, \d+\.\d together",
    "What if it is larger than memory?": r"decode +\d\.\d+ tokens/s .*\(0\.\d+ to \d\.\d",
    "Does a draft model pay?": r"draft +pays: \d+\.\d tokens/s instead of \d+\.\d with llama-3\.2-1b",
    "Does skipping neurons pay?": r"skipping +pays: \d\.\d tokens/s with 80% zeros",
    "Do two machines help?": r"^m4 alone is the fastest: .* Splitting the layers gives \d\.\d, 0\.\d+ x m4 alone",
    "What does a token cost in energy?": r"energy +\d\.\d J a token \(.*\), 0\.\d+ Wh .* at 315 of 450 W \(the card\)",
    "What is the limit there, and why?": r"limits +memory is the limit in decoding, arithmetic is in a prompt of 512",
    "Is another program faster there?": r"decode +\d+\.\d tokens/s .*, llama\.cpp on the GPU \(Metal\)",
}
ON_FORUMS = (
    r"^It fits, with \d+ experts in memory: ", r"^\w+ is the most exact that fits GeForce RTX 4060: ",
    r"^It fits: .* of the GPU's 12\.88 GB; ",
    r"answer +first word after \d{3} s, then \d+ ms a token; 500 tokens after",
    r"^lfm2\S+ as \w+: 1\d\.\d tokens/s in ", r"tokens/s in .* the largest for code on GeForce RTX 5090",
    r"^The least memory is \d+ GB: ", r"16 users +\d+\.\d tokens/s each, \d+\.\d together",
    r"decode +\d+\.\d tokens/s ", r"DDR4-3200 \(51\.2 GB/s\) decode +[67]\.\d tokens/s",
    r"96 GB/s decode +1\d\.\d tokens/s", r"tokens/s in .* the largest for chat on phone with 8 cores and 51 GB/s",
    r"decode +(1[6-9]|2[0-4])\.\d tokens/s .*, llama\.cpp on the GPU",
)
"""Answers to the questions of the second table."""
IMPORTED = "import sys; from edgeinfer.cli.app import execute; execute(sys.argv[1:]); " \
           "print(*(m for m in ('numba', 'llvmlite', 'asyncio', 'numpy') if m in sys.modules), file=sys.stderr)"


def test_the_page_has_fifteen_questions() -> None:
    assert [question for question, _ in ROWS] == list(ANSWERS) and len(ROWS) == 15


@pytest.mark.parametrize(("question", "command"), ROWS)
def test_the_answer_is_in_the_first_three_lines(question: str, command: str) -> None:
    done = edgeinfer(*shlex.split(command))
    assert done.code in (0, 3), done.err
    lines = done.out.splitlines()
    first = [line for line in lines if line][:3] if lines[1:2] == [""] else lines[:3]  # below the title
    assert re.search(ANSWERS[question], " ".join(" ".join(first).split())), first
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("row", "answer"), [*zip(ASKED, ON_FORUMS, strict=True)])
def test_questions_as_people_ask_them_are_answered(row: tuple[str, str], answer: str) -> None:
    done = edgeinfer(*shlex.split(row[1]))
    first = " ".join(" ".join([line for line in done.out.splitlines() if line][:4]).split())
    assert done.code == 0 and re.search(answer, first), first or done.err


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize(("question", "command"), ROWS)
def test_it_is_quick_and_compiles_nothing(question: str, command: str) -> None:
    """In processor time beside that of imports: half a second where those take a quarter.

    Only plans of a run on NVIDIA's cards, which lower the graph to ONNX, import NumPy.
    """

    def check(done: subprocess.CompletedProcess[str]) -> None:
        card = re.search(r"rtx|\bl4\b|--all-devices", command)
        assert done.stdout and done.stderr.splitlines()[-1] == ("numpy" if card else ""), question

    assert relative_cost([sys.executable, "-c", IMPORTED, *shlex.split(command)], check) < 4
