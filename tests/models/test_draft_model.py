"""A draft model: it follows texts in sequences of its own, and samples as their samplers would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.engine import DraftModel
from edgeinfer.errors import CancelledError
from edgeinfer.runner import Cancellation
from edgeinfer.runtime import Session
from tests.helpers.drafts import SETTINGS, Written
from tests.helpers.sessions import TINY, free_blocks, session, tokens, write_model

CTX = 320
Pair = tuple[Session, Session]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


def guest(path: Path, host: Session, **options: int) -> Session:
    return Session(Bundle.open(path), RuntimeConfig(**{"ctx": CTX, "prefill_chunk": 64, "max_sequences": 4, **options}),
                   host=host)


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[Pair]:
    """A model and the same model as its draft, on the same threads."""
    path = write_model(directory)
    with session(path, ctx=CTX, max_sequences=8, prefill_chunk=64) as target:
        draft = guest(path, target)
        yield target, draft
        draft.close()


def passes(draft: Session, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of each forward pass of the draft from now on."""
    found: list[int] = []
    take_in = draft._run_and_commit

    def counted(segments, cancel, further=0):
        before = len(segments[0].sequence)
        rows = take_in(segments, cancel, further)
        found.append(len(segments[0].sequence) - before)
        return rows

    monkeypatch.setattr(draft, "_run_and_commit", counted)
    return found


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_draft_that_is_the_model_draft_tokens_what_it_will_sample(pair: Pair, settings: dict) -> None:
    """For several texts at once, after right draft tokens, wrong ones and none; no block is lost."""
    target, draft = pair
    free = free_blocks(draft)
    texts = [Written(target, tokens(n, n), i, **settings) for i, n in enumerate((40, 70, 3))]
    drafter = DraftModel(draft, target.model.vocab_size)
    for n, wrong in ((5, 0), (1, 0), (7, 3), (3, 0), (4, 1)):
        expected = [text.ahead(n) for text in texts]
        assert drafter.propose(texts, n) == expected
        for text, right in zip(texts, expected, strict=True):
            text.take(right[: n - wrong])  # the rest was rejected
            text.write(1)
    assert drafter.propose(texts[1:], 2) == [text.ahead(2) for text in texts[1:]]
    drafter.release(texts)
    drafter.release(texts)
    assert free_blocks(draft) > free - 20  # the first text stays for a request that continues it
    for text in texts:
        target.release(text.sequence)


def test_no_pass_is_made_that_is_not_needed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt once for all samples; then as many as draft tokens: where all were right, two tokens are run in
    one.
    """
    target, draft = pair
    prompt, kept = tokens(80), []
    texts = [Written(target, prompt, i) for i in range(2)]
    drafter = DraftModel(draft, target.model.vocab_size, kept)
    found = passes(draft, monkeypatch)
    drafter.propose(texts, 1)
    assert found == [64, 16]  # the second sample begins as a copy of the first, and both end the prompt together
    del found[:]
    for text in texts:
        text.write(1)
    proposals = drafter.propose(texts, 4)
    assert sum(found) == 4
    for text, proposal in zip(texts, proposals, strict=True):
        assert proposal == text.ahead(4)
        text.take(proposal)
        text.write(1)
    del found[:]
    drafter.propose(texts, 3)
    assert found[0] == 2 and sum(found) == 2 + 2
    drafter.release(texts)
    del found[:]
    again = Written(target, texts[0].tokens, 0)
    DraftModel(draft, target.model.vocab_size, kept).propose([again], 1)
    assert found == [1]  # the same text in the next request: the draft still has it
    for text in (*texts, again):
        target.release(text.sequence)


def test_a_draft_ends_where_the_text_does(pair: Pair) -> None:
    target, draft = pair
    settings = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    plain = [Written(target, tokens(9, i), i, **settings) for i in range(2)]
    first, second = (text.ahead(6) for text in plain)
    end = next(token for token in first[1:4] if token not in first[:1] and token not in second)
    texts = [Written(target, tokens(9, i), i, ends=[end], **settings) for i in range(2)]
    drafter = DraftModel(draft, target.model.vocab_size)
    assert drafter.propose(texts, 6) == [first[: first.index(end) + 1], second]
    drafter.release(texts)
    for text in (*plain, *texts):
        target.release(text.sequence)


def test_draft_tokens_stay_within_the_drafts_context(pair: Pair) -> None:
    target, draft = pair
    text = Written(target, tokens(CTX - 3), room=CTX)
    drafter = DraftModel(draft, target.model.vocab_size)
    for left in (4, 3, 2, 1):  # a draft token after the last token needs no room
        assert len(drafter.propose([text], 7)[0]) == left
        text.write(1) if left > 1 else None
    drafter.release([text])
    target.release(text.sequence)


@pytest.mark.parametrize("at", range(6))
def test_a_cancelled_draft_leaves_what_is_right(pair: Pair, at: int) -> None:
    target, draft = pair
    texts = [Written(target, tokens(130, i), i, temperature=1.0) for i in range(2)]
    drafter, cancel, run, left = DraftModel(draft, target.model.vocab_size), Cancellation(), draft.executor.run, [at]

    def until(*arguments, **named):
        if not left[0]:
            cancel.cancel()
        left[0] -= 1
        return run(*arguments, **named)

    draft.executor.run = until
    try:
        with pytest.raises(CancelledError):
            drafter.propose(texts, 3, cancel)
            drafter.propose(texts, 30, cancel)
    finally:
        del draft.executor.run
    assert drafter.propose(texts, 3) == [text.ahead(3) for text in texts]
    drafter.release(texts)
    for text in texts:
        target.release(text.sequence)


@pytest.mark.parametrize("rows", [80, 120])
def test_vocabularies_of_other_lengths(directory: Path, rows: int) -> None:
    """Padding: what only one of the models has is neither drafted nor read, nor edited after the draft's logits."""
    with session(write_model(directory), ctx=64, max_sequences=4) as target:
        draft = guest(write_model(directory / str(rows), replace(TINY, vocab_size=rows)), target, ctx=64)
        common = min(rows, TINY.vocab_size)
        bias = {TINY.vocab_size - 1: 50.0, 2: 1.0}
        prompt = [token % common for token in tokens(12)]
        texts = [Written(target, prompt, i, temperature=9.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.2,
                         logit_bias=bias) for i in range(4)]
        texts[3].take([TINY.vocab_size - 1])
        drafter = DraftModel(draft, target.model.vocab_size)
        proposals = [proposal for _ in range(2) for proposal in drafter.propose(texts, 12)]
        assert max(token for proposal in proposals for token in proposal) < common
        assert rows > TINY.vocab_size or not any(proposals[3::4])
        # a text may be drafted again, if a check was called off
        assert any(proposals) and proposals[:4] == proposals[4:]
        drafter.release(texts)
        draft.close()


def test_a_drafting_sampler_samples_what_the_texts_own_would() -> None:
    """Without log-probabilities, and without edits after a smaller vocabulary, which would lie in other memory."""
    from edgeinfer.config import GenerationConfig
    from edgeinfer.engine import Sampler

    config = GenerationConfig(logit_bias={90: 5.0, 4: -3.0}, repetition_penalty=1.3, logprobs=3, temperature=2.0)
    own = Sampler(config, 100, 7, 1, room=40)
    own.prompt([1, 95, 4, 50])
    logits = np.random.default_rng(0).normal(0, 2, 100).astype(np.float32)
    other = own.for_draft(100, 5)
    assert other.sample(logits) == (own.fork().sample(logits).token_id, None, ())
    smaller, only = own.for_draft(60, 5), Sampler(replace(config, logit_bias={4: -3.0}), 60, 7, 1, room=40)
    only.prompt([1, 4, 50])
    only._position = own._position
    for _ in range(5):
        token = smaller.sample(logits[:60]).token_id
        assert token == only.sample(logits[:60]).token_id
        smaller.accept(token)
        only.accept(token)
    assert own.sample(logits).logprob is not None
