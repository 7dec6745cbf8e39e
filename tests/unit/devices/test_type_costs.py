"""Types of weights and passes over a few rows: figures that the probe solves, and speeds that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeinfer.devices import (
    Constants,
    DeviceProfile,
    MixedSteps,
    RowsRun,
    Traffic,
    constants_of,
    costs_of,
    estimate,
    parse_profile,
    pass_ms,
    profile_table,
    solve_rows,
    solve_type,
)
from edgeinfer.errors import ProfileError
from edgeinfer.models.describe import describe

FIGURES = {"unpacked_gbs_q4": 90.0, "unpacked_gbs_q4k": 100.0, "unpacked_gbs_q6": 94.0, "unpacked_gbs_int8": 115.0,
           "arithmetic_q4k": 1.09, "arithmetic_q6": 1.43, "arithmetic_int8": 1.06}
CONSTANTS = {"f_w": 1.0, "t0_ms": 0.0, "f_kv": 0.77, "mfu": 0.72, "mfu_attention": 0.36, "activation_cost": 403.0,
             "few_rows": 0.78, "unhidden": 0.26}
PROFILE = DeviceProfile("local", "This machine", "local", 24 << 30, 48.5, None, 2, "avx512vnni", int8_peak_gops=2200.0,
                        constants=CONSTANTS, figures=FIGURES, measured="2026-11-27T16:00:00")
"""Two cores of a Zen 5 as in docs/measurements/estimator.md."""


def test_unpacking_is_a_second_limit() -> None:
    half = (("q4", 0.5, 0.5), ("int8", 0.5, 0.5))
    reading, arithmetic = costs_of(FIGURES, 1e-3, half)
    assert reading == pytest.approx(1) and arithmetic == pytest.approx(1.03)
    both = 0.5 / 90 + 0.5 / 115
    assert costs_of(FIGURES, 1e6, half)[0] == pytest.approx(1e6 * both)
    assert costs_of(FIGURES, 1 / both, half)[0] == pytest.approx(2 ** 0.25)
    assert costs_of(FIGURES, 50.0, (("tableq", 1.0, 1.0),)) == costs_of(FIGURES, 50.0, (("q4", 1.0, 1.0),))
    assert costs_of({}, 50.0, half) == costs_of(FIGURES, 50.0, ()) == (1.0, 1.0), "profiles of older probes"


def test_the_figures_of_a_type_are_recovered() -> None:
    """One thread unpacks half of what two do; a thread that waits for the memory alone has no limit that shows."""
    runs = [((1 / gbs**4 + 1 / 45**4) ** 0.25, gbs) for gbs in (38.0, 41.0, 44.0)]
    found = dict(solve_type("q4k", 1e9, runs, [1.09, 1.0, 1.18], 2.0))
    assert found["unpacked_gbs_q4k"] == pytest.approx(90, rel=1e-3)
    assert found["arithmetic_q4k"] == pytest.approx(1.1)
    assert list(dict(solve_type("q4", 1e9, runs, [1.0], 2.0))) == ["unpacked_gbs_q4"]
    waiting = dict(solve_type("q4", 1e9, [(1 / 41.0, 41.0), (1 / 45.0, 41.0)], [1.0], 2.0))
    assert 2 * 41 < waiting["unpacked_gbs_q4"] < 4 * 41


def test_the_shares_of_a_few_rows_are_recovered() -> None:
    constants = {**CONSTANTS, "few_rows": 0.5, "unhidden": 0.26}
    device, model = replace(PROFILE, figures={}, constants=constants), describe("tinyllama-1.1b").traffic()
    runs = [RowsRun(22, rows, model.weight_bytes, rows * model.operations, rows * model.activation_values,
                    pass_ms(device, model, 0, rows) / 1e3, 48.5, 2200.0) for rows in (2, 4, 8, 16, 32)]
    known = {name: value for name, value in CONSTANTS.items() if name not in ("few_rows", "unhidden")}
    assert solve_rows(runs, known) == pytest.approx({"few_rows": 0.5, "unhidden": 0.26})
    assert solve_rows([], known) == solve_rows(runs, {"t0_ms": 1.0}) == {}


@pytest.mark.parametrize(("rows", "measured"), [(1, 13.7), (4, 14.5), (8, 14.5), (16, 25.0), (32, 46.1), (64, 89.0)])
def test_passes_over_a_few_rows_as_measured(rows: int, measured: float) -> None:
    """1.1B in q4 with 48.5 GB/s: times that barely grow up to 8 rows, and 1.4 ms for each further one."""
    took = MixedSteps(PROFILE, describe("tinyllama-1.1b").traffic(), 0).milliseconds(rows)
    assert took == pytest.approx(measured, rel=0.15)


def test_a_chunk_beside_sequences_costs_what_as_many_rows_do() -> None:
    """7 sequences and 8, 16, 32 or 64 tokens of a prompt, as measured in the same minutes."""
    steps = MixedSteps(PROFILE, describe("tinyllama-1.1b").traffic(), 64)
    for tokens, measured in ((8, 24.4), (16, 34.7), (32, 55.7), (64, 97.5)):
        assert steps.milliseconds(7, tokens, 64) == pytest.approx(measured, rel=0.12), tokens


def test_types_of_a_mixture_show_in_prompts() -> None:
    """A prompt took 15 % longer in the types of a Q4_K_M file, and 3 % in int8."""
    plain, mixed, eight = (describe("tinyllama-1.1b", kind).traffic() if kind != "q4_k_m" else
                           describe("tinyllama-1.1b-q4_k_m").traffic() for kind in ("q4", "q4_k_m", "int8"))
    speeds = [estimate(PROFILE, model).prefill_tok_per_s or 0.0 for model in (plain, mixed, eight)]
    assert speeds[0] / speeds[1] == pytest.approx(1.147, rel=0.05)
    assert speeds[0] / speeds[2] == pytest.approx(1.03, rel=0.05)


def test_few_rows_are_shares() -> None:
    table = {**profile_table(PROFILE), "constants": {**CONSTANTS, "unhidden": 0.0}}
    assert parse_profile("local", table, "here").constants["unhidden"] == 0
    with pytest.raises(ProfileError, match=r"constants\.unhidden is 1\.5; a share above 1 is impossible"):
        parse_profile("local", {**table, "constants": {**CONSTANTS, "unhidden": 1.5}}, "here")


def test_constants_of_several_rows_are_off_where_the_probe_did_not_solve_them() -> None:
    assert (Constants().few_rows, Constants().unhidden) == (0, 0)
    older = replace(PROFILE, constants={name: CONSTANTS[name] for name in ("f_w", "mfu", "t0_ms")}, figures={})
    model = Traffic(weight_bytes=6e8, layers=22, operations=2e9)
    shares = 8 * 2e9 / 0.31 / 2200e6
    assert pass_ms(older, model, 0, 8) == pytest.approx((12.371**2 + shares**2) ** 0.5, rel=1e-3)


def test_a_bandwidth_that_moved_during_the_probe_widens_the_band() -> None:
    for moved, error in ((0.05, 0.10), (0.44, 0.44), (0.9, 0.6)):
        found = constants_of(replace(PROFILE, figures={**FIGURES, "bandwidth_moved": moved}))
        assert found.error == error
        assert ("the bandwidth changed by 44% during the probe" in found.error_source) == (moved == 0.44)


def test_storage_as_fast_as_computing_hides_neither_whole() -> None:
    """Prompts of OLMoE in 2 GB: 0.5 s of computing and 0.5 s of reading experts took 0.57 to 0.6 s."""
    model = Traffic(weight_bytes=6e8, layers=22, operations=2e9)
    computing = estimate(PROFILE, model, prompt=256).ttft_ms
    assert computing is not None
    for share, longer in ((1.0, 2**0.25), (0.1, 1.0), (10.0, 10.0)):
        stored = replace(model, prompt_stored_bytes=share * computing * 1e6 * 4)
        found = estimate(replace(PROFILE, storage_sequential_gbs=4.0), stored, prompt=256).ttft_ms
        assert found == pytest.approx(longer * computing, rel=0.001)
