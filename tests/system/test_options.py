"""Every option of the Python API, given every kind of value: it works, or an error of ours names it; nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.errors import EdgeInferError, RequestError, UsageError
from edgeinfer.llm.api import LLM
from edgeinfer.quality.evaluate import evaluate, token_stream
from edgeinfer.runner import Segment
from tests.helpers.sessions import session, write_model

PROMPT = "Once upon a time"
HELLO = {"role": "user", "content": "hello"}


class Unprintable:
    """Its repr fails, as that of a broken object may."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


VALUES: list[Any] = [
    "", "1", "x", "\ud800", b"1", bytearray(b"x"), 0, 1, -1, 2, 65, 0.0, 0.5, 1.0, -2.5, 10**30, -(10**30), 10**5000,
    True, False, math.nan, math.inf, -math.inf, 1j, [], [1], ["a"], [""], [b"a"], (), ("a", "b"), (1, "a"), {},
    {"a": 1}, {1: "a"}, {5: 0.5}, {1: math.nan}, {True: 1}, {np.int64(7): np.float32(0.5)}, {"a"}, set(), range(3),
    object(), Unprintable(), len, Path("x"), np.int64(2), np.float32(0.5), np.float64(math.nan), np.bool_(True),
    np.str_("a"), np.array([1, 2]), np.array(0.5), np.zeros((2, 2)), np.datetime64("2020-01-01"), Decimal("0.5"),
    Fraction(1, 2), GenerationConfig,
]
"""Values that a program may pass by mistake, and values that it may well mean."""


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) or getattr(value, "shape", None) == () else value


def whole(low: int, high: float = 2**63 - 1) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def decimal(good: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float, Fraction) and abs(value) < 1e300 and good(value)


def texts(value: Any) -> bool:
    if isinstance(value, str):
        return value not in ("", "\ud800")
    return isinstance(value, (list, tuple, set, range)) and all(type(text) is str and text for text in value)


def biases(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(plain(key)) is int and type(plain(bias)) in (int, float) and bias == bias for key, bias in value.items())


def schemas(value: Any) -> bool:
    try:
        return isinstance(value, dict) and bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False


GENERATION: dict[str, Callable[[Any], bool]] = {
    "max_tokens": whole(0), "temperature": decimal(lambda t: t >= 0), "top_k": whole(0),
    "top_p": decimal(lambda p: 0 < p <= 1), "min_p": decimal(lambda p: 0 <= p <= 1),
    "repetition_penalty": decimal(lambda x: x > 0), "presence_penalty": decimal(math.isfinite),
    "frequency_penalty": decimal(math.isfinite), "logit_bias": biases, "seed": whole(0, 2**63 - 1), "stop": texts,
    "logprobs": whole(0, 100), "n": whole(1, 64), "beams": whole(1, 16),
    "length_penalty": decimal(lambda x: -10 <= x <= 10),
    "early_stopping": lambda value: type(value) is bool or (isinstance(value, str) and value == "never"),
    "ignore_eos": lambda value: type(value) is bool,
    "speculate": lambda value: False, "draft_tokens": whole(1, 64), "response_format": schemas,
}
RUNTIME: dict[str, Callable[[Any], bool]] = {
    "ctx": whole(1), "kv": lambda value: False, "threads": whole(1, 256), "budget": whole(1, 2**63 - 1),
    "prefill_chunk": whole(1, 4096), "max_sequences": whole(1, 64), "own_tokens": whole(1), "beams": whole(1, 16),
    "kv_tokens": whole(1), "kv_memory": whole(1, 2**63 - 1), "state_memory": whole(0, 2**63 - 1),
    "mlock": lambda value: type(value) is bool,
    "mmap": lambda value: type(value) is bool, "recipe": lambda value: False, "progress": callable,
    "speculate": lambda value: False, "draft_tokens": whole(0, 64), "lazy": lambda value: False,
    "kv_layout": lambda value: False,
}
OF_LLM = ("budget", "kv_memory", "state_memory", "progress", "recipe", "beams", "speculate", "lazy")
"""Settings of `LLM` that `RuntimeConfig` does not have, or not as they are given."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", ctx=64, max_sequences=2, threads=1) as model:
        yield model


def outcome(call: Callable[[], Any], name: str, value: Any, good: bool) -> None:
    """Assert that a good value works and that any other is refused by name, in one short sentence."""
    try:
        call()
    except EdgeInferError as error:
        message = str(error)
        assert name in message and "\n" not in message and len(message) < 600, message
        if good:  # it may still not fit this model: more samples, a longer context, another vocabulary
            assert isinstance(error, EdgeInferError) and not isinstance(error, UsageError), message
        return
    except Exception as error:
        pytest.fail(f"{name}={type(value).__name__}: a bare {type(error).__name__}: {error}")
    assert good, f"{name} took {value!r:.60} without a word"


def test_the_tables_are_complete() -> None:
    assert set(GENERATION) == {field.name for field in dataclasses.fields(GenerationConfig)}
    missing = {field.name for field in dataclasses.fields(RuntimeConfig)} - set(RUNTIME)
    assert missing == {"budget_bytes", "outputs", "techniques", "kv_windows", "fill_budget", "verified_sequences"}
    assert len(VALUES) * (len(GENERATION) + len(RUNTIME)) > 1000


@pytest.mark.parametrize("name", GENERATION)
def test_every_option_of_a_request(llm: LLM, name: str) -> None:
    named = {"n": "n is", "max_tokens": "max_tokens"}.get(name, name)
    for value in VALUES:
        search = {"beams": 2} if name in ("length_penalty", "early_stopping") else {}
        options = {"max_tokens": 2, **({} if search or name == "beams" else {"seed": 1}), **search, name: value}
        good = GENERATION[name](plain(value))
        if good and name == "n" and value != 1:
            named_here = "samples were asked for"
        else:
            named_here = named
        outcome(lambda options=options: llm.complete(PROMPT, **options), named_here, value, good)


@pytest.mark.parametrize("name", [*RUNTIME, "outputs"])
def test_every_setting_of_a_model(name: str) -> None:
    for value in VALUES:
        good = RUNTIME.get(name, whole(1, 4096))(plain(value))
        if name == "recipe" and isinstance(value, str) and value.isidentifier():
            continue  # the name of a pass, which the model's graph is asked for
        if name in OF_LLM and not good:
            outcome(lambda value=value: LLM("no-such-model", **{name: value}), name, value, good)
        elif name not in OF_LLM:
            outcome(lambda value=value: RuntimeConfig(**{name: value}), name, value, good)


def test_every_model_name(tmp_path: Path) -> None:
    for value in [*VALUES, "a\0b", None, "x" * 20_000]:
        with pytest.raises(EdgeInferError):
            LLM(value)


@pytest.mark.parametrize("name", ["reuse", "prompt_cache", "template_options", "tools"])
def test_what_else_a_request_takes(llm: LLM, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.text import ChatTemplate

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llm, "chat_template", ChatTemplate({"default": "{{ messages[0].content }}"}, {}))
    for value in VALUES:
        value = str(tmp_path / value) if name == "prompt_cache" and isinstance(value, (str, Path)) and value else value
        good = {
            "reuse": type(plain(value)) is bool,
            "prompt_cache": isinstance(value, str) and value != "" and "\ud800" not in value,
            "template_options": isinstance(value, dict) and all(isinstance(key, str) for key in value),
            "tools": isinstance(value, (list, tuple)) and not value,
        }[name]
        if name in ("reuse", "prompt_cache"):
            outcome(lambda value=value: llm.complete(PROMPT, max_tokens=1, **{name: value}), name, value, good)
        else:
            outcome(lambda value=value: llm.chat([HELLO], max_tokens=1, **{name: value}), name, value, good)


def test_every_continuation_that_is_scored(llm: LLM) -> None:
    for value in VALUES:
        for given in (value, [value]):
            try:
                llm.score(PROMPT, given)
            except EdgeInferError as error:
                assert str(error)
            else:
                assert not isinstance(given, (str, bytes, dict)), value


def test_none_is_the_default_everywhere(llm: LLM) -> None:
    nothing: dict[str, Any] = dict.fromkeys([*GENERATION, "reuse", "prompt_cache"])
    assert llm.generate(PROMPT, **{**nothing, "temperature": 0, "max_tokens": 8}) == llm.generate(
        PROMPT, temperature=0, max_tokens=8)
    assert GenerationConfig(**dict.fromkeys(GENERATION)) == GenerationConfig()
    settings = {**dict.fromkeys(RUNTIME), "budget_bytes": None, "outputs": None}
    for name in ("budget", "progress", "beams", "speculate", "lazy"):
        del settings[name]
    assert RuntimeConfig(**settings) == RuntimeConfig()
    with LLM("demo", **{**dict.fromkeys(RUNTIME), "ctx": 32}) as model:
        assert model.generate(PROMPT, max_tokens=1) is not None


def test_values_are_made_plain() -> None:
    config = GenerationConfig(
        max_tokens=np.int16(3), temperature=np.float32(0.5), top_k=np.array(7), stop=(text for text in "ab"),
        logit_bias={np.int64(7): np.float16(0.5)}, ignore_eos=np.bool_(True), top_p=Fraction(1, 2),
    )
    values = (config.max_tokens, config.temperature, config.top_k, config.ignore_eos, config.top_p)
    assert values == (3, 0.5, 7, True, 0.5) and list(map(type, values)) == [int, float, int, bool, float]
    assert config.stop == ("a", "b") and config.logit_bias == {7: 0.5}
    assert [type(item) for pair in config.logit_bias.items() for item in pair] == [int, float]


def test_sentences_name_option_value_and_remedy() -> None:
    for options, sentence in [
        ({"temperature": "1"}, "temperature is '1'; it must be a number, 0 or more."),
        ({"stop": 3}, "stop is 3; it must be text, or at most 1000 texts, none of them empty."),
        ({"max_tokens": math.inf}, "max_tokens is inf; it must be an integer, 0 or more."),
        ({"n": True}, "n is True; it must be an integer, from 1 to 64."),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False."),
        ({"seed": 10**5000}, "seed is a int that cannot be shown; it must be from 0 to 2^63 - 1, and"),
        ({"stop": "x" * 5 + "\ud800"}, "stop is 'xxxxx\\ud800'; it must be text, or"),
        ({"stop": repeat("a")}, "it must be text, or at most 1000 texts"),
        ({"logit_bias": [1]}, "logit_bias is [1]; it must be a mapping of token ids to numbers, such as {15043: "),
    ]:
        with pytest.raises(UsageError) as caught:
            GenerationConfig(**options)  # type: ignore[arg-type]
        assert sentence in str(caught.value)
    with pytest.raises(UsageError, match=r"^ctx is 'x'; it must be an integer, 1 or more\.$"):
        LLM("demo", ctx="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^budget: Size '1' cannot be read; did you mean 1GiB or 1MB\?$"):
        LLM("demo", budget="1")


@pytest.mark.parametrize("method", ["generate", "complete", "stream"])
def test_every_prompt(llm: LLM, method: str) -> None:
    """Text and token ids run; everything else is refused, and an endless list of ids ends at the context."""
    lists = [count(1), repeat(5), [True], [1.0], [None], [[1]], [10**5000], iter([1, 2]), np.array([[1]])]
    for value in [*VALUES, None, *lists]:
        ids = value if isinstance(value, (list, tuple, range, np.ndarray)) and np.ndim(value) == 1 else []
        good = (isinstance(value, str) and value not in ("", "\ud800")) or type(value).__name__ == "list_iterator" or (
            len(ids) > 0 and all(type(plain(token)) is int and 0 <= token < 4096 for token in ids))
        where = "holds half of a surrogate" if isinstance(value, str) and value == "\ud800" else "rompt"

        def call(value: Any = value) -> Any:
            done = getattr(llm, method)(value, max_tokens=1)
            return list(done) if method == "stream" else done

        outcome(call, where, value, good)


def test_messages_of_every_kind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.text import ChatTemplate

    monkeypatch.setattr(llm, "chat_template", ChatTemplate({"default": "{{ messages[0].content }}"}, {}))
    for value in [*VALUES, None]:
        for messages in (value, [value], [{"role": value, "content": "a"}], [{"role": "user", "content": value}]):
            good = isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], dict) and all(
                isinstance(messages[0].get(key), str) and messages[0][key] not in ("", "\ud800")
                for key in ("role", "content"))
            unread = isinstance(value, str) and messages == [{"role": "\ud800", "content": "a"}]
            good = good or unread
            if not isinstance(value, (list, tuple)) or messages == [value]:
                outcome(lambda messages=messages: llm.chat(messages, max_tokens=1), "", messages, good)


def test_options_of_an_evaluation(llm: LLM) -> None:
    stream = token_stream(llm.tokenizer, "A cat sat here.")
    for value in VALUES:
        outcome(lambda value=value: token_stream(llm.tokenizer, "A cat.", max_tokens=value), "max_tokens", value,
                whole(1)(plain(value)))
        outcome(lambda value=value: token_stream(llm.tokenizer, "A cat.", separator=value), "separator", value,
                isinstance(value, str) and value not in ("", "\ud800"))
        outcome(lambda value=value: token_stream(llm.tokenizer, value), "ext", value,
                isinstance(value, str) and value != "\ud800")
        good = whole(1)(plain(value))
        outcome(lambda value=value: evaluate(llm.session, stream, window=value), "window", value, good)


def test_segments_take_arrays_and_refuse_the_rest(tmp_path: Path) -> None:
    with session(write_model(tmp_path), ctx=50, outputs=8) as opened:
        expected = opened.forward([Segment(opened.new_sequence(), [1, 2, 3], (0, 2))]).copy()
        sequence = opened.new_sequence()
        segment = Segment(sequence, np.array([1, 2, 3]), np.array([0, 2]))  # type: ignore[arg-type]
        assert np.array_equal(opened.forward([segment]), expected)
        assert list(map(type, sequence.tokens)) == [int] * 3
        tree = Segment(opened.new_sequence(), np.int32([1, 2]), (0,), parents=np.array([-1, 0]))  # type: ignore[arg-type]
        assert len(opened.forward([tree])) == 1
        opened.prefill(opened.new_sequence(), np.array([1, 2, 3]))  # type: ignore[arg-type]
        for value in VALUES:
            for make in (lambda v: Segment(opened.new_sequence(), v), lambda v: Segment(opened.new_sequence(), [1], v),
                         lambda v: Segment(opened.new_sequence(), [1], (0,), parents=v), lambda v: v):
                for forward in (lambda s: opened.forward([s]), lambda s: opened.forward_range(s, 0, 0), opened.forward):
                    try:
                        forward(make(value))
                    except EdgeInferError as error:
                        assert isinstance(error, RequestError), error
            try:
                opened.prefill(opened.new_sequence(), value)
            except RequestError as error:
                assert str(error)


@pytest.mark.parametrize("name", ["messages", "tools", "stopped", 1])
def test_a_template_option_is_none_of_our_own_arguments(name: object) -> None:
    from edgeinfer.llm.prompts import template_options

    with pytest.raises(UsageError, match="template_options names"):
        template_options({"template_options": {name: 1}})
