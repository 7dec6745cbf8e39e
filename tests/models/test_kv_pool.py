"""A KV pool of its own size: bytes, windows, a draft beside it, budgets; the plan compared with real sessions."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, weights_file_bytes
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import BudgetError, RequestError
from edgeinfer.graph import ModelConfig, TypeOf, build_graph, requested_types
from edgeinfer.llm.api import LLM
from edgeinfer.memory_planner import (
    Alternative,
    DraftMemory,
    MemoryPlan,
    Planner,
    budget_of,
    draft_config,
    draft_memory_of,
    fit,
    to_request,
)
from edgeinfer.memory_planner.request import to_draft_request
from edgeinfer.runner import Sequence
from edgeinfer.runtime import Session, plan_run, planner_of
from tests.helpers.sessions import TINY, logits_of, session, tokens, write_model
from tests.models.test_draft import SMALLER, TARGET
from tests.models.test_gemma4 import SMALL, with_windows
from tests.models.test_latent import PLAIN as LATENT
from tests.models.test_windows import MODEL as SOME_WINDOWED

ALL_WINDOWED = replace(SOME_WINDOWED, windows=(40, 30, 17))
MODELS = {"plain": TINY, "some windowed": SOME_WINDOWED, "all windowed": ALL_WINDOWED, "latent": LATENT,
          "shared": with_windows(SMALL, 40)}
OPTIONS: dict[str, Any] = {"ctx": 1024, "threads": 1, "prefill_chunk": 32, "max_sequences": 8}


def planner_for(config: ModelConfig, draft_memory: DraftMemory | None = None) -> Planner:
    graph = build_graph(config, requested_types("q4", 32))
    return Planner(graph, weights_file_bytes(graph), draft_memory=draft_memory)


def plan_of(planner: Planner, **options: Any) -> MemoryPlan:
    return planner.plan(to_request(RuntimeConfig(**{**OPTIONS, **options})))


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_tokens_size_the_pool_and_nothing_else(name: str) -> None:
    """Whatever context and sequences are; a pool as large as all contexts is the plan of a run without one."""
    planner = planner_for(MODELS[name])
    usual = plan_of(planner)
    full = plan_of(planner, kv_tokens=usual.kv_blocks * 16)
    assert [(r.name, r.nbytes) for r in full.regions] == [(r.name, r.nbytes) for r in usual.regions]
    for kv_tokens in (1, 16, 17, 1000, 5000):
        plan = plan_of(planner, kv_tokens=kv_tokens)
        assert plan.kv_blocks == -(-kv_tokens // 16)
        assert f"({kv_tokens} tokens in all)" in plan.region("kv").reason or plan.kv_pool(1) < plan.kv_blocks
        assert plan.kv_blocks == plan_of(planner, kv_tokens=kv_tokens, ctx=512, max_sequences=3).kv_blocks
        assert sum(plan.kv_pool(i) * layer.stride for i, layer in plan.kv_layers.items()) + 64 \
            == plan.region("kv").nbytes
        assert plan.windowed is None or 0 < plan.windowed.blocks < plan.kv_blocks


@pytest.mark.parametrize("kv", ["int8", "f32"])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_give_the_most_tokens_that_fit(name: str, kv: str) -> None:
    planner, chance = planner_for(MODELS[name]), random.Random(3)
    most = plan_of(planner, kv=kv).region("kv").nbytes
    least = plan_of(planner, kv=kv, kv_tokens=1).region("kv").nbytes
    for memory in (least, least + 1, most, *(chance.randint(least, most) for _ in range(20))):
        plan = plan_of(planner, kv=kv, kv_memory=memory)
        request = plan.request
        assert plan.region("kv").nbytes <= memory and request.kv_memory is None and plan.kv_blocks
        more = planner.plan(request.of_pool(plan.kv_blocks + 1, request.windows))
        whole = plan.kv_blocks == request.full_pool.kv_blocks and name == "all windowed"  # a pool cannot use more
        assert whole or more.region("kv").nbytes > memory
    assert plan_of(planner, kv=kv, kv_memory=2 * most).kv_blocks > 1.9 * plan_of(planner, kv=kv).kv_blocks \
        or name == "all windowed"


def test_pruned_prompts_have_their_flags_within_the_pool(tmp_path: Path) -> None:
    """A byte for each token and stage belongs to the bytes of the pool; the session finds all of it."""
    path, options = write_model(tmp_path, replace(TINY, num_hidden_layers=4)), {"lazy": "keep=0.5,0.25"}
    with session(path, **OPTIONS, **options, kv_tokens=3000) as opened:
        memory, blocks = opened.plan.region("kv").nbytes, opened.plan.kv_blocks
        assert opened.plan.pruned and opened.plan.pruned.nbytes == 2 * blocks * 16
    for more, found in ((0, blocks), (-1, blocks - 1)):
        with session(path, **OPTIONS, **options, kv_memory=memory + more) as opened:
            assert opened.plan.kv_blocks == found
            opened.prefill(opened.new_sequence(), tokens(900))


@pytest.mark.parametrize("name", MODELS)
def test_a_session_has_the_memory_of_its_pool(name: str, tmp_path: Path) -> None:
    with session(write_model(tmp_path, MODELS[name]), **OPTIONS, kv_memory=300_000) as opened:
        assert opened.executor.regions["kv"].size == opened.plan.region("kv").nbytes <= 300_000
        assert opened.kv.pool.n_free == opened.plan.kv_blocks
        if opened.plan.windowed:
            assert opened.kv.recent and opened.kv.recent.pool.n_free == opened.plan.windowed.blocks


# -- sequences that fit ------------------------------------------------------------------------------------------------


def filled(opened: Session, n: int, length: int) -> bool:
    """Return whether n sequences of a length are read and get their last token together; all are released again."""
    sequences: list[Sequence] = []
    try:
        for number in range(n):
            sequences.append(opened.new_sequence())
            if length > 1:
                opened.prefill(sequences[-1], tokens(length - 1, number))
        opened.decode(sequences, [1] * n)
    except RequestError as error:
        assert "KV blocks of 16 tokens are in use" in str(error) or f"{n} sequences with {n} tokens" in str(error)
        return False
    finally:
        for sequence in sequences:
            opened.release(sequence)
    return True


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
def test_as_many_sequences_fit_as_the_plan_says(name: str, seed: int, tmp_path: Path) -> None:
    """Of random lengths in a random pool: n of them in a real session, and not one more."""
    chance, options = random.Random(seed), {**OPTIONS, "ctx": 512, "max_sequences": 6}
    whole = plan_of(planner_for(MODELS[name]), **options).region("kv").nbytes
    windows = None if seed % 2 else chance.randint(1, 6)
    pool = {"kv_memory": chance.randint(whole // 40, whole)} if windows is None else \
        {"kv_tokens": chance.randint(100, 3000), "kv_windows": windows}
    with session(write_model(tmp_path, MODELS[name]), **options, **pool) as opened:
        for length in (512, chance.randint(1, 90), chance.randint(90, 200), chance.randint(200, 511)):
            n = opened.plan.sequences_of(length)
            assert n == 0 or filled(opened, n, length), (pool, length, n)
            assert not filled(opened, n + 1, length), (pool, length, n)
            assert opened.kv.pool.n_free == opened.plan.kv_blocks


def test_short_of_windows_the_bits_are_the_same(tmp_path: Path) -> None:
    """In a pool of two windows six sequences take turns with the blocks that none of them needs."""
    path = write_model(tmp_path, SOME_WINDOWED)
    with session(path, **OPTIONS) as wide:
        expected = [logits_of(wide, tokens(400, seed), n_decoded=3)[-1].tobytes() for seed in range(2)]
    with session(path, **OPTIONS, kv_tokens=2048, kv_windows=2) as narrow:
        assert narrow.plan.windowed and narrow.plan.windowed.blocks < 2 * narrow.plan.windowed.sequence_blocks
        held = [narrow.new_sequence() for _ in range(2)]
        for seed, sequence in enumerate(held):
            narrow.prefill(sequence, tokens(400, seed)[:397])
        for i in range(397, 400):
            rows = narrow.decode(held, [tokens(400, seed)[i] for seed in range(2)]).copy()
        assert [row.tobytes() for row in rows] == expected


@pytest.mark.parametrize(("name", "windows", "lengths"), [
    ("plain", 1, {16: 8, 256: 8, 512: 4, 1024: 2}), ("some windowed", 8, {16: 8, 256: 8, 512: 4, 1024: 2}),
    ("some windowed", 3, {16: 8, 80: 7, 256: 4, 512: 4, 1024: 2}), ("all windowed", 1, {16: 8, 80: 2, 1024: 1}),
])
def test_what_two_contexts_hold(name: str, windows: int, lengths: dict[int, int]) -> None:
    """Few sequences with windows are the limit of long texts, not of short ones."""
    plan = plan_of(planner_for(MODELS[name]), kv_tokens=2048, kv_windows=windows)
    assert {length: plan.sequences_of(length) for length in lengths} == lengths


# -- a draft model beside ----------------------------------------------------------------------------------------------


def test_a_draft_has_the_pool_and_what_its_sequences_have_alone(tmp_path: Path) -> None:
    """The plan has room for what the draft's own session takes, and the draft never runs out before the model."""
    model, draft = write_model(tmp_path / "model", TARGET), write_model(tmp_path / "draft", SMALLER)
    options: dict[str, Any] = {"ctx": 512, "threads": 1, "prefill_chunk": 32, "max_sequences": 4}
    with LLM(model, speculate="off", kv_tokens=1024, **options) as plain:
        expected = plain.complete("What was she?", max_tokens=200, seed=3, n=4, ignore_eos=True).choices
    with LLM(model, draft=draft, speculate="draft", kv_tokens=1024, **options) as llm:
        assert isinstance(llm.draft, Session) and isinstance(llm.runner, Session)
        assert llm.plan.kv_blocks == 64 and llm.draft.plan.kv_blocks == 64 + 4 * 3
        for region in llm.draft.plan.regions:
            if region.kind != "reserve":
                assert region.nbytes == llm.plan.region(f"draft_{region.name}").nbytes, region.name
        choices = llm.complete("What was she?", max_tokens=200, seed=3, n=4, ignore_eos=True).choices
        assert [choice.token_ids for choice in choices] == [choice.token_ids for choice in expected]
        with pytest.raises(RequestError, match=r"^4 samples of up to 400 tokens .* open for 64; "):
            llm.complete("What was she?", max_tokens=400, seed=3, n=4, ignore_eos=True)
    plan = plan_of(planner_for(TINY), kv_tokens=10**6)
    assert to_draft_request(plan.request).kv_blocks == plan.request.full_pool.kv_blocks  # no more than texts that run


def test_windows_of_a_draft_are_those_of_its_model() -> None:
    planner = planner_for(SOME_WINDOWED, draft_memory_of(alone := planner_for(ALL_WINDOWED)))
    for pool in ({"kv_memory": 200_000}, {"kv_tokens": 3000}, {"kv_tokens": 2048, "kv_windows": 2}):
        plan = plan_of(planner, **pool)
        own = alone.plan(to_request(replace(draft_config(plan, 1 << 40), threads=1)))
        assert own.request.windows == plan.request.windows
        assert own.region("kv").nbytes == plan.region("draft_kv").nbytes


# -- budgets -----------------------------------------------------------------------------------------------------------


def rebuilt(config: ModelConfig) -> Any:
    def rebuild(types: TypeOf) -> Any:
        return build_graph(config, types)

    return rebuild


@pytest.mark.parametrize("name", MODELS)
def test_the_pool_gets_what_the_budget_leaves(name: str) -> None:
    """From one context, without which the run is refused with its plan, to one for each sequence."""
    planner, rebuild = planner_for(MODELS[name]), rebuilt(MODELS[name])
    config = RuntimeConfig(**OPTIONS, fill_budget=True)
    least, most = planner.plan(to_request(config)), plan_of(planner)
    assert least.kv_blocks == 64 and least.sequences_of(1024) == 1
    spread = most.total_bytes - least.total_bytes
    for share in (0, 0.001, 0.1, 0.5, 0.9, 1, 3):
        budget = least.total_bytes + round(share * spread)
        plan, applied = fit(planner, replace(config, budget_bytes=budget), rebuild)
        assert applied == budget and least.total_bytes <= plan.total_bytes <= min(budget, most.total_bytes)
        assert plan.sequences_of(1024) >= 1
        more = planner.plan(plan.request.of_pool(plan.kv_blocks + 1, plan.request.windows))
        assert more.total_bytes > budget or plan.kv_blocks == most.kv_blocks
        assert (plan.region("kv").nbytes == most.region("kv").nbytes) == (share >= 1)
    short = replace(config, budget_bytes=least.total_bytes - 1)
    if name == "shared":  # which has enough layers to read some from storage
        assert fit(planner, short, rebuild)[0].kv_blocks == 64
        return
    with pytest.raises(BudgetError, match=r"It fits with --ctx \d+") as caught:
        fit(planner, short, rebuild)
    assert caught.value.plan == least and caught.value.exit_code == 3
    for option in caught.value.alternatives:  # each with a pool of one context of its own
        assert isinstance(option, Alternative)
        if "ctx" in option.options and len(option.options) == 1:
            small = planner.plan(to_request(config, int(option.options["ctx"])))
            assert small.total_bytes == option.total_bytes <= least.total_bytes - 1


def test_what_the_system_has_is_not_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, options = planner_for(TINY), {**OPTIONS, "kv": "f32", "max_sequences": 64}
    config = RuntimeConfig(**options, fill_budget=True)
    whole = plan_of(planner, **options).total_bytes
    monkeypatch.setattr(sys.modules[budget_of.__module__], "process_budget", lambda: whole)
    plan, budget = fit(planner, config, rebuilt(TINY))
    assert budget == whole * 9 // 10 and plan.total_bytes <= budget
    assert fit(planner, replace(config, budget_bytes=whole), rebuilt(TINY))[0].total_bytes == whole
    assert fit(planner, replace(config, fill_budget=False), rebuilt(TINY))[0].total_bytes == whole


@pytest.mark.parametrize("pool", [{"kv_tokens": 2000}, {"kv_memory": 200_000}])
def test_a_pool_of_a_given_size_is_not_filled(pool: dict[str, int]) -> None:
    planner = planner_for(TINY)
    plan = fit(planner, RuntimeConfig(**OPTIONS, **pool, fill_budget=True, budget_bytes=1 << 40), rebuilt(TINY))[0]
    assert plan == plan_of(planner, **pool)


def test_a_bundle_is_opened_with_what_its_budget_leaves(tmp_path: Path) -> None:
    path = write_model(tmp_path, SOME_WINDOWED)
    with Bundle.open(path) as bundle:
        least = plan_of(planner_of(bundle), kv_tokens=1024, kv_windows=1).total_bytes
    budget = least + 200_000
    with session(path, **OPTIONS, fill_budget=True, budget_bytes=budget) as opened:
        assert opened.budget_bytes == budget and opened.plan.total_bytes <= budget
        assert opened.plan.sequences_of(1024) == 2 or opened.plan.kv_blocks > 64
        opened.prefill(opened.new_sequence(), tokens(1024))


def test_with_weights_in_storage_the_pool_has_a_context(tmp_path: Path) -> None:
    """The rest of the memory is for weights; all weights in memory and a larger pool where both fit."""
    path = write_model(tmp_path, replace(TINY, num_hidden_layers=8, hidden_size=256, intermediate_size=2048))
    with Bundle.open(path) as bundle:
        config = RuntimeConfig(**OPTIONS, fill_budget=True)
        least = plan_of(planner_of(bundle), kv_tokens=1024, kv_windows=1)
        streamed = plan_run(bundle, replace(config, budget_bytes=least.total_bytes - 500_000)).plan
        resident = plan_run(bundle, replace(config, budget_bytes=least.total_bytes + 500_000)).plan
    assert streamed.mode == "streamed" and streamed.kv_blocks == 64
    assert resident.mode == "resident" and resident.kv_blocks > 64


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv", ["int8", "f16"])
def test_a_pool_beyond_the_budget_is_offered_smaller(name: str, kv: str) -> None:
    planner, rebuild = planner_for(MODELS[name]), rebuilt(MODELS[name])
    for pool in ({"kv_memory": 5_000_000}, {"kv_tokens": 100_000}):
        config = RuntimeConfig(**OPTIONS, **pool, kv=kv)
        plan = planner.plan(to_request(config))
        budget = plan.total_bytes - plan.region("kv").nbytes // 3
        with pytest.raises(BudgetError, match=r"and the budget is .*It fits with --kv-memory \d+B") as caught:
            fit(planner, replace(config, budget_bytes=budget), rebuild)
        assert caught.value.plan == plan and caught.value.exit_code == 3
        first, *others = caught.value.alternatives
        assert isinstance(first, Alternative) and list(first.options) == ["kv_memory"]
        memory = int(first.options["kv_memory"])
        smaller = RuntimeConfig(**OPTIONS, kv=kv, kv_memory=memory)
        assert planner.plan(to_request(smaller)).total_bytes == first.total_bytes <= budget
        block = plan_of(planner, kv=kv, kv_tokens=1).region("kv").nbytes
        beyond = planner.plan(to_request(replace(smaller, kv_memory=memory + block + 4096)))
        assert beyond.total_bytes > budget or name == "all windowed"
        assert all(isinstance(one, Alternative) and "ctx" not in one.options and "kv_memory" not in one.options
                   for one in others)


def test_a_pool_without_a_block_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    block = plan_of(planner_for(TINY), kv_tokens=1).region("kv").nbytes
    with session(path, **OPTIONS, kv_memory=block) as opened:
        assert opened.plan.kv_blocks == 1
        opened.prefill(opened.new_sequence(), tokens(16))
    sentence = r"^The KV pool of \d\S* \S+ is too small for one block of 16 tokens, which takes [\d,]+ bytes; r"
    with pytest.raises(BudgetError, match=sentence) as caught, session(path, **OPTIONS, kv_memory=block - 1):
        pass
    plan = caught.value.plan
    assert isinstance(plan, MemoryPlan) and plan.kv_blocks == 1 and caught.value.exit_code == 3


def test_no_pool_is_no_change() -> None:
    """Plans of runs without a pool of their own are those of before: contexts times sequences, or a prompt once."""
    planner = planner_for(SOME_WINDOWED)
    plan = plan_of(planner)
    assert plan.kv_blocks == 8 * 65 and plan.request.kv_tokens is plan.request.kv_windows is None
    assert plan.windowed and plan.windowed.blocks == plan.windowed.needed(1024, 8)
    assert plan.region("kv").reason.startswith("int8 blocks: 520 x 1 layers, ")
    shared = plan_of(planner, own_tokens=100)
    assert "(a prompt once, 8 x 100 tokens)" in shared.region("kv").reason
    assert np.array_equal(sorted(plan.kv_layers), [0, 1, 2])
