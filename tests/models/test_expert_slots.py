"""Experts that are read from storage when a token wants them: the bits of the model in memory, whatever befalls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.cli.reports.streaming import Usage, line
from edgeinfer.config import RuntimeConfig
from edgeinfer.graph import ExpertsConfig, read_config
from edgeinfer.memory_planner import MemoryPlan, Planner, Request, in_memory
from edgeinfer.offload import ALIKE, SKEWED, from_flash, keep_experts
from edgeinfer.registry import placer
from edgeinfer.runtime import Session, plan_run
from tests.helpers import golden_cases
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import TINY, logits_of, session, tokens, write_model
from tests.helpers.streamed import Pread, decoded_after_errors, real, resumed_after_cancellations, watched
from tests.models.test_gpt_oss import MOE as BIASED

MOE = replace(TINY, model_type="qwen3_moe", num_hidden_layers=4, experts=ExpertsConfig(9, 3, 40))
LARGER = replace(TINY, model_type="qwen2_moe", hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, attention_bias=True,
                 experts=ExpertsConfig(6, 2, 130, normalise=False, shared_size=50, dense_layers=(1,)))
"""Matrices of more than a page, a layer without experts, a shared expert."""
EARLY = replace(TINY, model_type="smallthinker", num_hidden_layers=3, hidden_act="relu",
                experts=ExpertsConfig(7, 3, 44, scores="sigmoid"))
"""The router stands before the attention, so reads go on meanwhile."""
BESIDE = read_config(golden_cases.config_of("gemma4-mixture-rows"))
"""Experts side by side with an FFN, and added to nothing before they are normed; a table that stays in its file."""
IDS = tokens(70)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def slots(n: int) -> Callable[[Planner, Request, int], MemoryPlan]:
    """So many experts are kept, whatever the budget."""
    def place(planner: Planner, request: Request, budget: int) -> MemoryPlan:
        return planner.plan(replace(in_memory(request), expert_slots=n))

    return place


@contextmanager
def kept(path: Path, n: int, **options: Any) -> Iterator[Session]:
    config = RuntimeConfig(**{"threads": 1, "budget_bytes": 1, "prefill_chunk": 48, "ctx": 256, **options})
    opened = Session(Bundle.open(path), config, placer=slots(n))
    try:
        yield opened
    finally:
        opened.close()


def resident(path: Path, **options: Any) -> np.ndarray:
    with session(path, prefill_chunk=48, ctx=256, **options) as opened:
        return logits_of(opened, IDS, 12)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("config", "weights", "n"), [
    (MOE, "q4", 9), (MOE, "f16", 20), (LARGER, "q4", 7), (LARGER, "int8", 12), (EARLY, "q4", 8),
    (BIASED, "q4", 12), (replace(BESIDE, max_position_embeddings=256), "int8", 11),
], ids=["9", "20", "shared", "all", "early", "biased", "beside"])
def test_the_bits_of_the_model_in_memory(config: Any, weights: str, n: int, models: Path) -> None:
    path = write_model(models, config, weights)
    want = resident(path)
    for threads, chunk in ((1, 48), (2, 5)):
        with kept(path, n, threads=threads, prefill_chunk=chunk) as opened:
            for _ in range(2):  # with an empty cache, and with what is left
                assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all(), (threads, chunk)


@pytest.mark.parametrize("config", [LARGER, BIASED], ids=["shared", "biased"])
def test_experts_lie_beside_each_other_wherever_weights_are(config: Any, models: Path) -> None:
    """Copied into memory, and streamed layer by layer."""
    path = write_model(models, config)
    want = resident(path)
    with session(path, prefill_chunk=48, ctx=256, mmap=False) as opened:
        assert (logits_of(opened, IDS, 12) == want).all()

    def streamed(planner: Planner, request: Request, budget: int) -> MemoryPlan:
        names = [(weight.name, "streamed") for weight in planner.graph.weights if weight.kind in ("experts", "matrix")]
        return planner.plan(replace(request, residency=(("*", "resident"), *names)))

    options = RuntimeConfig(threads=2, budget_bytes=1, prefill_chunk=48, ctx=256)
    opened = Session(Bundle.open(path), options, placer=streamed)
    try:
        assert opened.plan.parts and any("experts_down" in name for name in opened.plan.parts[0])
        assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all()
    finally:
        opened.close()


@pytest.mark.slow
def test_every_instruction_beside_its_reference(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(models, LARGER)
    want = resident(path)
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with kept(path, 7, prefill_chunk=20) as opened:
        assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all()
        assert (watched(lambda: logits_of(opened, IDS[:30], 3))).any()


def test_a_token_brings_an_expert_with_one_read(models: Path, host: Callable[[Pread], None]) -> None:
    path, calls = write_model(models, LARGER), list[tuple[int, int]]()

    def seen(file: int, to: int, length: int, offset: int) -> int:
        calls.append((offset, length))
        return real(file, to, length, offset)

    host(seen)
    with kept(path, 7) as opened:
        sequence, plan, readers = opened.new_sequence(), opened.plan.experts, opened.executor.stream
        opened.prefill(sequence, IDS[:3])
        assert plan and readers
        calls.clear()
        before = readers.hits.misses
        for token in IDS[3:20]:
            opened.decode([sequence], [token])
        assert len(calls) == readers.hits.misses - before > 5
        first = {layer.offset + e * layer.nbytes: layer.nbytes for layer in plan.layers for e in range(plan.experts)}
        begins = {at // 4096 * 4096: -(-(at % 4096 + nbytes) // 4096) * 4096 for at, nbytes in first.items()}
        assert all(begins[offset] == length for offset, length in calls)


def test_sequences_side_by_side_and_forks(models: Path) -> None:
    path, prompts = write_model(models, MOE), [tokens(20 + i, seed=i) for i in range(3)]

    def rows(opened: Session) -> np.ndarray:
        sequences = [opened.new_sequence() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            opened.prefill(sequence, prompt)
        sequences.append(opened.fork(sequences[0]))
        found = [opened.decode(sequences, ids).copy() for ids in ([3, 5, 8, 4], [7, 7, 7, 9], [1, 2, 3, 4])]
        return np.stack(found)

    with session(path, max_sequences=4, prefill_chunk=48, ctx=256) as opened:
        want = rows(opened)
    with kept(path, 11, max_sequences=4, threads=2) as opened:
        assert (watched(lambda: rows(opened)) == want).all()


def test_a_plan_keeps_what_the_budget_allows(tmp_path: Path) -> None:
    path = write_model(tmp_path, replace(LARGER, num_hidden_layers=9))
    with Bundle.open(path) as bundle:
        config = RuntimeConfig(threads=1, ctx=64, prefill_chunk=16, mmap=False)
        full = plan_run(bundle, replace(config, budget_bytes=1 << 40)).plan
        for spared in (100_000, 300_000):
            budget = full.total_bytes - spared
            plan = plan_run(bundle, replace(config, budget_bytes=budget), placer(bundle.config, bundle)).plan
            assert plan.experts
            assert plan.experts.experts <= plan.experts.slots < plan.experts.total
            assert budget - 2 * plan.experts.slot_bytes < plan.total_bytes <= budget


def test_tables_of_rows_stay_in_their_file(models: Path) -> None:
    """Unless nothing is to be mapped."""
    path = write_model(models, BESIDE)
    with Bundle.open(path) as bundle:
        for mmap in (True, False):
            config = RuntimeConfig(threads=1, ctx=64, prefill_chunk=16, mmap=mmap, budget_bytes=1 << 40)
            _, _, _, graph, plan, *_ = plan_run(bundle, config)
            kept = keep_experts(Planner(graph, bundle.weights_bytes), plan.request, 1 << 40)
            assert kept and kept.experts
            assert kept.allocations["layer_rows"].region == ("weights" if mmap else "resident")
            assert bool(kept.filed_bytes) == mmap


def test_a_bundle_that_lacks_room_even_for_a_layer_is_streamed_or_refused(models: Path) -> None:
    path = write_model(models, MOE)
    with Bundle.open(path) as bundle:
        _, _, _, graph, plan, *_ = plan_run(bundle, RuntimeConfig(threads=1, ctx=64, prefill_chunk=16))
        planner = Planner(graph, bundle.weights_bytes)
        assert keep_experts(planner, plan.request, plan.total_bytes // 100) is None


# -- a storage that fails ----------------------------------------------------------------------------------------------


def test_an_error_ends_the_pass_and_the_next_one_is_right(models: Path,
                                                          host: Callable[[Pread], None]) -> None:
    path, bad = write_model(models, MOE), list[bool]()
    host(lambda *call: -1 if bad else real(*call))
    want = resident(path)
    with kept(path, 9, threads=2) as opened:
        match = r"weights.bin could not be read at byte .*, and could when"
        assert (decoded_after_errors(opened, IDS[:58], IDS[58:], bad, match) == want[1:]).all()


def test_a_cancellation_does_not_wait_for_reads(models: Path, host: Callable[[Pread], None]) -> None:
    path, answers = write_model(models, MOE), threading.Event()
    answers.set()

    def waiting(*call: int) -> int:
        answers.wait()
        return real(*call)

    want = resident(path)
    host(waiting)
    with kept(path, 9, threads=2) as opened:
        sequence = opened.new_sequence()
        assert (resumed_after_cancellations(opened, sequence, IDS, 58, answers) == want[1:]).all()


def test_a_read_that_is_cut_short_is_repeated(models: Path, host: Callable[[Pread], None]) -> None:
    path, calls = write_model(models, LARGER), list[tuple[int, int]]()

    def torn(file: int, to: int, length: int, offset: int) -> int:
        """Nothing, then a page of it, then all."""
        calls.append((to, offset))
        got = real(file, to, length, offset)
        return (-1, min(got, 4096), got)[(calls.count((to, offset)) - 1) % 3]

    want = resident(path)
    host(torn)
    with kept(path, 7) as opened:
        assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all()


# -- what stays --------------------------------------------------------------------------------------------------------


def test_what_is_chosen_often_stays_and_hits_are_reported(models: Path) -> None:
    """The same token again and again finds its experts, also after a prompt that goes through all of them."""
    path = write_model(models, MOE)
    with kept(path, 14) as opened:
        usage = Usage(opened)
        sequence = opened.new_sequence()
        opened.prefill(sequence, [5])
        for _ in range(20):
            opened.decode([sequence], [5])
        found = usage.report()
        assert found
        assert found["decision"] == "experts from flash"
        assert found["kept_share"] == 14 / 36
        assert found["hit_rate"] > 0.5
        assert found["flash_bytes_per_token"] == pytest.approx(
            (1 - found["hit_rate"]) * 12 * opened.plan.experts.expert_bytes)
        assert "hit rate" in line(found)
        opened.prefill(opened.new_sequence(), IDS[:40])
        usage = Usage(opened)
        opened.decode([sequence], [5])
        assert usage.report()["hit_rate"] > 0.3


def test_expected_reads(models: Path) -> None:
    path = write_model(models, MOE)
    with kept(path, 18) as opened:
        plan = opened.plan.experts
    assert plan
    alike, skewed = from_flash(plan, ALIKE), from_flash(plan, SKEWED)
    assert alike.hit_rate == pytest.approx(0.5)
    assert alike.nbytes == pytest.approx(0.5 * 12 * plan.expert_bytes)
    assert skewed.hit_rate == pytest.approx(0.75, abs=0.06)
    assert from_flash(replace(plan, slots=plan.total), SKEWED).nbytes < 1


def test_plan_says_how_many_stay_and_what_a_token_reads(tmp_path: Path) -> None:
    path = write_model(tmp_path, replace(LARGER, num_hidden_layers=9))
    with Bundle.open(path) as bundle:
        full = plan_run(bundle, RuntimeConfig(threads=1, ctx=64, budget_bytes=1 << 40)).plan.total_bytes
    report = edgeinfer("plan", path, "-c", 64, "--threads", 1, "--budget", f"{full - 300_000}B", "--json").json
    (option,) = [one for one in report["alternatives"] if "kept_experts" in one["options"]]
    assert 6 <= option["options"]["kept_experts"] < option["experts"] == 48
    assert 0 < option["routing"]["skewed"]["streamed_bytes"] < option["routing"]["alike"]["streamed_bytes"]
    assert option["routing"]["alike"]["hit_rate"] == pytest.approx(option["options"]["kept_experts"] / 48)
