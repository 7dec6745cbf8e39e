"""Kernel objects: built once, checked each time, linked without Numba; what is in their machine code."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.errors import KernelError
from edgeinfer.kernels import Isa, Kernels, available, find_set
from edgeinfer.kernels.toolchain import build, elf, objects

ROOT = str(Path(edgeinfer.__file__).parents[1])
ISA = available()[-1]
NAMES = ("quantize", "gather_outputs")


@pytest.fixture(scope="session")
def real_set() -> Path:
    """The user's own set, built now if it is not there."""
    return find_set(ISA)


class Builds:
    """Stands for the compiling processes: copies some objects of the real set, and counts."""

    def __init__(self, source: Path):
        self.source, self.started, self.failure = source, 0, ""

    def start(self, isa: Isa, out: Path, share: int, shares: int) -> subprocess.Popen[str]:
        self.started += share == 0
        copy = f"""
            import shutil, sys
            if {self.failure!r}: raise RuntimeError({self.failure!r})
            for name in {NAMES[share::shares]!r}:
                shutil.copy(f"{self.source}/{{name}}.o", {str(out)!r})
                print(name, {len(NAMES)}, flush=True)"""
        script = "\n".join(line[12:] for line in copy.splitlines())
        return subprocess.Popen(
            [sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def builds(real_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    """A new cache and package, and compiling processes that only copy."""
    stand_in = Builds(real_set)
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "package_directory", lambda: tmp_path / "package")
    monkeypatch.setattr(build, "_start", stand_in.start)
    return stand_in


def test_a_set_is_built_once(builds: Builds, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    directory = find_set(ISA, lambda *progress: seen.append(progress))
    assert directory.parent == tmp_path / "cache" / "kernels"
    assert directory.name.startswith(f"{ISA.machine}-{ISA.name}-")
    assert seen[0] == (0, 0, "")  # at once: a clock that starts here has the whole build
    told = [entry for entry in seen if entry[2]]
    assert sorted(name for *_, name in told) == sorted(NAMES)
    assert [done for done, *_ in told] == [1, 2] and {total for _, total, _ in told} == {2}
    assert find_set(ISA) == directory and builds.started == 1
    assert {file.name for file in directory.iterdir()} == {"manifest.json", *(f"{name}.o" for name in NAMES)}
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]  # nothing half-built is left


def flip_a_bit(directory: Path) -> None:
    file = directory / "quantize.o"
    code = bytearray(file.read_bytes())
    code[len(code) // 2] ^= 4
    file.write_bytes(bytes(code))


def edit_manifest(change: dict) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        manifest = json.loads((directory / "manifest.json").read_text())
        (directory / "manifest.json").write_text(json.dumps(manifest | change))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda directory: (directory / "quantize.o").unlink(),
        lambda directory: (directory / "manifest.json").unlink(),
        lambda directory: (directory / "manifest.json").write_text("{"),
        lambda directory: (directory / "manifest.json").write_text("[]"),
        edit_manifest({"sources": "0" * 64}),
        edit_manifest({"abi": 0}),
        edit_manifest({"objects": {"quantize": 3}}),
    ],
    ids=["bit flip", "no object", "no manifest", "half a manifest", "a list", "stale", "other ABI", "odd checksum"],
)
def test_a_damaged_set_is_built_again(builds: Builds, damage: Callable[[Path], object]) -> None:
    directory = find_set(ISA)
    damage(directory)
    assert objects.read_set(directory) is None
    assert find_set(ISA) == directory and builds.started == 2
    assert objects.read_set(directory) is not None


def test_changed_sources_name_another_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = objects.set_directory(Path("cache"), ISA)
    monkeypatch.setattr(objects, "source_hash", lambda: "other")
    assert objects.set_directory(Path("cache"), ISA) != before


def test_another_compiler_names_another_set_but_not_a_released_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [objects.set_directory(Path("cache"), ISA, released) for released in (False, True)]
    monkeypatch.setattr(objects, "compiler_versions", lambda: {"numba": "0"})
    after = [objects.set_directory(Path("cache"), ISA, released) for released in (False, True)]
    assert after[0] != before[0] and after[1] == before[1]


def test_every_source_that_kernels_import_is_hashed() -> None:
    """What compile.py loads in its process is what the hash covers; only the tools around it are not."""
    script = (
        "import sys; from edgeinfer.kernels import isa; from edgeinfer.kernels.toolchain import compile;"
        "compile.load_kernels(isa.LADDER[-2]);"
        "print(*sorted(m.__file__ for n, m in sys.modules.items() if n.startswith('edgeinfer.kernels.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    kernels = Path(ROOT) / "kernels"
    loaded = {Path(file).resolve().relative_to(kernels).as_posix() for file in done.stdout.split()}
    hashed = {file.relative_to(kernels).as_posix() for file in objects.compiled_sources()}
    assert loaded - hashed == {"toolchain/__init__.py", "toolchain/elf.py"}


def test_a_wheel_brings_its_objects(builds: Builds, tmp_path: Path) -> None:
    released = objects.set_directory(tmp_path / "package", ISA, released=True)
    build.build(ISA, released)
    assert find_set(ISA) == released and builds.started == 1
    flip_a_bit(released)
    assert find_set(ISA).parent == tmp_path / "cache" / "kernels"


def test_an_unwritable_cache_is_said_once_and_done_without(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "file" / "cache"))
    directory = find_set(ISA)
    assert objects.read_set(directory, NAMES) is not None
    said = capsys.readouterr().err
    assert said.startswith("edgeinfer: kernels cannot be kept (") and said.count("\n") == 1
    assert "Set EDGEINFER_CACHE to a writable directory." in said
    assert Kernels(ISA).addresses(NAMES).keys() == set(NAMES)
    assert builds.started >= 1


def test_a_set_that_another_process_has_finished_stays(builds: Builds) -> None:
    """Two build at the same time: the second finds a valid set in place and leaves it, files and all."""
    directory = find_set(ISA)
    inode = (directory / "quantize.o").stat().st_ino
    build.build(ISA, directory)
    assert (directory / "quantize.o").stat().st_ino == inode
    workers = [threading.Thread(target=build.build, args=(ISA, directory)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert objects.read_set(directory) is not None
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_a_failed_build_says_why_and_leaves_nothing(builds: Builds, tmp_path: Path) -> None:
    builds.failure = "kernel bad needs the symbols exp, which only Numba has"
    with pytest.raises(KernelError) as caught:
        find_set(ISA)
    assert str(caught.value) == f"Compiling the {ISA.name} kernels failed: RuntimeError: {builds.failure}."
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_an_interrupted_build_leaves_nothing(builds: Builds, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_set(ISA, interrupt)
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_an_unknown_kernel_is_refused(real_set: Path) -> None:
    with pytest.raises(KernelError, match=r"do not hold gemv; delete the directory and run again to compile them\."):
        Kernels(ISA).addresses(["gemv"])


def test_sources_may_change_while_a_process_runs(real_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Kernels(ISA)
    monkeypatch.setattr(objects, "source_hash", lambda: "edited")
    assert linked.addresses(["quantize"])["quantize"]


def test_linking_needs_neither_numba_nor_a_second_look(real_set: Path) -> None:
    script = (
        "import sys; from edgeinfer.kernels import Kernels, available; k = Kernels(available()[-1]);"
        "a = dict(k.addresses(['quantize'])); b = k.addresses(['quantize', 'gather_outputs']);"
        "assert a['quantize'] == b['quantize'] != b['gather_outputs'] and 'numba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- machine code ------------------------------------------------------------------------------------------------------


def test_a_kernel_that_needs_a_foreign_symbol_is_refused() -> None:
    script = """
import math
from edgeinfer.kernels import available
from edgeinfer.kernels.toolchain import compile
compile.load_kernels(available()[-1])
compile.only_translate()
def bad(rec, ctx, tid, n_threads):
    return int(math.exp(rec) * 8)
try:
    compile.compile_kernel("bad", bad)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "kernel bad needs the symbols exp, which only Numba has\n", done.stderr


@pytest.mark.parametrize("code", [b"", b"garbage", b"MZ" + bytes(100), b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_elf_object_is_refused(code: bytes) -> None:
    with pytest.raises(KernelError, match="is no 64-bit little-endian ELF file; kernels are built as ELF everywhere"):
        elf.undefined_symbols(code)


def test_the_whole_set_needs_no_foreign_symbols(real_set: Path) -> None:
    for file in real_set.glob("*.o"):
        assert elf.undefined_symbols(file.read_bytes()) <= {"memset", "memcpy", "memmove"}, file.name


def test_two_kernels_of_one_name_are_refused() -> None:
    from edgeinfer.kernels.registry import KERNELS, kernel

    kernel("twice")(lambda rec, ctx, tid, n: 0)
    try:
        with pytest.raises(ValueError, match="Two kernels are named 'twice'"):
            kernel("twice")(lambda rec, ctx, tid, n: 0)
    finally:
        del KERNELS["twice"]
