"""Grammars of forced calls: accepted texts are parsed as calls that satisfy the schema."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import RequestError
from edgeinfer.server.tools import Tool, forced, format_of
from edgeinfer.text import Constraint, GrammarCompiler, Tokenizer
from tests.helpers.tool_calls import FORMS, Call, read, said

POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"],
         "additionalProperties": False}
DRAW = Tool("draw", "", {"type": "object", "properties": {
    "label": {"type": "string"}, "size": {"type": "integer"}, "at": {"$ref": "#/$defs/point"},
    "style": {"type": "string", "enum": ["thin", "bold"]}, "filled": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["label", "at"], "additionalProperties": False, "$defs": {"point": POINT}}, True)
CLEAR = Tool("clear", "", {}, False)
FULL: dict[str, Any] = {"label": "a \"b\"", "size": -3, "at": {"x": 1.5, "y": 2}, "style": "bold", "filled": True,
                        "tags": ["p", "q"]}
LEAST: dict[str, Any] = {"label": "", "at": {"x": 0, "y": -1}}

SPECIAL = {"<tool_call>": 0, "[TOOL_CALLS]": 0, "<|python_tag|>": 0, "<|tool_call>": 0, '<|"|>': 1, "<think>": 0,
           "</think>": 1, "<|message|>": 0, "<｜tool▁sep｜>": 0, "</arg_value>": 1, "<|end|>": 1}


class Vocabulary:
    """The demo model's tokenizer, and the tokens of a text by their bytes, the longest first."""

    def __init__(self) -> None:
        import edgeinfer.demo

        self.tokenizer = Tokenizer.open(Path(edgeinfer.demo.__path__[0]) / "bundle")
        size = self.tokenizer.vocab_size
        self.eos = min(self.tokenizer.eos_ids)
        self.grammars = GrammarCompiler(self.tokenizer, size, self.tokenizer.eos_ids)
        self.bytes = {i: self.tokenizer.token_bytes(i) for i in range(size) if i not in self.tokenizer.special_ids}
        self.ids = {spelled: i for i, spelled in self.bytes.items() if spelled}
        self.longest = max(map(len, self.ids))
        self.signs = [self.ids[bytes([sign])] for sign in b'"}],']

    def encode(self, text: str) -> list[int]:
        left, ids = text.encode(), []
        while left:
            length = next(n for n in range(self.longest, 0, -1) if left[:n] in self.ids)
            ids.append(self.ids[left[:length]])
            left = left[length:]
        return ids

    def may_follow(self, constraint: Constraint) -> NDArray[np.intp]:
        return np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))

    def may_end(self, constraint: Constraint) -> bool:
        allowed = self.may_follow(constraint)
        return not len(allowed) or self.eos in allowed

    def go_on(self, constraint: Constraint, text: str) -> bool:
        """Write a text if it may stand here; where it is forced the mask has one spelling, but all are taken."""
        try:
            for token in self.encode(text):
                constraint.accept(token)
        except RequestError:
            return False
        return True

    def takes(self, form: Any, text: str) -> bool:
        """Return whether a text has a form and may end."""
        constraint = self.grammars.begin(form)
        return self.go_on(constraint, text) and self.may_end(constraint)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


def written(name: str, calls: list[Call]) -> str:
    """Return the text of calls as far as it is generated: harmony's end is the token that ends the text."""
    return FORMS[name].write(calls).removesuffix("<|call|>")


def canonical(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """With booleans as the grammars of marked-up values have them: JSON's."""
    return {**arguments, "filled": "true"} if name == "qwen_coder" and "filled" in arguments else arguments


@pytest.mark.parametrize("name", FORMS)
def test_a_rendered_call_is_taken(vocabulary: Vocabulary, name: str) -> None:
    form = FORMS[name]
    one = forced(format_of(form.template), [DRAW, CLEAR], "draw", False)
    either = forced(format_of(form.template), [DRAW, CLEAR], "required", True)
    for arguments in (FULL, LEAST):
        text = written(name, [("draw", canonical(name, arguments))])
        assert vocabulary.takes(one, text) and vocabulary.takes(either, text), text
    clear = written(name, [("clear", {})])
    assert vocabulary.takes(either, clear) and not vocabulary.takes(one, clear)
    twice = written(name, [("clear", {})] * 2)
    assert vocabulary.takes(either, twice) == (name not in ("llama", "harmony"))  # these write one call at a time
    assert not vocabulary.takes(forced(format_of(form.template), [CLEAR], "required", False), twice)


@pytest.mark.parametrize("name", FORMS)
def test_other_arguments_are_not_taken(vocabulary: Vocabulary, name: str) -> None:
    form = FORMS[name]
    grammar = forced(format_of(form.template), [DRAW, CLEAR], "required", True)
    wrong: list[dict[str, Any]] = [{"label": ""}, {**LEAST, "size": "big"}, {**LEAST, "style": "wavy"},
                                   {**LEAST, "other": 1}, {**LEAST, "at": {"x": 1}}]
    for arguments in wrong:
        assert not vocabulary.takes(grammar, written(name, [("draw", arguments)])), arguments
    assert not vocabulary.takes(grammar, written(name, [("erase", {})]))
    assert not vocabulary.takes(grammar, "Hello")


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", FORMS)
def test_whatever_is_generated_is_a_call_that_satisfies_the_schema(vocabulary: Vocabulary, name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (extra 'dev')")
    form, rng, complete = FORMS[name], random.Random(name), 0
    grammar = forced(format_of(form.template), [DRAW, CLEAR], "draw", False)
    end = "\n</parameter>" if name == "qwen_coder" else (*form.banned, "<|end|>")[0]
    for _ in range(2):
        text = generated(vocabulary, vocabulary.grammars.begin(grammar), rng, end)
        if text is None:
            continue
        found = said(read(form, [DRAW, CLEAR], list(text)))
        assert (found.content, [called for called, _ in found.calls]) == ("", ["draw"]), text
        jsonschema.validate(json.loads(found.calls[0][1]), DRAW.parameters)
        complete += 1
    assert complete


def generated(vocabulary: Vocabulary, constraint: Constraint, rng: random.Random, end: str) -> str | None:
    """Return a random text of a form, or None if it becomes too long; ends of values are preferred."""
    spelled = b""
    for _ in range(400):
        if vocabulary.may_end(constraint):
            return spelled.decode("utf-8", "replace")
        if rng.random() < 0.3 and vocabulary.go_on(constraint.fork(), end):
            vocabulary.go_on(constraint, end)
            spelled += end.encode()
            continue
        allowed = vocabulary.may_follow(constraint)
        signs = np.intersect1d(allowed, vocabulary.signs)
        token = int(rng.choice(signs if len(signs) and rng.random() < 0.8 else allowed))
        spelled += vocabulary.bytes[token]
        constraint.accept(token)
    return None


@pytest.mark.parametrize("name", FORMS)
def test_markers_that_are_special_tokens_are_generated_as_such(vocabulary: Vocabulary, name: str) -> None:
    form = FORMS[name]
    grammar = forced(format_of(form.template), [DRAW, CLEAR], "required", True, special=SPECIAL)
    constraint = vocabulary.grammars.begin(grammar)
    allowed = vocabulary.may_follow(constraint)
    first = next((SPECIAL[marker] for marker in SPECIAL if form.write([("clear", {})]).startswith(marker)), None)
    assert first is None or allowed.tolist() == [first]
    assert ("<[" in grammar.source) == any(marker in form.write([("draw", FULL)]) for marker in SPECIAL)


@pytest.mark.parametrize(("prompt", "text", "taken"), [
    ("<think>\n", "Hm.\n</think>\n\n", True), ("<think>\n", "", False), ("<think>\n\n</think>\n\n", "", True),
    ("<think>\n\n</think>\n\n", "<think>\n</think>\n\n", False), ("assistant\n", "<think>\nHm.\n</think>\n", True),
    ("assistant\n", "", True), ("", "", True), ("", "<think>\nHm.\n</think>\n", False),
])
def test_reasoning_before_a_forced_call(vocabulary: Vocabulary, prompt: str, text: str, taken: bool) -> None:
    form = FORMS["hermes"]
    grammar = forced(format_of(form.template), [CLEAR], "required", False, prompt_text=prompt)
    text += form.write([("clear", {})])
    assert vocabulary.takes(grammar, text) is taken
    if taken:
        assert said(read(form, [CLEAR], [text], prompt)).calls == [("clear", "{}")]


def test_harmonys_analysis_before_a_forced_call(vocabulary: Vocabulary) -> None:
    form = FORMS["harmony"]
    grammar = forced(format_of(form.template), [CLEAR], "required", False)
    call = written("harmony", [("clear", {})])
    assert vocabulary.takes(grammar, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + call)


def test_schemas_that_refer_to_themselves(vocabulary: Vocabulary) -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "v": {"type": ["integer", "null"]}},
            "required": ["v"], "additionalProperties": False}
    tool = Tool("plant", "", {"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}}, "required": ["t"],
                              "$defs": {"tree": tree}, "additionalProperties": False}, False)
    for name in ("hermes", "gemma", "glm"):
        form = FORMS[name]
        grammar = forced(format_of(form.template), [tool], "plant", False)
        assert vocabulary.takes(grammar, form.write([("plant", {"t": {"left": {"v": 1}, "v": None}})]))
        assert not vocabulary.takes(grammar, form.write([("plant", {"t": {"left": {"v": "a"}, "v": None}})]))


@pytest.mark.parametrize(("tools", "choice", "message"), [
    ([], "required", "tool_choice is 'required', but tools is empty; add a tool."),
    ([CLEAR], "paint", "tool_choice names the function 'paint', which is not among the tools."),
])
def test_a_choice_of_nothing_is_refused(tools: list[Tool], choice: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forced(format_of(""), tools, choice, False)


def test_gemmas_notation_of_a_schema_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    tool = Tool("f", "", {"type": "object", "properties": {"a": schema}}, False)
    with pytest.raises(RequestError, match="nested deeper than 32"):
        forced(format_of(FORMS["gemma"].template), [tool], "f", False)


@pytest.mark.parametrize("name", ["qwen_coder", "glm", "gemma", "function_gemma"])
def test_arguments_whose_names_cannot_be_written(name: str) -> None:
    for key in ("a>b" if name == "qwen_coder" else "a<b", " a", "", "a\nb"):
        tool = Tool("f", "", {"type": "object", "properties": {key: {"type": "string"}}}, False)
        with pytest.raises(RequestError, match="of the tool 'f' has a character that this model's format"):
            forced(format_of(FORMS[name].template), [tool], "f", False)
