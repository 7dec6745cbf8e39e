"""Kernel sets that a package or a cache should not have: named, replaced, and cleared away in the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.base.lock import DestinationLock
from edgeinfer.errors import KernelError
from edgeinfer.kernels import ISA_LEVELS, Isa, Kernels, available, find_set
from edgeinfer.kernels.toolchain import build, elf, objects, provide, tidy
from tests.helpers.kernel_builds import EVERY_PROGRAM, FEW, SEAL, Builds
from tests.helpers.tasks import within

ISA = available()[0]
OTHER = next(isa for isa in available() + tuple(ISA_LEVELS) if isa != ISA)
DAY = 86400
COMPILED = "they are compiled into the user's cache."


@pytest.fixture
def package(real_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release's set of few kernels and an empty cache; compiling processes that copy."""
    def start(isa: Isa, extension: object = None) -> subprocess.Popen[bytes]:
        return Builds(real_set).start(isa, extension)

    monkeypatch.setattr(objects.KernelSet, "names", list(FEW))
    root = tmp_path / "package"
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "package_directory", lambda: root)
    monkeypatch.setattr(provide, "_unkept", {})
    monkeypatch.setattr(build, "_start", start)
    released = objects.KernelSet(ISA).directory(root, released=True)
    shutil.copytree(real_set, released)
    return released


def flip_a_byte(package: Path) -> str:
    code = bytearray((package / "quantize.o").read_bytes())
    code[100] ^= 255
    (package / "quantize.o").write_bytes(bytes(code))
    return "quantize.o is damaged"


def truncate(package: Path) -> str:
    (package / "gather_outputs.o").write_bytes((package / "gather_outputs.o").read_bytes()[:64])
    return "gather_outputs.o is damaged"


def lose_an_object(package: Path) -> str:
    (package / "quantize.o").unlink()
    return "No such file or directory: quantize.o"


def seal_again(package: Path, wanted: objects.KernelSet, change: Callable[[bytes], bytes]) -> None:
    for file in package.glob("*.o"):
        wanted.write(package, file.stem, change(file.read_bytes()[:-SEAL]))


def other_sources(package: Path) -> str:
    seal_again(package, objects.KernelSet(ISA, sources="0" * 64), lambda code: code)
    return "linear_q4_g32.o is damaged"


def older_release(package: Path) -> str:
    package.rename(package.with_name(f"{package.name.rpartition('-')[0]}-0123456789abcdef"))
    return "they were built from other sources"


def other_instruction_set(package: Path) -> str:
    seal_again(package, objects.KernelSet(OTHER, sources=objects.source_hash()), lambda code: code)
    return "linear_q4_g32.o is damaged"


def other_architecture(package: Path) -> str:
    """Objects whose names and checksums are right, and whose code is for another processor."""
    riscv = (243).to_bytes(2, "little")
    seal_again(package, objects.KernelSet(ISA), lambda code: code[:18] + riscv + code[20:])
    return f"linear_q4_g32.o holds no code for {ISA.machine}"


def no_elf(package: Path) -> str:
    seal_again(package, objects.KernelSet(ISA), lambda code: b"MZ" + bytes(200))
    return "A kernel object is no 64-bit little-endian ELF file; kernels are built as ELF everywhere."


def nothing_for_this_machine(package: Path) -> str:
    shutil.rmtree(package)
    return "there are none"


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("spoil", [
    flip_a_byte, truncate, lose_an_object, other_sources, older_release, other_instruction_set,
    other_architecture, no_elf, nothing_for_this_machine,
])
def test_a_packages_bad_set_is_named_once_and_replaced_in_the_cache(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], str]
) -> None:
    assert find_set(ISA) == package and capsys.readouterr().err == ""
    why = spoil(package)
    directory = find_set(ISA)
    assert directory.parent == tmp_path / "cache" / "kernels"
    said = capsys.readouterr().err
    assert said == f"edgeinfer: the package's kernels for {ISA.name} cannot be used ({why}); {COMPILED}\n"
    assert find_set(ISA) == directory and capsys.readouterr().err == ""


@pytest.mark.parametrize("spoil", [flip_a_byte, truncate, other_architecture])
def test_a_bad_set_in_the_cache_is_named_and_compiled_again(
    package: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], str]
) -> None:
    shutil.copytree(package, (directory := objects.KernelSet(ISA).directory(objects.cache_directory())))
    shutil.rmtree(package.parent)  # a source checkout has none
    assert find_set(ISA) == directory and capsys.readouterr().err == ""
    why = spoil(directory)
    assert find_set(ISA) == directory
    assert capsys.readouterr().err == f"edgeinfer: kernels in {directory} cannot be used ({why}); " \
        "they are compiled again.\n"
    assert find_set(ISA) == directory and capsys.readouterr().err == ""


def test_a_checkout_without_objects_compiles_without_a_word(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(package.parent)
    assert find_set(ISA).name.startswith(f"{ISA.machine}-{ISA.name}-") and capsys.readouterr().err == ""


def test_without_a_home_kernels_are_compiled_for_one_process(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(package.parent)
    monkeypatch.setattr(objects, "cache_directory", lambda: Path("~/.cache/edgeinfer/kernels"))  # nobody's
    monkeypatch.chdir(tmp_path)
    assert Kernels(ISA).addresses(["quantize"])
    assert not (tmp_path / "~").exists()
    assert "kernels cannot be kept (the home directory is not known)" in capsys.readouterr().err
    assert Kernels(ISA).addresses(["quantize"]) and capsys.readouterr().err == ""  # this process has them now


@pytest.mark.parametrize("code", [b"", b"\x7fELF\x02\x01", b"MZ" + bytes(100)])
def test_the_architecture_of_what_is_no_elf_object_is_not_guessed(code: bytes) -> None:
    with pytest.raises(KernelError, match="is no 64-bit little-endian ELF file"):
        elf.machine(code)


# -- several at once ---------------------------------------------------------------------------------------------------


def test_processes_that_need_the_same_set_build_it_once(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads stand for processes: the lock does not tell them apart."""
    shutil.rmtree(package.parent)
    monkeypatch.setattr(provide, "TICK_SECONDS", 0.02)
    real, built = build.build, []

    def slowly(wanted: objects.KernelSet, names: list[str], *rest: Any) -> dict[str, bytes]:
        assert within(60, lambda: (0, 0, "") in ticks), "the others wait"
        built.append(names)
        return real(wanted, names, *rest)

    monkeypatch.setattr(build, "build", slowly)
    found, ticks = [], []
    threads = [threading.Thread(target=lambda: found.append(find_set(ISA, lambda *told: ticks.append(told))))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(set(found)) == 1 and (0, 0, "") in ticks
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name]  # the lock is gone


def test_who_waits_goes_on_when_what_it_needs_is_there(
    package: Path, real_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process compiles more than this one asks for: it is not waited for to the end."""
    shutil.rmtree(package.parent)
    monkeypatch.setattr(provide, "TICK_SECONDS", 0.02)
    wanted = objects.KernelSet(ISA)
    directory = wanted.directory(objects.cache_directory())
    directory.mkdir(parents=True)
    (other := DestinationLock(directory)).acquire()
    codes = {name: (real_set / f"{name}.o").read_bytes()[:-SEAL]
             for name in ("quantize", *EVERY_PROGRAM)}

    def tick(*_: object) -> None:
        if codes:
            wanted.write(directory, *codes.popitem())

    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("compiled what the other process compiles"))
    assert provide.find_objects(wanted, ["quantize"], tick).keys() == {"quantize", *EVERY_PROGRAM}
    other.release()


def test_a_builder_that_does_not_move_is_not_waited_for_forever(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(package.parent)
    monkeypatch.setattr(provide, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(provide, "PATIENCE_SECONDS", 0.1)
    directory = objects.KernelSet(ISA).directory(objects.cache_directory())
    directory.mkdir(parents=True)
    (stopped := DestinationLock(directory)).acquire()
    assert find_set(ISA) == directory
    stopped.release()


# -- clearing away -----------------------------------------------------------------------------------------------------


def make_set(directory: Path, days: float) -> Path:
    directory.mkdir(parents=True)
    (directory / "quantize.o").write_text("")
    os.utime(directory, (time.time() - days * DAY,) * 2)
    return directory


def test_superseded_sets_go_a_week_after_their_last_use(package: Path) -> None:
    shutil.rmtree(package.parent)
    new = objects.KernelSet(ISA).directory(objects.cache_directory())
    kind, cache = new.name.rpartition("-")[0], new.parent
    old = make_set(cache / f"{kind}-0123456789abcdef", tidy.UNUSED_DAYS + 1)
    recent = make_set(cache / f"{kind}-1123456789abcdef", tidy.UNUSED_DAYS - 1)
    other = make_set(cache / f"{OTHER.machine}-{OTHER.name}-0123456789abcdef", 365)
    foreign = make_set(cache / "notes", 365)
    assert find_set(ISA) == new
    assert not old.exists() and recent.exists() and other.exists() and foreign.exists()
    assert sorted(path for path in cache.iterdir()) == sorted([new, recent, other, foreign])


def test_a_set_in_use_is_marked_once_a_day(package: Path) -> None:
    shutil.rmtree(package.parent)
    directory = find_set(ISA)
    for days, marked in ((3, True), (0.5, False)):
        before = time.time() - days * DAY
        os.utime(directory, (before, before))
        find_set(ISA)
        assert (directory.stat().st_mtime > before + 1) == marked


def test_remains_of_killed_processes_go_after_a_day(package: Path) -> None:
    shutil.rmtree(package.parent)
    directory = objects.KernelSet(ISA).directory(objects.cache_directory())
    directory.mkdir(parents=True)
    for folder in (directory, directory.parent):
        for name, age in ((".quantize.abc", 2 * DAY), (".young", 0)):
            (folder / name).write_text("half")
            os.utime(folder / name, (time.time() - age,) * 2)
    (old := directory.parent / ".build-123-abc").mkdir()
    os.utime(old, (time.time() - 2 * DAY,) * 2)
    assert find_set(ISA) == directory
    assert sorted(path.name for path in directory.parent.iterdir()) == [".young", directory.name]
    assert [path.name for path in directory.iterdir() if path.suffix != ".o"] == [".young"]


def test_several_processes_clear_away_at_once(tmp_path: Path) -> None:
    """A process that comes second finds nothing, or half of it, and continues."""
    for number in range(40):
        make_set(tmp_path / f"x86_64-avx2-{number:016x}", 30)
    kept = make_set(tmp_path / "x86_64-avx2-ffffffffffffffff", 30)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            tidy.tidy(kept)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and [path.name for path in tmp_path.iterdir()] == [kept.name]
