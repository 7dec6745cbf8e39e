"""Tokens chosen from the best logits of a row are those of the whole row, and rows that nobody needs are left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends.onnx import calls
from edgeinfer.backends.onnx.step import Step
from edgeinfer.backends.onnx.topk_sampling import RETURNED_LOGITS, choose
from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Sampler
from edgeinfer.errors import KernelError
from edgeinfer.kernels import abi
from edgeinfer.llm.api import LLM
from edgeinfer.runner import DECODE, Segment
from tests.helpers.sessions import tokens, write_model

VOCABULARY = 997
ENOUGH: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"top_k": 1}, {}, {"top_k": RETURNED_LOGITS - 1, "top_p": 1.0, "min_p": 0.0}, {"top_p": 0.5},
    {"min_p": 0.3, "temperature": 3.0}, {"temperature": 1e-3})
NOT: tuple[dict[str, Any], ...] = (
    {"top_k": RETURNED_LOGITS}, {"top_k": 0}, {"top_k": 0, "min_p": 0.5}, {"logprobs": 0},
    {"temperature": 0.0, "logprobs": 2},
    {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"logit_bias": {5: 1.0}})


def best_of(logits: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The largest logits in any order, and of equals any."""
    shuffled = rng.permutation(len(logits))
    ids = shuffled[np.argsort(-logits[shuffled], kind="stable")[:RETURNED_LOGITS]].astype(np.int64)
    rng.shuffle(ids)
    return logits[ids], ids


def alone(sampler: Sampler, values: np.ndarray, ids: np.ndarray, position: int) -> bool:
    return choose([sampler.address], values[None], ids[None], np.array([position]))


def sampler_of(settings: dict[str, Any], seen: list[int], seed: int = 3) -> Sampler:
    sampler = Sampler(GenerationConfig(**settings), VOCABULARY, seed)
    sampler.prompt(seen)
    return sampler


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("settings", ENOUGH, ids=str)
def test_the_token_is_that_of_the_whole_row(settings: dict[str, Any]) -> None:
    """Rows with few different values, so that many are equal; with ties at the cut the whole row is asked for."""
    rng, told = np.random.default_rng(1), 0
    for trial in range(300):
        spread = (0.5, 3.0, 50.0)[trial % 3]
        logits = np.round(rng.normal(0, spread, VOCABULARY), trial % 4).astype(np.float32)
        seen = list(range(trial % 7 + 1))
        whole, part = sampler_of(settings, seen, trial), sampler_of(settings, seen, trial)
        values, ids = best_of(logits, rng)
        if alone(part, values, ids, len(seen)):
            told += 1
            assert part.sample(np.full(VOCABULARY, np.nan, np.float32)) == whole.sample(logits), trial
    assert told > 100


def test_equals_that_may_be_missing_ask_for_the_whole_row() -> None:
    logits = np.zeros(VOCABULARY, np.float32)
    logits[500:510] = 1.0
    values, ids = best_of(logits, np.random.default_rng(2))
    assert alone(sampler_of({"temperature": 0.0}, [1]), values, ids, 1), "ten equals, all of them there"
    assert alone(sampler_of({"top_k": 10}, [1]), values, ids, 1)
    assert not alone(sampler_of({"top_k": 11}, [1]), values, ids, 1)
    level = np.zeros(RETURNED_LOGITS, np.float32)
    assert not alone(sampler_of({"temperature": 0.0}, [1]), level, ids, 1)


@pytest.mark.parametrize("settings", NOT, ids=str)
def test_what_looks_at_more_gets_the_whole_row(settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(4).normal(0, 5, VOCABULARY).astype(np.float32)
    sampler = sampler_of(settings, [1, 2])
    assert not alone(sampler, *best_of(logits, np.random.default_rng(5)), 2)
    assert sampler.sample(logits) == sampler_of(settings, [1, 2]).sample(logits)


def test_a_mask_gets_the_whole_row() -> None:
    """Tokens that it allows may not be among the best logits."""
    logits = np.random.default_rng(4).normal(0, 5, VOCABULARY).astype(np.float32)
    sampler, words = sampler_of({"temperature": 0.0}, [1, 2]), np.zeros(-(-VOCABULARY // 32), np.uint32)
    words[np.argmin(logits) // 32] = 1 << np.argmin(logits) % 32
    sampler.set_mask(words)
    assert not alone(sampler, *best_of(logits, np.random.default_rng(5)), 2)
    assert sampler.sample(logits).token_id == logits.argmin()
    sampler.set_mask(None)
    assert alone(sampler, *best_of(logits, np.random.default_rng(5)), 2)


def test_no_sample_and_no_numbers() -> None:
    values, ids = np.ones(RETURNED_LOGITS, np.float32), np.arange(RETURNED_LOGITS)
    values[1:] = 0
    assert not choose([0], values[None], ids[None], np.array([1]))
    assert not alone(sampler_of({}, [1]), values * np.float32(np.nan), ids, 1)


def test_rows_of_any_settings_at_once() -> None:
    """All rows of a step, or none: one that needs its whole row brings all of them."""
    rng = np.random.default_rng(6)
    rows = rng.normal(0, 2, (len(ENOUGH), VOCABULARY)).astype(np.float32)
    values, ids = map(np.stack, zip(*(best_of(row, rng) for row in rows), strict=True))
    positions = np.arange(1, len(ENOUGH) + 1)
    for other in ({}, NOT[1]):
        samplers = [sampler_of(settings, list(range(place + 1))) for place, settings in enumerate(ENOUGH)]
        want = [sampler.sample(row).token_id for sampler, row in zip(samplers, rows, strict=True)]
        samplers[2] = sampler_of({**ENOUGH[2], **other}, [0, 1, 2])
        assert choose([sampler.address for sampler in samplers], values, ids, positions) is (other == {})
        assert other or [sampler.sample(row * np.nan).token_id for sampler, row in
                         zip(samplers, rows, strict=True)] == want


# -- in a runner -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that decode steps brought whole, step by step."""
    rows = list[int]()

    def logits(step: Step, plain: Any = Step.logits) -> Any:
        found = plain(step)
        rows.append(len(found))
        return found

    monkeypatch.setattr(Step, "logits", logits)
    return rows


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgeinfer.backends.onnx.stored.cache_root",
                      lambda: tmp_path_factory.getbasetemp() / "onnx-cache")
        with LLM("demo", ctx=192, threads=1, device="onnx-cpu", max_sequences=4) as opened:
            yield opened


REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"seed": 5}, {"seed": 7, "n": 4}, {"seed": 2, "temperature": 2.0, "top_k": 63, "top_p": 1.0},
    {"seed": 3, "speculate": "lookup"}, {"temperature": 0, "speculate": "lookup", "n": 2})


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_texts_with_and_without(options: dict[str, Any], llm: LLM, fetched: list[int],
                                monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"speculate": "off", "max_tokens": 60, "ignore_eos": True, **options}
    part = llm.complete("Once upon a time, Tom and", **request)
    assert not fetched, "no row crossed"
    monkeypatch.setattr(calls, "choose", lambda *given: False)
    whole = llm.complete("Once upon a time, Tom and", **request)
    assert fetched
    assert [choice.token_ids for choice in part.choices] == [choice.token_ids for choice in whole.choices]


@pytest.mark.parametrize("options", [{"temperature": 0, "logprobs": 2}, {"seed": 1, "top_k": 0},
                                     {"temperature": 0, "logit_bias": {9: -1.0}}, {"beams": 2}], ids=str)
def test_other_requests_bring_whole_rows(options: dict[str, Any], llm: LLM, fetched: list[int]) -> None:
    llm.complete("Once", max_tokens=4, speculate="off", ignore_eos=True, **options)
    assert fetched


def test_samples_of_one_token_prompts_share_its_row(llm: LLM, fetched: list[int]) -> None:
    """A prompt's row is for all samples, also where its only token is a step."""
    alone = [llm.complete([5], max_tokens=1, seed=2, n=n, temperature=3.0, ignore_eos=True).choices for n in (1, 4)]
    assert alone[0][0].token_ids == alone[1][0].token_ids and len({c.token_ids for c in alone[1]}) > 1
    assert fetched == [1, 1]


def test_rows_that_were_left_out_are_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    with LLM(write_model(tmp_path), ctx=32, threads=1, device="onnx-cpu", max_sequences=2) as llm:
        runner, size = llm.runner, llm.runner.model.vocab_size
        held = [runner.new_sequence() for _ in range(2)]
        for sequence in held:
            runner.prefill(sequence, tokens(5))
        greedy = Sampler(GenerationConfig(temperature=0.0), size, 1)
        want = runner.decode(held, [1, 2])[0].argmax()
        for sequence in held:
            runner.truncate(sequence, 5)
        rows = runner.decode(held, [1, 2], None, [greedy.address, greedy.address])
        assert np.isnan(rows).all()
        for sequence in held:
            runner.truncate(sequence, 5)
        other = Sampler(GenerationConfig(temperature=0.0), size, 1)
        rows = runner.decode(held, [1, 2], None, [other.address, 0])
        assert np.isfinite(rows).all() and other.sample(rows[0]).token_id == want, "one row is wanted, and all come"
        runner.truncate(held[0], 5)
        rows = runner.forward([Segment(held[0], (1,), (0,), DECODE, None, (_read(greedy),))])
        assert np.isfinite(rows).all(), "a sample whose row is read, as of an evaluation"


def _read(sampler: Sampler) -> int:
    sampler._spec[abi.SAMPLE_ALONE >> 3] = 0
    return sampler.address


def test_a_model_that_computes_nan_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(step: Step, name: str) -> Any:
        return np.full_like(step._outputs[name].numpy(), np.nan)

    monkeypatch.setattr(Step, "logits", lambda step: spoilt(step, "logits"))
    monkeypatch.setattr(Step, "best", lambda step: (spoilt(step, "top_logits"), step._outputs["top_ids"].numpy()))
    with pytest.raises(KernelError, match="computed nan as its largest logit"):
        llm.complete("Once", max_tokens=4, temperature=0, speculate="off")
