"""Available memory of the machine and its container, and the message if a plan exceeds it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgeinfer.base.units import format_size
from edgeinfer.bundle import weights_file_bytes
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import BudgetError, EdgeInferError
from edgeinfer.graph import Graph, TypeOf, build_graph, requested_types
from edgeinfer.memory_planner import (
    Alternative,
    Planner,
    alternatives,
    available_bytes,
    budget,
    cgroup,
    default_threads,
    fit,
    fitting,
    largest_ctx,
    process_budget,
    to_request,
)
from tests.helpers.sessions import HYBRID, TINY, session, tokens, write_model

MODEL = replace(TINY, hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64,
                max_position_embeddings=1 << 20)


def rebuild(type_of: TypeOf) -> Graph:
    return build_graph(MODEL, type_of)


def planner_of(weights: str, group_size: int = 32) -> Planner:
    graph = rebuild(requested_types(weights, group_size))
    return Planner(graph, weights_file_bytes(graph))


def config_of(ctx: int, kv: str, limit: int | None = None, **more: Any) -> RuntimeConfig:
    return RuntimeConfig(ctx, kv, 2, limit, 64, **more)


def total(ctx: int, kv: str, weights: str = "q4", group_size: int = 32) -> int:
    return planner_of(weights, group_size).plan(to_request(config_of(ctx, kv))).total_bytes


def refusal(ctx: int, kv: str, limit: int, weights: str = "q4") -> BudgetError:
    planner, config = planner_of(weights), config_of(ctx, kv, limit)
    plan = planner.plan(to_request(config))
    with pytest.raises(BudgetError) as caught:
        fit(planner, config, rebuild)
    error = caught.value
    assert error.plan == plan and error.exit_code == 3 and error.budget_bytes == limit
    return error


def test_a_plan_within_the_budget_passes() -> None:
    planner = planner_of("q4")
    plan = planner.plan(to_request(config_of(512, "int8")))
    assert fit(planner, config_of(512, "int8", plan.total_bytes), rebuild) == (plan, plan.total_bytes)
    assert fit(planner, config_of(512, "int8"), rebuild)[1] >= plan.total_bytes


def test_streaming_is_not_planned_where_all_weights_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []
    plan = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda planner, request: planned.append(request) or plan(planner, request))
    graph = build_graph(replace(MODEL, num_hidden_layers=8), requested_types("q4", 32))
    fit(Planner(graph, weights_file_bytes(graph)),
        config_of(512, "int8", 1 << 40), rebuild)
    assert len(planned) == 1


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("ctx", "kv", "weights"), [
    (ctx, kv, weights) for i, ctx in enumerate((16, 48, 250, 1000, 4096, 65536, 100_000))
    for j, kv in enumerate(("int8", "f16", "f32")) for weights in ("f32", "f16", "int8", "q4")[(i + j) % 2 :: 2]])
def test_alternatives_fit_and_nothing_larger_does(ctx: int, kv: str, weights: str) -> None:
    """For budgets from hopeless to one byte short: each alternative is planned again with its options."""
    least, most = total(16, "int8", "q4", 128), total(ctx, kv, weights)
    for part in (-0.01, 0, 0.01, 0.1, 0.3, 0.6, 0.9, 0.999, 1):
        limit = min(int(least + part * (most - 1 - least)), most - 1)
        offers = [one for one in refusal(ctx, kv, limit, weights).alternatives if isinstance(one, Alternative)]
        changes = [one.change for one in offers]
        assert changes == sorted(changes, key=lambda c: 2 if "weights" in c else 1 if "kv" in c else 0)
        for one in offers:
            small, use = int(one.options.get("ctx", ctx)), str(one.options.get("kv", kv))
            stored = str(one.options.get("weights", weights)), int(one.options.get("group_size", 32))
            assert small < ctx or use != kv or stored != (weights, 32)
            assert total(small, use, *stored) == one.total_bytes <= limit
            if "ctx" in one.options:  # a block more does not fit
                assert small % 16 == 0
                assert small + 16 >= ctx or total(small + 16, use, *stored) > limit
        if ctx > 16 and total(16, kv, weights) <= limit:
            assert changes[0] == "ctx"
        if kv != "int8" and total(ctx, "int8", weights) <= limit:
            assert "kv" in changes
        if weights != "q4" and total(ctx, kv, "q4") <= limit:
            assert "weights" in changes
        assert bool(offers) == (limit >= least) or ctx == 16


def test_the_smallest_step_that_helps_is_offered() -> None:
    """From f32 KV to f16 before int8; from f16 weights to int8 before 4 bits."""
    offers = refusal(4096, "f32", total(4096, "f16", "f16"), "f16").alternatives
    assert str(offers[1]) == "--kv f16"
    offers = refusal(4096, "f16", total(4096, "f16", "int8"), "f16").alternatives
    assert [(one.change, one.value) for one in offers][-1] == ("weights", "int8")  # type: ignore[attr-defined]
    offers = refusal(4096, "f16", total(1024, "int8", "q4"), "f16").alternatives
    last = offers[-1]
    assert isinstance(last, Alternative) and (last.change, last.value) == ("weights+kv+ctx", "q4+int8+1024")
    assert str(last) == "--weights q4 --group-size 32 --kv int8 --ctx 1024"


def test_a_hopeless_budget_names_what_helps() -> None:
    error = refusal(4096, "f16", 1000)
    needs = format_size(total(4096, "f16"))
    assert str(error).startswith(f"The run needs {needs}, and the budget is 1.0 kB. edgeinfer itself takes 1")
    assert str(error).endswith(" MB of that, so no model fits; raise --budget.")
    assert error.alternatives == ()
    python = planner_of("q4").plan(to_request(config_of(4096, "int8"))).region("python").bytes
    error = refusal(4096, "int8", python + 1000)
    assert str(error).endswith("No smaller setting of this model fits; use a smaller model or raise --budget.")


def test_a_budget_that_is_hardly_short_shows_as_short() -> None:
    most = total(4096, "int8")
    text = str(refusal(4096, "int8", most - 1))
    assert text.startswith(f"The run needs {most:,} bytes, and the budget is {most - 1:,} bytes. "
                           "It fits with --ctx 4080, or with --")
    assert text.endswith("(--weights takes a checkpoint or GGUF file, not a bundle).")


def test_the_largest_context() -> None:
    planner, config = planner_of("q4"), config_of(512, "int8")
    for ctx in (17, 100, 1000, 5000, 99_999):
        exact = total(ctx, "int8")
        assert largest_ctx(planner, config, exact, ctx) == ctx  # as asked, though no whole block
        assert largest_ctx(planner, config, exact - 1, ctx) == 16 * ((ctx - 1) // 16) or ctx == 17
        assert largest_ctx(planner, config, exact, 1 << 20) // 16 == ctx // 16
    assert largest_ctx(planner, config, 1000, 4096) == 0
    assert largest_ctx(planner, config, 10**12, 0) == 0


def test_samples_are_part_of_the_alternatives() -> None:
    planner, config = planner_of("q4"), config_of(4096, "int8", max_sequences=8)
    whole = planner.plan(to_request(config)).total_bytes
    half = next(alternatives(planner, config, whole - 1_000_000, rebuild))
    ctx = int(half.options["ctx"])
    assert planner.plan(to_request(config, ctx)).request.sequences == 8
    assert planner.plan(to_request(config, ctx)).total_bytes == half.total_bytes


def test_a_session_is_refused_before_it_takes_memory_and_opens_as_advised(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with session(path, ctx=1024, kv="f32", max_sequences=8) as opened:
        limit = opened.plan.total_bytes - 4_000_000
    process = psutil.Process()
    before = process.memory_info().rss
    with pytest.raises(BudgetError) as caught, session(path, ctx=1024, kv="f32", max_sequences=8, budget_bytes=limit):
        pass
    assert process.memory_info().rss - before < 1 << 20
    offers = [one for one in caught.value.alternatives if isinstance(one, Alternative) and "weights" not in one.change]
    assert len(offers) == 2
    for offer in offers:
        options = {"ctx": int(offer.options.get("ctx", 1024)), "kv": str(offer.options.get("kv", "f32")),
                   "budget_bytes": limit}
        with session(path, max_sequences=8, **options) as opened:
            assert opened.plan.total_bytes <= opened.budget_bytes == limit
            opened.prefill(opened.new_sequence(), tokens(options["ctx"]))


# -- the machine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups; the system has 8 GB and 8 cores."""
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr("edgeinfer.memory_planner.budget._system_available", lambda: 8_000_000_000)
    monkeypatch.setattr("edgeinfer.memory_planner.budget._physical_cores", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    return tmp_path


def write(group: Path, **files: object) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (group / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_control_groups_the_machine_decides(groups: Path) -> None:
    assert available_bytes() == 8_000_000_000
    assert default_threads() == 8


def test_version_2_limits(groups: Path) -> None:
    """Of the own group and those above it; the page cache in it can be had."""
    write(groups, membership="0::/box/run")
    write(groups / "box", memory__max=5_000_000_000, memory__current=3_000_000_000, cpu__max="250000 100000",
          memory__stat="anon 1\ninactive_file 400000000\nactive_file 600000000\nfile 7")  # fmt: skip
    write(groups / "box" / "run", memory__max="max", memory__current=10, cpu__max="max 100000")
    write(groups / "other", memory__max=1, memory__current=0, cpu__max="1000 100000")
    assert available_bytes() == 3_000_000_000
    assert default_threads() == 3
    write(groups / "box" / "run", memory__max=2000, memory__current=500, cpu__max="50000 100000")
    assert available_bytes() == 1500
    assert default_threads() == 1
    write(groups / "box" / "run", memory__max=2000, memory__current=5000)
    assert available_bytes() == 0


def test_version_2_seen_from_inside_a_container(groups: Path) -> None:
    """The path is the root's, or one that cannot be seen."""
    write(groups, memory__max=1_000_000, memory__current=400_000, cpu__max="200000 100000")
    for membership in ("0::/", "0::/docker/0123", "0::/../.."):
        write(groups, membership=membership)
        assert available_bytes() == 600_000
        assert default_threads() == 2


def test_version_1_limits(groups: Path) -> None:
    write(groups, membership="9:memory:/box\n4:cpu,cpuacct:/box\n3:cpuset:/\n0::/")
    write(groups / "memory" / "box", memory__limit_in_bytes=3_000_000, memory__usage_in_bytes=2_000_000,
          memory__stat="inactive_file 7\ntotal_inactive_file 200000\ntotal_active_file 300000")  # fmt: skip
    write(groups / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    write(groups / "cpu" / "box", cpu__cfs_quota_us=400000, cpu__cfs_period_us=100000)
    write(groups / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert available_bytes() == 1_500_000
    assert default_threads() == 4


@pytest.mark.parametrize("text", ["", "max", "nonsense here", "-5", "100 0", "1 2 3"])
def test_strange_files_limit_nothing(groups: Path, text: str) -> None:
    write(groups, membership="0::/\nx\n7:", memory__max=text, memory__current=text, cpu__max=text, memory__stat=text)
    assert available_bytes() == 8_000_000_000
    assert default_threads() == 8


def test_the_kernels_own_memory_can_be_had(groups: Path) -> None:
    """Page tables and stacks belong to those who run, and go with them."""
    write(groups, membership="0::/box")
    write(groups / "box", memory__max=5_000_000, memory__current=3_000_000, memory__stat="anon 1\nkernel 400000")
    assert available_bytes() == 2_400_000
    write(groups, membership="9:memory:/box")
    write(groups / "memory" / "box", memory__limit_in_bytes=5_000_000, memory__usage_in_bytes=3_000_000,
          memory__kmem__usage_in_bytes=500_000)  # fmt: skip
    assert available_bytes() == 2_500_000


def test_what_the_process_has_is_part_of_its_budget(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # for each core it may be a little more
    own = process_budget() - available_bytes()
    assert 10_000_000 < own <= psutil.Process().memory_info().rss + (8 << 20)
    monkeypatch.setattr(budget, "open", lambda *_, **__: (_ for _ in ()).throw(OSError()), raising=False)
    assert process_budget() - available_bytes() == pytest.approx(psutil.Process().memory_info().rss, abs=8 << 20)


def test_affinity_limits_threads(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert default_threads() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert default_threads() == 3


def test_memory_that_the_system_refuses() -> None:
    from edgeinfer.runtime.memory import allocate

    for nbytes in (1 << 62, 1 << 70):
        with pytest.raises(EdgeInferError, match=r"^The system refuses \d+\.\d\d GB of memory \(.*\); lower --ctx o"):
            allocate(nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_memory_is_aligned_zero_and_there(nbytes: int) -> None:
    from edgeinfer.runtime.memory import allocate

    before = psutil.Process().memory_info().rss
    memory = allocate(nbytes)
    assert memory.size == nbytes and memory.ctypes.data % 64 == 0
    assert psutil.Process().memory_info().rss - before >= nbytes - (1 << 20)
    assert not memory.any()
    memory[:] = 1


def test_what_is_read_here_is_what_psutil_says() -> None:
    from edgeinfer.memory_planner import budget

    def agrees() -> bool:
        said = psutil.virtual_memory().available
        return bool(budget._system_available() == pytest.approx(said, abs=max(256 << 20, said // 10)))

    assert any(agrees() for _ in range(20))  # other programs take memory between two readings
    assert budget._physical_cores() == psutil.cpu_count(logical=False)


def test_fewer_checkpoints_of_recurrent_state_are_offered_first(tmp_path: Path) -> None:
    path = write_model(tmp_path, HYBRID)
    with session(path) as opened:
        plan = opened.plan
    assert plan.state and plan.state.checkpoints == 4
    slot, python = plan.state.slot_bytes, plan.region("python").nbytes
    for limit, fewer in ((plan.total_bytes - 1, 3), (plan.total_bytes - 4 * slot, 0)):
        with pytest.raises(BudgetError, match=f"It fits with --state-memory {fewer * slot or '0'}") as caught, \
                session(path, budget_bytes=limit, state_memory=4 * slot):
            pass
        first = caught.value.alternatives[0]
        assert isinstance(first, Alternative) and first.total_bytes <= limit and python < limit
        with session(path, budget_bytes=limit, **first.options) as opened:
            assert opened.plan.total_bytes == first.total_bytes
            assert opened.plan.state and opened.plan.state.checkpoints == fewer


def test_a_run_gives_up_checkpoints_that_nobody_asked_for(tmp_path: Path) -> None:
    path = write_model(tmp_path, HYBRID)
    with session(path) as opened:
        plan = opened.plan
    assert plan.state
    for missing in (1, 4):
        with session(path, budget_bytes=plan.total_bytes - (missing - 1) * plan.state.slot_bytes - 1) as opened:
            assert opened.plan.state and opened.plan.state.checkpoints == 4 - missing
            assert not opened.plan.parts


def test_what_fits_instead_does_not_count_checkpoints_that_nobody_asked_for(tmp_path: Path) -> None:
    """Neither contexts that are offered nor the largest one that a plan states."""
    path = write_model(tmp_path, HYBRID)
    with session(path, state_memory=0) as opened:
        least = opened.plan.total_bytes
    for missing in (1, 100_000, 200_000):
        with pytest.raises(BudgetError, match="It fits with --ctx") as caught, \
                session(path, budget_bytes=least - missing):
            pass
        offer = next(one for one in caught.value.alternatives if isinstance(one, Alternative) and one.change == "ctx")
        with session(path, budget_bytes=least - missing, **offer.options) as opened:
            assert opened.plan.total_bytes == offer.total_bytes <= least - missing
        with pytest.raises(BudgetError), \
                session(path, budget_bytes=least - missing, ctx=int(offer.options["ctx"]) + 16, state_memory=0):
            pass


def test_weights_are_read_from_storage_only_without_checkpoints_that_nobody_asked_for() -> None:
    """As few layers are streamed as in a run without any, within the same budgets."""
    assert HYBRID.recurrent
    config = replace(HYBRID, hidden_size=256, num_hidden_layers=16, recurrent=replace(
        HYBRID.recurrent, layers=tuple(i for i in range(16) if i % 4 != 3)))
    graph = build_graph(config, requested_types("f32"))
    planner = Planner(graph, weights_file_bytes(graph))
    asked = RuntimeConfig(64, threads=1, max_sequences=1)
    none = replace(asked, state_memory=0)
    plan, streamed = planner.plan(to_request(none)), set()
    assert plan.state
    for limit in range(plan.total_bytes - 1, plan.total_bytes - planner.weight_bytes, -3 * plan.state.slot_bytes):
        found, exact = (fitting(planner, one, limit) for one in (asked, none))
        assert (found and len(found.parts)) == (exact and len(exact.parts)), limit
        assert found is None or found.total_bytes <= limit
        streamed.add(found and len(found.parts))
    assert {None, 16} < streamed
