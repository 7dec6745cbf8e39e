"""`edgeinfer estimate`: the fields that checks rely on, all devices, pictures, refusals, and how fast it answers."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import BinaryIO

import pytest

from edgeinfer.cli.commands.estimate import JSON_FIELDS
from edgeinfer.cli.output import seconds
from edgeinfer.cli.reports.plot import Chart, Line, check_plot, draw, save_plot
from edgeinfer.errors import DestinationError, UsageError
from tests.helpers.command_line import PYTHON, ROOT, edgeinfer, environment, needs_matplotlib, relative_cost

LLAMA = ("estimate", "llama-2-7b", "--machine", "phone-lpddr5x-8533")
PROBED = """title = "A probed machine"
device_class = "local"
memory_bytes = 8000000000
bandwidth_gbs = 40.0
cores = 2
isa = "avx2"
int8_peak_gops = 800.0
memory_random = [[64, 3.0], [1024, 20.0], [4096, 32.0], [65536, 40.0]]
"""


@pytest.fixture
def probed(tmp_path) -> Path:
    path = tmp_path / "probed.toml"
    path.write_text(PROBED, encoding="utf-8")
    return path


def test_the_worked_example() -> None:
    """Pure figures beside those with scales: 3.37 GB, 2 GiB at 8K and 8 GiB at 32K, 10.5 tokens/s at 58 GB/s."""
    out = edgeinfer(*LLAMA, "--ctx", 8192, "--json").json
    assert out["ceiling_tok_per_s"] == pytest.approx(10.5, abs=0.05)
    assert out["pure"] == {"weight_bytes": 3369207808, "kv_bytes": 2 * 2**30, "parameters": 6738415616}
    assert out["kv_bytes"] == 2 * (128 + 2) * 32 * 32 * 8192
    assert 4.5 < out["bits_per_weight"] < 4.7
    assert out["weight_bytes"] > out["weight_bytes_read"] > 1.1 * out["pure"]["weight_bytes"]
    assert out["decode_tok_per_s"] < out["ceiling_tok_per_s"]
    assert edgeinfer(*LLAMA, "--ctx", 32768, "--json").json["pure"]["kv_bytes"] == 8 * 2**30


def test_fields_and_bands() -> None:
    out = edgeinfer("estimate", "tinyllama-1.1b", "--machine", "rpi5", "--json").json
    assert set(JSON_FIELDS["estimate"]) - {"devices", "ways"} <= set(out)
    assert out["low"] == pytest.approx(out["decode_tok_per_s"] * (1 - out["error"]))
    assert out["high"] == pytest.approx(out["decode_tok_per_s"] * (1 + out["error"]))
    assert out["basis"] == "class arm-sbc"
    assert out["ctx"] == 2048
    assert out["fits"] is True
    assert out["ttft_ms"] == pytest.approx(1000 * 512 / out["prefill_tok_per_s"])
    speeds = [item["decode_tok_per_s"] for item in out["contexts"]]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] == out["decode_tok_per_s"]
    assert sum(value for key, value in out["terms_ms"].items() if not key.startswith("prefill")) == pytest.approx(
        1000 / out["decode_tok_per_s"])


def test_more_bytes_are_slower_and_accepted_tokens_multiply() -> None:
    speeds = [edgeinfer(*LLAMA, "--json", "--weights", kind).json["decode_tok_per_s"] for kind in ("q4", "int8", "f16")]
    assert speeds[0] > 1.3 * speeds[1] > 1.3 * speeds[2]
    assert edgeinfer(*LLAMA, "--json", "--kv", "f16").json["decode_tok_per_s"] < speeds[0]
    twice = edgeinfer(*LLAMA, "--json", "--accepted", 2, "--draft-cost", 0.25).json
    assert twice["decode_tok_per_s"] == pytest.approx(2 / 1.25 * speeds[0]) and not twice["draft_cost_assumed"]
    assumed = edgeinfer(*LLAMA, "--json", "--accepted", 3).json
    assert assumed["decode_tok_per_s"] == pytest.approx(3 / 1.2 * speeds[0]) and assumed["draft_cost_assumed"]
    shown = " ".join(edgeinfer(*LLAMA, "--accepted", 3).out.split())
    assert "A forward pass yields 3 tokens; drafting is assumed to take 20% of a token's time per pass" in shown
    assert "yields" not in edgeinfer(*LLAMA).out and "draft" not in edgeinfer(*LLAMA, "--json").json["terms_ms"]


def test_a_person_reads_both_figures_and_the_basis() -> None:
    shown = edgeinfer(*LLAMA, "--ctx", 8192)
    assert shown.code == 0
    for words in ("10.5 tokens/s: 58 GB/s over the 5.52 GB of a token, pure 4 bits", "4.66 bits each",
                  "class arm-phone, ±35%", "exceeds the model's 4096, so run refuses it.", "(2.00 GiB)",
                  "faster than the dense one from 48% zeros on (29% to 66%)", "pure 4 bits: 3.37 GB"):
        assert words in " ".join(shown.out.split())


def test_break_even_of_a_probed_machine(probed) -> None:
    out = edgeinfer("estimate", "llama-2-7b", "--machine", probed, "--json").json
    point = out["break_even"]
    assert point["row_bytes"] == 2048 + 256
    assert 0.5 < point["efficiency"] < 0.8
    assert point["sparsity"] == pytest.approx(1 - point["efficiency"])
    assert point["relative_time"]["0.5"] == pytest.approx(0.5 / point["efficiency"])
    assert point["smallest_row_bytes"] == {"0.5": 4096, "0.7": 1024, "0.8": 1024, "0.9": 1024, "0.95": 64}
    shown = edgeinfer("estimate", "llama-2-7b", "--machine", probed).out
    shown = " ".join(shown.split())
    assert "faster than the dense one from 3" in shown
    assert "Smallest rows that pay, by share of zeros: 50% from 4096 bytes" in shown


def test_of_a_moe_the_ceiling_counts_active_experts() -> None:
    """3.3 G of 30.5 G parameters at 4 bits, and the words agree with the figures."""
    arguments = ("estimate", "qwen3-30b-a3b", "--machine", "rpi5", "--ctx", 16)
    out = edgeinfer(*arguments, "--json").json
    assert 10.5e9 / out["ceiling_tok_per_s"] == pytest.approx(3.35e9 / 2, rel=0.03)
    assert out["weight_bytes_read"] < 0.12 * out["weight_bytes"]
    assert all(type(out[key]) is int for key in ("bytes_per_token", "weight_bytes", "weight_bytes_read", "kv_bytes"))
    assert "6.3 tokens/s: 10.5 GB/s over the 1.68 GB of a token" in edgeinfer(*arguments).out


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-12b"])
def test_an_estimate_fits_where_the_plan_does(model: str) -> None:
    """Context by context around the limit of 16 GiB; weights and KV cache alone are not all."""
    for ctx in (512, 32_768, 81_920, 131_072, 163_840):
        options = (model, "--machine", "rpi5", "--ctx", ctx, "--json")
        told, planned = edgeinfer("estimate", *options).json, edgeinfer("plan", *options).json
        assert (told["fits"], told["total_bytes"]) == (planned["fits"], planned["total_bytes"])
        assert told["unstreamed_bytes"] > told["weight_bytes"] + told["kv_bytes"] + 118_000_000
        remark = "It does not fit: a run takes" in edgeinfer("estimate", *options[:-1]).out
        assert remark == (not told["fits"])


@pytest.mark.slow
def test_all_devices_say_where_it_does_not_fit() -> None:
    out = edgeinfer("estimate", "llama-3.1-70b", "--all-devices", "--json").json
    found = {item["device"]: item for item in out["devices"]}
    assert {"rpi4", "rpi5", "m1", "h200", "phone-lpddr5x-8533"} <= set(found)
    assert found["m1"]["fits"] and found["m1"]["mode"] == "streamed"
    assert found["h200"]["fits"]
    shown = edgeinfer("estimate", "llama-3.1-70b", "--all-devices")
    line = next(line for line in shown.out.splitlines() if line.startswith("m1 "))
    assert line.endswith("  apple-cpu; streamed")


@pytest.mark.parametrize(("arguments", "words"), [
    (("--machine", "rpi55"), "There is no device 'rpi55'; the names next to it, 'rpi5'"),
    (("--machine", "rpi5", "--ctx", "0"), "--ctx is 0; it must be 1 or more"),
    (("--machine", "rpi5", "--ctx", "-5"), "--ctx is -5; it must be 1 or more"),
    (("--machine", "rpi5", "--ctx", "many"), "--ctx is 'many'; it must be a whole number."),
    (("--machine", "rpi5", "-p", "9999999999"), "-p is 9999999999; it must be from 1 to"),
    (("--machine", "rpi5", "-p", "200", "--ctx", "100"), "-p 200 does not fit a context of 100 tokens"),
    (("--machine", "rpi5", "--kv", "int2"), "kv is 'int2'; choose one of int8, f16, f32"),
    (("--machine", "rpi5", "--weights", "q3"), "q3"),
    (("--machine", "rpi5", "--group-size", "48"), "48"),
    (("--machine", "rpi5", "--accepted", "0.5"), "--accepted is 0.5; a forward pass yields 1 to 64 tokens"),
    (("--accepted", "2", "--draft-cost", "-1"), "--draft-cost is -1; it must be a share of a token's time"),
    (("--all-devices", "--machine", "rpi5"), "--machine rpi5 has no effect with --all-devices, which"),
    (("--all-devices", "--plot", "a.svg"), "--plot a.svg has no effect with --all-devices"),
    (("--machine", "rpi5", "--plot", "a.doc"), "--plot 'a.doc' has no known ending; use one of .svg, .png, .pdf"),
    pytest.param(("--machine", "rpi5", "--plot", "/nowhere/at/all.svg"),
                 "The picture /nowhere/at/all.svg cannot be written", marks=needs_matplotlib),
])
def test_bad_questions_get_one_sentence(arguments, words) -> None:
    outcome = edgeinfer("estimate", "tinyllama-1.1b", *arguments)
    assert outcome.code in (1, 2)
    assert words in outcome.sentence
    assert outcome.out == ""


def test_without_a_probe_the_remedy_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    outcome = edgeinfer("estimate", "tinyllama-1.1b")
    assert outcome.code == 2
    assert "devices --probe" in outcome.sentence


def test_unknown_models_get_the_nearest_names() -> None:
    outcome = edgeinfer("estimate", "llama-2-9b", "--machine", "rpi5")
    assert outcome.code == 1
    assert "llama-2-7b" in outcome.sentence


def test_a_long_title_is_folded_and_states_the_bandwidth_once() -> None:
    for machine in (["--machine", "strix halo 128gb"], ["--bandwidth", 96, "--cores", 8, "--class", "desktop"]):
        lines = edgeinfer("estimate", "gpt-oss-120b", *machine).out.splitlines()
        assert max(map(len, lines)) <= 80 and " ".join(lines[:2]).count("GB/s") == 1


@pytest.mark.parametrize(("ms", "said"), [(127.4, "0.13 s"), (26_804, "26.8 s"), (295_020, "295 s")])
def test_times_have_three_digits(ms: float, said: str) -> None:
    assert seconds(ms) == said


@pytest.mark.slow
@needs_matplotlib
def test_a_picture_of_the_curve(tmp_path) -> None:
    path = tmp_path / "speed.svg"
    assert edgeinfer(*LLAMA, "--plot", path, "--ctx", 32768).code == 0
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    texts = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "llama-2-7b on Phone with LPDDR5X-8533" in texts
    chart = Chart("t", "x", "y", [Line("l", [1, 2, 4], [9, 6, 5], [8, 5, 4], [10, 7, 6])])
    (axes,) = draw(chart).axes
    assert [(x, y) for x, y in axes.lines[0].get_xydata()] == [(1, 9), (2, 6), (4, 5)]
    assert len(axes.collections) == 1 and axes.get_ylim()[0] == 0  # its band; axes begin at 0


@needs_matplotlib
def test_logarithmic_axes_and_names_that_need_escaping(tmp_path) -> None:
    line = Line("c & d", [64, 4096, 1 << 20], [0.1, 1.0, 10.0])
    chart = Chart("a < b", "bytes", "GB/s", [line], log_x=True, log_y=True)
    save_plot(chart, tmp_path / "a.svg")
    texts = [item.text for item in ElementTree.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "c & d", "16 Ki", "1 Mi"} <= set(texts)
    (axes,) = draw(chart).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


@needs_matplotlib
def test_a_flat_line_is_drawn(tmp_path) -> None:
    save_plot(Chart("flat", "x", "y", [Line("one", [0, 0], [3, 3])]), tmp_path / "a.svg")
    assert "one" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_pictures_need_matplotlib(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--plot needs matplotlib.*: pip install 'edgeinfer\[plot\]'"):
        check_plot(Path("a.svg"))


@needs_matplotlib
def test_the_ending_says_which_format(tmp_path) -> None:
    path = tmp_path / "a.png"
    save_plot(Chart("t", "x", "y", [Line("l", [1, 2], [3, 4], [2, 3], [4, 5])]), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    chart, path = Chart("t", "x", "y", [Line("l", [1, 2], [3, 4])]), tmp_path / "a.svg"
    path.write_text("the one before")
    (tmp_path / "link.svg").symlink_to("a.svg")

    def full(self: object, file: BinaryIO, **_: object) -> None:
        file.write(b"<svg")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(DestinationError, match="cannot be written: No space left"):
        patched.setattr("matplotlib.figure.Figure.savefig", full)
        save_plot(chart, path)
    assert path.read_text() == "the one before" and len(list(tmp_path.iterdir())) == 2
    save_plot(chart, tmp_path / "link.svg")
    assert path.read_text().endswith("</svg>\n") and (tmp_path / "link.svg").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_variables_for_all_commands_contradict_no_flag(monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_DEVICE", "rpi5")
    monkeypatch.setenv("EDGEINFER_THREADS", "2")
    assert edgeinfer("estimate", "demo", "--all-devices", "--json").code == 0
    assert edgeinfer("estimate", "demo", "--json").json["device"] == "rpi5"
    assert edgeinfer("devices").code == edgeinfer("devices", "m1").code == 0
    assert "--machine m1 has no effect" in edgeinfer("estimate", "demo", "--all-devices", "--machine", "m1").sentence
    assert edgeinfer("devices", "").sentence.startswith("The name of the device is empty;")


def test_a_device_that_names_a_machine_is_taken_for_it_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("plan", "estimate"):
        new, old = (edgeinfer(command, "llama-2-7b", flag, "rpi5", "--json") for flag in ("--machine", "--device"))
        assert new.json == old.json and new.json["device"] == "rpi5" and "--machine" not in new.err
        assert "--device rpi5 names a machine; write --machine rpi5" in old.err
    assert "both name a machine" in edgeinfer("plan", "demo", "--device", "rpi5", "--machine", "m1").sentence
    assert "--device cuda has no effect" in edgeinfer("plan", "demo", "--device", "cuda", "--machine", "m1").sentence
    assert edgeinfer("estimate", "demo", "--device", " ").sentence.startswith("--device is ' '; give one of cpu, ")
    assert "--device cuda selects an executor" in edgeinfer("estimate", "demo", "--device", "cuda").sentence
    monkeypatch.setenv("EDGEINFER_DEVICE", "rpi5")
    assert edgeinfer("run", "demo", "Once", "-n", "1", "--no-stats").code == 0
    monkeypatch.setenv("EDGEINFER_WEIGHTS", "int8")
    assert edgeinfer("run", "demo", "Once", "-n", "1", "--no-stats").code == 0
    assert edgeinfer("run", "demo", "Once", "--weights", "int8").code == 2


@needs_matplotlib
def test_a_folder_is_no_picture(tmp_path) -> None:
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(DestinationError, match="cannot be written"):
        save_plot(Chart("t", "x", "y", [Line("l", [1, 2], [3, 4])]), tmp_path / "a.svg")


@pytest.mark.timing
def test_it_is_quick_and_compiles_nothing() -> None:
    """In processor time beside that of imports which it needs anyway; numba and llvmlite stay out of the process."""

    def check(done: subprocess.CompletedProcess[str]) -> None:
        assert json.loads(done.stdout)["decode_tok_per_s"] > 0 and done.stderr.splitlines()[-1] == "[]"

    code = "import sys; from edgeinfer.cli.app import execute; execute(sys.argv[1:]); " \
           "print([m for m in ('numba', 'llvmlite') if m in sys.modules], file=sys.stderr)"
    assert relative_cost([sys.executable, "-c", code, *map(str, LLAMA), "--json"], check) < 2.8  # it takes 1.8 times
    assert subprocess.run([*PYTHON, *LLAMA], capture_output=True, cwd=ROOT, env=environment(), check=True).stdout


def test_the_time_of_an_answer() -> None:
    asked = ("estimate", "qwen3-8b", "--machine", "m4 16gb", "-p", 2000, "-n", 500)
    out, shown = edgeinfer(*asked, "--json").json, edgeinfer(*asked).out.splitlines()
    answer = out["answer"]
    assert answer["total_ms"] == pytest.approx(answer["ttft_ms"] + 499 * answer["tpot_ms"])
    at_2250 = edgeinfer("estimate", "qwen3-8b", "--machine", "m4 16gb", "-c", 2250, "--json").json
    assert answer["tpot_ms"] == pytest.approx(1000 / at_2250["decode_tok_per_s"])
    assert answer["ttft_ms"] == pytest.approx(out["ttft_ms"]) and shown[2].startswith("answer     first word after ")
    assert edgeinfer("estimate", "qwen3-8b", "--machine", "m4", "--json").json["answer"] is None


@pytest.mark.parametrize(("more", "sentence"), [
    (["--goodput", "ttft:500"], "--goodput ttft:500 requires --users N."),
    (["--users", "4", "--goodput", "speed:5"], "--goodput 'speed:5' cannot be read"),
    (["-n", "0"], "-n is 0; it must be from 1 to 16777216 tokens"),
    (["-n", "9", "--all-devices"], "--answer 9 has no effect with --all-devices"),
])
def test_wrong_questions_are_refused(more: list[str], sentence: str) -> None:
    machine = [] if "--all-devices" in more else ["--machine", "m4"]
    done = edgeinfer("estimate", "qwen3-8b", *machine, *more)
    assert done.code == 2 and sentence in done.err


def test_several_users() -> None:
    asked = ("estimate", "llama-3.1-8b", "--machine", "l4", "--users", 8, "--goodput", "ttft:2000,tpot:100")
    shown, users = edgeinfer(*asked).out.splitlines(), edgeinfer(*asked, "--json").json["users"]
    assert shown[2].startswith("8 users    ") and "tokens/s each" in shown[2]
    assert users["goodput"]["met"] and 8 <= users["goodput"]["users"] <= users["most_users"]
    planned = edgeinfer("plan", "llama-3.1-8b", "--machine", "l4", "--ctx", 640, "--samples", 8, "--json").json
    assert users["memory_bytes"] == planned["device_bytes"] < planned["device_budget_bytes"] == users["budget_bytes"]


@pytest.mark.parametrize("machine", ["m4 16gb", "rpi5", "rtx4090"])
def test_the_memory_is_that_of_a_plan(machine: str) -> None:
    plan, estimate = (edgeinfer(command, "llama-3.1-8b", "--machine", machine, "--json").json
                      for command in ("plan", "estimate"))
    assert estimate["total_bytes"] == plan["total_bytes"] and (plan["threads"] > 1) == (machine != "rtx4090")
