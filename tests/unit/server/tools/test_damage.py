"""Text that only looks like calls, slips of models, and garbage: nothing raises and no text is lost."""

from __future__ import annotations

import json
import random

import pytest

from edgeinfer.server.tools import AnswerParser, CallArguments, CallStart, Tool, format_of
from tests.helpers.tool_calls import FORMS, MARKERS, THOUGHT_MARKERS, pieces, read, said

TEXT = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
F = Tool("f", "", TEXT, False)
WORDS = ["f", "{", "}", "[", "]", '"name"', ":", ",", '"arguments"', '{"name": "f", "arguments": ', '{"a": 1}', "\n",
         " ", "hello", "<", "<|", "é", "[TOOL_CALLS]f", "<function=f>", "<tool_call>f\n", "call:f{", '"', "\\", "\\u12",
         "<|channel|>commentary to=functions.f<|message|>"]


def garbage(rng: random.Random, words: list[str]) -> str:
    return "".join(rng.choice(words) for _ in range(rng.randrange(1, 30)))


@pytest.mark.parametrize("name", FORMS)
def test_garbage_that_calls_nothing_is_content_to_the_letter(name: str) -> None:
    form, rng = FORMS[name], random.Random(name)
    harmony = name == "harmony"
    words = [word for word in [*MARKERS, *WORDS] if not harmony or "<|message|>" not in word]
    for _ in range(150):
        text = garbage(rng, words)
        cuts = [rng.randrange(len(text) + 1) for _ in range(4)]
        assert said(read(form, [Tool("other", "", TEXT, False)], pieces(text, cuts))) == ("", text, [])


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", FORMS)
def test_garbage_reads_the_same_however_it_is_cut(name: str) -> None:
    form, rng = FORMS[name], random.Random(name)
    for _ in range(150):
        text = garbage(rng, [*MARKERS, *THOUGHT_MARKERS, *WORDS, *WORDS])
        whole = said(read(form, [F], [text]))
        assert said(read(form, [F], list(text))) == whole
        kept = "".join([*whole.reasoning, *whole.content, *(arguments for _, arguments in whole.calls)])
        assert whole.calls or name == "harmony" or text.count("é") == kept.count("é"), "lost text"


@pytest.mark.parametrize(("text", "content"), [
    ("a <tool_cal b", "a <tool_cal b"),
    ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>"),
    ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>'),
    ('<tool_call>{"name": "f", "arguments": 5}</tool_call>', '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
    ('<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}'),
    ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>'),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    ("<tool_call>", "<tool_call>"),
    ('<tool_call>{"name": "', '<tool_call>{"name": "'),
    ("  leading and trailing  \n", "  leading and trailing  \n"),
])
def test_what_only_looks_like_a_call_is_content(text: str, content: str) -> None:
    assert said(read(FORMS["hermes"], [F], list(text))) == ("", content, [])


@pytest.mark.parametrize(("text", "arguments"), [
    ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
    ('{"name": "f"}', "{}"),
    ('{"name": "f", "arguments": null}', "{}"),
    ('{"name": "f", "arguments": ""}', "{}"),
    ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
    ('{"id": [1, {"x": -2.5e3}], "name": "f", "type": true, "parameters": {"a": 1}}', '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": "1\n2\t\\d \\u00e9 \\uzz"}}', r'{"a": "1\n2\t\\d \u00e9 \\uzz"}'),
    ('{"name":"f","arguments":{"a":[1,2.5,-3e2,[],[[]],{}],"b":{"c":null}}}',
     '{"a":[1,2.5,-3e2,[],[[]],{}],"b":{"c":null}}'),
])
def test_a_call_in_another_spelling(text: str, arguments: str) -> None:
    found = said(read(FORMS["hermes"], [F], list(f"<tool_call>{text}</tool_call>")))
    assert found == ("", "", [("f", arguments)])
    json.loads(arguments)


@pytest.mark.parametrize(("arguments", "kept", "rest"), [
    ('{"a": 1,, "b": 2}', '{"a": 1,', ', "b": 2}}</tool_call>'),
    ('{"a": [1, 2}', '{"a": [1, 2', "}}</tool_call>"),
    ("{'a': 1}", "{", "'a': 1}}</tool_call>"),
    ('{"a": 01, "b": 2}', '{"a": 01', ', "b": 2}}</tool_call>'),
    ('{"a" 1}', '{"a" ', "1}}</tool_call>"),
])
def test_arguments_that_turn_out_malformed_end_there(arguments: str, kept: str, rest: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert said(read(FORMS["hermes"], [F], list(text))) == ("", rest, [("f", kept)])


def test_a_call_behind_a_broken_one_is_read() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert said(read(FORMS["hermes"], [F], ["<tool_call>oops " + call])) == ("", "<tool_call>oops", [("f", "{}")])
    assert said(read(FORMS["hermes"], [F], ["<tool_call>" + call])) == ("", "<tool_call>", [("f", "{}")])


def test_text_around_calls() -> None:
    call = FORMS["hermes"].write([("f", {})])
    found = said(read(FORMS["hermes"], [F], list(f"one\n\n{call}\n two {call}\n\n")))
    assert found == ("", "one\n two", [("f", "{}"), ("f", "{}")])


def test_arguments_are_passed_on_as_they_come() -> None:
    for name in ("hermes", "qwen_coder", "glm", "gemma", "llama"):
        parser = AnswerParser(format_of(FORMS[name].template), [F], "")
        before, after = FORMS[name].write([("f", {"a": "one two"})]).split("two")
        events = parser.push(before)
        assert isinstance(events[0], CallStart) and isinstance(events[1], CallArguments), name
        assert "one" in events[1].text
        assert parser.push("three")[-1].text == "three"  # type: ignore[union-attr]
        assert not [event for event in parser.push(after) + parser.flush() if not isinstance(event, CallArguments)]


@pytest.mark.parametrize(("value", "kind", "written"), [
    ("12", "string", '"12"'), ("12", "integer", "12"), ("12", "number", "12"), ("True", "boolean", "true"),
    ("null", ["string", "null"], "null"), ("None", ["string", "null"], "null"), ("12", ["string", "null"], '"12"'),
    ("None", "string", '"None"'), ("[1, 2]", "array", "[1, 2]"), ("twelve", "integer", '"twelve"'),
    ("NaN", "number", '"NaN"'), ("12", None, "12"), ("word", None, '"word"'), ("  5 ", "integer", "5"),
    (" 5 ", "string", '" 5 "'), ('"q"', "string", '"\\"q\\""'), ("</function>", "string", '"</function>"'),
    ("a</parameter>b", "string", '"a</parameter>b"'),
])
def test_values_without_quotes_are_of_the_schemas_type(value: str, kind: object, written: str) -> None:
    tool = Tool("f", "", {"properties": {"a": {"type": kind} if kind else {}}}, False)
    text = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
    assert said(read(FORMS["qwen_coder"], [tool], list(text))).calls == [("f", f'{{"a": {written}}}')]


@pytest.mark.parametrize(("schema", "written"), [
    ({"$ref": "#/$defs/x"}, '"1"'), ({"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}, '"1"'),
    ({"enum": ["1", "2"]}, '"1"'), ({"const": 1}, "1"), ({"$ref": "#/$defs/loop"}, "1"), ({"$ref": "#/none"}, "1"),
    ("not a schema", "1"),
])
def test_the_type_of_a_value_behind_references(schema: object, written: str) -> None:
    tool = Tool("f", "", {"properties": {"a": schema}, "$defs": {
        "x": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 3}}}, False)
    text = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    assert said(read(FORMS["glm"], [tool], [text])).calls == [("f", f'{{"a": {written}}}')]


def test_damaged_markup() -> None:
    assert said(read(FORMS["glm"], [F], ["<tool_call>f\n<arg_key>a</arg_key>\nx</tool_call>"])) == (
        "", "\nx</tool_call>", [("f", '{"a": null}')])
    text = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\nand more"
    assert said(read(FORMS["qwen_coder"], [F], [text])) == ("", "", [("f", '{"a": "x\\n</parameter>\\nand more')])
    assert said(read(FORMS["qwen_coder"], [F], ["<function=f>why</function>"])) == ("", "why</function>", [("f", "{}")])
    assert said(read(FORMS["gemma"], [F], ["<|tool_call>call:f{a:bare word,n:[5,]}<tool_call|>"])) == (
        "", "]}<tool_call|>", [("f", '{"a":"bare word","n":[5,')])


def test_json_inside_the_markup_of_other_formats() -> None:
    text = FORMS["hermes"].write([("f", {"a": "b"})])
    for name in ("qwen_coder", "glm"):
        assert said(read(FORMS[name], [F], list(text))) == ("", "", [("f", '{"a": "b"}')])


def test_llamas_calls_need_no_marker_only_where_the_answer_begins() -> None:
    form, call = FORMS["llama"], FORMS["llama"].write([("f", {"a": "b"})])
    assert said(read(form, [F], list("<|python_tag|>" + call))) == ("", "", [("f", '{"a": "b"}')])
    assert said(read(form, [F], list("\n" + call + "\n" + call))).calls == [("f", '{"a": "b"}')] * 2
    for text in ("Sure: " + call, '{"name": "Bob", "age": 3}', '{"name": "f"', "<|python_tag|>f.call(a=1)", "{"):
        assert said(read(form, [F], list(text))) == ("", text, [])


def test_harmonys_channels() -> None:
    form = FORMS["harmony"]
    text = ("<|channel|>analysis<|message|>Hm.<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I will look. <|end|>"
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>")
    assert said(read(form, [F], list(text))) == ("Hm.", "I will look.", [("f", "{}")])
    assert said(read(form, [F], list(" to=functions.f<|channel|>commentary<|message|>{}"))).calls == [("f", "{}")]
    assert said(read(form, [F], ["Hello"], form.prompt + "<|channel|>final<|message|>")).content == "Hello"
    assert said(read(form, [], list("<|channel|>final<|message|>Hello <b>.<|return|>"))) == ("", "Hello <b>.", [])
    assert said(read(form, [F], list("plain < text <|"))).content == "plain < text <|"


def test_mistrals_arguments_as_text() -> None:
    for text, calls in ((r'{\"a\": 1}', [("f", '{"a": 1}')]), ("no object", [])):
        whole = f'[TOOL_CALLS]f[ARGS]"{text}"'
        assert said(read(FORMS["mistral"], [F], list(whole))) == ("", "" if calls else whole, calls)


@pytest.mark.parametrize(("name", "length"), [("hermes", 29), ("harmony", 29), ("mistral", 9)])
def test_ids(name: str, length: int) -> None:
    form = FORMS[name]
    ids = [event.id for _ in range(20) for event in read(form, [F], [form.write([("f", {})])])
           if isinstance(event, CallStart)]
    assert len(set(ids)) == 20 and {len(one) for one in ids} == {length}
    assert all(one.removeprefix("call_").isalnum() and one.isascii() for one in ids)


def test_deep_nesting_is_read_without_recursion() -> None:
    deep = "[" * 5000 + "]" * 5000
    for text in (f'{{"name": "f", "arguments": {{"a": {deep}}}}}', f'{{"x": {deep}, "name": "f", "arguments": {{}}}}'):
        assert len(said(read(FORMS["hermes"], [F], [f"<tool_call>{text}</tool_call>"])).calls) == 1
    text = f"<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>{deep}</arg_value>\n</tool_call>"
    assert said(read(FORMS["glm"], [F], [text])).calls == [("f", f'{{"n": "{deep}"}}')]
