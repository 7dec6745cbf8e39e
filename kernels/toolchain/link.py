"""Linking kernels into this process by llvmlite alone: no Numba, no compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.errors import KernelError

from ..catalogue import Extension, extension_of, is_known
from ..isa import Isa, triple
from .objects import KernelSet
from .provide import find_objects


class Kernels:
    """Kernels of one instruction set, linked into this process.

    Parameters
    ----------
    isa : Isa
        Which set.
    progress : callable, optional
        Called with (done, total, name) while kernels are compiled.
    """

    def __init__(self, isa: Isa, progress: OnStageProgress | None = None):
        self.isa = isa
        self._progress = progress
        # Named now: editing the sources during the run does not take its kernels away.
        self._sets: dict[Extension | None, KernelSet] = {None: KernelSet(isa)}
        self._engine: Any = None
        self._addresses: dict[str, int] = {}

    @property
    def arithmetic(self) -> str:
        """Return the key of all that the bits of results depend on: the sources, and how a set multiplies and adds.

        The sets of x86-64 with fused products agree bit for bit (tests/models/test_kv_identity.py); others are
        identified by name.
        """
        fused = "fma" in self.isa.needs
        sources = sorted(each.sources for each in self._sets.values())
        return " ".join([self.isa.machine, "fused" if fused else self.isa.name, *sources])

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """Addresses of the named kernels, linked on first use, and compiled if that has not been done before.

        Raises `KernelError` if there is no kernel of that name, or it cannot be compiled.
        """
        missing: dict[Extension | None, list[str]] = {}
        for name in dict.fromkeys(names):
            if not is_known(name):
                raise KernelError(f"There is no kernel named {name!r}.")
            if name not in self._addresses:
                missing.setdefault(extension_of(name), []).append(name)
        for extension, absent in missing.items():
            if extension not in self._sets:
                self._sets[extension] = KernelSet(self.isa, extension)
            self._link(absent, find_objects(self._sets[extension], absent, self._progress))
        return self._addresses

    def function(self, name: str) -> Callable[[int, int, int, int], int]:
        """A kernel as a Python callable of four int64; the GIL is released while it runs."""
        import ctypes

        word = ctypes.c_int64
        return ctypes.CFUNCTYPE(word, word, word, word, word)(self.addresses([name])[name])

    def _link(self, names: list[str], objects: dict[str, bytes]) -> None:
        import llvmlite.binding as llvm

        if self._engine is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_triple(triple(self.isa.machine)).create_target_machine(jit=True)
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for name in names:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(objects[name]))
        self._engine.finalize_object()
        for name in names:
            self._addresses[name] = self._engine.get_function_address(name)
