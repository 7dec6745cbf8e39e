"""ARM: what the system reports about a core, and which instruction set that gives."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.kernels import ISA_LEVELS, available, choose, detect, isa
from edgeinfer.kernels.toolchain import objects

PI_4 = {16: 0x887, 26: 0}  # fp asimd evtstrm crc32 cpuid
PI_5 = {16: 0x119FFF, 26: 0}  # with aes, atomics, asimdhp, asimdrdm, lrcpc, dcpop, asimddp
PHONE = {16: 0x119FFF, 26: 1 << 13 | 1 << 14}  # i8mm, bf16
BEST = {"neon": [], "neon_dotprod": ["dotprod"], "neon_i8mm": ["dotprod", "i8mm"]}


class Function:
    """A C function as ctypes gives it: argtypes and restype can be set."""

    def __init__(self, call: Callable[..., int]):
        self.call = call

    def __call__(self, *arguments: object) -> int:
        return self.call(*arguments)


class Library:
    """A C library with some functions."""

    def __init__(self, **functions: Callable[..., int]):
        for name, function in functions.items():
            setattr(self, name, Function(function))


@pytest.fixture(autouse=True)
def fresh_features(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Features are asked for once per process, so they are forgotten around each test."""
    monkeypatch.delenv("EDGEINFER_ISA", raising=False)
    isa.host_features.cache_clear()
    yield
    isa.host_features.cache_clear()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    """Pretend to be an ARM machine with a system and its C library."""

    def pretend(platform: str, library: object) -> None:
        monkeypatch.setattr("platform.machine", lambda: "arm64" if platform == "darwin" else "aarch64")
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(ctypes, "WinDLL", lambda name: library, raising=False)

    return pretend


def sysctl(known: dict[bytes, int]) -> Callable[..., int]:
    """macOS' sysctlbyname for 32-bit integers."""

    def call(name: bytes, value, size, new, new_size) -> int:
        assert (new, new_size) == (None, 0)
        if name not in known:
            return -1
        ctypes.memmove(value, ctypes.byref(ctypes.c_int32(known[name])), 4)
        return 0

    return call


@pytest.mark.parametrize(("words", "name"), [(PI_4, "neon"), (PI_5, "neon_dotprod"), (PHONE, "neon_i8mm")])
def test_linux(board, words: dict[int, int], name: str) -> None:
    board("linux", Library(getauxval=words.__getitem__))
    assert detect.arm_features() == set(BEST[name])
    assert choose().name == name


@pytest.mark.parametrize("name", list(BEST))
def test_macos(board, name: str) -> None:
    keys = {"dotprod": b"hw.optional.arm.FEAT_DotProd", "i8mm": b"hw.optional.arm.FEAT_I8MM"}
    known = {key: int(feature in BEST[name]) for feature, key in keys.items()}
    board("darwin", Library(sysctlbyname=sysctl(known)))
    assert choose().name == name


def test_a_macos_that_knows_no_such_names_gets_neon(board) -> None:
    board("darwin", Library(sysctlbyname=sysctl({})))
    assert choose().name == "neon"


@pytest.mark.parametrize("name", list(BEST))
def test_windows(board, name: str) -> None:
    numbers = {43: "dotprod", 66: "i8mm"}
    board("win32", Library(IsProcessorFeaturePresent=lambda number: int(numbers[number] in BEST[name])))
    assert choose().name == name


def nothing(name: object) -> None:
    raise OSError("no such library")


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_system_that_cannot_be_asked_gets_neon(board, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board(platform, object())  # a library without that function
    assert detect.arm_features() == frozenset()
    for loader in ("CDLL", "WinDLL"):
        monkeypatch.setattr(ctypes, loader, nothing, raising=False)
    assert detect.arm_features() == frozenset()
    assert [level.name for level in available()] == ["neon", "generic"]


def test_a_isa_level_that_the_core_lacks_is_refused(board) -> None:
    board("linux", Library(getauxval=PI_4.__getitem__))
    with pytest.raises(UsageError, match="'neon_dotprod' is not available here; choose one of neon, generic"):
        choose("neon_dotprod")


def test_objects_are_elf_everywhere_and_windows_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    level = next(level for level in ISA_LEVELS if level.name == "neon")
    names = {}
    for platform in ("linux", "darwin", "win32"):
        monkeypatch.setattr(sys, "platform", platform)
        names[platform] = isa.triple("aarch64"), objects.KernelSet(level).directory(Path("x"), False).name
    assert names["linux"] == names["darwin"]
    assert names["linux"][0] == "aarch64-unknown-linux-gnu" and names["linux"][1].startswith("aarch64-neon-")
    assert names["win32"][0] == "aarch64-pc-windows-msvc" and names["win32"][1].startswith("windows-aarch64-neon-")
