"""Tests that README's command runs, and those that it leaves to `--all`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.kernels import choose
from edgeinfer.kernels.toolchain import objects
from tests import conftest, kernel_selection, tiers
from tests.helpers import machine_speed
from tests.helpers.command_line import ROOT, environment


def item(name: str, *more: str, **marks: dict[str, Any]) -> Any:
    found = {mark: [SimpleNamespace(kwargs=kwargs)] for mark, kwargs in marks.items()}
    for mark in more:
        found.setdefault(mark, []).append(SimpleNamespace(kwargs={}))
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: found.get(mark, [None])[0],
                           iter_markers=lambda mark: iter(found.get(mark, [])), user_properties=[])


def config(**options: Any) -> Any:
    values = {"all_tests": False, "markexpr": "", **options}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    return SimpleNamespace(getoption=values.get, args=["tests"], hook=hook)


def test_slow_tests_and_times_are_left_out_and_some_cases_stay() -> None:
    cases = [item(f"many[{i}]", slow={"keep": 3}) for i in range(10)]
    long = [item(f"many[long {i}]", "slow", slow={"keep": 3}) for i in range(2)]
    items = [item("plain"), item("slow", slow={}), item("times", timing={}), item("torch", reference={}), *cases, *long]
    assert tiers.leave_out(config(), items) == {"slow": 10, "timing": 1, "reference": 1}
    assert [one.nodeid for one in items] == ["plain", "many[0]", "many[3]", "many[6]"]


@pytest.mark.parametrize("options", [{"all_tests": True}, {"markexpr": "slow"}])
def test_a_larger_request_is_honoured(options: dict[str, Any]) -> None:
    items = [item("plain"), item("slow", slow={}), item("times", timing={})]
    tiers.leave_out(config(**options), items)
    assert [one.nodeid for one in items] == ["plain", "slow", "times"]
    assert [bool(one.user_properties) for one in items] == [False, True, True], "what the report is told"


def test_a_unit_test_that_takes_long_is_named_with_all_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(seconds: float, *marks: str, all_tests: bool = True) -> str:
        return tiers.too_long(SimpleNamespace(**vars(item("a", *marks)), config=config(all_tests=all_tests)), seconds)

    monkeypatch.setattr(machine_speed, "ROUNDS", 1000)
    monkeypatch.setattr(machine_speed, "QUIET_SECONDS", 1e3)  # this machine is fast
    assert said(1.1) == "a unit test took 1.1 s of at most 1.0: mark it slow" and not said(0.9)
    assert not any(said(1.1, mark) for mark in ("slow", "timing", "reference")) and not said(1.1, all_tests=False)
    monkeypatch.setattr(machine_speed, "QUIET_SECONDS", 1e-12)  # and now it is slow or busy
    assert not said(1.1)


def test_the_end_of_a_run_says_what_was_left_out() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--co", "-p", "no:cacheprovider"]
    command.append("tests/system/test_startup.py")
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_building_a_graph_needs_no_numpy" in done.stdout and "test_help_answers_at_once" not in done.stdout
    assert re.search(r"left out: 1 slow tests.*; `python -m pytest --all` runs everything", done.stdout), done.stdout


def test_the_record_of_kernels_knows_files_of_tests() -> None:
    known = set(objects.KernelSet(choose()).names)
    assert {"norm_f32", "norm_q8"} <= set(kernel_selection.wanted({"kernels/test_norms.py"})) <= known
    assert kernel_selection.wanted({"unit/base/test_units.py"}) == [] and len(kernel_selection.wanted(None)) > 60
    record = json.loads(kernel_selection.RECORD.read_text(encoding="utf-8"))
    here = kernel_selection.RECORD.parents[1]
    assert [file for file in record if not (here / file).exists()] == []


def test_no_test_of_the_tier_wants_a_kernel_that_the_tier_leaves_out() -> None:
    assert [name for name in kernel_selection.wanted(None) if not kernel_selection.in_tier(name)] == []
    assert not kernel_selection.in_tier("linear_iq4_g32")
    assert kernel_selection.in_tier("linear_q4_g32") and kernel_selection.in_tier("quantize")


@pytest.mark.parametrize(("shares", "fails", "outcome"), [
    ([0.0, 0.0], 1, "passed"), ([0.0] * 4, 9, "failed"), ([0.5] * 7 + [0.02], 9, "skipped"), ([0.5] * 7, 6, "passed"),
    ([0.5, 0.0, 0.0, 0.3, 0.0, 0.0], 9, "failed")])
def test_a_test_of_times_fails_where_nobody_disturbs_it(shares: list[float], fails: int, outcome: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times; on a machine that is busy with something else it is skipped, and says so."""
    left, ran = iter(shares), list[int]()
    monkeypatch.setattr(conftest, "PAUSE_S", 0.0)
    monkeypatch.setattr(machine_speed, "Others", lambda: SimpleNamespace(share=lambda: next(left)))

    def measured() -> None:
        ran.append(1)
        assert len(ran) > fails

    one = SimpleNamespace(get_closest_marker=lambda name: name == "timing" or None, obj=measured,
                          _fixtureinfo=SimpleNamespace(argnames=()), funcargs={})
    try:
        found = "passed" if conftest.pytest_pyfunc_call(one) else ""  # type: ignore[arg-type]
    except AssertionError:
        found = "failed"
    except pytest.skip.Exception as why:
        found = "skipped"
        assert str(why) == "not measured: it failed 8 times, and other programs had up to 50% of the processor time " \
            "meanwhile"
    assert found == outcome


def test_programs_that_a_test_starts_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ran, and one that runs; a quota that held them back disturbs, too."""
    loop = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    own = machine_speed._own()
    subprocess.run([sys.executable, "-c", loop], input=b"\n", check=True, capture_output=True)
    with subprocess.Popen([sys.executable, "-c", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() and machine_speed._own() - own > 0.5
        child.communicate(b"\n")
    others = machine_speed.Others()
    monkeypatch.setattr(machine_speed, "_busy", lambda: others._busy + 1e9)
    assert others.share() > 1
    monkeypatch.setattr(machine_speed, "_busy", lambda: 0.0)
    assert others.share() == 0
    monkeypatch.setattr(machine_speed, "_throttled", lambda: others._throttled + 1)
    assert others.share() == 1
    assert re.fullmatch(r"load average [\d., ]+ on \d+ cores; [\d.]+ of [\d.]+ GB of memory available",
                        machine_speed.state())
