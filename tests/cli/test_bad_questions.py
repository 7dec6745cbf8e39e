"""Questions that cannot be answered: one sentence each, with the nearest that can."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command_line import edgeinfer

ESTIMATE = ("estimate", "llama-3.1-8b")
LAPTOP = ("--cores", "8", "--class", "laptop")
PROFILE = 'title = "A"\ndevice_class = "arm-sbc"\nmemory_bytes = 4294967296\nbandwidth_gbs = 17.1\ncores = 4\n' \
          'isa = "neon"\n'


@pytest.mark.parametrize(("asked", "sentence"), [
    (["--machine", "rpi5", "-p", "5000", "--ctx", "4096"], "-p 5000 does not fit a context of 4096 tokens"),
    (["--machine", "rpi5 64gb"], "exists with 1, 2, 4, 8 or 16 GB, not with 64 GB"),
    (["--machine", "rpi5 8gb", "--memory", "4GiB"], "write the memory into the name, such as 'rpi5 8GB'."),
    (["--machine", "rpi5", "--budget", "4XB"], "has the unknown unit 'XB'; units are B, kB, MB, GB, TB and KiB"),
    (["--machine", "rpi5", "--budget", "4"], "Size '4' cannot be read; did you mean 4GiB or 4MB?"),
    (["--bandwidth", "0", *LAPTOP], "--bandwidth is 0.0; it must be a number of GB/s above 0."),
    (["--bandwidth", "nan", *LAPTOP], "--bandwidth is nan; it must be a number of GB/s above 0."),
    (["--bandwidth", "1e9", *LAPTOP], "--bandwidth is 1e+09; it must be above 0 and at most 1e+06 GB/s."),
    (["--bandwidth", "100", *LAPTOP, "--memory", "1B"], "--memory is 1 bytes; a device has 64 MiB to 64 TiB."),
    (["--bandwidth", "100", "--cores", "0", "--class", "laptop"], "--cores is 0; it must be 1 or more."),
    (["--machine", "l4", "--users", "65"], "--users is 65; it must be from 1 to 64, the most sequences of an engine."),
    (["--machine", "l4", "--users", "2", "--goodput", "ttft:0"], "--goodput 'ttft:0' cannot be read; write metrics"),
    (["--machine", "l4", "--users", "2", "--goodput", "ttft:inf"], "--goodput 'ttft:inf' cannot be read"),
    (["--machine", "l4", "--users", "2", "--goodput", "ttft:5,ttft:6"], "--goodput 'ttft:5,ttft:6' cannot be read"),
    (["--machine", "rpi5", "--draft", "llama-3.2-1b", "--acceptance", "1.01"], "from 0 to 1, such as 0.7."),
    (["--nodes", "rpi5,rpi5", "--link", "0B/s"], "--link is '0B/s'; the rate must be above 0, as in 1MB/s."),
    (["--nodes", "rpi5,rpi5", "--link", "5XB/s"], "give 100Mbit, 1GbE, 2.5GbE, 10GbE, wifi6, tb4, or a rate such as"),
    (["--machine", "rpi5", "--unit", "npu"], "Nothing is known of an NPU of Raspberry Pi 5; known is its CPU."),
    (["--machine", "rpi5", "--unit", "tpu"], "--unit is 'tpu'; choose one of cpu, gpu, npu."),
    (["--machine", "m4", "--runtime", "vllm"], "'vllm' is known on Apple M4; known are llama.cpp, edgeinfer."),
    (["--machine", "rpi5", "--storage", "nmve"], "There is no storage 'nmve'; did you mean nvme?"),
    (["--machine", "galaxy s24"], "is the name of 2 devices, 'exynos-2400' (Exynos 2400) or 'sd8g3' (Snapdragon 8"),
    (["--machine", "rpi55"], "There is no device 'rpi55'; the names next to it, 'rpi5'"),
])
def test_one_sentence_with_the_nearest_that_works(asked: list[str], sentence: str) -> None:
    done = edgeinfer(*ESTIMATE, *asked)
    assert done.code == 2 and sentence in done.sentence and not done.out


@pytest.mark.parametrize(("text", "sentence"), [
    (PROFILE.replace("cores = 4\n", ""), "cores is missing; every profile gives title, device_class, memory_bytes"),
    (PROFILE + "bandwith = 3\n", "there is no field 'bandwith'; did you mean bandwidth_gbs?"),
    (PROFILE.replace("17.1", "0"), "bandwidth_gbs is 0; it must be a number from 1e-06 to 1e+06."),
    (PROFILE.replace('"neon"', '"nean"'), "isa is 'nean'; choose one of generic"),
])
def test_a_device_file_says_what_is_wrong_with_it(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "board.toml"
    path.write_text(text)
    done = edgeinfer(*ESTIMATE, "--machine", path)
    assert done.code in (1, 2) and sentence in done.sentence and str(path) in done.sentence


def test_more_users_than_memory_and_bounds_that_nothing_meets() -> None:
    """These have an answer: how many there is room for, and which bounds would be met."""
    shown = " ".join(edgeinfer(*ESTIMATE, "--machine", "rtx 4060", "--users", 64, "-p", 4000).out.split())
    assert "64 users memory holds " in shown and "users, so lower --users to that; with enough of it" in shown
    none = " ".join(edgeinfer("estimate", "llama-3.1-70b", "--machine", "rtx 4060", "--users", 2).out.split())
    assert "memory holds not even one, so choose a smaller model" in none
    asked = (*ESTIMATE, "--machine", "rpi5 8gb", "--users", 1, "--goodput", "ttft:1,tpot:1")
    shown, one = " ".join(edgeinfer(*asked).out.split()), edgeinfer(*asked, "--json").json["users"]
    assert one["goodput"]["users"] is None and one["goodput"]["one"] == pytest.approx(
        {"ttft": one["ttft_ms"], "tpot": one["tpot_ms"]})
    assert f"not even one user does; alone it is TTFT {one['ttft_ms']:.4g} ms, TPOT {one['tpot_ms']:.4g} ms" in shown
