"""The list of levels of instruction sets: the target of each, which of them this machine runs, and the
choice.
"""

from __future__ import annotations

import functools
import os
import platform
import sys

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError

INT8_CHAINS = 16
"""Independent products of 64 values in the register loop int8_peak."""


@dataclass(frozen=True)
class Isa:
    """One ISA level: a target for the compiler and the features that a machine must have to run it."""

    name: str
    machine: str
    """x86_64 or aarch64."""
    cpu: str
    """LLVM's CPU name: fixes the baseline and the scheduling model."""
    features: str
    """LLVM features added to it."""
    needs: frozenset[str]
    """Features that the host must report."""
    row_tiles: int
    """Tiles of 16 rows in a register block of a matmul: 1, or 2."""
    streams: int
    """Row tiles, a multiple of those, that up to 4 tokens go through together: this many streams of weights, and memory
    fetches each ahead by itself. The same number where that was not measured to pay."""
    token_tiles: tuple[int, ...]
    """Tokens of the register blocks, descending, 2 the last: as many as the register file holds with its accumulators,
    and with 8 tokens scales them in memory, once a group. Quantised activations are interleaved in blocks of this many
    tokens (abi.token_blocks)."""
    f32_chains: int = 6
    """Vectors of 16 in the register loop f32_peak: enough for the units' latency, few enough for the registers."""

    @property
    def round_operations(self) -> dict[str, int]:
        """Multiplications and additions of a round of each register loop (ops/probe.py)."""
        return {"int8_peak": 2 * 64 * INT8_CHAINS, "f32_peak": 2 * 16 * self.f32_chains}


_AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+sse3,+ssse3,+sse4.1,+sse4.2"
_AVX512 = _AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni,-prefer-256-bit"

_ARM = "-sve,-sve2,+reserve-x18"  # LLVM 22 gets sums of int8 wrong on wide SVE; x18 is the system's on macOS
_DOTPROD = "+neon,+dotprod,+lse," + _ARM  # every core with dotprod has LSE: FEAT_DotProd needs Armv8.1
_I8MM = _DOTPROD + ",+i8mm"
_NOT_IMPLIED = ",-altnzcv,-bf16,-complxnum,-flagm,-fptoint,-fullfp16,-jsconv,-mte,-pauth,-rcpc,-rcpc-immo"

ISA_LEVELS = (
    Isa("avx512vnni", "x86_64", "x86-64", _AVX512,
        frozenset({"avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"}), 2, 4, (8, 6, 4, 3, 2), 12),
    Isa("avxvnni", "x86_64", "x86-64", _AVX2 + ",+avxvnni",
        frozenset({"avxvnni", "avx2", "fma", "f16c"}), 1, 1, (4, 2)),
    Isa("avx2", "x86_64", "x86-64", _AVX2, frozenset({"avx2", "fma", "f16c"}), 1, 1, (4, 2)),
    Isa("generic", "x86_64", "x86-64", "", frozenset(), 1, 1, (4, 2)),
    # neoverse-n2 for its scheduling, which keeps accumulators in registers; its other features are removed
    Isa("neon_i8mm", "aarch64", "neoverse-n2", _I8MM + _NOT_IMPLIED, frozenset({"dotprod", "i8mm"}), 1, 1, (4, 2)),
    Isa("neon_dotprod", "aarch64", "generic", _DOTPROD, frozenset({"dotprod"}), 1, 1, (4, 2)),
    Isa("neon", "aarch64", "generic", "+neon," + _ARM, frozenset(), 1, 1, (4, 2)),
    Isa("generic", "aarch64", "generic", _ARM, frozenset(), 1, 1, (4, 2)),
)
"""Best first, per machine. `generic` uses no target intrinsics; the others equal it bit for bit in the integer part."""


def machine() -> str:
    """This process' architecture in LLVM's words."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def triple(machine: str) -> str:
    """Return the target triple for kernels of an architecture: ELF, which LLVM's linker loads on every system.

    Kernels take and return int64 alone, so Linux' convention is that of macOS as well (x18 stays free), but not that of
    Windows; there llvmlite adds the "-elf" itself.
    """
    return f"{machine}-pc-windows-msvc" if sys.platform == "win32" else f"{machine}-unknown-linux-gnu"


@functools.cache
def host_features() -> frozenset[str]:
    """Features of the host CPU that the list of levels asks for (x86: cpuid through LLVM; ARM: the operating
    system).
    """
    if machine() == "aarch64":
        from .detect import arm_features

        return arm_features()
    if machine() != "x86_64":
        return frozenset()
    import llvmlite.binding as llvm

    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


def available() -> tuple[Isa, ...]:
    """ISA levels that this machine can run, best first."""
    return tuple(isa for isa in ISA_LEVELS if isa.machine == machine() and isa.needs <= host_features())


@functools.cache
def halves_streams() -> bool:
    """Return whether a single token reads weights faster in half as many streams as kernels are made for (Isa.streams).

    Measured on Zen 5, where it does; on an Intel Xeon it does not. Zen 4 was not measured.
    """
    if machine() != "x86_64":
        return False
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_name() == "znver5")


def choose(name: str | None = None) -> Isa:
    """The best ISA level, or the one forced by `name` or EDGEINFER_ISA; one that the CPU lacks is refused.

    An instruction that the CPU lacks would abort the whole process, so the check comes first.
    """
    name = name or os.environ.get("EDGEINFER_ISA")
    there = available()
    if not there:
        raise UsageError(f"No kernels exist for this machine's architecture, {machine()!r}; "
                         "x86_64 and aarch64 are supported.")
    if not name:
        return there[0]
    for isa in there:
        if isa.name == name:
            return isa
    names = ", ".join(isa.name for isa in there)
    raise UsageError(f"Instruction set {name!r} is not available here; choose one of {names}.")
