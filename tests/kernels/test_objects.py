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

import edgeinfer
from edgeinfer.errors import DestinationError, KernelError
from edgeinfer.kernels import Isa, Kernels, available, find_set
from edgeinfer.kernels.catalogue import FAMILIES
from edgeinfer.kernels.toolchain import build, elf, objects, provide
from edgeinfer.kernels.toolchain.__main__ import main as compile_ahead

ROOT = str(Path(edgeinfer.__file__).parents[1])
ISA = available()[0]
NAMES = ("quantize", "gather_outputs")
EVERY_PROGRAM = next(family.kernels for family in FAMILIES if family.name == "forward")
FEW = ("linear_q4_g32", *NAMES, "rms_norm_q8", *EVERY_PROGRAM)
"""Kernels that represent a set: nothing here depends on their number."""
SEAL = 32


@pytest.fixture(scope="session")
def real_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of the user's own set, built now where they are not there."""
    return few_objects(tmp_path_factory.mktemp("set"))


def few_objects(directory: Path) -> Path:
    """Lay sealed objects of FEW into a directory; returns it."""
    wanted = objects.KernelSet(ISA)
    for name, code in provide.find_objects(wanted, FEW).items():
        wanted.write(directory, name, code)
    return directory


class Builds:
    """Stands for the compiling processes: they hand out objects of the real set."""

    def __init__(self, source: Path):
        self.source, self.started, self.failure = source, 0, ""

    def start(self, isa: Isa, extension: object = None) -> subprocess.Popen[bytes]:
        self.started += 1
        script = f"""
            import sys
            from pathlib import Path
            if {self.failure!r}: raise RuntimeError({self.failure!r})
            for name in sys.stdin:
                code = Path({str(self.source)!r}, name.strip() + ".o").read_bytes()[:-{SEAL}]
                sys.stdout.buffer.write(f"{{name.strip()}} {{len(code)}}\\n".encode() + code)
                sys.stdout.flush()"""
        script = "\n".join(line[12:] for line in script.splitlines())
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-S", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)


@pytest.fixture
def builds(real_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    """A new cache and package, few kernels, and compiling processes that only copy."""
    stand_in = Builds(real_set)
    monkeypatch.setattr(objects.KernelSet, "names", list(FEW))
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "package_directory", lambda: tmp_path / "package")
    monkeypatch.setattr(provide, "_unkept", {})
    monkeypatch.setattr(build, "_start", stand_in.start)
    return stand_in


def cached(tmp_path: Path) -> Path:
    return objects.KernelSet(ISA).directory(tmp_path / "cache" / "kernels", False)


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


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


def flip_a_bit(file: Path) -> None:
    code = bytearray(file.read_bytes())
    code[len(code) // 2] ^= 4
    file.write_bytes(bytes(code))


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


def refused(why: str) -> str:
    return f"edgeinfer: kernels cannot be kept ({why}); they are compiled again in the next process. " \
        "Set EDGEINFER_CACHE to a directory that only you can write.\n"


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
    with pytest.raises(KernelError, match=r"kernels with numba .* failed: what it gave cannot be read \("):
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


# -- whose files -------------------------------------------------------------------------------------------------------

posix = pytest.mark.skipif(os.name == "nt", reason="files have no such owners")
as_root = pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="giving files away needs root")


def open_file(directory: Path) -> str:
    (directory / "quantize.o").chmod(0o666)
    return "quantize.o can be written by others"


def given_file(directory: Path) -> str:
    os.chown(directory / "quantize.o", 12345, 12345)
    return "quantize.o belongs to another user (12345)"


def link_in_place_of_a_file(directory: Path) -> str:
    (directory / "quantize.o").rename(directory / "elsewhere")
    (directory / "quantize.o").symlink_to("elsewhere")
    return "Too many levels of symbolic links: quantize.o"


@posix
@pytest.mark.parametrize("spoil", [open_file, pytest.param(given_file, marks=as_root), link_in_place_of_a_file])
def test_an_object_that_others_could_change_is_compiled_again(
    builds: Builds, tmp_path: Path, spoil: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    Kernels(ISA).addresses(NAMES)
    started, why = builds.started, spoil(cached(tmp_path))
    Kernels(ISA).addresses(NAMES)
    assert builds.started > started
    assert capsys.readouterr().err == f"edgeinfer: kernels in {cached(tmp_path)} cannot be used ({why}); they are " \
        "compiled again.\n"
    status = (cached(tmp_path) / "quantize.o").lstat()
    assert (status.st_uid, status.st_mode) == (os.geteuid(), 0o100600)


def open_set(directory: Path) -> str:
    directory.chmod(0o777)
    return f"{directory} can be written by others"


def open_directory_above(directory: Path) -> str:
    directory.parents[1].chmod(0o757)
    return f"{directory.parents[1]} can be written by others"


def given_directory(directory: Path) -> str:
    os.chown(directory.parent, 12345, 12345)
    return f"{directory.parent} belongs to another user (12345)"


def link_of_another(directory: Path) -> str:
    directory.rename(directory.parent / "elsewhere")
    directory.symlink_to("elsewhere")
    os.chown(directory, 12345, 12345, follow_symlinks=False)
    return f"{directory} belongs to another user (12345)"


def link_into_an_open_directory(directory: Path) -> str:
    (open_one := directory.parents[2] / "open").mkdir()
    open_one.chmod(0o777)
    directory.rename(open_one / "set")
    directory.symlink_to(open_one / "set")
    return f"{open_one} can be written by others"


@pytest.mark.slow(keep=3)
@posix
@pytest.mark.parametrize("spoil", [
    open_set, open_directory_above, pytest.param(given_directory, marks=as_root),
    pytest.param(link_of_another, marks=as_root), link_into_an_open_directory,
])
def test_a_cache_that_others_could_change_is_not_used(
    builds: Builds, tmp_path: Path, spoil: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    Kernels(ISA).addresses(NAMES)
    directory = cached(tmp_path)
    started, why = builds.started, spoil(directory)
    flip_a_bit(directory / "quantize.o")  # nobody looks
    assert Kernels(ISA).addresses(NAMES) and builds.started > started
    assert capsys.readouterr().err == refused(f"{why}, and they are code")
    with pytest.raises(DestinationError, match=re.escape(why)):
        find_set(ISA)


@posix
def test_links_and_sticky_directories_of_our_own_are_fine(builds: Builds, tmp_path: Path) -> None:
    Kernels(ISA).addresses(NAMES)
    directory, started = cached(tmp_path), builds.started
    (sticky := tmp_path / "sticky").mkdir()
    sticky.chmod(0o1777)
    directory.rename(sticky / "set")
    directory.symlink_to("../../sticky/set")
    Kernels(ISA).addresses(NAMES)
    assert builds.started == started


# -- machine code ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_kernel_that_needs_a_foreign_symbol_is_refused() -> None:
    script = """
import math
from edgeinfer.kernels import available
from edgeinfer.kernels.toolchain import compile
compile.load_kernels(available()[-1])
compile.only_translate()
def bad(inst, ctx, tid, n_threads):
    return int(math.exp(inst) * 8)
try:
    compile.compile_kernel("bad", bad)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "kernel bad needs the symbols exp, which only Numba has\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("names", [["quantize", "rms_norm_q8"], ["neuron_mask_signs"]], ids=" ".join)
def test_a_lighter_front_end_changes_no_code(names: list[str]) -> None:
    """With outlined helpers Numba makes one for each constant, so both front ends make one for all."""
    script = """
import hashlib, sys
from edgeinfer.kernels import available
from edgeinfer.kernels.toolchain import compile
from edgeinfer.kernels.toolchain import front_end
kernels = compile.load_kernels(available()[-1])
compile.only_translate()
if sys.argv[1] == "light":
    front_end.lighten()
elif "neuron_mask_signs" in sys.argv:
    front_end._one_helper_for_all_constants()
for name in sys.argv[2:]:
    print(hashlib.sha256(compile.compile_kernel(name, kernels[name])[0]).hexdigest())
"""
    codes = [subprocess.run([sys.executable, "-c", script, how, *names], cwd=ROOT, capture_output=True, text=True)
             for how in ("light", "whole")]
    assert codes[0].stdout == codes[1].stdout != "", codes[0].stderr
    assert len(codes[0].stdout.split()) == len(names), codes[0].stderr


@pytest.mark.parametrize("code", [b"", b"garbage", b"MZ" + bytes(100), b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_elf_object_is_refused(code: bytes) -> None:
    with pytest.raises(KernelError, match="is no 64-bit little-endian ELF file; kernels are built as ELF everywhere"):
        elf.undefined_symbols(code)


@pytest.mark.slow
def test_the_whole_set_needs_no_foreign_symbols() -> None:
    for file in find_set(ISA).glob("*.o"):
        assert elf.undefined_symbols(file.read_bytes()) <= {"memset", "memcpy", "memmove"}, file.name


def test_two_kernels_of_one_name_are_refused() -> None:
    from edgeinfer.kernels.registry import KERNELS, kernel

    kernel("twice")(lambda inst, ctx, tid, n: 0)
    try:
        with pytest.raises(ValueError, match="Two kernels are named 'twice'"):
            kernel("twice")(lambda inst, ctx, tid, n: 0)
    finally:
        del KERNELS["twice"]


def test_what_lies_in_the_working_directory_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's directory may hold modules that are named like ours or like those that the compiler imports."""
    for name in ("edgeinfer", "numba", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    child = build._start(available()[0])
    child.communicate(timeout=600)
    assert not (tmp_path / "executed").exists()
