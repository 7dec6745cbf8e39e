"""Constants of a machine from the runs of its calibration, and runs that contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from edgeinfer.bench import SHAPES as CALIBRATION_SHAPES
from edgeinfer.bench import Lengths
from edgeinfer.bench import machine as machine_module
from edgeinfer.bench.calibration import Runs, lengths_for
from edgeinfer.converters import SHAPES
from edgeinfer.devices import (
    Constants,
    DecodeRun,
    PromptRun,
    Traffic,
    believable,
    constants_of,
    contradictions,
    estimate,
    parse_profile,
    solve_constants,
)
from edgeinfer.errors import UsageError


def runs(noise: Callable[[int], float] = lambda i: 1.0) -> tuple[list[DecodeRun], list[PromptRun]]:
    """Runs of a machine with f_w 0.9, f_kv 0.6, t0 1.6 ms, mfu 0.7, mfu_attention 0.2."""
    decodes, prompts = [], []
    shapes = [(30, 90e6, 46e6, 0.27e9), (5, 110e6, 10e6, 0.47e9), (2, 250e6, 35e6, 0.88e9)]
    for i, (layers, weights, kv, operations) in enumerate(4 * shapes):
        bandwidth, peak = 30.0 + i, 900.0 + 10 * i
        for cached in (0.0, kv):
            seconds = 1.6e-3 * layers / 32 + weights / (0.9 * bandwidth * 1e9) + cached / (0.6 * bandwidth * 1e9)
            decodes.append(DecodeRun(layers, weights, cached, seconds * noise(i), bandwidth))
            attention = cached * 40
            seconds = 1.6e-3 * layers / 32 + operations * 512 / (0.7 * peak * 1e9) + attention / (0.2 * peak * 1e9)
            prompts.append(PromptRun(layers, operations * 512, attention, seconds * noise(i), peak))
    return decodes, prompts


def test_constants_are_recovered() -> None:
    want = {"f_w": 0.9, "f_kv": 0.6, "t0_ms": 1.6, "mfu": 0.7, "mfu_attention": 0.2}
    assert solve_constants(*runs()) == pytest.approx(want, rel=1e-6)
    disturbed = solve_constants(*runs(lambda i: 3.0 if i == 5 else 1.0))  # another process took the core once
    assert disturbed == pytest.approx(want, rel=0.02)


def test_the_cost_of_values_between_matrices_is_recovered() -> None:
    decodes, prompts = runs()
    prompts = [replace(run, values=1e9 * run.layers, seconds=run.seconds + 300 * run.layers / run.int8_peak_gops)
               for run in prompts]
    found = solve_constants(decodes, prompts)
    assert found["activation_cost"] == pytest.approx(300, rel=1e-4)
    assert found["mfu"] == pytest.approx(0.7, rel=1e-4)


def test_the_time_of_multiplying_beside_reading_the_cache_is_recovered() -> None:
    decodes, _ = runs()
    operations = [run.kv_bytes * share for run, share in zip(decodes, 4 * (6, 6, 16, 16, 2, 2), strict=True)]
    decodes = [replace(run, attention_operations=n, seconds=run.seconds + 5.0 * n / 1e12)
               for run, n in zip(decodes, operations, strict=True)]
    found = solve_constants(decodes, [])
    assert found["attention_ms"] == pytest.approx(5.0, rel=1e-4)
    assert found["f_kv"] == pytest.approx(0.6, rel=1e-4)
    disturbed = [replace(run, attention_operations=n / 1e4) for run, n in zip(decodes, operations, strict=True)]
    assert solve_constants(disturbed, [])["attention_ms"] == 1e4  # of 5e4: the most that a profile holds


def test_one_kind_of_model_cannot_tell_multiplying_from_reading() -> None:
    decodes, _ = runs()
    alike = [replace(run, attention_operations=16 * run.kv_bytes) for run in decodes]
    found = solve_constants(alike, [])
    assert "attention_ms" not in found and found["f_kv"] == pytest.approx(0.6, rel=1e-6)


def test_constants_that_the_runs_do_not_show_are_left_out() -> None:
    decodes, _ = runs()
    without = [run for run in decodes if not run.kv_bytes]
    assert set(solve_constants(without, [])) == {"t0_ms", "f_w"}
    with pytest.raises(UsageError, match="Constants cannot be solved from no runs; measure at least one model"):
        solve_constants([], [])


def test_models_in_the_caches_show_nothing_of_decoding() -> None:
    cached = [DecodeRun(layers, nbytes, 0.0, layers * 1e-5, 30.0) for layers, nbytes in ((4, 9e3), (8, 1e3), (12, 3e3))]
    assert set(solve_constants(cached, runs()[1])) == {"mfu", "mfu_attention"}


def test_no_constant_is_negative_or_beyond_belief() -> None:
    odd = [DecodeRun(30, 90e6, 0.0, 1e-3, 30.0), DecodeRun(2, 250e6, 0.0, 1e-4, 30.0),
           DecodeRun(2, 250e6, 9e6, 1e-4, 30.0)]
    found = solve_constants(odd, [PromptRun(2, 1e9, 1e8, 1e-9, 900.0)])
    assert found.get("t0_ms", 0.0) >= 0 and all(0 < found[name] <= 1 for name in found if not name.endswith("_ms"))


def test_a_fixed_time_per_token_is_told_from_one_per_layer() -> None:
    """Python's time for a token does not grow with the layers; it is a good part of a small model's time."""
    decodes, prompts = runs()
    found = solve_constants([replace(run, seconds=run.seconds + 0.4e-3) for run in decodes], prompts)
    assert found["token_ms"] == pytest.approx(0.4, rel=1e-3) and found["t0_ms"] == pytest.approx(1.6, rel=1e-3)
    constants = Constants(**found)
    small = Traffic(1e6, layers=4)
    profile = parse_profile("local", {"title": "t", "device_class": "local", "memory_bytes": 1, "bandwidth_gbs": 30.0,
                                      "cores": 2, "isa": "avx2", "constants": found}, "here")
    assert constants_of(profile).token_ms == constants.token_ms
    assert estimate(profile, small).terms["overhead"] == pytest.approx(0.4 + 1.6 * 4 / 32, rel=1e-3)


def test_calm_runs_contradict_nothing() -> None:
    decodes, prompts = runs()
    assert contradictions(decodes, prompts) == []
    assert believable(decodes) == decodes and believable(prompts) == prompts


def test_disturbed_readings_are_found_out() -> None:
    """Others took the processor while the limits were read and not while models ran: shares above 1."""
    decodes, prompts = runs()
    slow = [replace(run, int8_peak_gops=run.int8_peak_gops / 2) for run in prompts]
    assert max(run.share for run in slow) > 1.2
    assert any("of the int8 peak that was read beside them" in said for said in contradictions(decodes, slow))
    mixed = [replace(run, int8_peak_gops=run.int8_peak_gops / 3) if i % 3 else run for i, run in enumerate(prompts)]
    assert any(said.startswith("the int8 peak was read as ") for said in contradictions(decodes, mixed))
    starved = [replace(run, bandwidth_gbs=run.bandwidth_gbs / 2) for run in decodes]
    assert any(said.startswith("tokens reached up to 1.") for said in contradictions(starved, prompts))
    one = [replace(prompts[0], int8_peak_gops=prompts[0].int8_peak_gops / 2), *prompts[1:]]
    assert contradictions(decodes, one) == [] and believable(one) == one[1:]  # one in many is left out


def test_no_share_above_1_is_ever_solved() -> None:
    decodes, prompts = runs()
    found = solve_constants([replace(run, seconds=run.seconds / 2) for run in decodes],
                            [replace(run, seconds=run.seconds / 2) for run in prompts])
    assert all(found[name] <= 1 for name in ("f_w", "f_kv", "mfu", "mfu_attention") if name in found)


def test_slow_machines_get_short_prompts() -> None:
    assert lengths_for(900.0) == Lengths() and lengths_for(50.0).prompt == 128


def test_the_calibrations_shapes_can_be_made() -> None:
    assert {shape.name for shape in CALIBRATION_SHAPES} <= set(SHAPES)
    assert all(Lengths().depth % lengths_for(peak).prompt == 0 for peak in (10.0, 1000.0))


def test_who_has_little_of_the_processor_is_not_believed() -> None:
    decodes, prompts = runs()
    said = machine_module._doubts(Runs(decodes, prompts, [0.2, 0.3, 0.9]))
    assert said == ["other programs had 70% of the processor"]
    assert machine_module._doubts(Runs(decodes, prompts, [0.9, 1.0, 0.2])) == []
