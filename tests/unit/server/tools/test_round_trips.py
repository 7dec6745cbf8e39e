"""Calls of every format, written as a model writes them and read back, cut anywhere."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.helpers.tool_calls import FORMS, Call, Form, Said, pieces, random_call, read, said, tool_of

WEATHER: dict[str, Any] = {"city": "São \"Paulo\" \\ <b>\n</tool_call> 🦜", "days": 3, "metric": True,
                           "where": {"lat": -23.5, "tags": ["a", None, "}"]}}
CALLS: list[Call] = [("get_weather", WEATHER), ("now", {})]
TOOLS = [tool_of("get_weather", WEATHER), tool_of("now", {})]


def example(form: Form) -> tuple[str, Said]:
    """An answer with everything that the format has, and its parts."""
    opening, closing = form.thought
    reasoning = "I should <look>.\n\nYes." if opening else ""
    content = "Let me see: 3 < 4." if form.content else ""
    text = opening + reasoning + closing + content + ("\n" if content else "") + form.write(CALLS)
    return text, Said(reasoning, content, [(name, json.dumps(arguments)) for name, arguments in CALLS])


def compared(found: Said) -> Said:
    """With arguments in one spelling."""
    return found._replace(calls=[(name, json.dumps(json.loads(text), sort_keys=True)) for name, text in found.calls])


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", FORMS)
def test_an_example_at_every_cut(name: str) -> None:
    form = FORMS[name]
    text, want = example(form)
    for cut in range(len(text) + 1):
        assert compared(said(read(form, TOOLS, pieces(text, [cut])))) == compared(want), text[:cut]
    assert compared(said(read(form, TOOLS, list(text)))) == compared(want)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_that_ends_anywhere(name: str) -> None:
    """Nothing is taken back or invented, and complete calls are complete."""
    form = FORMS[name]
    text, _ = example(form)
    want = said(read(form, TOOLS, [text]))
    for end in range(len(text)):
        found = said(read(form, TOOLS, [text[:end]]))
        assert not found.calls or (found.reasoning == want.reasoning and found.content.startswith(want.content))
        for i, (called, arguments) in enumerate(found.calls):
            assert called == want.calls[i][0]
            assert arguments == want.calls[i][1] if i < len(found.calls) - 1 else True
        if found.calls and found.calls[-1][1].endswith("}") and found.calls == want.calls[:len(found.calls)]:
            json.loads(found.calls[-1][1])


@pytest.mark.parametrize("kind", FORMS)
def test_a_thousand_random_calls(kind: str) -> None:
    form, rng = FORMS[kind], random.Random(kind)
    for _ in range(1000 // len(FORMS) + 1):
        name, arguments = random_call(rng, form)
        calls = [(name, arguments)] * rng.randrange(1, 3)
        text = form.write(calls)
        cuts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))]
        found = said(read(form, [tool_of(name, arguments)], pieces(text, cuts)))
        assert (found.reasoning, found.content) == ("", "")
        assert [(one, json.loads(text)) for one, text in found.calls] == calls, text


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.thought[0]])
def test_reasoning_that_the_prompt_opens(name: str) -> None:
    form = FORMS[name]
    opening = form.thought[0]
    text, want = example(form)
    found = read(form, TOOLS, list(text.removeprefix(opening)), form.prompt + opening)
    assert compared(said(found)) == compared(want)
    assert said(read(form, TOOLS, ["still ", "thinking"], form.prompt + opening)).reasoning == "still thinking"


@pytest.mark.parametrize("name", FORMS)
def test_without_tools_only_reasoning_is_split_off(name: str) -> None:
    form = FORMS[name]
    opening, closing = form.thought
    text = form.write(CALLS)
    found = said(read(form, [], list(opening + "Hm." + closing + text if opening else text)))
    content = found.content.removeprefix("<|start|>assistant")  # harmony's calls are messages of their own
    assert found._replace(content=content) == Said("Hm." if opening else "", text, [])
    assert said(read(form, [], list(text))) == Said("", text, [])


@pytest.mark.parametrize("name", FORMS)
def test_an_unknown_name_is_content(name: str) -> None:
    form = FORMS[name]
    text = form.write([("unheard_of", {"a": "b"})])
    assert said(read(form, TOOLS, list(text))) == Said("", text, [])
    if name != "llama":  # whose calls have no marker after other text
        both = said(read(form, TOOLS, list(text + form.write([("now", {})]))))
        assert both == Said("", text, [("now", "{}")])
