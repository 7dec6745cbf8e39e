"""What the machine and its container can give, and what is said when a plan exceeds it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgeinfer.errors import BudgetError, EdgeInferError
from edgeinfer.graph import build_graph, requested_types
from edgeinfer.memory_planner import Request, available_bytes, cgroup, check_budget, default_threads, make_plan
from tests.sessions import TINY, session, tokens, write_model

MODEL = replace(TINY, max_position_embeddings=1 << 20)
GRAPH = build_graph(MODEL, requested_types("q4"))
WEIGHTS = 1_000_000


def total(ctx: int, kv: str, sequences: int = 1) -> int:
    return make_plan(GRAPH, Request(ctx, kv, 2, 64, 1, sequences), WEIGHTS).total_bytes


def refusal(ctx: int, kv: str, budget: int) -> tuple[str, list[dict[str, str]]]:
    """The message, and its alternatives as option: value."""
    plan = make_plan(GRAPH, Request(ctx, kv, 2, 64, 1, 1), WEIGHTS)
    with pytest.raises(BudgetError) as caught:
        check_budget(GRAPH, plan, WEIGHTS, budget)
    assert caught.value.plan is plan and caught.value.exit_code == 3
    return str(caught.value), alternatives(str(caught.value))


def alternatives(text: str) -> list[dict[str, str]]:
    """What a message offers."""
    offers = re.search(r"Fits: (.*)\.$", text)
    return [dict(re.findall(r"--(\w+) (\w+)", one)) for one in offers[1].split("; ")] if offers else []


def test_a_plan_within_the_budget_passes() -> None:
    plan = make_plan(GRAPH, Request(512, "int8", 2, 64, 1, 1), WEIGHTS)
    assert check_budget(GRAPH, plan, WEIGHTS, plan.total_bytes) == plan.total_bytes
    assert check_budget(GRAPH, plan, WEIGHTS, None) >= plan.total_bytes


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("ctx", [48, 250, 1000, 4096, 65536, 100_000])
def test_alternatives_fit_and_nothing_larger_does(ctx: int, kv: str) -> None:
    """For budgets from hopeless to one byte short."""
    least, most = total(16, "int8"), total(ctx, kv)
    offered = 0
    for part in (0, 0.01, 0.1, 0.3, 0.6, 0.9, 0.999, 1):
        budget = int(least + part * (most - 1 - least))
        text, offers = refusal(ctx, kv, budget)
        for offer in offers:
            small, use = int(offer.get("ctx", ctx)), offer.get("kv", kv)
            assert small < ctx or use != kv
            assert total(small, use) <= budget
            if "ctx" in offer:  # the next one up does not fit; contexts from 1024 tokens on are multiples of 256
                step = 16 if small < 1024 else 256
                assert small % step == 0
                assert small + step >= ctx or total(small + step, use) > budget
        offered += len(offers)
        if kv != "int8" and total(ctx, "int8") <= budget:
            assert {"kv": "int8"} in offers
        if not offers:
            assert text.endswith("convert it with fewer bits per weight or take a smaller model.")
    assert offered


def test_a_hopeless_budget_names_what_helps() -> None:
    text, offers = refusal(4096, "f16", 1000)
    needs = total(4096, "f16") / 1e9
    assert text == (f"The run needs {needs:.2f} GB and the budget is 0.00 GB. Nothing smaller in this model fits; "
                    "convert it with fewer bits per weight or take a smaller model.")  # fmt: skip
    assert offers == []


def test_a_budget_that_is_hardly_short_shows_as_short() -> None:
    most = total(4096, "int8")
    text, _ = refusal(4096, "int8", most - 1)
    needs, has = most / 1e9, (most - 1) / 1e9
    assert text.startswith(f"The run needs {needs:.9f} GB and the budget is {has:.9f} GB. Fits: --ctx ")


def test_a_session_is_refused_before_it_takes_memory_and_opens_as_advised(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with session(path, ctx=1024, kv="f32", max_sequences=8) as opened:
        budget = opened.plan.total_bytes - 4_000_000
    process = psutil.Process()
    before = process.memory_info().rss
    with pytest.raises(BudgetError) as caught, session(path, ctx=1024, kv="f32", max_sequences=8, budget_bytes=budget):
        pass
    assert process.memory_info().rss - before < 1 << 20
    offers = alternatives(str(caught.value))
    assert len(offers) == 2
    for offer in offers:
        options = {"ctx": int(offer.get("ctx", 1024)), "kv": offer.get("kv", "f32"), "budget_bytes": budget}
        with session(path, max_sequences=8, **options) as opened:
            assert opened.plan.total_bytes <= opened.budget_bytes == budget
            opened.prefill(opened.new_sequence(), tokens(options["ctx"]))


# -- the machine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups; psutil has 8 GB and 8 cores."""
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8_000_000_000))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 8)
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
