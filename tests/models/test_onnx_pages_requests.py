"""Requests whose KV cache lies in pages: the texts of our own kernels, in calls of several requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import engine
from edgeinfer.backends.onnx.step import Step
from edgeinfer.llm.api import LLM
from edgeinfer.runner import DECODE, Cancellation, Segment
from tests.helpers.sessions import TINY, free_blocks, on_device, tokens, write_model
from tests.models.test_onnx_pages import calls, pages
from tests.system.test_device_requests import agree


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """A model in f32 on our own kernels, and in pages."""
    path = write_model(tmp_path_factory.mktemp("pages"), TINY, "f32")
    options: dict[str, Any] = {"ctx": 128, "threads": 1, "kv": "f32", "max_sequences": 4, "beams": 4}
    with on_device("pages") as device:
        ours, theirs = LLM(path, **options), LLM(path, **options, **device)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"seed": 7, "n": 3}, {"seed": 1, "temperature": 1.3, "top_k": 0, "top_p": 0.8},
    {"beams": 4, "n": 2, "length_penalty": 0.7}, {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 3},
], ids=str)
def test_texts_are_those_of_our_kernels(options: dict[str, Any], both: tuple[LLM, LLM]) -> None:
    """Prompts that end within a page, at its end and after it; samples and beams share them."""
    for length in (15, 16, 37):
        prompt = tokens(length, length)
        ours, theirs = (llm.complete(prompt, max_tokens=30, ignore_eos=True, **options) for llm in both)
        for want, found in zip(ours.choices, theirs.choices, strict=True):
            if options.get("temperature") == 0:
                assert agree(*both, list(found.token_ids), list(want.token_ids), prompt)
            else:  # samples and sums of logarithms follow small differences: the beginning has none that matter
                assert found.token_ids[:8] == want.token_ids[:8]
        assert free_blocks(both[1].runner) == both[1].plan.kv_blocks


def test_the_best_logits_tell_the_same_tokens(both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples at random are the same with whole rows and without, and without none crosses."""
    rows = list[int]()
    monkeypatch.setattr(Step, "logits", lambda step, plain=Step.logits: rows.append(1) or plain(step))
    request: dict[str, Any] = {"seed": 3, "n": 3, "temperature": 2.0, "max_tokens": 30, "ignore_eos": True}
    part = both[1].complete(tokens(9), speculate="off", **request)
    assert not rows
    monkeypatch.setattr("edgeinfer.backends.onnx.calls.choose", lambda *given: False)
    whole = both[1].complete(tokens(9), speculate="off", **request)
    assert rows and [choice.token_ids for choice in part.choices] == [choice.token_ids for choice in whole.choices]


def test_samples_hold_their_prompt_once(both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    runner, held = both[1].runner, list[int]()
    forward = type(runner).forward

    def running(self: Any, *given: Any) -> Any:
        held.append(runner.plan.kv_blocks - free_blocks(runner))
        return forward(self, *given)

    monkeypatch.setattr(type(runner), "forward", running)
    both[1].complete(tokens(70, 1), n=4, seed=3, max_tokens=8, ignore_eos=True)
    assert max(held) == 4 + 4, "four whole pages, and one for each sample"


@pytest.mark.slow
def test_draft_tokens_are_checked_in_the_call_of_all(both: tuple[LLM, LLM], tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked-up draft tokens and those of a draft model in pages of its own; the texts are those without."""
    monkeypatch.setattr(engine, "Speculation", partial(engine.Speculation, fixed=True))  # whatever passes cost here
    theirs, prompt = both[1], tokens(6, 2) * 4
    want = theirs.complete(prompt, temperature=0, max_tokens=40, ignore_eos=True, speculate="off").token_ids
    done = theirs.complete(prompt, temperature=0, max_tokens=40, ignore_eos=True, speculate="lookup")
    assert done.token_ids == want and done.speculation and done.speculation.drafted
    small = write_model(tmp_path, replace(TINY, num_hidden_layers=1), "int8")
    request: dict[str, Any] = {"seed": 4, "n": 2, "max_tokens": 30, "ignore_eos": True}
    with on_device("pages") as device, LLM(theirs.path, ctx=128, threads=1, max_sequences=2, draft=small,
                                           speculate="draft", **device) as llm:
        (region,) = (region for region in llm.plan.regions if region.name == "draft_kv")
        assert "pages of 16 positions" in region.reason
        found = llm.complete(prompt, **request)
        assert [one.token_ids for one in found.choices] == [
            one.token_ids for one in theirs.complete(prompt, **request, speculate="off").choices]
        assert found.speculation and found.speculation.drafted
        assert any(len(call["past_seqlens"]) == 2 and len(call["input_ids"]) > 3 for call in calls(llm.runner))


def test_a_common_beginning_is_not_computed_again(both: tuple[LLM, LLM]) -> None:
    theirs, prompt = both[1], tokens(50, 9)
    for _ in theirs.stream(prompt, temperature=0, max_tokens=4, reuse=True, ignore_eos=True):
        pass
    calls(theirs.runner)
    stream = theirs.stream([*prompt, *tokens(9, 1)], temperature=0, max_tokens=4, reuse=True, ignore_eos=True)
    list(stream)
    assert stream.completion.cached_tokens == 48 and calls(theirs.runner)[0]["past_seqlens"].tolist() == [48]  # pages
    assert stream.completion.token_ids == theirs.complete([*prompt, *tokens(9, 1)], temperature=0, max_tokens=4,
                                                          ignore_eos=True).token_ids


def test_requests_of_several_threads_are_calls_of_one(tmp_path: Path) -> None:
    """A graph belongs to the thread that recorded it; requests of several threads record each once."""
    with on_device("pages") as device, LLM(write_model(tmp_path), ctx=64, threads=1, max_sequences=2, **device) as llm:
        texts = list[Any]()
        makers = [threading.Thread(target=lambda: texts.append(llm.complete(tokens(5), seed=2, n=2, max_tokens=4)))
                  for _ in range(3)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        assert len(texts) == 3 and len({text.token_ids for text in texts}) == 1
        (own,) = llm.runner.sessions.model.threads  # type: ignore[attr-defined]
        assert own not in makers and own is not threading.current_thread()


def test_a_call_with_graphs_is_not_ended(tmp_path: Path) -> None:
    """A graph that was ended while it was recorded would be replayed as far as it came: the pass ends after the call.
    """
    with pages(tmp_path) as opened:
        sequence, cancel, ended = opened.new_sequence(), Cancellation(), list[bool]()
        opened.prefill(sequence, tokens(5))
        run = opened.sessions.model.run_with_iobinding

        def cancelled(binding: Any, options: Any) -> None:
            cancel.cancel()
            opened.sessions._caller.end()
            time.sleep(0.1)  # who waits looks meanwhile
            ended.append(options.terminate)
            run(binding, options)

        opened.sessions.model.run_with_iobinding = cancelled
        opened.forward([Segment(sequence, [3], (0,), DECODE)], cancel)
        assert ended == [False] and len(sequence) == 6
