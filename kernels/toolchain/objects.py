"""Kernel objects on disk, and their linking into this process by llvmlite alone (no Numba, no compile)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from edgeinfer.cache import cache_root
from edgeinfer.errors import KernelError

from .. import abi
from ..catalogue import Extension, extension_of
from ..isa import Isa, triple
from . import elf

_KERNELS = Path(__file__).parents[1]
_COMPILED = ("abi.py", "parameters.py", "registry.py", "isa.py", "vector", "ops", "toolchain/compile.py")
"""What decides what the objects do, folders whole; the hash of these files names a set."""
MANIFEST = "manifest.json"
_DAY_SECONDS = 86400


def compiled_sources() -> list[Path]:
    """The files that decide what the objects do."""
    paths = (_KERNELS / name for name in _COMPILED)
    return [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]


def source_hash() -> str:
    """Hash of the kernel sources and the ABI version."""
    digest = hashlib.sha256(str(abi.VERSION).encode())
    for file in compiled_sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def sources_of(extension: Extension | None) -> str:
    """Hash that names a set: of the package's own sources, and of an extension's on top of them."""
    return extension.source_hash(source_hash()) if extension else source_hash()


def compiler_versions() -> dict[str, str]:
    """Versions of Numba and llvmlite, without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    out = {}
    for package in ("numba", "llvmlite"):
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            out[package] = "absent"
    return out


def package_directory() -> Path:
    """Where a release wheel carries the objects of all instruction sets."""
    return _KERNELS / "objects"


def cache_directory() -> Path:
    """Where this user's compiled objects lie; EDGEINFER_CACHE moves it."""
    return cache_root() / "kernels"


def set_directory(root: Path, isa: Isa, released: bool = False, extension: Extension | None = None) -> Path:
    """Directory of one instruction set: named by sources, and in the cache by the compiler's versions as well."""
    key = sources_of(extension)
    if not released:
        key = hashlib.sha256(json.dumps([key, compiler_versions()]).encode()).hexdigest()
    system = "windows-" if "windows" in triple(isa.machine) else ""  # its calls differ; elsewhere they are the same
    owner = f"+{extension.module}" if extension else ""
    return root / f"{system}{isa.machine}-{isa.name}{owner}-{key[:16]}"


def write_manifest(directory: Path, isa: Isa, extension: Extension | None = None) -> None:
    """Record each object's checksum beside it."""
    objects = {file.stem: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.glob("*.o"))}
    manifest = {"abi": abi.VERSION, "isa": isa.name, "machine": isa.machine, "sources": sources_of(extension),
                "built_by": compiler_versions(), "objects": objects}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def read_set(
    directory: Path, names: Iterable[str] | None = None, sources: str | None = None
) -> dict[str, bytes] | None:
    """The objects of a set (all, or those named), or None where it is absent, damaged, or not of these sources.

    `sources` is their hash; by default that of the files as they are now.
    """
    try:
        return _checked_set(directory, names, sources or source_hash())
    except KernelError:
        return None


def _checked_set(
    directory: Path, names: Iterable[str] | None = None, sources: str = "", isa: Isa | None = None
) -> dict[str, bytes]:
    """The objects of a set; a KernelError says in a clause what is wrong with it."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if isa and (manifest["machine"], manifest["isa"]) != (isa.machine, isa.name):
            raise KernelError(f"they are for {manifest['machine']} {manifest['isa']}")
        if manifest["sources"] != (sources or source_hash()) or manifest["abi"] != abi.VERSION:
            raise KernelError("they were built from other sources")
        checksums = manifest["objects"]
        out = {}
        for name in checksums if names is None else names:
            code = (directory / f"{name}.o").read_bytes()
            if hashlib.sha256(code).hexdigest() != checksums[name]:
                raise KernelError(f"{name}.o is damaged")
            out[name] = code
        if isa and out and elf.machine(next(iter(out.values()))) != isa.machine:
            raise KernelError(f"they hold no code for {isa.machine}")
        return out
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{error.strerror}: {Path(error.filename).name}" if isinstance(error, OSError) else "no valid manifest"
        raise KernelError(what) from None


def find_set(
    isa: Isa, progress: Callable[[int, int, str], None] | None = None, extension: Extension | None = None
) -> Path:
    """Directory of a valid set: the wheel's, the cache's, or a new one compiled now; of an extension the latter two.

    Sets that are damaged or do not belong here are named on standard error before new ones are compiled. Where the
    cache cannot be written the new one goes into a temporary directory, which is said there once, too.
    """
    released = set_directory(package_directory(), isa, released=True)
    lacking = "" if extension else fault(released, isa)
    if not lacking and not extension:
        return released
    directory = set_directory(cache_directory(), isa, extension=extension)
    worn = fault(directory, isa, extension)
    if not worn:
        _mark_used(directory)
        return directory
    from .build import build, build_once  # what most processes never need

    if lacking and package_directory().is_dir():  # a release: it should not have come to this
        _say(f"the package's kernels for {isa.name} cannot be used ({lacking}); "
             "they are compiled into the user's cache.")
    if directory.is_dir():
        _say(f"the kernels in {directory} cannot be used ({worn}); they are compiled again.")
    try:
        if str(directory).startswith("~"):
            raise OSError("the home directory is not known")
        build_once(isa, directory, progress, extension)
    except OSError as error:
        directory = _temporary_directory() / directory.name
        if fault(directory, isa, extension):
            _say(f"kernels cannot be kept ({error}); they are compiled again in the next process. "
                 "Set EDGEINFER_CACHE to a writable directory.")
            build(isa, directory, progress, extension)
    return directory


def fault(directory: Path, isa: Isa, extension: Extension | None = None) -> str:
    """What is wrong with a set, or nothing."""
    try:
        if not directory.is_dir():
            return _other_set(directory)
        _checked_set(directory, sources=sources_of(extension), isa=isa)
        return ""
    except KernelError as error:
        return str(error)


def _other_set(directory: Path) -> str:
    """Why there is no set of this name: those of an instruction set differ by their sources alone."""
    kind = directory.name.rpartition("-")[0]
    others = directory.parent.glob(f"{kind}-*") if directory.parent.is_dir() else ()
    return "they were built from other sources" if any(others) else "there are none"


def _mark_used(directory: Path) -> None:
    """Note once a day that the set is in use; tidy.py removes sets that nobody uses."""
    manifest = directory / MANIFEST
    with contextlib.suppress(OSError):  # not ours, or read-only
        if time.time() - manifest.stat().st_mtime > _DAY_SECONDS:
            os.utime(manifest)


def _say(sentence: str) -> None:
    print(f"edgeinfer: {sentence}", file=sys.stderr)


@functools.cache
def _temporary_directory() -> Path:
    import atexit
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="edgeinfer-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


class Kernels:
    """Kernels of one instruction set, linked into this process.

    Parameters
    ----------
    isa : Isa
        Which set.
    progress : callable, optional
        Called with (done, total, name) if the set must be compiled first.
    """

    def __init__(self, isa: Isa, progress: Callable[[int, int, str], None] | None = None):
        self.isa = isa
        self._progress = progress
        self._sets: dict[Extension | None, tuple[Path, str]] = {}
        self._set(None)
        self._engine: Any = None
        self._addresses: dict[str, int] = {}

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """Addresses of the named kernels, linked on first use.

        Raises `KernelError` if the set has no kernel of that name, or its files changed under this process.
        """
        missing: dict[Extension | None, list[str]] = {}
        for name in dict.fromkeys(names):
            if name not in self._addresses:
                missing.setdefault(extension_of(name), []).append(name)
        for extension, absent in missing.items():
            directory, sources = self._set(extension)
            objects = read_set(directory, absent, sources)
            if objects is None:
                raise KernelError(f"The kernels in {directory} do not hold {', '.join(absent)}; delete the directory "
                                  "and run again to compile them.")
            self._link(objects)
        return self._addresses

    def _set(self, extension: Extension | None) -> tuple[Path, str]:
        """Directory and source hash of a set; an extension's is found, or compiled, when it is first asked for."""
        if extension not in self._sets:
            sources = sources_of(extension)  # whoever edits them while this runs does not take its kernels away
            self._sets[extension] = find_set(self.isa, self._progress, extension), sources
        return self._sets[extension]

    def function(self, name: str) -> Callable[[int, int, int, int], int]:
        """A kernel as a Python callable of four int64; the GIL is released while it runs."""
        import ctypes

        word = ctypes.c_int64
        return ctypes.CFUNCTYPE(word, word, word, word, word)(self.addresses([name])[name])

    def _link(self, objects: dict[str, bytes]) -> None:
        import llvmlite.binding as llvm

        if self._engine is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_triple(triple(self.isa.machine)).create_target_machine(jit=True)
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for code in objects.values():
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        for name in objects:
            self._addresses[name] = self._engine.get_function_address(name)
