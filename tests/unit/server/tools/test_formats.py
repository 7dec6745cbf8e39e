"""The choice of a format by the content of a chat template."""

from __future__ import annotations

import pytest

from edgeinfer.server.tools import format_of
from tests.helpers.tool_calls import FORMS


@pytest.mark.parametrize(("template", "name", "special"), [
    *((form.template, name.removeprefix("old_").removeprefix("small_").removeprefix("fenced_").removeprefix("newer_"),
       name != "plain") for name, form in FORMS.items()),
    ('<|start_header_id|>{"name": function name, "parameters": dictionary}', "llama", True),
    ("", "plain", False),
    ("<think> {{ messages }} </think>", "plain", False),
    ("[THINK] {{ messages }} [/THINK]", "plain", True),
    ("<function=name>{json}</function>", "plain", False),
])
def test_the_format_of_a_template(template: str, name: str, special: bool) -> None:
    found = format_of(template)
    assert (found.name, found.special) == (name, special)
    assert format_of(template) is found


@pytest.mark.parametrize(("template", "prompt", "thinks"), [
    ("<think></think>", "Hi<think>\n", True), ("<think></think>", "Hi<think>\n\n</think>\n\n", False),
    ("<think></think>", "what is <think>?", False), ("", "<think>\n", False), ("[THINK][/THINK]", "[THINK]", True),
    (FORMS["harmony"].template, "<|start|>assistant<|channel|>analysis<|message|>", True),
    (FORMS["harmony"].template, "<|start|>assistant", False),
])
def test_whether_a_prompt_opens_reasoning(template: str, prompt: str, thinks: bool) -> None:
    assert format_of(template).thinks(prompt) is thinks
