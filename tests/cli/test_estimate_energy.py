"""`edgeinfer estimate --energy`: joules of a token and watt-hours of an answer, where a power figure is published."""

from __future__ import annotations

import pytest

import edgeinfer as library
from edgeinfer.devices import load_profile, power_of, profiles
from edgeinfer.devices.power import _tables
from tests.helpers.command_line import edgeinfer


def estimated(*asked: object) -> dict:
    done = edgeinfer("estimate", *asked, "--json")
    assert done.code == 0, done.err
    return done.json


@pytest.mark.parametrize("name", ["rtx 4090", "rpi5 8gb", "m4 16gb", "ryzen 7950x", "agx orin", "n100"])
def test_joules_are_watts_over_tokens_a_second(name: str) -> None:
    out = estimated("llama-3.2-3b", "--machine", name, "-p", 1000, "-n", 500)
    energy, power = out["energy"], power_of(load_profile(name))
    assert power and energy["decoding_watts"] == pytest.approx(power.decoding) and power.low < power.decoding
    assert energy["joules_per_token"] == pytest.approx(power.decoding / out["decode_tok_per_s"])
    assert energy["wh_per_1000_tokens"] == pytest.approx(energy["joules_per_token"] / 3.6)
    assert energy["low"] < energy["joules_per_token"] < energy["high"] and energy["source"]
    answer = out["answer"]
    spent = power.prompt * answer["ttft_ms"] + power.decoding * answer["tpot_ms"] * 499
    assert energy["total_wh"] == pytest.approx(spent / 3.6e6)
    assert energy["prompt_joules"] == pytest.approx(power.prompt * answer["ttft_ms"] / 1000)


def test_from_python() -> None:
    out = estimated("llama-3.2-3b", "--machine", "rpi5 8gb")
    assert library.estimate("llama-3.2-3b", "rpi5 8gb").joules_per_token == pytest.approx(
        out["energy"]["joules_per_token"])
    assert library.estimate("llama-3.2-3b", "a19").joules_per_token is None


def test_the_band_is_that_of_speed_and_power_together() -> None:
    power = power_of(load_profile("rtx4090"))
    assert power
    value, low, high = power.joules(100.0)
    assert (low, high) == pytest.approx((power.low / 100, power.high / 100)) and value == power.decoding / 100
    assert power.joules(100.0, 0.4)[2] > high and power.joules(100.0, 0.4)[1] < low


def test_the_answer_comes_first_where_it_is_asked_for() -> None:
    shown = edgeinfer("estimate", "llama-3.1-8b", "--machine", "rpi5 8gb", "--energy").out.splitlines()
    assert shown[2].startswith("energy     ") and " J a token (" in shown[2] and max(map(len, shown)) <= 80
    plain = edgeinfer("estimate", "llama-3.1-8b", "--machine", "rpi5 8gb").out
    assert "J a token" not in plain and "J a token" in edgeinfer(
        "estimate", "llama-3.1-8b", "--machine", "rpi5 8gb", "-n", 9).out
    unknown = edgeinfer("estimate", "llama-3.2-1b", "--machine", "a19", "--energy")
    assert "no power figure of Apple A19 is published" in unknown.out
    assert estimated("llama-3.2-1b", "--machine", "a19")["energy"] is None
    assert "--energy has no effect with" in edgeinfer("estimate", "demo", "--all-devices", "--energy").sentence


def test_every_figure_is_of_a_known_device() -> None:
    kinds, figures = _tables()
    assert set(figures) <= set(profiles()) and len(figures) > 200
    for kind in kinds.values():
        assert 0 < kind["low"] < kind["share"] < kind["high"] and kind["source"] and kind["title"]
