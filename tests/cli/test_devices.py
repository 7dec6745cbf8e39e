"""`edgeinfer devices`: the list, one device, the probe's command line, and the picture."""

from __future__ import annotations

import json
import os
import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import bench, converters
from edgeinfer.devices import DeviceProfile, local_path, local_profile, parse_profile, profiles
from tests.helpers.command_line import Outcome, edgeinfer, needs_matplotlib
from tests.make_manual import renewed

LOCAL: dict[str, Any] = {
    "title": "This machine", "device_class": "local", "memory_bytes": 8 << 30, "bandwidth_gbs": 30.0, "cores": 2,
    "isa": "generic", "memory_random": [[64, 10.0], [1024, 20.0], [1 << 20, 30.0]],
    "storage_random": [[4096, 0.2], [1 << 20, 1.0]], "measured": "2026-05-01T12:00:00",
    "curves": {"storage_random_gbs_queue_1": [[4096, 0.05], [1 << 20, 0.9]], "read_gbs_by_threads": [[1, 20], [2, 30]]},
    "figures": {"frequency_share": 0.97}, "constants": {"f_w": 0.9}, "sources": {"f_w": "fitted to 3 runs"},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The probe answers at once; gives the requests that it got."""
    requests: list[Any] = []

    def answer(request: Any, bundles: Callable[[], list[Path]], progress: Callable[..., None]) -> DeviceProfile:
        requests.append(request)
        return parse_profile("local", LOCAL, "here")

    monkeypatch.setattr(bench, "probe_machine", answer, raising=False)
    return requests


def refused(shown: Outcome, sentence: str, code: int) -> None:
    assert shown.code == code and shown.out == "" and shown.err.startswith("edgeinfer: ") and sentence in shown.err
    assert len(shown.err.splitlines()) == 1


def test_the_list() -> None:
    shown = edgeinfer("devices")
    assert shown.code == 0 and shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0].split() == ["name", "memory", "GB/s", "drawn", "device"]
    assert [line.split()[0] for line in lines[1 : len(profiles()) + 1]] == list(profiles())
    assert "'edgeinfer devices --probe' measures this machine" in " ".join(shown.out.split())
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_the_list_as_json() -> None:
    out = json.loads(edgeinfer("devices", "--json").out)
    assert out["local"] is None and [one["name"] for one in out["devices"]] == list(profiles())
    assert next(one for one in out["devices"] if one["name"] == "rpi5")["bandwidth_gbs"] == 17.1


def test_one_device_with_its_sources() -> None:
    shown = edgeinfer("devices", "rpi5")
    assert re.search("^class +arm-sbc$", shown.out, re.MULTILINE)
    assert max(len(line) for name in profiles() for line in edgeinfer("devices", name).out.splitlines()) <= 80
    assert shown.code == 0 and "17.1 GB/s" in shown.out and "vendor: LPDDR4X-4267, 32 bits" in shown.out
    out = json.loads(edgeinfer("devices", "Raspberry Pi 5", "--json").out)
    assert out["name"] == "rpi5" and out["sources"]["bandwidth_gbs"] == "vendor: LPDDR4X-4267, 32 bits"
    assert "4 KiB" in edgeinfer("devices", "m1-max").out


def test_the_probe_saves_the_profile(probed: list[Any], cache: Path) -> None:
    shown = edgeinfer("devices", "--probe", "--quick", "--threads", "3")
    assert shown.code == 0 and f"saved as {local_path()}." in shown.out and "fitted to 3 runs" in shown.out
    assert "frequency share" in shown.out and "read gbs by threads" in shown.out
    assert probed[0].quick and probed[0].threads == 3 and probed[0].directory == local_path().parent
    assert local_profile() == parse_profile("local", LOCAL, "here")
    assert [path.name for path in (cache / "devices").iterdir()] == [local_path().name]
    assert edgeinfer("devices").out.splitlines()[1].startswith("local")
    full = edgeinfer("devices", "--probe", "--json")
    assert "The probe writes a temporary file of 537 MB into" in full.err and "direct I/O" not in full.err
    out = json.loads(full.out)
    assert out["path"] == str(local_path()) and out["seconds"] >= 0 and out["figures"]["frequency_share"] == 0.97
    assert json.loads(edgeinfer("devices", "local", "--json").out)["name"] == "local"


def test_storage_without_direct_io_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**LOCAL, "figures": {"storage_direct": 0.0}}
    monkeypatch.setattr(bench, "probe_machine", lambda *call: parse_profile("local", table, "here"), raising=False)
    assert "refuses direct I/O: storage was read through the page cache" in edgeinfer("devices", "--probe").err


def test_a_disturbed_calibration_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**LOCAL, "figures": {"processor_share": 0.5}}
    monkeypatch.setattr(bench, "probe_machine", lambda *call: parse_profile("local", table, "here"), raising=False)
    assert "Other programs used the processor while models ran" in edgeinfer("devices", "--probe").err


def test_the_table_in_the_manual_is_up_to_date() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "devices.md").read_text(encoding="utf-8")
    assert renewed("devices.md") == page, "run: python -m tests.make_manual"
    assert all(f"| `{name}` |" in page for name in profiles())


def test_remains_of_a_killed_probe_go(probed: list[Any], cache: Path) -> None:
    for name, age in (("old", 7200), ("new", 60)):
        (cache / "devices" / f".calibration-{name}" / "a").mkdir(parents=True)
        os.utime(cache / "devices" / f".calibration-{name}", (time.time() - age,) * 2)
    assert edgeinfer("devices", "--probe").code == 0
    assert [path.name for path in (cache / "devices").glob(".calibration-*")] == [".calibration-new"]


def test_the_calibrations_models_are_removed(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    made: list[Path] = []

    def write(config: Any, path: Path, weights: str, **options: object) -> None:
        assert config.max_position_embeddings >= 4096
        path.mkdir()
        made.append(path)

    def interrupt(request: Any, bundles: Callable[[Any], list[Path]], progress: object) -> None:
        assert bundles(bench.SHAPES) == made and all(path.is_dir() for path in made)
        raise KeyboardInterrupt

    monkeypatch.setattr(converters, "write_random_bundle", write, raising=False)
    monkeypatch.setattr(bench, "probe_machine", interrupt, raising=False)
    shown = edgeinfer("devices", "--probe")
    assert shown.code == 1 and "Interrupted" in shown.err and len(made) == 3
    assert not list((cache / "devices").iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (["rpi6"], "There is no device 'rpi6'; the names next to it, 'rpi5', 'rpi4' or 'rpi3', are other devices'.", 2),
        (["local"], "has no profile; measure it with 'edgeinfer devices --probe'", 2),
        (["rpi5", "--probe"], "--probe measures this machine; leave 'rpi5' out", 2),
        (["--quick"], "--quick requires --probe", 2),
        (["--threads", "2"], "--threads requires --probe", 2),
        (["--probe", "--threads", "0"], "--threads 0 is out of range; it must be from 1 to 256", 2),
        (["m1-max", "--plot", "a.txt"], "--plot 'a.txt' has no known ending; use one of .svg, .png, .pdf", 2),
        pytest.param(["m1-max", "--plot", "no/such/a.svg"], "a.svg cannot be written: there is no directory", 1,
                     marks=needs_matplotlib),
        pytest.param(["rpi5", "--plot", "a.svg"], "rpi5 has no curves to draw", 2, marks=needs_matplotlib),
        pytest.param(["--plot", "a.svg"], "has no profile; measure it with", 2, marks=needs_matplotlib),
    ],
)
def test_what_is_refused(arguments: list[str], sentence: str, code: int) -> None:
    refused(edgeinfer("devices", *arguments), sentence, code)


def test_a_probe_that_cannot_save_does_not_begin(probed: list[Any], cache: Path) -> None:
    cache.write_text("")
    shown = edgeinfer("devices", "--probe")
    refused(shown, "The profile cannot be saved in", 1)
    assert "EDGEINFER_CACHE moves the directory" in shown.err and not probed


@pytest.mark.slow
@needs_matplotlib
def test_a_picture_of_the_curves(probed: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    assert edgeinfer("devices", "--probe", "--plot", str(path)).code == 0
    texts = [one.text for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    for text in ("This machine", "bytes of a piece", "GB/s", "memory, in order", "memory, scattered",
                 "storage, 1 at a time"):
        assert text in texts, text
    os.unlink(path)
    assert edgeinfer("devices", "m1-max", "--plot", str(path)).code == 0 and "storage, scattered" in path.read_text()
    path.unlink()
    path.mkdir()
    refused(edgeinfer("devices", "m1-max", "--plot", str(path)), "curves.svg cannot be written: Is a directory", 1)
