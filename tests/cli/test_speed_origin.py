"""Origin of an estimate's speed: program and unit beside the figure, two programs apart, bands that hold the notes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.published.rows import read_rows
from edgeinfer.devices import Traffic, chosen, constants_of, estimate, load_profile, profiles
from edgeinfer.devices.names import unit_of
from edgeinfer.models.describe import describe
from tests.helpers.command_line import edgeinfer
from tests.kernel_selection import everything

LLAMA = Traffic(3.8e9, 32, kv_bytes=2.6e5, parameters=6.7e9, kv_values=2.6e5)
FIELDS = ("effective_gbs", "bandwidth_gbs")
NOTES = [(name, field, float(figure)) for name, profile in profiles().items() for field in FIELDS
         for found in re.finditer(r"([\d.]+)(?: to ([\d.]+))? GB/s", profile.sources.get(field, ""))
         for figure in found.groups() if figure and "were measured with" not in profile.sources[field]]
"""Figures of the notes: speeds of other programs, the ends of a range, the memory of other versions."""


@pytest.mark.slow
def test_every_figure_says_whose_it_is() -> None:
    for out in edgeinfer("estimate", "llama-2-7b", "--all-devices", "--json").json["devices"]:
        ours = out["unit"] == "cpu" and out["device_class"] != "riscv-sbc"  # for which there are no kernels
        assert out["program"] and ours == (out["program"] == "edgeinfer"), out
    for name, profile in profiles().items():
        other = chosen(profile, runtime=constants_of(profile).program.split(" or ")[0])
        found = estimate(other, LLAMA)
        assert found.program != "edgeinfer" and found.unit == unit_of(profile), name


KINDS = {(unit_of(one), constants_of(one).program, one.device_class): name for name, one in profiles().items()}
PLANNED = sorted(profiles() if everything() else {*KINDS.values(), *sorted(profiles())[::8]})
"""EDGEINFER_TEST_ALL=1 plans for all, others for one of each unit, program and class, and some more."""


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_has_the_origin_of_the_estimate(name: str) -> None:
    out = edgeinfer("estimate", "llama-2-7b", "--machine", name, "--json").json
    planned = edgeinfer("plan", "llama-2-7b", "--machine", name, "--budget", "64GiB", "--json").json
    assert planned["estimate"]["program"] == out["program"] and out["remark"] in ("", *planned["notes"])


def test_the_line_of_the_figure_names_program_and_unit() -> None:
    shown = " ".join(edgeinfer("estimate", "llama-2-7b", "--machine", "m4", "--unit", "gpu").out.split())
    figure = r"decode [\d.]+ tokens/s at 4096 tokens of context \([\d. to]+\), llama.cpp on the GPU \(Metal\)"
    assert re.search(figure, shown)
    assert "edgeinfer cannot use the GPU (Metal) and runs on the CPU (--unit cpu estimates it)" in shown
    lines = edgeinfer("plan", "llama-2-7b", "--machine", "m4 mini 16GB", "--unit", "gpu").out.splitlines()
    first = r"It fits: 5.1\d GB of 16.11 GB; [\d.]+ tok/s, 512-token prompt in [\d.]+ s \(llama.cpp, GPU\)"
    assert re.fullmatch(first, " ".join(lines[:2]))
    assert "at the start; llama.cpp on the GPU (Metal)" in " ".join(" ".join(lines).split())
    shown = " ".join(edgeinfer("estimate", "llama-2-7b", "--machine", "m2-pro").out.split())
    assert re.search(r"decode [\d.]+ tokens/s at 4096 tokens of context \([\d. to]+\), edgeinfer on the CPU", shown)
    assert "edgeinfer was not measured on this device: the speed is derived from its cores and its memory" in shown
    here = edgeinfer("plan", "llama-2-7b", "--machine", "rpi5", "--budget", "2.3GB")
    assert here.out.startswith("It fits, with 28 layers read from storage: ") and "not of edgeinfer" not in here.out
    assert "the speed is derived from another program's bandwidth there" in " ".join(here.out.split())
    asked = ("plan", "llama-2-7b", "--machine", "rpi5", "--runtime", "LLAMA.cpp", "--budget", "8GiB")
    shown = " ".join(edgeinfer(*asked).out.split())
    assert "speed of llama.cpp: edgeinfer has not been measured on this device" in shown
    probed = replace(load_profile("rpi5"), device_class="local", effective_gbs=None, programs={})
    assert estimate(probed, LLAMA).program == "edgeinfer" and estimate(probed, LLAMA).unit_words == "the CPU"


def test_without_a_profile_the_first_line_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    first = edgeinfer("plan", "demo", "--budget", "1GiB").out.splitlines()[0]
    assert re.fullmatch(r"It fits: \d+ MB of 1.07 GB; speed not measured here", first)


def test_two_programs_are_two_speeds() -> None:
    for name, other, less in (("orin-nano", "llama.cpp", True), ("agx-orin", "llama.cpp", True),
                              ("lnl-258v-igpu", "IPEX-LLM", False)):
        found = estimate(load_profile(name), LLAMA)
        assert other in found.others and found.program not in found.others
        assert found.low <= found.others[other] <= found.high
        assert (found.others[other] < found.decode_tok_per_s * (1 - found.error)) == less
        assert f"it reaches to the speed with {other}" in found.error_source
        out = edgeinfer("estimate", "llama-2-7b", "--machine", name, "--unit", "gpu")
        assert f"tokens/s with {other}" in out.out and f"tok/s with {other}" in edgeinfer(
            "plan", "llama-2-7b", "--machine", name, "--unit", "gpu").out


@pytest.mark.parametrize(("name", "field", "gbs"), NOTES)
def test_the_band_holds_what_the_notes_say(name: str, field: str, gbs: float) -> None:
    profile = load_profile(name)
    scale = gbs / profile.bandwidth_gbs if field == "bandwidth_gbs" else 1.0
    sampled = gbs if field == "effective_gbs" else profile.effective_gbs and profile.effective_gbs * scale
    noted = replace(profile, programs={}, versions={}, bandwidth_gbs=profile.bandwidth_gbs * scale,
                    effective_gbs=sampled)
    found, said = estimate(profile, LLAMA, 1024), estimate(noted, LLAMA, 1024).decode_tok_per_s
    assert found.low * 0.999 <= said <= found.high * 1.001


def test_notes_were_found() -> None:
    assert len(NOTES) >= 20


@pytest.mark.parametrize(("weights", "kv", "bits", "kv_bits"), [
    ("q4", "int8", 4, 8), ("int8", "int8", 8, 8), ("f16", "f16", 16, 16), ("f32", "f32", 32, 32),
])
def test_the_ceiling_follows_the_types(weights: str, kv: str, bits: int, kv_bits: int) -> None:
    asked = ("estimate", "llama-2-7b", "--machine", "m4", "--weights", weights, "--kv", kv)
    out = edgeinfer(*asked, "--json").json
    nbytes = min(out["pure"]["parameters"] * bits / 8, out["weight_bytes_read"]) + out["pure"]["kv_bytes"] * kv_bits / 8
    assert out["decode_tok_per_s"] < out["ceiling_tok_per_s"] == pytest.approx(120e9 / nbytes)
    shown = " ".join(edgeinfer(*asked).out.split())
    assert f"of a token, pure {bits} bits and {kv} KV" in shown
    assert describe("llama-2-7b", weights).traffic(kv).pure_bits == bits


def test_rows_that_were_wrong() -> None:
    models = {row.model for row in read_rows() if row.device in ("m4", "m1-max") and row.group == "localscore-apple"}
    assert models == {"Llama-3.2-1B", "Llama-3.1-8B"}
    assert load_profile("orin-nx").int8_peak_gops == 30000


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("weights", ["q4", "f32"])
@pytest.mark.parametrize("ctx", [1, 4096])
def test_nothing_is_faster_than_its_ceiling(weights: str, ctx: int) -> None:
    asked = ("estimate", "llama-2-7b", "--all-devices", "--weights", weights, "-c", ctx)
    report = edgeinfer(*asked, "--json").json
    found = [item for item in report["devices"] if item["decode_tok_per_s"] and item["ceiling_tok_per_s"]]
    assert len(found) > 20
    assert [item["device"] for item in found if max(item["high"], item["decode_empty_tok_per_s"])
            > 1.000001 * item["ceiling_tok_per_s"]] == []
    for line in edgeinfer(*asked).out.splitlines()[4:]:
        empty, full, _, _, high, top = (word if word == "to" else float(word) for word in line.split()[1:7])
        assert max(empty, full, high) <= top, line
