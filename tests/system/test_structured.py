"""Answers of a given form: valid documents from any logits, the same with drafts and in company, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")

from edgeinfer import LLM
from edgeinfer.base.text_form import MAX_DEPTH, TextForm, text_form
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.text import Constraint, GrammarCompiler
from tests.helpers.command_line import edgeinfer

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"},
                                           "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
          "required": ["name", "age", "tags"], "additionalProperties": False}
PROMPT = "The king: "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", ctx=512, threads=1, max_sequences=4) as opened:
        yield opened


def checked(text: str) -> Any:
    """Return the document that a text is, which follows the schema."""
    import jsonschema

    document = json.loads(text)
    jsonschema.validate(document, SCHEMA)
    return document


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_follow_a_schema(llm: LLM, temperature: float) -> None:
    for seed in range(4):
        done = llm.complete(PROMPT, response_format=SCHEMA, seed=seed, temperature=temperature, max_tokens=300)
        assert done.finish_reason == "stop"
        checked(done.text)


def test_the_text_is_the_same_with_drafts_and_in_company(llm: LLM) -> None:
    options: dict[str, Any] = {"response_format": SCHEMA, "temperature": 0.9, "max_tokens": 200, "logprobs": 1}
    with LLM("demo", ctx=512, threads=1, speculate="off") as plain:  # one row of logits: nothing is verified
        want = [plain.complete(PROMPT, seed=seed, **options) for seed in range(4)]
    requests = [llm.request(PROMPT, {**options, "seed": seed}) for seed in range(4)]
    for request in requests:
        request.start_whole()
    found = [request.finish() for request in requests]
    assert [(one.token_ids, one.logprobs) for one in found] == [(one.token_ids, one.logprobs) for one in want]


def test_forced_tokens_take_fewer_passes(llm: LLM) -> None:
    long = {"type": "regex", "pattern": "(perhaps it is a mistake of the king|no)"}
    before = llm._engine.passes
    done = llm.complete(PROMPT, response_format=long, logit_bias={}, temperature=0, max_tokens=60)
    assert re.fullmatch(long["pattern"], done.text)
    assert llm._engine.passes - before <= max(len(done.token_ids) // 2, 3)


@pytest.mark.parametrize(("form", "pattern"), [
    ({"type": "regex", "pattern": "(yes|no), [0-9]{2}"}, "(yes|no), [0-9]{2}"),
    ({"type": "grammar", "grammar": 'start: "a" "b"+ "c"\n'}, "ab+c"),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
    ({"type": "json_object"}, r"\{(.|\n)*\}"),
])
def test_patterns_and_grammars(llm: LLM, form: dict[str, str], pattern: str) -> None:
    done = llm.complete(PROMPT, response_format=form, seed=1, max_tokens=400)
    if done.finish_reason == "stop":
        assert re.fullmatch(pattern, done.text), done.text
    else:
        assert done.finish_reason == "length" and form["type"] in ("json_object", "grammar")


def test_a_pydantic_model_is_a_schema() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMA

    wrapped = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert text_form(Model) == text_form(SCHEMA) == text_form(wrapped)


def test_bias_and_form_that_leave_nothing_end_the_text(llm: LLM) -> None:
    allowed = [i for i in range(llm.tokenizer.vocab_size) if llm.tokenizer.token_text(i) in ("y", "ye", "yes")]
    done = llm.complete(PROMPT, response_format={"type": "regex", "pattern": "yes"}, seed=1,
                        logit_bias=dict.fromkeys(allowed, float("-inf")))
    assert done.finish_reason == "grammar" and done.text == ""


@pytest.mark.parametrize(("form", "sentence"), [
    ({"type": "strin"}, "The json schema cannot be used: "),
    ({"not": {"type": "string"}, "x-guidance": {"lenient": True}}, 'cannot be used: Unimplemented keys: \\["not"\\]'),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}], "x-guidance": {"coerce_one_of": True}}, "oneOf constraints are"),
    ({"type": "regex", "pattern": "("}, "The regex cannot be"),
    ({"type": "grammar", "grammar": "start: foo bar["}, "The grammar cannot be used: "),
])
def test_forms_that_mean_nothing(llm: LLM, form: dict[str, str], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.complete(PROMPT, response_format=form)
    assert llm.generate(PROMPT, max_tokens=2)


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(("form", "sentence"), [
    (3, "^3 is not a response format; give"),
    ({"type": "regex"}, "^A form of the type regex needs a text 'pattern'"),
    ({"type": "json_schema", "json_schema": 3}, "A JSON schema is an object, and this is a int"),
    (deep(MAX_DEPTH + 5), "The JSON schema is nested 6. deep or more; at most 64 are taken"),
    ({"enum": ["x" * 300_000]}, "at most 262144 bytes are taken"), ({"enum": [{1, 2}]}, "cannot be written as JSON"),
])
def test_forms_that_are_refused_before_anything_runs(form: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        text_form(form)
    with pytest.raises(UsageError, match="A form of the kind 'x' is not known"):
        TextForm("x")


@pytest.mark.parametrize("pattern", ["((a{0,99}){0,99}){0,99}b" * 9, "(.*a){30}", "(a|b|ab)*(a|aa){500}c{1000}",
                                     "[a-z]{1,100000}x", "|".join(f"w{i}.*" for i in range(3000))])
def test_patterns_that_explode_neither_hang_nor_break_the_model(llm: LLM, pattern: str) -> None:
    try:
        done = llm.complete(PROMPT, response_format={"type": "regex", "pattern": pattern}, max_tokens=8, seed=1)
        assert done.finish_reason in ("length", "stop")
    except RequestError as error:
        assert "cannot be" in str(error)
    assert llm.generate(PROMPT, max_tokens=2)


def test_a_form_that_fails_within_a_text_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = llm.complete(PROMPT, response_format=SCHEMA, seed=1, max_tokens=30).token_ids
    failing = llm.request(PROMPT, {"response_format": {"type": "regex", "pattern": "[a-z]+"}, "max_tokens": 30})
    other = llm.request(PROMPT, {"response_format": SCHEMA, "seed": 1, "max_tokens": 30})
    constraint, accept = failing.task._samples[0].constraint, Constraint.accept

    def fail(self: Constraint, token_id: int) -> bool:
        complete = accept(self, token_id)
        if self is constraint:
            self._matcher.consume_token(0)  # which no form allows
        return complete

    monkeypatch.setattr(Constraint, "accept", fail)
    for request in (failing, other):
        request.start_whole()
    with pytest.raises(RequestError, match=r"^The form of the text cannot be followed: "):
        failing.finish()
    assert other.finish().token_ids == want
    assert not constraint.words.any()


def test_masks_are_computed_within_the_pass_that_samples_under_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, prepare, events = llm.runner.executor.pool.submit, Constraint.prepare, []
    monkeypatch.setattr(llm.runner.executor.tuner, "plan", lambda *given: (1, False))  # as of a long pass
    monkeypatch.setattr(llm.runner.executor.tuner, "short", lambda *given: False)
    monkeypatch.setattr(llm.runner.executor.pool, "submit", lambda *given: (events.append("pass"), submit(*given))[1])
    monkeypatch.setattr(Constraint, "prepare", lambda self: (events.append("mask"), prepare(self))[1])
    done = llm.complete(PROMPT, response_format={"type": "regex", "pattern": "[a-z]{8}"}, seed=1, speculate="off")
    assert re.fullmatch("[a-z]{8}", done.text)
    assert events[:2] == ["mask", "pass"]  # of the prompt
    assert ["pass", "mask", "pass"] * (len(done.token_ids) - 1) == events[2:]


def test_forms_are_compiled_once(llm: LLM) -> None:
    grammars = GrammarCompiler(llm.tokenizer, llm.runner.model.vocab_size, [2])
    first, second = grammars.begin(text_form(SCHEMA)), grammars.begin(text_form(SCHEMA))
    assert first._matcher is not second._matcher and len(grammars._compiled) == 1


# -- the command line --------------------------------------------------------------------------------------------------


def test_run_takes_a_schema_and_a_grammar(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "grammar.lark").write_text('start: "yes" | "no"\n')
    run = ("run", "demo", PROMPT, "--seed", "2", "-n", "200")
    told = edgeinfer(*run, "--json-schema", tmp_path / "schema.json", "--json")
    assert told.code == 0, told.err
    checked(told.json["text"])
    assert edgeinfer(*run, "--grammar", tmp_path / "grammar.lark").out.strip() in ("yes", "no")
    (tmp_path / "wrong.json").write_text("[1")
    for given, sentence in (
        (("--json-schema", tmp_path / "wrong.json"), "wrong.json is not a JSON schema"),
        (("--json-schema", tmp_path / "none.json"), "Cannot read"),
        (("--json-schema", "-", "--grammar", "x"), "--json-schema and --grammar exclude each other"),
        (("--json-schema", "-", "--beams", "2"), "response_format and beams exclude each other"),
    ):
        refused = edgeinfer("run", "demo", PROMPT, *given)
        assert refused.code == 2 and sentence in refused.sentence, refused


@pytest.mark.parametrize("text", ["▁a", "<｜tool▁calls▁begin｜>x", "naïve ▁▁ é"])
def test_characters_that_a_tokenizer_replaces(llm: LLM, text: str) -> None:
    """SentencePiece writes U+2581 as a space, and so cannot encode it; bytes can."""
    assert llm.generate("Once", response_format={"type": "regex", "pattern": text}, max_tokens=60) == text
