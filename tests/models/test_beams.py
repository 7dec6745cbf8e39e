"""Beam search against a plain one that knows no cache, on a tiny model: texts, scores, ends, blocks, cancellation."""

from __future__ import annotations

import _thread
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import BeamSearch, Completion, run_alone
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.llm.api import LLM
from edgeinfer.memory_planner import Request, shared_blocks
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, free_blocks, scored, session, tokens, write_model
from tests.helpers.tasks import Stepped

PROMPT = "Once upon a time"
Ends = frozenset[int]
Found = list[tuple[float, tuple[int, ...], str]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    path = write_model(tmp_path_factory.mktemp("models"))
    with session(path, ctx=128, max_sequences=16, own_tokens=40, outputs=64) as one:
        yield one
        assert free_blocks(one) == one.plan.kv_blocks, "a block was lost"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", ctx=256, beams=8, own_tokens=64, threads=1) as model:
        yield model


def outcome(opened: Session, ids: list[int], ends: Ends = frozenset(), **options: Any) -> Completion:
    config = GenerationConfig(**{"n": options["beams"], **options})
    found = run_alone(BeamSearch(opened, None, ids, config, ends), opened)
    assert free_blocks(opened) == opened.plan.kv_blocks
    return found


def plainly(opened: Session, ids: list[int], ends: Ends, beams: int, max_tokens: int, length_penalty: float = 1.0,
            early_stopping: bool | str = False) -> Found:
    """Beam search as it is defined: whole texts are computed from scratch, and all candidates sorted."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: Found = []
    for length in range(1, max_tokens + 1):
        candidates = []
        for total, text in live:
            row = scored(opened, [*ids, *text])[-1].astype(np.float64)
            row -= row.max() + np.log(np.exp(row - row.max()).sum())
            candidates += [(total + value, (*text, token)) for token, value in enumerate(row.tolist())]
        candidates.sort(key=lambda one: -one[0])
        live = []
        for rank, (total, text) in enumerate(candidates[: max(2, 1 + len(ends)) * beams]):
            if text[-1] in ends or length == max_tokens:
                if rank < beams:
                    kept = text[:-1] if text[-1] in ends else text
                    done.append((total / length**length_penalty, kept, "stop" if kept != text else "length"))
            elif len(live) < beams:
                live.append((total, text))
        done = sorted(done, key=lambda one: -one[0])[:beams]
        reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if not live or (len(done) == beams and (
                early_stopping is True or live[0][0] / reach**length_penalty <= done[-1][0])):
            break
    return done


# -- texts and scores --------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize(("options", "n_ends"), [
    ({"beams": 2}, 0), ({"beams": 4}, 2), ({"beams": 16}, 5), ({"beams": 3, "length_penalty": 0}, 12),
    ({"beams": 4, "early_stopping": True}, 12), ({"beams": 4, "length_penalty": 2.5}, 12),
    ({"beams": 4, "early_stopping": "never", "length_penalty": 0.7}, 12), ({"beams": 5, "length_penalty": -1.5}, 12),
    ({"beams": 3, "early_stopping": "never", "length_penalty": -0.5}, 12),
])  # fmt: skip
def test_texts_and_scores_are_those_of_a_plain_search(opened: Session, options: dict[str, Any], n_ends: int) -> None:
    for seed, n in ((1, 1), (2, 15), (3, 16), (4, 33)):
        ids, ends = tokens(n, seed), frozenset(tokens(n_ends, seed + 10))
        done = outcome(opened, ids, ends, max_tokens=12, **options)
        expected = plainly(opened, ids, ends, max_tokens=12, **options)
        assert [(choice.token_ids, choice.finish_reason) for choice in done.choices] == [one[1:] for one in expected]
        scores = [one[0] for one in expected]
        assert [choice.score for choice in done.choices] == pytest.approx(scores, abs=1e-5, rel=1e-6)
        assert done.score == done.choices[0].score and done.text == ""


def test_one_result_is_the_first_of_several(llm: LLM) -> None:
    best = llm.complete(PROMPT, beams=4, max_tokens=20)
    several = llm.complete(PROMPT, beams=4, max_tokens=20, n=3)
    assert len(best.choices) == 1 and best.token_ids == several.token_ids and best.score == several.score
    scores = [choice.score for choice in several.choices]
    assert scores == sorted(scores, reverse=True) and [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.token_ids for choice in several.choices}) == 3
    assert several.completion_tokens == 60 and several.tpot_ms and several.tok_per_s
    for choice in several.choices:
        whole = llm.tokenizer.decode([*llm.tokenizer.encode(PROMPT), *choice.token_ids])
        assert choice.text == whole[len(PROMPT) :]


def test_the_best_beam_is_at_least_as_likely_as_the_greedy_text(llm: LLM) -> None:
    greedy = llm.complete(PROMPT, temperature=0, max_tokens=24, logprobs=0)
    assert greedy.logprobs and greedy.score is None
    found = llm.complete(PROMPT, beams=8, max_tokens=24, logprobs=2)
    assert found.logprobs and found.score and found.score > sum(one.logprob for one in greedy.logprobs) / 24
    assert found.score == pytest.approx(sum(one.logprob for one in found.logprobs) / 24, abs=1e-5)
    assert [one.token_id for one in found.logprobs] == list(found.token_ids)
    assert all(len(one.top) == 2 for one in found.logprobs)


def test_an_end_token_counts_for_the_score_and_not_for_the_text(opened: Session) -> None:
    ids = tokens(5)
    first = outcome(opened, ids, beams=2, max_tokens=1)
    end = first.token_ids[0]
    ended = outcome(opened, ids, frozenset([end]), beams=2, max_tokens=6, n=1)
    assert ended.token_ids == () and ended.finish_reason == "stop" and ended.score == first.score
    assert ended.ttft_ms is None and ended.tok_per_s is None
    ignored = outcome(opened, ids, frozenset([end]), beams=2, max_tokens=6, ignore_eos=True)
    assert [choice.finish_reason for choice in ignored.choices] == ["length"] * 2


def test_a_forbidden_token_is_in_no_beam(llm: LLM) -> None:
    usual = llm.complete(PROMPT, beams=4, max_tokens=10, n=4)
    word = usual.token_ids[0]
    other = llm.complete(PROMPT, beams=4, max_tokens=10, n=4, logit_bias={word: float("-inf")})
    assert word in usual.token_ids and not any(word in choice.token_ids for choice in other.choices)
    with pytest.raises(RequestError, match="logit_bias forbids every token"):
        llm.complete(PROMPT, beams=2, logit_bias=dict.fromkeys(range(4096), float("-inf")))
    only = {token: float("-inf") for token in range(4096) if token != 300}
    done = llm.complete(PROMPT, beams=4, n=4, max_tokens=3, logit_bias=only)
    assert [choice.token_ids for choice in done.choices] == [(300, 300, 300)]
    assert done.score == pytest.approx(0, abs=1e-6)


def test_a_stop_string_ends_a_beam(llm: LLM) -> None:
    """Every result ends before the string, or has none of it; the string's tokens count for the score."""
    plain = llm.complete(PROMPT, beams=4, max_tokens=24, n=4)
    stop = " girl"
    assert stop in plain.text
    done = llm.complete(PROMPT, beams=4, max_tokens=24, n=4, stop=stop, logprobs=0)
    assert any(choice.finish_reason == "stop" for choice in done.choices)
    for choice in done.choices:
        assert stop not in choice.text
        assert choice.logprobs and choice.score == pytest.approx(
            sum(one.logprob for one in choice.logprobs) / len(choice.token_ids), abs=1e-5)
        decoded = llm.tokenizer.decode([*llm.tokenizer.encode(PROMPT), *choice.token_ids])[len(PROMPT) :]
        if choice.finish_reason == "stop":
            assert decoded.startswith(choice.text + stop)
        else:
            assert choice.text == decoded


@pytest.mark.parametrize("n_prompt", [120, 126, 127, 128])
def test_a_context_that_ends(opened: Session, n_prompt: int) -> None:
    done = outcome(opened, tokens(n_prompt), beams=4, max_tokens=40, n=2)
    room = 128 - n_prompt
    assert [len(choice.token_ids) for choice in done.choices] == [room] * (2 if room else 1)
    assert {choice.finish_reason for choice in done.choices} == {"length"}
    assert outcome(opened, tokens(5), beams=4, max_tokens=0, n=2).token_ids == ()


# -- blocks ------------------------------------------------------------------------------------------------------------


def most_held(opened: Session, n_prompt: int, **options: Any) -> int:
    """Most blocks that were held after any forward pass of a search."""
    one = Stepped(BeamSearch(opened, None, tokens(n_prompt), GenerationConfig(**options)), opened)
    held = 0
    while not one.ended:
        one.step()
        held = max(held, opened.plan.kv_blocks - free_blocks(opened))
    return held


def test_the_prompt_is_held_once(opened: Session) -> None:
    for n_prompt in (80, 81, 88):
        held = most_held(opened, n_prompt, beams=16, max_tokens=40)
        assert n_prompt // 16 + 16 <= held <= shared_blocks(n_prompt, 40, 16) <= opened.plan.kv_blocks


def test_no_prompt_needs_more_blocks_than_planned() -> None:
    for ctx in (1, 16, 17, 40, 100):
        for own in range(1, 60):
            request = Request(ctx, "int8", 1, 1, 1, 3, own_tokens=own)
            needed = [shared_blocks(n, min(own, ctx - n), 3) for n in range(1, ctx + 1)]
            assert max(needed) <= request.kv_blocks <= replace(request, own_tokens=None).kv_blocks, (ctx, own)


def test_forks_are_made_for_further_children_alone(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are never more sequences than beams: those without a child are released before others are forked."""
    alive = {"now": 0, "most": 0}

    def count(name: str, change: int) -> None:
        plain: Callable[..., Any] = getattr(opened, name)

        def counting(*sequence: Any) -> Any:
            alive["now"] += change
            alive["most"] = max(alive["most"], alive["now"])
            return plain(*sequence)

        monkeypatch.setattr(opened, name, counting)

    count("new_sequence", 1), count("fork", 1), count("release", -1)
    outcome(opened, tokens(20), beams=8, max_tokens=40)
    assert alive == {"now": 0, "most": 8}


def test_a_search_that_may_not_fit_is_refused(llm: LLM) -> None:
    message = (r"^8 beams of up to 200 tokens after a prompt of 5 may need \d+ KV blocks of 16 tokens, and the model "
               r"is open for \d+; lower max_tokens, or open it with own_tokens=200\.$")
    with pytest.raises(RequestError, match=message):
        llm.complete(PROMPT, beams=8, max_tokens=200)
    assert llm.complete(PROMPT, beams=2, max_tokens=200).completion_tokens == 200
    with pytest.raises(RequestError, match="16 beams were asked for, but the model is open for 8; open it with"):
        llm.complete(PROMPT, beams=16)


def test_a_request_may_go_on_from_the_prompt_of_a_search(llm: LLM) -> None:
    prompt = PROMPT + " there was a king who had three daughters and a garden behind the house."
    first = llm.complete(prompt, beams=4, max_tokens=8, reuse=True)
    second = llm.complete(prompt, beams=4, max_tokens=8, reuse=True)
    assert first.cached_tokens == 0 and second.cached_tokens == 16 < second.prompt_tokens  # a whole block
    assert second.token_ids == first.token_ids and second.score == first.score
    llm.complete(prompt, max_tokens=1)
    assert free_blocks(llm.session) == llm.plan.kv_blocks


# -- cancellation ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cancellations_lose_no_block(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand, before, within and after forward passes of random searches; what there is so far is right."""
    rng, forward = np.random.default_rng(0), opened._run
    countdown = [0]

    def cancelling(*args: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            one.cancel()
        return forward(*args)

    monkeypatch.setattr(opened, "_run", cancelling)
    for _ in range(1000):
        beams, n = int(rng.integers(2, 5)), int(rng.integers(10, 20))
        config = GenerationConfig(beams=beams, n=int(rng.integers(1, beams + 1)), max_tokens=int(rng.integers(1, 12)))
        one = BeamSearch(opened, None, tokens(n, n), config, frozenset([3, 5, 8]))
        countdown[0] = int(rng.integers(1, 5))
        run = Stepped(one, opened)
        run.read()
        for _ in range(int(rng.integers(1, 5))):
            run.step()
        done = run.cancel()
        assert one.finished and 1 <= len(done.choices) <= config.n
        assert free_blocks(opened) == opened.plan.kv_blocks


def test_a_cancelled_search_gives_the_best_so_far(opened: Session) -> None:
    ids = tokens(9)
    one = Stepped(BeamSearch(opened, None, ids, GenerationConfig(beams=4, n=4, max_tokens=12)), opened)
    one.read()
    for _ in range(4):
        one.step()
    assert not one.ended
    one.task.cancel()
    one.step()
    assert one.ended and one.request.next_piece() is None
    done = one.finish()
    expected = outcome(opened, ids, beams=4, max_tokens=5)
    assert [(choice.token_ids, choice.score) for choice in done.choices] == [
        (choice.token_ids, choice.score) for choice in expected.choices]
    assert {choice.finish_reason for choice in done.choices} == {"cancelled"}
    with pytest.raises(RequestError, match="The request was released"):
        BeamSearch(opened, None, ids, GenerationConfig(beams=2)).runs()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"beams": 17}, r"beams is 17; it must be from 2 to 16, or 1 for no beam search\."),
    ({"beams": 0}, r"beams is 0; it must be from 2 to 16"),
    ({"beams": 4, "n": 5}, r"n is 5, and a search with 4 beams has as many results; lower n or raise beams\."),
    ({"beams": 4, "temperature": 0.9}, r"temperature is 0\.9, and beam search does not sample; omit temperature or "
                                       r"beams\."),
    ({"beams": 4, "top_k": 5}, "top_k is 5"), ({"beams": 4, "top_p": 0.5}, "top_p is 0.5"),
    ({"beams": 4, "min_p": 0}, "min_p is 0"), ({"beams": 4, "seed": 1}, "seed is 1"),
    ({"beams": 4, "repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
    ({"beams": 4, "presence_penalty": 1}, "presence_penalty is 1"),
    ({"beams": 4, "frequency_penalty": 1}, "frequency_penalty is 1"),
    ({"length_penalty": 2}, r"length_penalty is 2, and it applies to beam search alone; give beams, 2 to 16\."),
    ({"early_stopping": True}, "early_stopping is True, and it applies to beam search alone"),
    ({"beams": 2, "early_stopping": "soon"}, r"early_stopping is 'soon'; it must be True, False or 'never'\."),
    ({"beams": 2, "length_penalty": 11}, r"length_penalty is 11; it must be from -10 to 10\."),
])  # fmt: skip
def test_what_contradicts_a_search_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        GenerationConfig(**options)


def test_streams_have_no_beams(llm: LLM) -> None:
    message = r"^A stream returns text as it is generated, and the best of 4 beams is known only at the end; use "
    with pytest.raises(RequestError, match=message):
        llm.stream(PROMPT, beams=4)
    assert llm.generate(PROMPT, beams=4, temperature=0, max_tokens=4)


def test_a_model_opens_for_beams(llm: LLM) -> None:
    assert (llm.session.config.max_sequences, llm.session.config.own_tokens) == (8, 64)
    assert "(a prompt once, 8 x 64 tokens)" in llm.plan.region("kv").reason
    with pytest.raises(UsageError, match="beams is 20; it must be from 2 to 16"):
        LLM("demo", beams=20)


@pytest.fixture
def listening() -> Iterator[None]:
    """Hear Ctrl-C although the suite may be deaf to it, as in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("place", ["finished", "release", "_conclude"])
def test_ctrl_c_while_a_search_ends_leaves_the_model_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    expected = llm.complete(PROMPT, beams=3, max_tokens=3)
    plain = getattr(BeamSearch, place)

    def interrupted(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        _thread.interrupt_main()  # the thread that waits for the search
        return plain.fget(*args) if place == "finished" else plain(*args, **options)

    monkeypatch.setattr(BeamSearch, place, property(interrupted) if place == "finished" else interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.complete(PROMPT, beams=3, max_tokens=3)
    assert llm.complete(PROMPT, beams=3, max_tokens=3).token_ids == expected.token_ids
    assert free_blocks(llm.session) == llm.plan.kv_blocks


def test_cancel_from_another_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches a search between two forward passes and within one."""
    forward, steps = llm.session._run, [0]

    def running(*args: Any) -> Any:
        steps[0] += 1
        if steps[0] == 6:
            thread = threading.Thread(target=llm.cancel)
            thread.start()
            thread.join()
        return forward(*args)

    monkeypatch.setattr(llm.session, "_run", running)
    done = llm.complete(PROMPT, beams=4, n=2, max_tokens=40)
    assert [choice.finish_reason for choice in done.choices] == ["cancelled"] * 2
    assert [len(choice.token_ids) for choice in done.choices] == [5, 5] and done.text
    assert free_blocks(llm.session) == llm.plan.kv_blocks


def test_a_saved_prompt_serves_a_search(llm: LLM, tmp_path: Path) -> None:
    first = llm.complete(PROMPT, beams=4, max_tokens=8, prompt_cache=tmp_path / "prompt")
    second = llm.complete(PROMPT, beams=4, max_tokens=8, prompt_cache=tmp_path / "prompt")
    assert (first.cached_tokens, second.cached_tokens) == (0, first.prompt_tokens - 1)
    assert second.token_ids == first.token_ids and second.score == first.score


def test_more_beams_than_tokens(tmp_path: Path) -> None:
    with session(write_model(tmp_path, replace(TINY, vocab_size=3)), max_sequences=16, own_tokens=4) as opened:
        done = outcome(opened, [1, 2], beams=16, max_tokens=3)
        found = sorted(itertools.product(range(3), repeat=3))
        assert len(done.choices) == 16 and {one.token_ids for one in done.choices} <= set(found)
        assert len(outcome(opened, [1, 2], beams=16, max_tokens=1).choices) == 3
        expected = plainly(opened, [1, 2], frozenset(), 16, 3)
        assert [one.token_ids for one in done.choices] == [one[1] for one in expected]
