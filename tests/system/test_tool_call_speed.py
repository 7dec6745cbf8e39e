"""The time to read a hostile answer grows with its length alone, however it is cut."""

from __future__ import annotations

import time

import pytest

from edgeinfer.server.tools import AnswerParser, Tool, format_of
from tests.helpers.tool_calls import FORMS

TOOL = Tool("f", "", {"type": "object", "properties": {"a": {"type": "string"}}}, False)
SMALL, LARGE = 100_000, 800_000


def seconds(name: str, text: str) -> float:
    form = FORMS[name]
    parser = AnswerParser(format_of(form.template), [TOOL], form.prompt)
    begin = time.process_time()
    for at in range(0, len(text), 50):
        parser.push(text[at:at + 50])
    parser.flush()
    return time.process_time() - begin


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "qwen_coder", "gemma", "harmony"])
def test_hostile_answers_take_linear_time(name: str) -> None:
    openers = format_of(FORMS[name].template).openers
    before, after = FORMS[name].write([("f", {"a": "@"})]).split("@")
    for begin, fill in [("", openers[-1][:-1]), ("", " "), (openers[0], "a"), (openers[0], '{"name": "f", '),
                        (before, after[:-1]), (openers[0] + '{"arguments": {"a": "', "x<"), ("", before + after)]:
        small, large = (seconds(name, begin + fill * (length // len(fill))) for length in (SMALL, LARGE))
        assert large < 2 * LARGE / SMALL * small + 0.2, (begin, fill)  # 64 times as long if it were quadratic
