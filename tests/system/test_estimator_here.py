"""benchmarks/estimator_here.py with commands that only pretend: the order, the section, the exit code."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import estimator_here

PROFILE = {"bandwidth_gbs": 40.0, "int8_peak_gops": 800.0, "constants": {"f_w": 0.8, "t0_ms": 0.5}}


def report(moment: float) -> dict[str, Any]:
    rows = [{"test": "pp512", "measured": 100.0, "t_per_s": 90.0, "at_the_moment": 97.0},
            {"test": "tg64 @ d4096", "measured": 20.0, "t_per_s": 30.0, "at_the_moment": moment}]
    return {"estimate": {"rows": rows}, "bandwidth_low_gbs": 25.0, "bandwidth_high_gbs": 41.0}


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, ...]]:
    """Instruction the calls of the command line, which answers that the last prediction is 5 % off."""
    calls: list[tuple[str, ...]] = []

    def pretend(*arguments: str) -> dict[str, Any]:
        calls.append(arguments)
        return PROFILE if arguments[0] == "devices" else report(21.0)

    monkeypatch.setattr(estimator_here, "command", pretend)
    return calls


def test_it_probes_then_measures_then_writes_its_section_alone(asked, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- published: begin -->\nkept\n<!-- published: end -->\n", encoding="utf-8")
    assert estimator_here.main(["--output", str(page), "--shape", "smollm2-135m", "--kinds", "q4_k_m"]) == 1
    assert [call[:2] for call in asked] == [("devices", "--probe"), ("devices", "local"), ("bench", "--shape")]
    assert asked[2][3:5] == ("--weights", "q4_k_m")
    text = page.read_text(encoding="utf-8")
    assert "kept" in text
    assert "| smollm2-135m | q4_k_m | tg64 @ d4096 | 20.00 | 30.00 | +50.0% | 21.00 | +5.0% |" in text
    assert "Median absolute miss: 30.0% from the probe, 4.0% with the readings beside the tests" in text
    assert "25.0 to 41.0 GB/s" in text
    assert "Within 10%: 1 of 2 from the probe, 2 with the readings." in text
    said = capsys.readouterr().out
    assert "smollm2-135m q4_k_m pp512: 100.00, from the probe -10.0%, with the readings -3.0%" in said


def test_all_shapes_and_kinds_by_default_and_the_bound(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(estimator_here, "BOUND", 0.51)
    assert estimator_here.main(["--output", str(tmp_path / "page.md"), "--no-probe"]) == 0
    pairs = [(call[2], call[4]) for call in asked if call[0] == "bench"]
    assert pairs == [(shape, kind) for shape in estimator_here.SHAPES for kind in ("q4", "q4_k_m", "int8")]
    assert ("devices", "--probe") not in asked


def test_tests_of_several_calls_make_one_table(asked, tmp_path):
    page, keep = tmp_path / "page.md", tmp_path / "tests.json"
    for depths in ("0", "4096"):
        estimator_here.main(["--output", str(page), "--no-probe", "--keep", str(keep), "--shape", "llama-2-7b",
                             "--kinds", "int8", "--depths", depths])
    assert page.read_text(encoding="utf-8").count("| llama-2-7b | int8 | pp512 |") == 2
    assert [call[call.index("-d") + 1] for call in asked if call[0] == "bench"] == ["0", "4096"]


def test_without_a_profile_it_says_so(monkeypatch, tmp_path, capsys):
    answers = {"bench": {"estimate": None}, "devices": PROFILE}
    monkeypatch.setattr(estimator_here, "command", lambda *words: answers[words[0]])
    assert estimator_here.main(["--output", str(tmp_path / "page.md"), "--no-probe"]) == 2
    assert "has no profile, or one of other threads" in capsys.readouterr().err


def test_a_command_that_fails_is_named(tmp_path):
    with pytest.raises(estimator_here.NoPredictionError, match="estimate no-such-thing --machine rpi5 failed"):
        estimator_here.command("estimate", "no-such-thing", "--machine", "rpi5")
