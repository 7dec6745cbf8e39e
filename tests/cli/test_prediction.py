"""Predicted beside measured after `run` and `bench`, and learning by the local profile."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.base.cache_dir import cache_root
from edgeinfer.bench import Case, Measurement, Row
from edgeinfer.cli.reports.bench_prediction import bench_estimate, learn_from_bench
from edgeinfer.cli.reports.prediction import (
    Disturbances,
    Predictor,
    learn_from_run,
    make_predictor,
    run_estimate,
    sentence,
)
from edgeinfer.config import RuntimeConfig
from edgeinfer.devices import DeviceProfile, Traffic, local_path, local_profile, save_profile
from edgeinfer.engine import Choice, Completion
from edgeinfer.graph.topn_cost import TopNCost
from edgeinfer.kernels import choose
from edgeinfer.models import demo_path
from edgeinfer.runner.pruning import Schedule
from tests.helpers.command_line import edgeinfer

TRAFFIC = Traffic(1e9, 16, operations=2e9, head_operations=2e8, kv_bytes=1e4, attention_operations=1e5)
PRUNED = (("lazy", Schedule((0.5,), (8,))),)


def profile(**changes: object) -> DeviceProfile:
    """A probed machine with two threads."""
    constants = {"f_w": 0.8, "t0_ms": 1.0, "f_kv": 0.5, "mfu": 0.6, "mfu_attention": 0.2, "activation_cost": 300.0}
    plain = DeviceProfile("local", "This machine", "local", 8 << 30, 40.0, 32.0, 2, choose().name, int8_peak_gops=800.0,
                          constants=constants, sources={"f_w": "probe: 48 runs"}, measured="2026-05-01T12:00:00")
    return replace(plain, **changes)


@pytest.fixture
def probed(tmp_path, monkeypatch) -> DeviceProfile:
    """A cache with this machine's profile and the kernels that are already built."""
    kernels = cache_root() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(kernels, target_is_directory=True)
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    monkeypatch.delenv("EDGEINFER_LEARN", raising=False)
    save_profile(profile(), local_path())
    return profile()


def completion(**changes: object) -> Completion:
    """A request of 512 + 64 tokens on 32 ms a token."""
    choice = Choice(0, "text", tuple(range(64)), "length")
    plain = Completion("text", choice.token_ids, 512, 0, 64, 2000.0, 34.0, 1000 / 34, "length", 1, None, (choice,))
    return replace(plain, **changes)


def row(kind: str, tokens: int, depth: int, speed: float, spread: float = 0.01) -> Row:
    samples = tuple(speed * (1 + spread * i) for i in (-1, 0, 1))
    return Row(Case(kind, tokens, depth), samples, (30.0, 30.0, 30.0), (600.0,) * 3 if kind == "pp" else (), 1e9, 2e9)


def predicted_ms(depth: float, bandwidth: float = 40.0) -> float:
    return 0.5 + 1e3 * 1e9 / (0.8 * bandwidth * 1e9) + 1e3 * 1e4 * depth / (0.5 * bandwidth * 1e9)


def test_pruned_prompts_stand_beside_their_own_prediction() -> None:
    """As many operations as the share of tokens times layers; a prompt that is too short for stages is a plain one."""
    plain, pruned = (Predictor(profile(), TRAFFIC, used) for used in ((), PRUNED))
    assert pruned.computed(0, 512) == 0.75
    ratio = plain.prompt(0, 512)["t_per_s"] / pruned.prompt(0, 512)["t_per_s"]
    assert ratio == pytest.approx(0.75, abs=0.02)
    assert run_estimate(pruned, completion())["prompt"]["t_per_s"] == pruned.prompt(0, 512)["t_per_s"]
    assert pruned.prompt(0, 63) == plain.prompt(0, 63)


def test_a_request_stands_beside_its_prediction() -> None:
    out = run_estimate(Predictor(profile(), TRAFFIC), completion())
    assert out["decode"]["t_per_s"] == pytest.approx(1000 / predicted_ms(512 + 32))
    assert out["decode"]["measured"] == pytest.approx(1000 / 34)
    assert out["decode"]["miss"] == pytest.approx(34 / predicted_ms(544) - 1)
    assert out["decode"]["low"] < out["decode"]["t_per_s"] < out["decode"]["high"]
    assert out["prompt"]["measured"] == pytest.approx(256)
    assert out["basis"] == "this machine, calibrated"
    line = sentence(out)
    assert line.startswith("estimated: decode 31.2 tok/s (28.1 to 34.4), measured 29.4 (+6%); prompt ")
    assert line.endswith("this machine, calibrated")


def test_cached_tokens_and_samples_are_not_predicted_as_computed() -> None:
    predictor = Predictor(profile(), TRAFFIC)
    assert run_estimate(predictor, completion(cached_tokens=256))["prompt"]["measured"] == pytest.approx(128)
    assert run_estimate(predictor, completion(cached_tokens=512))["prompt"] is None
    two = completion(choices=completion().choices * 2)
    assert run_estimate(predictor, two)["decode"] is None
    nothing = run_estimate(predictor, completion(ttft_ms=None, tpot_ms=None, tok_per_s=None))
    assert nothing["decode"] is nothing["prompt"] is None
    assert sentence(nothing) is None
    assert run_estimate(None, completion()) is sentence(None) is None


def test_tests_stand_beside_their_predictions_before_and_at_the_moment() -> None:
    measured = Measurement((row("tg", 128, 4096, 20.0), row("pp", 512, 0, 200.0)), (30.0,), (600.0,))
    out = bench_estimate(Predictor(profile(), TRAFFIC), measured)
    first, second = out["rows"]
    assert first["test"] == "tg128 @ d4096"
    assert first["t_per_s"] == pytest.approx(1000 / predicted_ms(4160))
    assert first["at_the_moment"] == pytest.approx(1000 / predicted_ms(4160, 30.0))
    assert first["miss"] == pytest.approx(first["t_per_s"] / 20 - 1)
    assert second["at_the_moment"] < second["t_per_s"]
    assert bench_estimate(None, measured) is None
    unknown = bench_estimate(Predictor(profile(int8_peak_gops=None), TRAFFIC), measured)["rows"][1]
    assert unknown["t_per_s"] is None
    assert unknown["measured"] == 200.0


def test_the_profile_learns_from_tests_with_the_readings_beside_them(probed) -> None:
    predictor = Predictor(probed, TRAFFIC)
    faster = 1.1 * 1000 / predicted_ms(64, 30.0)
    learn_from_bench(predictor, Measurement(tuple(row("tg", 128, 0, faster) for _ in range(20)), (30.0,), (600.0,)))
    kept = json.loads(local_path().with_suffix(".runs.json").read_text(encoding="utf-8"))["decodes"]
    assert len(kept) == 20
    assert kept[0]["bandwidth_gbs"] == 30.0
    assert local_profile().constants["f_w"] > 0.83


def test_disturbed_tests_and_requests_teach_nothing(probed) -> None:
    predictor = Predictor(probed, TRAFFIC)
    learn_from_bench(predictor, Measurement((row("tg", 128, 0, 30.0, spread=0.5),), (30.0,), (600.0,)))
    learn_from_bench(predictor, Measurement((row("tg", 4, 0, 30.0),), (30.0,), (600.0,)))
    learn_from_bench(None, Measurement((row("tg", 128, 0, 30.0),), (30.0,), (600.0,)))
    learn_from_run(predictor, completion(), disturbed=True)
    learn_from_run(predictor, completion(completion_tokens=4, prompt_tokens=20), disturbed=False)
    learn_from_run(None, completion(), disturbed=False)
    assert local_profile() == probed
    learn_from_run(predictor, completion(), disturbed=False)
    assert local_profile().sources["f_w"] == "probe and 1 runs of decoding, 1 prompts of this machine"


def test_runs_that_approximate_teach_nothing(probed) -> None:
    """After a pruned prompt decoding skips rows that a layer lacks, too; how much of V is chosen is assumed."""
    chosen = replace(TRAFFIC, value_bytes=5e3, topn=TopNCost(0.01, 0, 1))
    measured = Measurement((row("tg", 128, 512, 30.0), row("pp", 512, 0, 150.0)), (30.0,), (600.0,))
    for predictor in (Predictor(probed, TRAFFIC, PRUNED), Predictor(probed, chosen)):
        learn_from_run(predictor, completion(), disturbed=False)
        learn_from_bench(predictor, measured)
        assert local_profile() == probed
    learn_from_bench(Predictor(probed, TRAFFIC), measured)
    assert local_profile() != probed


def test_other_programs_are_noticed(monkeypatch) -> None:
    counted = iter([100, 139, 100, 141])
    monkeypatch.setattr("edgeinfer.cli.reports.prediction._switches", lambda: next(counted))
    assert not Disturbances().disturbed(seconds=1.0, threads=2)
    assert Disturbances().disturbed(seconds=1.0, threads=2)


def test_there_is_no_prediction_without_this_very_machine(probed) -> None:
    isa = choose().name
    config = RuntimeConfig()
    assert make_predictor(demo_path(), config, 2, isa) is not None
    assert make_predictor(demo_path(), config, 1, isa) is None
    assert make_predictor(demo_path(), config, 2, "npu") is None
    assert make_predictor(Path("nothing"), config, 2, isa) is None
    local_path().write_text("broken =", encoding="utf-8")
    assert make_predictor(demo_path(), config, 2, isa) is None
    local_path().unlink()
    assert make_predictor(demo_path(), config, 2, isa) is None


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="the profile of this test has two threads")
def test_run_and_bench_report_predictions(probed) -> None:
    done = edgeinfer("run", "demo", "Once upon a time", "-n", 20, "--temp", 0, "-t", 2, "--json")
    found = done.json["estimate"]
    assert found["decode"]["measured"] == pytest.approx(1000 / done.json["tpot_ms"])
    assert found["decode"]["t_per_s"] > 0
    said = edgeinfer("run", "demo", "Once upon a time", "-n", 20, "--temp", 0, "-t", 2).err.splitlines()[-1]
    assert said.startswith("estimated: decode ")
    assert edgeinfer("run", "demo", "Once", "-n", 4, "-t", 1, "--json").json["estimate"] is None
    arguments = ("bench", "demo", "-p", 16, "-n", 8, "-r", 2, "-t", 2, "--no-startup")
    rows = edgeinfer(*arguments, "--json").json["estimate"]["rows"]
    assert [item["test"] for item in rows] == ["pp16", "tg8"]
    assert all(item["t_per_s"] > 0 < item["at_the_moment"] for item in rows)
    shown = edgeinfer(*arguments).out
    assert "estimated before (this machine, calibrated, ±10%: probe" in shown


def test_without_a_probe_reports_are_as_before(probed) -> None:
    local_path().unlink()
    done = edgeinfer("run", "demo", "Once upon a time", "-n", 20, "--temp", 0, "--json")
    assert done.json["estimate"] is None
    assert "estimated" not in edgeinfer("run", "demo", "Once upon a time", "-n", 4).err
