"""Kernel objects: built once, checked each time, linked without Numba; what is in their machine code."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeinfer.errors import DestinationError, KernelError
from edgeinfer.kernels import Isa, Kernels, find_set
from edgeinfer.kernels.toolchain import build, objects, provide
from edgeinfer.kernels.toolchain.__main__ import main as compile_ahead
from tests.helpers.kernel_builds import (
    EVERY_PROGRAM,
    FEW,
    ISA,
    NAMES,
    ROOT,
    Builds,
    cached,
    files,
    flip_a_bit,
    refused,
)


def test_only_what_is_needed_is_compiled_and_once(builds: Builds, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    assert provide.find_objects(objects.KernelSet(ISA), NAMES, lambda *progress: seen.append(progress)).keys() \
        == {*NAMES, *EVERY_PROGRAM}
    total = len(NAMES) + len(EVERY_PROGRAM)
    assert seen[0] == (0, total, "")  # at once: a clock that starts here has the whole build
    told = [entry for entry in seen if entry[2]]
    assert sorted(name for *_, name in told) == sorted([*NAMES, *EVERY_PROGRAM])
    assert [entry[:2] for entry in told] == [(done + 1, total) for done in range(total)]
    assert files(cached(tmp_path)) == {f"{name}.o" for name in (*NAMES, *EVERY_PROGRAM)}  # nothing half-written is left
    assert files(cached(tmp_path).parent) == {cached(tmp_path).name}
    started = builds.started
    assert Kernels(ISA).addresses([*NAMES, "worker"]) and builds.started == started
    Kernels(ISA).addresses(["rms_norm_q8"])
    assert builds.started == started + 1 and len(files(cached(tmp_path))) == total + 1


def test_find_set_completes_a_set(builds: Builds, tmp_path: Path) -> None:
    Kernels(ISA).addresses(NAMES)
    inode = (cached(tmp_path) / "quantize.o").stat().st_ino
    assert find_set(ISA) == cached(tmp_path)
    assert files(cached(tmp_path)) == {f"{name}.o" for name in FEW}
    assert (cached(tmp_path) / "quantize.o").stat().st_ino == inode  # what is there stays


def test_the_cache_is_private(builds: Builds, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Kernels(ISA).addresses(NAMES)
    finally:
        os.umask(before)
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("damage", [
    flip_a_bit,
    lambda file: file.unlink(),
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:64]),
    lambda file: file.write_bytes((file.parent / "gather_outputs.o").read_bytes()),
], ids=["bit flip", "no object", "empty", "truncated", "another kernel"])
def test_a_damaged_object_is_built_again(builds: Builds, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    Kernels(ISA).addresses(NAMES)
    file, started = cached(tmp_path) / "quantize.o", builds.started
    content = file.read_bytes()
    damage(file)
    Kernels(ISA).addresses(NAMES)
    assert builds.started == started + 1 and file.read_bytes() == content


def test_a_release_may_take_what_the_cache_has(builds: Builds, tmp_path: Path) -> None:
    find_set(ISA)
    started, wanted = builds.started, objects.KernelSet(ISA)
    compile_ahead(["--isa", ISA.name, "--cached", "--into", str(tmp_path / "release")])
    assert builds.started == started
    into = wanted.directory(tmp_path / "release", released=True)
    kept = wanted.read_all(wanted.directory(objects.cache_directory()), wanted.names)
    assert wanted.read_all(into, wanted.names, own=False) == kept
    compile_ahead(["--isa", ISA.name, "--into", str(tmp_path / "release")])
    assert builds.started > started, "without being told to it takes nothing from there"


def test_changed_sources_name_another_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = objects.KernelSet(ISA).directory(Path("cache"), False)
    monkeypatch.setattr(objects, "source_hash", lambda: "other")
    assert objects.KernelSet(ISA).directory(Path("cache"), False) != before


def test_another_compiler_names_another_set_but_not_a_released_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [objects.KernelSet(ISA).directory(Path("cache"), released) for released in (False, True)]
    monkeypatch.setattr(objects, "compiler_versions", lambda: {"numba": "0"})
    after = [objects.KernelSet(ISA).directory(Path("cache"), released) for released in (False, True)]
    assert after[0] != before[0] and after[1] == before[1]


@pytest.mark.slow
def test_every_source_that_kernels_import_is_hashed() -> None:
    """The hash covers everything that compile.py loads in its process, except for the tools around it.

    Of the types' package that is the table alone: kernels import no other name from there.
    """
    script = (
        "import sys; from edgeinfer.kernels import isa; from edgeinfer.kernels.toolchain import compile;"
        "compile.load_kernels(isa.ISA_LEVELS[-2]);"
        "print(*sorted(m.__file__ for n, m in sys.modules.items()"
        "              if n.startswith(('edgeinfer.kernels.', 'edgeinfer.quant.'))))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {Path(file).resolve().relative_to(ROOT).as_posix() for file in done.stdout.split()}
    hashed = {file.resolve().relative_to(ROOT).as_posix() for file in objects.compiled_sources()}
    assert loaded - hashed == {"kernels/toolchain/__init__.py", "kernels/toolchain/elf.py", "edgeinfer/quant/types.py"}
    lines = [line for file in objects.compiled_sources()
             for line in re.findall(r"^from edgeinfer\.quant import (.+)$", file.read_text("utf-8"), re.MULTILINE)]
    assert {name for line in lines for name in line.split(", ")} <= set(vars(import_module("edgeinfer.quant.table")))
    assert len(lines) > 3


def test_a_wheel_brings_its_objects(builds: Builds, tmp_path: Path) -> None:
    released = objects.KernelSet(ISA).directory(tmp_path / "package", True)
    shutil.copytree(builds.source, released)
    released.chmod(0o777)  # whoever may write there may write edgeinfer's Python as well
    assert find_set(ISA) == released and builds.started == 0
    flip_a_bit(released / "quantize.o")
    assert find_set(ISA).parent == tmp_path / "cache" / "kernels"


def test_an_unwritable_cache_is_said_once_and_done_without(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "file" / "cache"))
    assert Kernels(ISA).addresses(NAMES).keys() == set(NAMES)
    started = builds.started
    assert capsys.readouterr().err == refused(f"{tmp_path}/file/cache: Not a directory, and they are code")
    assert Kernels(ISA).addresses(NAMES) and builds.started == started  # this process has them now
    with pytest.raises(DestinationError, match=r"^Kernels cannot be kept \(.*Not a directory.*\)\. Set EDGE"):
        find_set(ISA)


def test_a_full_disk_is_said_once_and_leaves_no_half_object(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, written = os.replace, []

    def full(source: str, target: Path) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(target.name)
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert Kernels(ISA).addresses(NAMES).keys() == set(NAMES)
    assert capsys.readouterr().err == refused("No space left on device")
    assert files(cached(tmp_path)) == set(written)


def test_a_failed_build_says_why_and_leaves_nothing(builds: Builds, tmp_path: Path) -> None:
    builds.failure = "kernel bad needs the symbols exp, which only Numba has"
    with pytest.raises(KernelError) as caught:
        find_set(ISA)
    by = f"numba {version('numba')}, llvmlite {version('llvmlite')}"
    assert str(caught.value) == f"Compiling the {ISA.name} kernels with {by} failed: RuntimeError: {builds.failure}."
    assert not files(cached(tmp_path)) and files(cached(tmp_path).parent) == {cached(tmp_path).name}


def test_an_interrupted_build_ends_its_processes(builds: Builds, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_set(ISA, interrupt)
    assert not files(cached(tmp_path)) and files(cached(tmp_path).parent) == {cached(tmp_path).name}


def test_a_process_that_cannot_be_started_leaves_none_of_those_before_it(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(isa: Isa, extension: object = None) -> subprocess.Popen[bytes]:
        if started:
            raise KeyboardInterrupt
        started.append(builds.start(isa))
        return started[0]

    monkeypatch.setattr(build, "_start", start)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    with pytest.raises(KeyboardInterrupt):
        build.build(objects.KernelSet(ISA), NAMES)
    assert started[0].poll() is not None


@pytest.mark.parametrize("line", ["quantize many", "\\xff 1", "quantize"])
def test_an_unreadable_answer_ends_the_build(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    def start(isa: Isa, extension: object = None) -> subprocess.Popen[bytes]:
        script = f"import sys, time; sys.stdout.buffer.write(b'{line}\\n'); sys.stdout.flush(); time.sleep(600)"
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-S", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)

    def patient(done: int, total: int, name: str) -> None:
        ticks.append(done)
        assert len(ticks) < 60, "the build waits for ever"

    ticks: list[int] = []
    monkeypatch.setattr(build, "_start", start)
    with pytest.raises(KernelError, match=r"kernels with numba .* failed: its output cannot be read \("):
        build.build(objects.KernelSet(ISA), NAMES, patient)


@pytest.mark.parametrize(("free", "n_kernels", "expected"), [
    (64 << 30, 40, 2), (64 << 30, 1, 1), (300_000_000, 40, 1), (0, 40, 1), (2 * build.COMPILER_BYTES, 40, 2)])
def test_compilers_fit_into_free_memory(
    free: int, n_kernels: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    assert build.processes(n_kernels) == expected


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(KernelError, match=r"There is no kernel named 'gemv'\."):
        Kernels(ISA).addresses(["gemv"])


def test_sources_may_change_while_a_process_runs(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    Kernels(ISA).addresses(["quantize"])
    linked = Kernels(ISA)
    monkeypatch.setattr(objects, "source_hash", lambda: "edited")
    assert linked.addresses(["quantize"])["quantize"]
    with pytest.raises(KernelError, match="sources have changed since this process started; start it again"):
        linked.addresses(["gather_outputs"])


def test_linking_needs_neither_numba_nor_a_second_look(real_set: Path) -> None:
    script = (
        "import sys; from edgeinfer.kernels import Kernels, available;"
        f"k = Kernels(next(isa for isa in available() if isa.name == {ISA.name!r}));"  # which `real_set` has
        "a = dict(k.addresses(['quantize'])); b = k.addresses(['quantize', 'gather_outputs']);"
        "assert a['quantize'] == b['quantize'] != b['gather_outputs'];"
        "assert not {'numba', 'subprocess', 'filelock', 'secrets'} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
