"""The work to read a hostile answer grows with its length alone, however it is cut."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from edgeinfer.server.tools import AnswerParser, Tool, format_of
from edgeinfer.server.tools.source import Source
from tests.helpers.tool_calls import FORMS

TOOL = Tool("f", "", {"type": "object", "properties": {"a": {"type": "string"}}}, False)
SMALL, LARGE = 1_000, 8_000
MARGIN = 1.25
"""Of the growth in proportion: work at the beginning and end, and memory that is taken in steps."""


def work(monkeypatch: pytest.MonkeyPatch, name: str, text: str, cut: int) -> int:
    """Return the number of calls that reading a text takes, and of characters that are copied because they wait."""
    form, count = FORMS[name], 0
    feed = Source.feed

    def counted(source: Source, piece: str) -> None:
        nonlocal count
        count += len(source._text) - source._at
        feed(source, piece)

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    parser = AnswerParser(format_of(form.template), [TOOL], form.prompt)
    with monkeypatch.context() as patched:
        patched.setattr(Source, "feed", counted)
        before = sys.getprofile()
        sys.setprofile(called)
        try:
            for at in range(0, len(text), cut):
                parser.push(text[at:at + cut])
            parser.flush()
        finally:
            sys.setprofile(before)
    return count


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", FORMS)
def test_hostile_answers_take_linear_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    openers = format_of(FORMS[name].template).openers or ("<tool_call>",)
    before, after = FORMS[name].write([("f", {"a": "@"})]).split("@")
    for begin, fill in [("", openers[-1][:-1]), ("", openers[-1]), ("", " "), (openers[0], "a"),
                        (openers[0], '{"name": "f", '), (before, after[:-1]), (before, "\\"),
                        (openers[0] + '{"arguments": {"a": "', "x<"), ("", before + after)]:
        for cut in (50, LARGE):
            small, large = (work(monkeypatch, name, begin + fill * (length // len(fill)), cut)
                            for length in (SMALL, LARGE))
            most = MARGIN * LARGE / SMALL * small + 1000
            assert large < most, (begin, fill, cut)  # 64 times as much if it were quadratic
