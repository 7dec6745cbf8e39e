"""The local profile learns from runs: runs that are kept or left out, and nothing makes a run fail."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgeinfer.devices import (
    DecodeRun,
    DeviceProfile,
    PromptRun,
    constants_of,
    learn,
    local_path,
    local_profile,
    may_learn,
    save_profile,
    with_runs,
)

BASE = {"f_w": 0.8, "t0_ms": 1.0, "f_kv": 0.6, "mfu": 0.6, "mfu_attention": 0.2, "activation_cost": 300.0}
PROFILE = DeviceProfile(
    "local", "This machine", "local", 8 << 30, bandwidth_gbs=40.0, effective_gbs=32.0, cores=2, isa="avx2",
    int8_peak_gops=800.0, constants=BASE, sources={"f_w": "probe: 48 runs"}, measured="2026-05-01T12:00:00",
)


@pytest.fixture
def probed(tmp_path, monkeypatch) -> DeviceProfile:
    """A machine whose probe is saved in a cache of its own."""
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    monkeypatch.delenv("EDGEINFER_LEARN", raising=False)
    save_profile(PROFILE, local_path())
    return local_profile()


def decode(weights: float = 2e9, kv: float = 0.0, f_w: float = 0.8, layers: int = 32, factor: float = 1.0) -> DecodeRun:
    """A token whose time follows from such constants."""
    seconds = 1e-3 * layers / 32 + weights / (f_w * 40e9) + kv / (0.6 * 40e9)
    return DecodeRun(layers, weights, kv, seconds * factor, 40.0)


def prompt(operations: float = 1e12, mfu: float = 0.6) -> PromptRun:
    values = operations / 2e4
    return PromptRun(32, operations, 0.0, 1e-3 + (operations / mfu + 300 * values) / 800e9, 800.0, values)


def runs() -> dict:
    return json.loads(local_path().with_suffix(".runs.json").read_text(encoding="utf-8"))


def test_runs_move_the_constants_towards_what_was_measured(probed):
    learned = learn([decode(f_w=0.9) for _ in range(30)], [prompt(mfu=0.7) for _ in range(30)])
    assert learned == local_profile()
    assert learned.constants["f_w"] == pytest.approx(0.9, rel=0.03)
    assert learned.constants["mfu"] == pytest.approx(0.7, rel=0.03)
    assert learned.sources["f_w"] == "probe and 30 runs of decoding, 30 prompts of this machine"
    assert learned.effective_gbs == pytest.approx(40 * learned.constants["f_w"])
    found = constants_of(learned)
    assert (found.basis, found.error) == ("this machine, calibrated", 0.10)
    assert "30 runs" in found.error_source


def test_runs_as_predicted_change_nothing(probed):
    learned = learn([decode(), decode(4e9, 1e9)], [prompt()])
    assert dict(learned.constants) == pytest.approx(BASE, rel=1e-6)


def test_one_odd_run_moves_little(probed):
    learned = learn([decode(factor=1.4)], [])
    assert learned.constants["f_w"] == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize("odd", [
    decode(factor=1.6), decode(factor=0.5), decode(weights=1e6), replace(decode(), seconds=0.0),
])
def test_disturbed_runs_and_models_in_the_caches_are_left_out(probed, odd):
    assert learn([odd], []) is None
    assert local_profile() == probed
    assert not local_path().with_suffix(".runs.json").exists()


def test_a_model_without_int8_matmuls_teaches_no_prompts(probed):
    assert learn([], [PromptRun(32, 0.0, 0.0, 0.1, 800.0)]) is None


def test_the_number_of_runs_is_bounded_and_the_newest_stay(probed):
    for _ in range(5):
        learn([decode() for _ in range(20)], [])
    learn([decode(3e9)], [])
    kept = runs()["decodes"]
    assert len(kept) == 64
    assert kept[-1]["weight_bytes"] == 3e9
    assert [run["weight_bytes"] for run in kept].count(3e9) == 1


def test_the_probe_remains_the_base_however_often_is_learned(probed):
    learn([decode(f_w=0.9) for _ in range(20)], [])
    learn([decode(f_w=0.9) for _ in range(20)], [])
    assert runs()["base"] == BASE


def test_a_new_probe_starts_anew(probed):
    learn([decode(f_w=0.9) for _ in range(20)], [])
    save_profile(replace(PROFILE, measured="2026-06-01T12:00:00", constants={**BASE, "f_w": 0.7}), local_path())
    learned = learn([decode(f_w=0.7)], [])
    assert learned.constants["f_w"] == pytest.approx(0.7, rel=0.01)
    assert len(runs()["decodes"]) == 1
    assert runs()["base"]["f_w"] == 0.7


def test_without_a_probe_nothing_is_learned_or_written(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    assert not may_learn()
    assert learn([decode()], [prompt()]) is None
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_switched_off(probed, monkeypatch):
    monkeypatch.setenv("EDGEINFER_LEARN", "0")
    assert not may_learn()
    assert learn([decode(f_w=0.9)], []) is None
    assert local_profile() == probed


@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"probe": 1}', '{"probe": "x", "base": {"f_w": "much"}, "decodes": [], "prompts": []}',
    '{"probe": "x", "base": {}, "decodes": [{"layers": 1}], "prompts": []}', "[" * 100_000,
    '{"probe": "x", "base": {}, "decodes": [{"layers": 1, "weight_bytes": 1e300, "kv_bytes": 0, "seconds": 1, '
    '"bandwidth_gbs": 1}], "prompts": []}', " " * (2 << 20),
])
def test_damaged_runs_are_replaced(probed, content):
    local_path().with_suffix(".runs.json").write_text(content, encoding="utf-8")
    assert learn([decode()], []) is not None
    assert len(runs()["decodes"]) == 1


def test_a_damaged_profile_or_a_directory_in_the_way_fails_no_run(probed):
    local_path().write_text("bandwidth_gbs = -1", encoding="utf-8")
    assert learn([decode()], []) is None
    save_profile(PROFILE, local_path())
    (local_path().with_suffix(".runs.json")).mkdir()
    assert learn([decode()], []) is None
    assert local_profile() == probed
    assert [path.name for path in local_path().parent.iterdir() if path.name.startswith(".")] == []


def test_without_constants_of_the_probe_the_class_is_the_base():
    bare = replace(PROFILE, constants={}, effective_gbs=None)
    learned = with_runs(bare, {}, [decode(f_w=0.7) for _ in range(40)], [])
    assert learned.constants["f_w"] == pytest.approx(0.7, rel=0.05)
    assert learned.effective_gbs is None


def test_a_probe_without_constants_is_replaced_by_enough_runs_only(probed):
    save_profile(replace(PROFILE, constants={}, effective_gbs=None, sources={"constants": "it contradicted itself"}),
                 local_path())
    slow = [replace(decode(f_w=0.7), layers=layers) for layers in (16, 32)]
    assert learn(slow, []) is None and constants_of(local_profile()).basis == "class local"
    learned = None
    for _ in range(5):
        learned = learn(slow, [])
    assert learned is not None and constants_of(learned).basis == "this machine, calibrated"
