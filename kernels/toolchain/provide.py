"""Sources of a process' kernels: the package, the user's cache, or the compiler, in this order.

Kernels are compiled if they were requested and are missing, together with the few that every program needs. If several
processes need the same set, one compiles and the others check twice a second whether their kernels are there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.base.cache_dir import make_directories
from edgeinfer.base.process import say
from edgeinfer.base.progress import OnStageProgress
from edgeinfer.errors import DestinationError, KernelError

from ..catalogue import FAMILIES, Extension, is_foreign
from ..isa import Isa
from . import objects
from .objects import KernelSet
from .trust import distrust

if TYPE_CHECKING:
    from edgeinfer.base.lock import DestinationLock

PATIENCE_SECONDS = 180.0
"""Longest wait for another process that compiles the same set: it may have been stopped."""
TICK_SECONDS = 0.5
_DAY_SECONDS = 86400
_EVERY_PROGRAM = next(family.kernels for family in FAMILIES if family.name == "forward")
_REMEDY = "Set EDGEINFER_CACHE to a directory that only you can write."
_unkept: dict[KernelSet, dict[str, bytes]] = {}
"""Kernels that this process has compiled and could not store."""
_announced: set[KernelSet] = set()
"""Sets of kernels whose compilation this process has announced: a probe compiles several times."""


def find_objects(
    wanted: KernelSet, names: Iterable[str], progress: OnStageProgress | None = None, must_keep: bool = False
) -> dict[str, bytes]:
    """Code of the named kernels of a set.

    Objects that are damaged or do not belong here are named on standard error before new ones are compiled. If the
    cache cannot be written, or others can write it, nothing is kept, which is said there once.

    Raises
    ------
    KernelError
        A kernel does not compile, or the sources have changed since the set was named.
    DestinationError
        With `must_keep`: the compiled kernels cannot be kept.
    """
    names, lacking = list(names), ""
    released = wanted.directory(objects.package_directory(), released=True)
    if not wanted.extension:
        try:
            return wanted.read_all(released, names, own=False)
        except KernelError as error:
            lacking = str(error) if released.is_dir() else _other_set(released)
    directory = wanted.directory(objects.cache_directory())
    found, worn = _kept(wanted, directory, names)
    missing = [name for name in names if name not in found]
    if not missing:
        _mark_used(directory)
        return found
    if not wanted.is_current:
        raise KernelError("The kernels' sources have changed since this process started; start it again.")
    if lacking and objects.package_directory().is_dir():  # a release: it should not have come to this
        say(f"the package's kernels for {wanted.isa.name} cannot be used ({lacking}); "
            "they are compiled into the user's cache.")
    if worn:
        say(f"kernels in {directory} cannot be used ({worn}); they are compiled again.")
    if not wanted.extension:
        missing += [name for name in _EVERY_PROGRAM if name not in missing and name not in found]
    return found | _Compilation(wanted, directory, progress, must_keep).run(missing)


def find_set(
    isa: Isa, progress: OnStageProgress | None = None, extension: Extension | None = None, foreign: bool = True
) -> Path:
    """Directory with all kernels of a set: the package's, or the cache's, for which those that lack are compiled.

    Without `foreign` kernels that only few models need may be missing (`catalogue.is_foreign`).
    Raises `KernelError` and `DestinationError` as `find_objects`.
    """
    wanted = KernelSet(isa, extension)
    names = [name for name in wanted.names if foreign or not is_foreign(name)]
    find_objects(wanted, names, progress, must_keep=True)
    released = wanted.directory(objects.package_directory(), released=True)
    with contextlib.suppress(KernelError):
        wanted.read_all(released, names, own=False)
        return released
    return wanted.directory(objects.cache_directory())


class _Compilation:
    """Compile the kernels that no other process is compiling, and store them if possible."""

    def __init__(self, wanted: KernelSet, directory: Path, progress: OnStageProgress | None, must_keep: bool):
        self._wanted, self._directory, self._progress, self._must_keep = wanted, directory, progress, must_keep
        self._keeps = True

    def run(self, missing: list[str]) -> dict[str, bytes]:
        """Code of the missing kernels."""
        from edgeinfer.base.lock import DestinationLock  # most processes never need it

        from . import build

        lock = DestinationLock(self._directory)
        found: dict[str, bytes] = {}
        try:
            self._prepare()
            found = self._take_turn(lock, missing)
        except OSError as error:
            self._give_up(error)
        try:
            missing = [name for name in missing if name not in found]
            if missing:
                self._announce(len(missing))
                found |= build.build(self._wanted, missing, self._progress, self._keep)
        finally:
            lock.release()
        if not self._keeps:
            _unkept.setdefault(self._wanted, {}).update(found)
        return found

    def _announce(self, n: int) -> None:
        """Say once per process why the user waits."""
        if not self._progress or self._wanted in _announced:
            return
        _announced.add(self._wanted)
        from . import build

        more = " more" if any(self._directory.glob("*.o")) else ""
        n_processes = build.processes(n)
        say(f"Compiling {n}{more} kernel{'s' * (n != 1)} for {self._wanted.isa.name}, once for this machine. "
            f"{n_processes} compiler process{'es use' if n_processes != 1 else ' uses'} up to "
            f"{build.COMPILER_BYTES / 1e6:.0f} MB each, before the model runs and outside its plan.")

    def _prepare(self) -> None:
        from .tidy import tidy

        if str(self._directory).startswith("~"):
            raise OSError("the home directory is not known")
        if why := distrust(self._directory):
            raise OSError(f"{why}, and they are code")
        make_directories(self._directory)
        tidy(self._directory)

    def _take_turn(self, lock: DestinationLock, missing: list[str]) -> dict[str, bytes]:
        """Wait until no other process compiles this set or all missing kernels are there; return those that are there.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                lock.acquire()
                waits = False
            except DestinationError:
                waits = time.monotonic() < deadline
            found, _ = _kept(self._wanted, self._directory, missing)
            if not waits or len(found) == len(missing):
                return found
            if self._progress:
                self._progress(0, 0, "")
            time.sleep(TICK_SECONDS)

    def _keep(self, name: str, code: bytes) -> None:
        if self._keeps:
            try:
                self._wanted.write(self._directory, name, code)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._keeps = False
        why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror or error
        if self._must_keep:
            raise DestinationError(f"Kernels cannot be kept ({why}). {_REMEDY}") from None
        if self._wanted not in _unkept:
            say(f"kernels cannot be kept ({why}); they are compiled again in the next process. {_REMEDY}")


def _kept(wanted: KernelSet, directory: Path, names: list[str]) -> tuple[dict[str, bytes], str]:
    """Return the named kernels in the cache or in this process, and why stored objects were rejected."""
    found, worn, held = {}, "", _unkept.get(wanted, {})
    trusted = not distrust(directory)
    for name in names:
        if name in held:
            found[name] = held[name]
        elif trusted and (directory / f"{name}.o").exists():
            try:
                found[name] = wanted.read(directory, name)
            except KernelError as error:
                worn = worn or str(error)
    return found, worn


def _other_set(directory: Path) -> str:
    """Why there is no set of this name: those of an instruction set differ by their sources alone."""
    kind = directory.name.rpartition("-")[0]
    others = directory.parent.glob(f"{kind}-*") if directory.parent.is_dir() else ()
    return "they were built from other sources" if any(others) else "there are none"


def _mark_used(directory: Path) -> None:
    """Note once a day that the set is in use; tidy.py removes unused sets."""
    with contextlib.suppress(OSError):  # not ours, or read-only
        if time.time() - directory.stat().st_mtime > _DAY_SECONDS:
            os.utime(directory)
