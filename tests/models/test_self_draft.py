"""A model that drafts for itself: with its first layers, or with masks; verification is untouched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.engine import SelfDraft
from edgeinfer.errors import BudgetError, CancelledError, RequestError, UsageError
from edgeinfer.registry import recipe_with
from edgeinfer.runner import DECODE, Cancellation, Segment
from edgeinfer.runtime import SelfDraftPlan, SelfDraftSession, Session
from tests.helpers.drafts import SETTINGS, Written
from tests.helpers.sessions import SPLIT, TINY, free_blocks, logits_of, session, tokens, write_model
from tests.models.test_sparse_predict import with_predictor

CTX = 600
MODEL = replace(TINY, num_hidden_layers=3)
EXIT = "fuse_input+early_exit:layers=2"


@contextmanager
def opened(path: Path, exits: str | None = None, **options: object) -> Iterator[tuple[Session, SelfDraftSession]]:
    """A session and the way in which it drafts for itself, in one plan."""
    bundle, config = Bundle.open(path), RuntimeConfig(**{  # type: ignore[arg-type]
        "ctx": CTX, "threads": 1, "prefill_chunk": 64, "max_sequences": 6, "outputs": 8, **options})
    self_draft = SelfDraftPlan.of_bundle(bundle, config.recipe, Recipe.parse(exits) if exits else None)
    own = Session(bundle, config, draft_memory=self_draft.draft_memory)
    ahead = self_draft.open(own)
    try:
        yield own, ahead
    finally:
        ahead.close()
        own.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("self"), MODEL)


def proposals_alone(path: Path, texts: list[Written], recipe: str, n: int) -> list[list[int]]:
    """Return the tokens that a model with this recipe samples after reading the texts as prompts."""
    found = []
    with session(path, ctx=CTX, recipe=Recipe.parse(recipe)) as alone:
        for text in texts:
            sampler, token, proposal = text.sampler.fork(), text.tokens[-1], []
            sequence = alone.new_sequence()
            alone.prefill(sequence, text.tokens[:-1])
            while len(proposal) < n and (not proposal or proposal[-1] not in sampler.ends):
                token = sampler.sample(alone.decode([sequence], [token])[0]).token_id
                sampler.accept(token)
                proposal.append(token)
            alone.release(sequence)
            found.append(proposal)
    return found


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_early_exit_draft_tokens_as_the_model_without_the_other_layers(path: Path, settings: dict) -> None:
    """Of several texts at once, on both sides of where attention is split; what follows is the same bit for bit."""
    with opened(path, EXIT) as (target, ahead):
        free = free_blocks(target)
        drafter, lengths = SelfDraft(target, ahead), (40, SPLIT - 4, 2 * SPLIT + 15, 3)
        texts = [Written(target, tokens(n, n), i, **settings) for i, n in enumerate(lengths)]
        assert drafter.propose(texts, 9) == proposals_alone(path, texts, EXIT, 9)
        for text in texts:
            expected = target.fork(text.sequence)
            plain = target.decode([expected], text.tokens[-1:])[0].copy()
            target.release(expected)
            drafter.propose([text], 5)
            assert target.decode([text.sequence], text.tokens[-1:])[0].tobytes() == plain.tobytes()
            target.release(text.sequence)
        assert free_blocks(target) == free


def test_checks_compute_all_rows_anew(path: Path) -> None:
    """Drafted rows of deeper layers were never written, those of the first ones hold other tokens: a pass over tokens,
    right or wrong, gives the logits of a sequence for which nothing was drafted.
    """
    with opened(path, EXIT, max_sequences=2) as (target, ahead):
        text, drafter = Written(target, tokens(SPLIT - 3), 0), SelfDraft(target, ahead)
        for round_ in range(4):
            checked = [text.tokens[-1], *tokens(6, seed=round_)]
            alone = target.new_sequence()
            target.prefill(alone, text.tokens[:-1])
            expected = target.forward([Segment(alone, checked, range(7), DECODE)]).tobytes()
            target.release(alone)
            drafter.propose([text], 7)
            assert target.forward([Segment(text.sequence, checked, range(7), DECODE)]).tobytes() == expected
            target.truncate(text.sequence, len(text.tokens) - 1 + round_)
            text.tokens += checked[1 : 1 + round_]


@pytest.mark.parametrize("kind", ["sign", "lowrank", "threshold"])
def test_masks_draft_for_a_model_that_computes_all_neurons(tmp_path: Path, kind: str) -> None:
    """By itself where the bundle has a predictor; K and V of draft tokens do not reach what is checked."""
    model = with_predictor(tmp_path, kind, 0.5 if kind == "threshold" else 0.0)
    with opened(model, max_sequences=2) as (target, ahead):
        assert any(op.decoded for op in ahead.graph.ops) or kind == "threshold"
        text, drafter = Written(target, tokens(40), 0, temperature=1.0), SelfDraft(target, ahead)
        fork = target.fork(text.sequence)
        expected = target.forward([Segment(fork, text.tokens[-1:] * 4, range(4), DECODE)]).tobytes()
        target.release(fork)
        sparse = f"{recipe_with(sparse='predict')}"
        assert drafter.propose([text], 6) == proposals_alone(model, [text], sparse, 6)
        assert drafter.propose([text], 6) != proposals_alone(model, [text], str(Recipe()), 6)
        assert target.forward([Segment(text.sequence, text.tokens[-1:] * 4, range(4), DECODE)]).tobytes() == expected


def test_without_a_predictor_or_with_the_weights_in_memory_it_leaves_early(path: Path, tmp_path: Path) -> None:
    with opened(path) as (_, ahead):
        assert {op.layer for op in ahead.graph.ops} == {None, 0}
    model = with_predictor(tmp_path, "sign", 0.0)
    for options in ({"mmap": False}, {"recipe": recipe_with(sparse="predict")}):
        with opened(model, **options) as (target, ahead):
            text = Written(target, tokens(20), 0)
            assert {op.layer for op in ahead.graph.ops} == {None, 0}
            assert len(SelfDraft(target, ahead).propose([text], 3)[0]) == 3
    with Bundle.open(write_model(tmp_path, replace(TINY, num_hidden_layers=1))) as bundle, \
            pytest.raises(RequestError, match="The model has one layer and no predictor, so no part of it can draft"):
        SelfDraftPlan.of_bundle(bundle, Recipe())


def test_draft_tokens_end_with_the_text_and_with_the_context(path: Path) -> None:
    with opened(path, EXIT, ctx=64) as (target, ahead):
        drafter, text = SelfDraft(target, ahead), Written(target, tokens(9), 0)
        proposal = drafter.propose([text], 8)[0]
        end = next(token for token in proposal if token != proposal[0])
        ended = Written(target, tokens(9), 0, ends=[end])
        both = [ended, Written(target, tokens(10), 1, ends=[end])]
        first, second = drafter.propose(both, 8)
        assert first == proposal[: proposal.index(end) + 1] and [second] == proposals_alone(path, both[1:], EXIT, 8)
        full = Written(target, tokens(61), 2)
        assert [len(drafter.propose([full], n)[0]) for n in (1, 4, 9)] == [1, 4, 4]


@pytest.mark.parametrize("at", range(3))
def test_a_cancelled_draft_leaves_the_sequences_as_they_were(path: Path, at: int) -> None:
    with opened(path, EXIT, max_sequences=2) as (target, ahead):
        free, texts = free_blocks(target), [Written(target, tokens(31, i), i) for i in range(2)]
        drafter, cancel, run, left = SelfDraft(target, ahead), Cancellation(), ahead.executor.run, [at]

        def until(*arguments, **named):
            if not left[0]:
                cancel.cancel()
            left[0] -= 1
            return run(*arguments, **named)

        ahead.executor.run, ahead.executor.tuner.further = until, lambda tokens, stop: 0
        held = [(list(text.sequence.tokens), list(text.sequence.blocks)) for text in texts]
        with pytest.raises(CancelledError):
            drafter.propose(texts, 5, cancel)
        assert held == [(text.sequence.tokens, text.sequence.blocks) for text in texts]
        assert drafter.propose(texts, 3) == proposals_alone(path, texts, EXIT, 3)
        for text in texts:
            target.release(text.sequence)
        assert free_blocks(target) == free


def test_room_ahead_is_made_by_the_first_pass(path: Path) -> None:
    with opened(path, EXIT, max_sequences=2) as (target, ahead):
        text = Written(target, tokens(8), 0)
        with pytest.raises(RequestError, match="3 tokens ahead are more than the 0 that there is room for"):
            ahead.ahead([text.sequence], [1], [0], 2, 0)


def test_it_is_planned_with_reasons_and_within_the_budget(path: Path) -> None:
    with opened(path, EXIT) as (target, ahead):
        own = {region.name: region for region in target.plan.regions if region.name.startswith("draft_")}
        assert sorted(own) == ["draft_activations", "draft_logits", "draft_scratch", "draft_tables"]
        assert own["draft_activations"].reason.startswith("draft tokens of 2 of 3 layers: 6 tokens a pass")
        held = {name: len(memory) for name, memory in ahead.executor.regions.items()
                if memory is not target.executor.regions.get(name)}
        assert held == {name.removeprefix("draft_"): region.nbytes for name, region in own.items()
                        if name != "draft_tables"}
        total, more = target.plan.total_bytes, sum(region.nbytes for region in own.values())
    with pytest.raises(BudgetError, match="It fits with --speculate off"), \
            opened(path, EXIT, budget_bytes=total - more // 2):
        pass


def test_a_model_whose_weights_are_read_from_storage_does_not_draft(path: Path) -> None:
    with opened(path, EXIT) as (target, _):
        self_draft = SelfDraftPlan.of_bundle(target.bundle, Recipe(), Recipe.parse(EXIT))
        streamed = replace(target.plan, parts=(("layers.0.qkv",),))
        assert self_draft.draft_memory.plan(streamed) is streamed
        target.plan = streamed
        with pytest.raises(RequestError, match="Weights of the model are read from storage, so it cannot draft for"):
            self_draft.open(target)


def test_an_early_exit_is_a_recipe(path: Path) -> None:
    """Of the whole model with all layers it would be refused; with fewer it gives other logits, by fewer
    instructions.
    """
    with session(path) as whole, session(path, recipe=Recipe.parse(EXIT)) as short:
        assert len(short.program.instructions) < len(whole.program.instructions) and len(short.kv.planes[0].layers) == 2
        assert not np.array_equal(logits_of(whole, tokens(5)), logits_of(short, tokens(5)))
    for layers in ("0", "3", "1.5", "one"):
        with pytest.raises(UsageError, match=f"early_exit has layers '?{layers}'?; the model has 3, so from 1 to 2"), \
                session(path, recipe=Recipe.parse(f"early_exit:layers={layers}")):
            pass
