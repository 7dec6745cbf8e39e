"""Heads for further tokens (MTP): their logits, and texts that they draft for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import edgeinfer.engine as engine
from edgeinfer import LLM
from edgeinfer.bundle import DRAFT_HEAD_FILE, Bundle
from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.engine import DraftHead, Generation, Speculation, Times
from edgeinfer.errors import BundleError, CancelledError
from edgeinfer.graph import ExpertsConfig
from edgeinfer.runner import DECODE, Cancellation, Segment
from edgeinfer.runtime import DraftHeadPlan, DraftHeadSession, HiddenRows, Session
from tests.helpers import golden_cases
from tests.helpers.draft_heads import head_rows, text, with_head
from tests.helpers.drafts import SETTINGS, Written
from tests.helpers.sessions import HYBRID, TINY, free_blocks, session, tokens, write_model
from tests.models import test_latent

CTX = 320
EXPERTS = ExpertsConfig(7, 3, 24, shared_size=40)
CONFIGS = {"dense": HYBRID, "experts": replace(HYBRID, model_type="qwen3_5_moe_text", experts=EXPERTS),
           "by-key-head": replace(HYBRID, model_type="qwen3_next", experts=EXPERTS),
           "grouped": replace(TINY, model_type="glm4_moe", head_norm=True, experts=test_latent.MODEL.experts),
           "latent": test_latent.MODEL, "latent-v3": replace(test_latent.PLAIN, model_type="deepseek_v3")}
FEW = {"logit_bias": {token: 60.0 for token in (7, 8)}, "temperature": 1.0, "ignore_eos": True}
"""Two tokens that are about as likely: draft tokens of a random head are right now and then."""


@contextmanager
def opened(path: Path, **options: object) -> Iterator[tuple[Session, DraftHeadSession]]:
    """A session and the head that drafts for it, in one plan."""
    bundle, config = Bundle.open(path), RuntimeConfig(**{  # type: ignore[arg-type]
        "ctx": CTX, "threads": 1, "prefill_chunk": 32, "max_sequences": 4, "draft_tokens": 7, **options})
    head = DraftHeadPlan.of_bundle(bundle)
    own = Session(bundle, config, draft_memory=head.draft_memory)
    ahead = head.open(own)
    try:
        yield own, ahead
    finally:
        ahead.close()
        own.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mtp"), HYBRID)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens are verified in each forward pass, whatever it costs."""
    monkeypatch.setattr(engine, "Speculation", partial(engine.Speculation, fixed=True))


# -- logits ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize(("name", "chunk"), [
    ("qwen3-5", 1), ("qwen3-5", 5), ("qwen3-5", 32), ("qwen3-5-wrapped", 5), ("qwen3-5-equal-heads", 5),
    ("qwen3-5-moe", 1), ("qwen3-5-moe", 32), ("qwen3-5-moe-wrapped", 5), ("qwen3-next", 5), ("glm4-moe-lite", 1),
    ("glm4-moe-lite", 32), ("glm4-moe-lite-halves", 5), ("deepseek-v3", 5),
    ("glm4-moe", 5), ("glm4-moe-plain", 32)])
def test_logits_are_those_of_the_equations(tmp_path: Path, name: str, chunk: int) -> None:
    """From a checkpoint, after a prompt in chunks, of the next token and of those that are drafted after it; of a text
    model inside one that sees, whose embedding is the head, too."""
    case = with_head(golden_cases.load(name))
    source = golden_cases.write_checkpoint(case, tmp_path / "model")
    report = convert(source, tmp_path / "bundle", weights="f32")
    assert not any("predict further tokens" in remark for remark in report.remarks)
    ids = tokens(23)
    with opened(tmp_path / "bundle", ctx=64, kv="f32", prefill_chunk=chunk) as (own, head):
        c, sequence, given = own.model, own.new_sequence(), [np.zeros((1, own.model.hidden_size), np.float32)]
        with patch.object(head, "take", lambda segments, take=head.take: (
                given.append(HiddenRows(own).rows(0, len(segments[0].ids))), take(segments))):
            own.prefill(sequence, ids[:-1])
        words, tensors = ids, text(case)
        table = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).astype(np.float64)
        for offset in range(4):
            expected = head_rows(c, tensors, np.concatenate(given), words)
            logits = expected[-1] @ table.T
            found, _ = head.ahead([sequence], words[-1:], [0], offset, 3 - offset)
            assert np.abs(found[0] - logits).max() < 1e-5 * np.abs(logits).max()
            words, given = [*words, int(found[0].argmax())], [*given, expected[-1:]]
        own.truncate(sequence, len(sequence))


def test_what_it_drafts_depends_on_the_text_alone(path: Path) -> None:
    """After accepted and rejected draft tokens, in forks and beside other texts: as after reading the text at once."""
    with opened(path) as (own, head):
        drafter, text = DraftHead(own, head), Written(own, tokens(40), 0, **FEW)
        for round_ in range(4):
            checked = [text.tokens[-1], *tokens(5, seed=round_)]
            own.forward([Segment(text.sequence, checked, range(6), DECODE)])
            own.truncate(text.sequence, len(text.tokens) + round_)
            text.tokens += checked[1 : 2 + round_]
        fork = Written(own, tokens(9), 1, **FEW)
        whole = Written(own, text.tokens, 0, **FEW)
        whole.sampler, copy = text.sampler, Written(own, tokens(3), 2, **FEW)
        copy.tokens, copy.sampler, copy.sequence = text.tokens, text.sampler, own.fork(text.sequence)
        expected = drafter.propose([whole], 5)[0]
        assert drafter.propose([fork, text, copy], 5)[1:] == [expected, expected]


def test_of_large_vocabularies_the_first_words_are_drafted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as (own, head):
        text = Written(own, tokens(20), 0, temperature=0)
        logits = head.ahead([text.sequence], text.tokens[-1:], [0], 0, 0)[0].copy()
        assert head.vocab_size == logits.shape[1] == 99
    monkeypatch.setattr("edgeinfer.graph.build.DRAFT_WORDS", 41)
    with opened(path) as (own, head):
        text = Written(own, [98, *tokens(20)], 0, temperature=0)
        own.release(text.sequence)
        text = Written(own, tokens(20), 0, temperature=0)
        found = head.ahead([text.sequence], text.tokens[-1:], [0], 0, 0)[0]
        assert head.vocab_size == found.shape[1] == 41
        assert found.tobytes() == logits[:, :41].tobytes()
        assert max(DraftHead(own, head).propose([text], 7)[0]) < 41


# -- texts -------------------------------------------------------------------------------------------------------------


def outcome(llm: LLM, drafter: str = "", **options: Any) -> list[tuple]:
    done = llm.complete(tokens(50), **{"max_tokens": 40, "seed": 4, "logprobs": 1, "ignore_eos": True, **options})
    assert not drafter or (done.speculation and done.speculation.drafter == drafter and done.speculation.drafted > 9)
    return [(choice.token_ids, choice.finish_reason, choice.logprobs) for choice in done.choices]


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "dense"])
def test_texts_of_every_family(family: str, always: None, tmp_path: Path) -> None:
    path = write_model(tmp_path, CONFIGS[family])
    options: dict[str, Any] = {"ctx": 128, "threads": 1, "prefill_chunk": 16, "max_sequences": 2}
    with LLM(path, speculate="off", **options) as plain:
        expected = outcome(plain, **FEW)
    with LLM(path, speculate="mtp", draft_tokens=7, **options) as llm:
        for n in (1, 3, 7):
            assert outcome(llm, "mtp", draft_tokens=n, **FEW) == expected
        done = llm.complete(tokens(50), max_tokens=60, seed=1, **FEW).speculation
        assert done and 0 < done.accepted < done.drafted
        assert llm.session.kv.pool.n_available == llm.plan.kv_blocks
        assert 0 < (path / DRAFT_HEAD_FILE).stat().st_size - llm.plan.region("draft_weights").nbytes < 8192


REQUESTS: list[dict[str, Any]] = [{"temperature": 0}, FEW, {**FEW, "n": 3}, {"repetition_penalty": 1.3, "n": 2}]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("words", [99, 41])
def test_texts_and_probabilities_are_those_without_draft_tokens(path: Path, always: None, words: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 to 7 draft tokens; some of them are right, and all blocks are free again."""
    monkeypatch.setattr("edgeinfer.graph.build.DRAFT_WORDS", words)
    options: dict[str, Any] = {"ctx": 128, "threads": 1, "prefill_chunk": 16, "max_sequences": 3}
    with LLM(path, speculate="off", **options) as plain:
        expected = [outcome(plain, **request) for request in REQUESTS]
    with LLM(path, speculate="mtp", draft_tokens=7, **options) as llm:
        assert isinstance(llm.draft, DraftHeadSession)
        for n in range(1, 8):
            for request, text in zip(REQUESTS, expected, strict=True):
                assert outcome(llm, "mtp", draft_tokens=n, **request) == text
        done = llm.complete(tokens(50), max_tokens=60, seed=1, **FEW).speculation
        assert done and 0 < done.accepted < done.drafted
        assert outcome(llm, speculate="off", **REQUESTS[0]) == expected[0]
        assert outcome(llm, speculate="lookup", **REQUESTS[0]) == expected[0]
        assert llm.session.kv.pool.n_available == llm.plan.kv_blocks


def test_requests_at_once(path: Path, always: None) -> None:
    prompts = [tokens(n, n) for n in (5, 60, 33, 17)]
    options: dict[str, Any] = {"ctx": 128, "threads": 2, "prefill_chunk": 16, "max_sequences": 4}

    def texts(llm: LLM) -> list[list[int]]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda prompt: list(llm.complete(
                prompt, max_tokens=30, seed=len(prompt), **FEW).token_ids), prompts))

    with LLM(path, speculate="off", **options) as plain:
        expected = texts(plain)
    with LLM(path, speculate="mtp", draft_tokens=3, **options) as llm:
        assert texts(llm) == expected == texts(llm)  # the second time with cached prefixes


@pytest.mark.parametrize(("what", "at"), [("draft", 0), ("draft", 1), ("draft", 2), ("draft", 3), ("verify", 0),
                                          ("verify", 1), ("verify", 2)])
def test_a_cancelled_pass_leaves_the_sequences_as_they_were(path: Path, what: str, at: int) -> None:
    """Wherever it ends: before or after the rows in front of the head, or while these are followed."""
    with opened(path) as (own, head):
        text, cancel, left = Written(own, tokens(31), 0, **FEW), Cancellation(), [at]
        held, free = (list(text.sequence.tokens), list(text.sequence.blocks)), free_blocks(own)

        def until(run: Any, *arguments: Any, **named: Any) -> Any:
            if not left[0]:
                cancel.cancel()
            left[0] -= 1
            return run(*arguments, **named)

        runs = own.executor.run, head.executor.run
        own.executor.run, head.executor.run = (partial(until, run) for run in runs)  # type: ignore[method-assign]
        drafter, checked = DraftHead(own, head), [text.tokens[-1], 3, 4]
        with pytest.raises(CancelledError):
            if what == "draft":
                drafter.propose([text], 2, cancel)
            else:
                own.forward([Segment(text.sequence, checked, range(3), DECODE)], cancel)
        own.executor.run, head.executor.run = runs  # type: ignore[method-assign]
        assert held == (text.sequence.tokens, text.sequence.blocks) and free_blocks(own) == free
        whole = Written(own, text.tokens, 0, **FEW)
        assert drafter.propose([text], 4) == drafter.propose([whole], 4)


def test_saved_sequences_draft_and_belong_to_sessions_with_a_head(path: Path, tmp_path: Path) -> None:
    with opened(path) as (own, _):
        text = Written(own, tokens(40), 0, **FEW)
        own.save(text.sequence, tmp_path / "cache")
        loaded = own.load(tmp_path / "cache")
        pairs = [own.decode([one], text.tokens[-1:])[0].tobytes() for one in (loaded, text.sequence)]
        assert pairs[0] == pairs[1]
        own.cache_prefix(text.sequence)
        assert own.save_prefixes(tmp_path / "prefixes")
    for load, name in ((Session.load, "cache"), (Session.load_prefixes, "prefixes")):
        with session(path, ctx=CTX) as alone, pytest.raises(BundleError, match="--ctx, --speculate or inst"):
            load(alone, tmp_path / name)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting(path: Path, settings: dict[str, Any]) -> None:
    """Beside a model without a head, whose text is the same."""
    def text(runner: Session, head: DraftHeadSession | None) -> Any:
        speculation = Speculation(DraftHead(runner, head), Times(), 4, runner.config.outputs, fixed=True) \
            if head else None
        config = GenerationConfig(max_tokens=30, seed=3, **settings)
        return engine.run_alone(Generation(runner, None, tokens(20), config, (), speculation), runner).token_ids

    with session(path, ctx=CTX) as alone, opened(path) as (own, head):
        assert text(own, head) == text(alone, None)


# -- plan and bundle ---------------------------------------------------------------------------------------------------
