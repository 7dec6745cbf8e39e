"""Kernel objects on disk: sets named by their sources, each object sealed with a checksum and written whole.

A set is a directory of ``NAME.o``. It need not be complete: a kernel is compiled when a program first needs it, and a
release has all. Each file is an ELF object and, after it, the SHA-256 of the set's identity, the kernel's name and the
code; so one that is damaged, or from another set, is not linked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path

from edgeinfer import quant
from edgeinfer.base.cache_dir import cache_root
from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.files import replacement
from edgeinfer.errors import KernelError

from .. import abi
from ..catalogue import FAMILIES, Extension
from ..isa import Isa, triple
from . import elf
from .trust import read_own

_KERNELS = Path(__file__).parents[1]
_COMPILED = ("abi", "routes.py", "parameters", "registry.py", "isa.py", "vector", "ops", "toolchain/compile.py",
             "toolchain/front_end.py")
"""Files and whole folders that determine the objects; the hash of these files names a set."""
_TABLE = Path(quant.__file__).with_name("table.py")
"""The table of storage types, whose rows kernels are compiled for."""
_SEAL_BYTES = 32


def compiled_sources() -> list[Path]:
    """Return the files that determine the objects."""
    paths = (_KERNELS / name for name in _COMPILED)
    return [_TABLE, *(file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path]))]


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
    return {package: _version(package) for package in ("numba", "llvmlite")}


def _version(package: str) -> str:
    """Return a package's version, without importing importlib.metadata if a folder beside the package names it."""
    from importlib.util import find_spec

    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return "absent"
    named = [*Path(spec.origin).parents[1].glob(f"{package}-*.dist-info")]
    if len(named) == 1:
        return named[0].name[len(package) + 1 : -len(".dist-info")]
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def package_directory() -> Path:
    """Return the directory in which a release wheel carries the objects of all instruction sets."""
    return _KERNELS / "objects"


def cache_directory() -> Path:
    """Return the directory of this user's compiled objects; EDGEINFER_CACHE moves it."""
    return cache_root() / "kernels"


@dataclass(frozen=True)
class KernelSet:
    """The kernels of one instruction set, as their sources are now, or of an extension."""

    isa: Isa
    extension: Extension | None = None
    sources: str = field(default="")
    """Hash of the sources; by default that of the files as they are now."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", self.sources or sources_of(self.extension))

    @property
    def names(self) -> list[str]:
        """All its kernels."""
        return list(self.extension.references) if self.extension else [name for f in FAMILIES for name in f.kernels]

    @property
    def is_current(self) -> bool:
        """True if the sources are still those that it was named by."""
        return self.sources == sources_of(self.extension)

    def directory(self, root: Path, released: bool = False) -> Path:
        """Return the directory of its objects below that of the package or of the cache."""
        key = self.sources
        if not released:
            key = hashlib.sha256(json.dumps([key, compiler_versions()]).encode()).hexdigest()
        system = "windows-" if "windows" in triple(self.isa.machine) else ""  # its calls differ
        owner = f"+{self.extension.module}" if self.extension else ""
        return root / f"{system}{self.isa.machine}-{self.isa.name}{owner}-{key[:16]}"

    def read(self, directory: Path, name: str, own: bool = True) -> bytes:
        """Code of one kernel; a KernelError has the error of its file as a clause.

        `own` requires that no other user can write the file; the package's are as trusted as its Python.
        """
        path = directory / f"{name}.o"
        try:
            content = read_own(path) if own else path.read_bytes()
        except OSError as error:
            raise KernelError(f"{error.strerror}: {path.name}") from None
        code, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
        if seal != self._seal(name, code):
            raise KernelError(f"{path.name} is damaged")
        if elf.machine(code) != self.isa.machine:
            raise KernelError(f"{path.name} holds no code for {self.isa.machine}")
        return code

    def read_all(self, directory: Path, names: Iterable[str], own: bool = True) -> dict[str, bytes]:
        """Code of some kernels, which must all be there."""
        return {name: self.read(directory, name, own) for name in names}

    def write(self, directory: Path, name: str, code: bytes) -> None:
        """Store one kernel, whole or not at all; only this user may write the file."""
        with replacement(directory / f"{name}.o") as file:
            file.write(code + self._seal(name, code))

    def _seal(self, name: str, code: bytes) -> bytes:
        identity = json.dumps([abi.VERSION, self.isa.machine, self.isa.name, self.sources, name])
        return hashlib.sha256(identity.encode() + b"\0" + code).digest()
