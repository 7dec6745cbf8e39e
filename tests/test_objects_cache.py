"""Kernel sets that a package or a cache should not have: named, replaced, and cleared away in the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeinfer.errors import KernelError
from edgeinfer.kernels import Isa, available, find_set
from edgeinfer.kernels.toolchain import build, elf, objects, tidy
from edgeinfer.lock import DestinationLock

ISA = available()[-1]
OTHER = next(isa for isa in available() + tuple(build.LADDER) if isa != ISA)
DAY = 86400
COMPILED = "they are compiled into the user's cache."


@pytest.fixture(scope="session")
def real_set() -> Path:
    """The user's own set, built now if it is not there."""
    return find_set(ISA)


@pytest.fixture
def package(real_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release's set and an empty cache; compiling processes that copy one kernel."""
    def start(isa: Isa, out: Path, share: int, shares: int) -> subprocess.Popen[str]:
        if share == 0:
            shutil.copy(real_set / "quantize.o", out)
        return subprocess.Popen([sys.executable, "-S", "-c", "print('quantize 1')" if share == 0 else ""],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    root = tmp_path / "package"
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "package_directory", lambda: root)
    monkeypatch.setattr(objects, "_temporary_directory", lambda: tmp_path / "temporary")
    monkeypatch.setattr(build, "_start", start)
    released = objects.set_directory(root, ISA, released=True)
    released.mkdir(parents=True)
    for name in ("quantize", "gather_outputs"):
        shutil.copy(real_set / f"{name}.o", released)
    objects.write_manifest(released, ISA)
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


def half_a_manifest(package: Path) -> str:
    text = (package / objects.MANIFEST).read_text()
    (package / objects.MANIFEST).write_text(text[: len(text) // 2])
    return "no valid manifest"


def edit(package: Path, **change: str) -> None:
    manifest = json.loads((package / objects.MANIFEST).read_text())
    (package / objects.MANIFEST).write_text(json.dumps(manifest | change))


def other_sources(package: Path) -> str:
    edit(package, sources="0" * 64)
    return "they were built from other sources"


def older_release(package: Path) -> str:
    package.rename(package.with_name(f"{package.name.rpartition('-')[0]}-0123456789abcdef"))
    return "they were built from other sources"


def other_instruction_set(package: Path) -> str:
    edit(package, isa=OTHER.name, machine=OTHER.machine)
    return f"they are for {OTHER.machine} {OTHER.name}"


def other_architecture(package: Path) -> str:
    """Objects whose names and checksums are right, and whose code is for another processor."""
    for file in package.glob("*.o"):
        code = bytearray(file.read_bytes())
        code[18:20] = (243).to_bytes(2, "little")  # RISC-V
        file.write_bytes(bytes(code))
    objects.write_manifest(package, ISA)
    return f"they hold no code for {ISA.machine}"


def no_elf(package: Path) -> str:
    for file in package.glob("*.o"):
        file.write_bytes(b"MZ" + bytes(200))
    objects.write_manifest(package, ISA)
    return "A kernel object is no 64-bit little-endian ELF file; kernels are built as ELF everywhere."


def nothing_for_this_machine(package: Path) -> str:
    shutil.rmtree(package)
    return "there are none"


@pytest.mark.parametrize("spoil", [
    flip_a_byte, truncate, lose_an_object, half_a_manifest, other_sources, older_release, other_instruction_set,
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


@pytest.mark.parametrize("spoil", [flip_a_byte, truncate, half_a_manifest, other_architecture])
def test_a_bad_set_in_the_cache_is_named_and_compiled_again(
    package: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], str]
) -> None:
    shutil.copytree(package, (directory := objects.set_directory(objects.cache_directory(), ISA)))
    shutil.rmtree(package.parent)  # a source checkout has none
    assert find_set(ISA) == directory and capsys.readouterr().err == ""
    why = spoil(directory)
    assert find_set(ISA) == directory
    assert capsys.readouterr().err == f"edgeinfer: the kernels in {directory} cannot be used ({why}); " \
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
    directory = find_set(ISA)
    assert directory.is_absolute() and not (tmp_path / "~").exists()
    assert "kernels cannot be kept (the home directory is not known)" in capsys.readouterr().err
    assert find_set(ISA) == directory and capsys.readouterr().err == ""  # this process has them now


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
    monkeypatch.setattr(build, "TICK_SECONDS", 0.02)
    real, built = build.build, []

    def slowly(isa: Isa, directory: Path, *_: object) -> None:
        time.sleep(0.2)
        built.append(directory)
        real(isa, directory)

    monkeypatch.setattr(build, "build", slowly)
    found, ticks = [], []
    threads = [threading.Thread(target=lambda: found.append(find_set(ISA, lambda *told: ticks.append(told))))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and found == built * 3 and set(ticks) == {(0, 0, "")}
    assert [path.name for path in built[0].parent.iterdir()] == [built[0].name]  # the lock is gone


def test_a_builder_that_does_not_move_is_not_waited_for_forever(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(package.parent)
    monkeypatch.setattr(build, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(build, "PATIENCE_SECONDS", 0.1)
    directory = objects.set_directory(objects.cache_directory(), ISA)
    directory.parent.mkdir(parents=True)
    (stopped := DestinationLock(directory)).acquire()
    assert find_set(ISA) == directory and objects.read_set(directory) is not None
    stopped.release()


# -- clearing away -----------------------------------------------------------------------------------------------------


def make_set(directory: Path, days: float) -> Path:
    directory.mkdir(parents=True)
    for file in (directory / objects.MANIFEST, directory / "quantize.o"):
        file.write_text("{}")
        os.utime(file, (time.time() - days * DAY,) * 2)
    return directory


def test_superseded_sets_go_a_week_after_their_last_use(package: Path) -> None:
    shutil.rmtree(package.parent)
    new = objects.set_directory(objects.cache_directory(), ISA)
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
    manifest = find_set(ISA) / objects.MANIFEST
    for days, marked in ((3, True), (0.5, False)):
        before = time.time() - days * DAY
        os.utime(manifest, (before, before))
        find_set(ISA)
        assert (manifest.stat().st_mtime > before + 1) == marked


def test_remains_of_dead_builds_go_and_those_of_living_ones_stay(package: Path) -> None:
    shutil.rmtree(package.parent)
    cache = objects.cache_directory()
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    dead = [cache / f".build-{ended.pid}-abc", cache / f".staged-{ended.pid}-abc", cache / ".build-x_9old"]
    living, young = cache / f".build-{os.getpid()}-abc", cache / f".build-{ended.pid}-young"
    for directory in (*dead, living, young):
        directory.mkdir(parents=True)
        if directory != young:
            os.utime(directory, (time.time() - 2 * tidy.DEAD_SECONDS,) * 2)
    directory = find_set(ISA)
    assert sorted(path for path in cache.iterdir()) == sorted([directory, living, young])


def test_several_processes_clear_away_at_once(tmp_path: Path) -> None:
    """Whoever comes second finds nothing, or half of it, and does not mind."""
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
