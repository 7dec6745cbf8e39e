"""Device profiles: those that come along, files of users, the local one; and refusals."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.devices import (
    CLASSES,
    SERVED,
    Curve,
    DeviceProfile,
    load_profile,
    local_path,
    local_profile,
    machine_name,
    parse_profile,
    profile_table,
    profiles,
    save_profile,
)
from edgeinfer.errors import DestinationError, ProfileError, UsageError

TABLE: dict[str, Any] = {
    "title": "A board", "device_class": "arm-sbc", "memory_bytes": 8 << 30, "bandwidth_gbs": 17.1, "cores": 4,
    "isa": "neon_dotprod",
}
ASKED = """rpi4 rpi5 rk3588 rk3588-npu orion-o6 orin-nano agx-orin sd8g3 x-elite m1 m1-pro m1-max m1-ultra m2 m2-pro
m2-max m2-ultra m3 m3-pro m3-max m4 m4-pro m4-max m5-pro n100 lnl-258v desktop-ddr4-3200 desktop-ddr5-5600 ryzen-8840u
strix-halo graviton3 rtx4090 a100 h100 h200 phone-lpddr5x-8533""".split()
DESCRIBED = {"title", "device_class", "aliases", "sources", "figures", "programs", "versions", "memory_gib", "family"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    return tmp_path


# -- curves ------------------------------------------------------------------------------------------------------------


def test_a_curve_is_interpolated_by_logarithms_and_constant_beyond_its_ends() -> None:
    curve = Curve(((64, 1.0), (1024, 16.0), (4096, 16.0)))
    assert [curve.at(size) for size in (1, 64, 1024, 4096, 1 << 30)] == \
        pytest.approx([1, 1, 16, 16, 16])
    assert curve.at(256) == pytest.approx(4.0)
    assert curve.at(2048) == pytest.approx(16.0)
    assert Curve(((64, 2.0),)).at(1) == Curve(((64, 2.0),)).at(128) == 2.0


# -- profiles that come along ------------------------------------------------------------------------------------------


def test_the_wanted_devices_are_known() -> None:
    assert not set(ASKED) - set(profiles())


@pytest.mark.parametrize("name", sorted(profiles()))
def test_every_figure_names_its_source(name: str) -> None:
    profile = profiles()[name]
    assert profile.name == name
    given = (set(profile_table(profile)) - DESCRIBED) | set(profile.figures) | set(profile.constants)
    assert not given - set(profile.sources), "figures without a source"
    assert not set(profile.sources) - given, "sources without a figure"


def test_every_class_has_a_device() -> None:
    assert {profile.device_class for profile in profiles().values()} == set(CLASSES) - {"local", SERVED}


def test_no_two_devices_share_a_name() -> None:
    names: dict[str, str] = {}
    shared = {"a100", "jetsonorinnano", "jetsonagxorin", "agxorin", "galaxys24", "7600"}
    for profile in profiles().values():  # but names that several devices have, one of which has to be chosen
        said = (text.lower().replace("+", "plus") for text in (profile.name, profile.title, *profile.aliases))
        for name in {"".join(filter(str.isalnum, text)) for text in said}:
            assert name in shared or names.setdefault(name, profile.name) == profile.name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RPI5", "rpi5"), ("Raspberry Pi 5", "rpi5"), ("RTX 4090", "rtx4090"), ("orange-pi-5", "rk3588"),
        ("M1 (7/8c)", "m1"), ("Jetson AGX Orin GPU TinyChat AWQ", "agx-orin"), ("Graviton3 r7g.16xl 64T", "graviton3"),
    ],
)
def test_titles_and_names_of_published_tables_find_the_device(typed: str, name: str) -> None:
    assert load_profile(typed).name == name


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("rpi6", "There is no device 'rpi6'; the names next to it, 'rpi5', 'rpi4' or 'rpi3', are other devices'."),
        ("orange pi", "did you mean 'visionfive-2', 'rk3588' or "),
        ("qqqqq", "There is no device 'qqqqq'; 'edgeinfer devices' lists the known ones"),
        ("", "The name of the device is empty"),
        ("no/such.toml", "There is no profile 'no/such.toml'; give a file, or a name that 'edgeinfer devices' lists"),
    ],
)
def test_an_unknown_device_is_refused_with_the_nearest_names(typed: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_profile(typed)
    assert sentence in str(caught.value)


# -- files -------------------------------------------------------------------------------------------------------------


def full() -> DeviceProfile:
    table = {
        **TABLE, "effective_gbs": 10.0, "int8_peak_gops": 600.0, "f32_peak_gflops": 150, "storage_sequential_gbs": 0.8,
        "storage_random": [[4096, 0.1], [65536, 0.5]], "memory_random": [[64, 1.5], [1 << 20, 12]],
        "constants": {"f_w": 0.9, "t0_ms": 0.0}, "sources": {"f_w": 'a "quoted" \\ é\x7f\n text'},
        "measured": "2026-05-01T12:00:00", "machine": "ARM, 4",
        "curves": {"read_gbs_by_threads": [[1, 5.0], [4, 11.0]]}, "figures": {"frequency_share": 0.0},
        "aliases": ["board"],
    }
    return parse_profile("board", table, "here")


def test_a_saved_profile_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "board.toml"
    save_profile(full(), path)
    assert load_profile(path) == full()
    assert [file.name for file in path.parent.iterdir()] == ["board.toml"]
    save_profile(replace(full(), cores=5), path)
    assert load_profile(str(path)).cores == 5


def test_nothing_absurd_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="bandwidth_gbs is nan"):
        save_profile(replace(full(), bandwidth_gbs=float("nan")), tmp_path / "a.toml")
    assert not list(tmp_path.iterdir())


def test_a_profile_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError, match=r"The profile .*board.toml cannot be written: .* EDGEINFER_CACHE moves"):
        save_profile(full(), tmp_path / "file" / "board.toml")

    def full_disk(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(DestinationError, match="cannot be written: No space left on device"):
        save_profile(full(), tmp_path / "board.toml")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for content, sentence in (
        (b"title = ", r"a.toml is not a TOML file: .*; mend it, or probe again"),
        (b"\xff\xfe", "a.toml is not a TOML file"),
        (b"cores = " + 5000 * b"9", "a.toml is not a TOML file: .*; mend it, or probe again"),
        (b"a = " + 2000 * b"[" + 2000 * b"]", "a.toml is not a TOML file"),
        (b"#" * ((1 << 20) + 1), "a.toml has 1048577 bytes; a profile has at most 1048576"),
        (b"", "a.toml: title is missing; every profile gives title, device_class, memory_bytes, bandwidth_gbs"),
    ):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match=sentence):
            load_profile(path)


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.toml"
    path.write_text("")

    def refuse(*arguments: object, **options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("edgeinfer.devices.toml_files.open_plain", refuse)
    with pytest.raises(ProfileError, match=r"a\.toml cannot be read: Permission denied"):
        load_profile(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"isa": None}, "here: isa is missing"),
        ({"bandwith_gbs": 1.0}, "here: there is no field 'bandwith_gbs'; did you mean bandwidth_gbs?"),
        ({"zzzzz": 1.0}, "here: there is no field 'zzzzz'; known are title, "),
        ({"title": 3}, "here: title is 3; it must be a text of 1 to 1000 characters"),
        ({"title": " "}, "title is ' '"),
        ({"device_class": "toaster"}, "device_class is 'toaster'; choose one of arm-sbc, arm-phone"),
        ({"isa": ["neon"]}, "isa is ['neon']; choose one of generic, avx2"),
        ({"cores": 0}, "cores is 0; it must be a whole number of cores from 1 to"),
        ({"cores": True}, "cores is True"),
        ({"cores": 2.0}, "cores is 2.0"),
        ({"memory_bytes": -1}, "memory_bytes is -1; it must be a whole number of bytes from 1 to"),
        ({"memory_bytes": 1 << 60}, "memory_bytes is 1152921504606846976"),
        ({"bandwidth_gbs": 0}, "bandwidth_gbs is 0; it must be a number from 1e-06 to 1e+06"),
        ({"bandwidth_gbs": -3.5}, "bandwidth_gbs is -3.5"),
        ({"bandwidth_gbs": float("nan")}, "bandwidth_gbs is nan"),
        ({"bandwidth_gbs": float("inf")}, "bandwidth_gbs is inf"),
        ({"bandwidth_gbs": 2e6}, "bandwidth_gbs is 2000000.0"),
        ({"bandwidth_gbs": "17"}, "bandwidth_gbs is '17'"),
        ({"effective_gbs": 18.0}, "effective_gbs is 18.0; it cannot exceed bandwidth_gbs, 17.1"),
        ({"int8_peak_gops": 0.0}, "int8_peak_gops is 0.0"),
        ({"storage_random": 3}, "storage_random is 3; it must be a list of pairs, as in [[4096, 0.4], [65536, 1.5]]"),
        ({"storage_random": []}, "storage_random is []"),
        ({"storage_random": [[1, 2, 3]]}, "storage_random is [[1, 2, 3]]"),
        ({"storage_random": [[0, 1.0]]}, "a size in storage_random is 0; it must be a whole number of bytes"),
        ({"memory_random": [[64, -1.0]]}, "a value in memory_random is -1.0"),
        ({"memory_random": [[64, 1.0], [64, 2.0]]}, "a size in memory_random is 64; sizes must ascend"),
        ({"constants": {"f_x": 1.0}}, "here: there is no constant 'f_x'; did you mean f_w?"),
        ({"constants": {"f_w": 1.01}}, "constants.f_w is 1.01; a share above 1 is impossible: other programs"),
        ({"constants": {"mfu": 1.44}}, "mfu is 1.44; a share above 1 is impossible: other programs disturbed"),
        ({"constants": {"f_kv": float("inf")}}, "constants.f_kv is inf; a share above 1 is impossible"),
        ({"constants": {"f_w": 0}}, "constants.f_w is 0; it must be a number from 1e-06 to 1"),
        ({"constants": {"t0_ms": -1}}, "constants.t0_ms is -1; it must be 0, or a number from 1e-06 to 10000"),
        ({"constants": [1]}, "constants is [1]; it must be a table, written [constants]"),
        ({"sources": {"title": ""}}, "sources.title is ''"),
        ({"measured": "yesterday"}, "measured is 'yesterday'; it must be a date and time such as '2026-"),
        ({"measured": 3}, "measured is 3"),
        ({"aliases": "x"}, "aliases is 'x'; it must be a list of texts"),
        ({"aliases": [1]}, "aliases is 1; it must be a text"),
        ({"curves": {"x": [[2, 1.0], [1, 1.0]]}}, "a size in curves.x is 1; sizes must ascend, and it follows 2"),
        ({"constants": {"f_w": 1e-300}}, "constants.f_w is 1e-300"),
        ({"title": "a board\x1b[31m"}, "title is 'a board\\x1b[31m'; it must be on one line and without control"),
        ({"machine": "a\nb"}, "machine is 'a\\nb'; it must be on one line"),
        ({"cores": int("9" * 3000)}, f"cores is {'9' * 60}...; it must be a whole number"),
        ({"figures": {"x": -1}}, "figures.x is -1; it must be 0, or a number from 1e-06 to 1e+09"),
        ({"figures": {"x": 1e-320}}, "figures.x is 1e-320; it must be 0, or a number from 1e-06"),
        ({"figures": {"clock_ghz": 1e-320}}, "figures.clock_ghz is 1e-320; it must be a number from 0.01 to 100."),
        ({"figures": {"ecc_share": 0}}, "figures.ecc_share is 0; it must be a number from 0.01 to 1."),
    ],
)
def test_an_absurd_field_is_refused(change: dict[str, Any], sentence: str) -> None:
    table = {key: value for key, value in {**TABLE, **change}.items() if value is not None}
    with pytest.raises(ProfileError) as caught:
        parse_profile("board", table, "here")
    assert sentence in str(caught.value)


def test_devices_go_by_the_names_that_people_use() -> None:
    for typed, name in [("Raspberry Pi 5", "rpi5"), ("Orange Pi 5", "rk3588"), ("Jetson Orin Nano", "orin-nano"),
                        ("jetson agx orin", "agx-orin"), ("Core Ultra 258V", "lnl-258v"), ("Strix Halo", "strix-halo"),
                        ("Snapdragon X Elite", "x-elite"), ("M3 Max", "m3-max"), ("NVIDIA RTX 4090", "rtx4090"),
                        ("DDR4", "desktop-ddr4-3200"), ("desktop DDR5", "desktop-ddr5-5600")]:  # fmt: skip
        assert load_profile(typed).name == name


# -- this machine ------------------------------------------------------------------------------------------------------


def test_the_local_profile(cache: Path) -> None:
    assert local_profile() is None
    with pytest.raises(UsageError, match=r"This machine \(.*\) has no profile; measure it with 'edgeinfer dev"):
        load_profile("local")
    save_profile(full(), local_path())
    assert local_path().parent == cache / "devices"
    assert local_profile() == load_profile("local") == replace(full(), name="local")


def test_another_machine_with_the_same_home_is_noticed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(full(), local_path())
    monkeypatch.setattr(sys.modules[local_path.__module__], "machine_name", lambda: "Another, 64 logical processors")
    assert local_profile() is None
    with pytest.raises(UsageError, match=r"This machine \(Another, .*\) has no profile \(1 of other machines lie in"):
        load_profile("local")


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"cpuinfo": "processor\t: 0\nmodel name\t: A 1000\n\nmodel name\t: B\n"}, "A 1000"),
        ({"cpuinfo": "CPU implementer\t: 0x41\nCPU part\t: 0xd0b\n", "model": "Raspberry Pi 5 Model B\0"},
         "Raspberry Pi 5 Model B"),
        ({"cpuinfo": "CPU implementer\t: 0x41\nCPU part\t: 0xd0b\n"}, "ARM 0x41 0xd0b"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="Linux's files")
def test_names_of_processors(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], name: str) -> None:
    def read(path: Path, **options: object) -> str:
        if path.name not in files:
            raise FileNotFoundError(path)
        return files[path.name]

    monkeypatch.setattr(Path, "read_text", read)
    assert sys.modules[local_path.__module__]._processor() == name


def test_the_machine_in_words() -> None:
    assert f"{os.cpu_count()} logical processors" in machine_name()


def test_a_damaged_local_profile_is_no_silent_absence(cache: Path) -> None:
    local_path().parent.mkdir()
    local_path().write_text("cores = 0")
    with pytest.raises(ProfileError, match="title is missing"):
        local_profile()
