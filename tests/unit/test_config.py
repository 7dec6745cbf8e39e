"""Requests are checked when they are made: each wrong value gives one sentence with the value and the limit."""

from __future__ import annotations

import dataclasses

import pytest

from edgeinfer.config import GenerationConfig, RuntimeConfig, generation_config
from edgeinfer.errors import BudgetError, EdgeInferError, UsageError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": -1}, r"max_tokens is -1; it must be 0 or more\."),
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be 0 or more\."),
        ({"temperature": float("nan")}, r"temperature is nan; it must be 0 or more\."),
        ({"temperature": float("inf")}, r"temperature is inf"),
        ({"top_k": -1}, r"top_k is -1; it must be 0 \(off\) or more\."),
        ({"top_p": 0}, r"top_p is 0; it must be above 0 and at most 1\."),
        ({"min_p": 1.5}, r"min_p is 1\.5; it must be from 0 to 1\."),
        ({"repetition_penalty": 0}, r"repetition_penalty is 0; it must be above 0\."),
        ({"n": 0}, r"n is 0; it must be from 1 to 64\."),
        ({"logprobs": 101}, r"logprobs is 101; it must be from 0 to 100\."),
        ({"seed": -1}, r"seed is -1; it must be from 0 to 2\^63 - 1\."),
        ({"stop": ("",)}, r"stop is \('',\); it must be text, or at most 1000 texts, none of them empty\."),
    ],
)
def test_a_generation_request_out_of_range(options: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        GenerationConfig(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ctx": 0}, r"ctx is 0; it must be 1 or more\."),
        ({"kv": "q4"}, r"kv is 'q4'; choose one of int8, f16, f32\."),
        ({"threads": 0}, r"threads is 0; it must be from 1 to 256\."),
        ({"prefill_chunk": 0}, r"prefill_chunk is 0; it must be from 1 to 4096\."),
        ({"max_sequences": 65}, r"max_sequences is 65; it must be from 1 to 64\."),
        ({"budget_bytes": 0}, r"budget_bytes is 0; it must be 1 or more\."),
    ],
)
def test_a_runtime_setting_out_of_range(options: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        RuntimeConfig(**options)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Unknown option 'temprature'; did you mean 'temperature'\?"):
        generation_config({"temprature": 1})
    with pytest.raises(UsageError, match=r"Unknown option 'zzz'; known options: max_tokens, temperature"):
        generation_config({"zzz": 1})


@pytest.mark.parametrize(("given", "kept"), [("END", ("END",)), (["a", "b"], ("a", "b")), (None, ())])
def test_stop_takes_a_string_or_several(given: object, kept: tuple[str, ...]) -> None:
    assert GenerationConfig(stop=given).stop == kept


def test_requests_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GenerationConfig().seed = 1  # type: ignore[misc]


def test_errors_carry_a_code_and_an_exit_code() -> None:
    def tree(kind: type[EdgeInferError]) -> list[type[EdgeInferError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]

    kinds = tree(EdgeInferError)
    assert len({kind.code for kind in kinds}) == len(kinds) - 3, "prompts, forms and long contexts are bad requests"
    assert {kind.exit_code for kind in kinds} == {1, 2, 3}
    plan = object()
    assert BudgetError("too large", plan).plan is plan
