"""Runs of any type of weights teach the profile the same: they are recorded as what the memory alone would deliver."""

from __future__ import annotations

import pytest

from edgeinfer.cli.reports.prediction import Predictor
from edgeinfer.devices import DeviceProfile, fit_errors
from edgeinfer.models.describe import describe

CONSTANTS = {"f_w": 0.95, "t0_ms": 0.3, "f_kv": 0.7, "mfu": 0.7, "mfu_attention": 0.3, "activation_cost": 400.0,
             "few_rows": 0.7, "unhidden": 0.1}
FIGURES = {"unpacked_gbs_q4": 90.0, "unpacked_gbs_int8": 110.0, "unpacked_gbs_q4k": 60.0, "unpacked_gbs_q6": 50.0,
           "arithmetic_int8": 1.2, "arithmetic_q4k": 1.3, "arithmetic_q6": 1.5}
PROFILE = DeviceProfile("local", "This machine", "local", 8 << 30, 78.0, None, 2, "avx512vnni", int8_peak_gops=2200.0,
                        constants=CONSTANTS, figures=FIGURES, measured="2026-11-27T16:00:00")


@pytest.mark.parametrize("model", ["tinyllama-1.1b", "tinyllama-1.1b-q8_0", "tinyllama-1.1b-q4_k_m"])
@pytest.mark.parametrize("gbs", [44.0, 78.0])
def test_a_run_as_predicted_says_nothing_new(model: str, gbs: float) -> None:
    predictor = Predictor(PROFILE, describe(model).traffic())
    run = predictor.decode_run(1024, 1 / predictor.decode(1024, gbs)["t_per_s"], gbs)
    predicted = predictor.prompt(0, 512)
    assert predicted is not None
    prompt = predictor.prompt_run(0, 512, 512 / predicted["t_per_s"])
    assert prompt is not None
    errors = fit_errors(CONSTANTS, [run], [prompt])
    assert errors["decode_error"] < 1e-4
    assert errors["prompt_error"] < 0.01  # the reading that prompts do not hide is part of mfu there


def test_types_cost_more_bytes_and_operations() -> None:
    names = ("tinyllama-1.1b", "tinyllama-1.1b-q4_k_m")
    plain, mixed = (Predictor(PROFILE, describe(name).traffic()) for name in names)
    for predictor, factor in ((plain, (1 + (78 / 92) ** 4) ** 0.25), (mixed, (1 + (78 / 57.4) ** 4) ** 0.25)):
        run = predictor.decode_run(0, 0.01)
        assert run.weight_bytes == pytest.approx(factor * predictor.traffic.weight_bytes, rel=0.01)
    prompts = [predictor.prompt_run(0, 512, 1.0) for predictor in (plain, mixed)]
    assert prompts[0] and prompts[1]
    assert prompts[1].operations / prompts[0].operations == pytest.approx(1.335 / 1.0126, rel=0.01)
