"""Processor cores by kind: operations per cycle, and bandwidth while decoding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from edgeinfer.base.dataclass import dataclass

from .toml_files import read_toml

ORDER = ("neon", "neon_dotprod", "neon_i8mm", "generic", "avx2", "avxvnni", "avx512vnni")
"""Instruction sets; a processor runs the least of its cores."""


@dataclass(frozen=True)
class Core:
    """One kind of core."""

    isa: str
    int8: int
    """Operations per cycle; likewise `f32`."""
    f32: int
    group: str
    """Cores that decode alike: of one set of instructions and width."""
    bytes_per_clock: float
    """Bytes of 4-bit weights that one core decodes in a cycle."""
    source: str


@cache
def core_kinds() -> dict[str, Core]:
    """Return the kinds of cores by name; the table is cores.toml."""
    return {name: Core(**row) for name, row in read_toml(Path(__file__).with_name("cores.toml")).items()}


def cores_gbs(processor: Mapping[str, tuple[int, float]], groups: Mapping[str, float] | None = None) -> float:
    """Return the bandwidth of all cores of a processor together with 4-bit weights, whatever the memory delivers, in
    GB/s.

    `groups` has other bytes per cycle than cores.toml (for fits), by group.
    """
    def each(kind: str) -> float:
        core = core_kinds()[kind]
        return core.bytes_per_clock if groups is None else groups.get(core.group, core.bytes_per_clock)

    return sum(number * clock * each(kind) for kind, (number, clock) in processor.items())


def cores_peak(processor: Mapping[str, tuple[int, float]], kind_of_number: str) -> float:
    """Return the peak of all cores in 1e9 operations per second, of ``int8`` or ``f32``."""
    return sum(number * clock * float(getattr(core_kinds()[kind], kind_of_number))
               for kind, (number, clock) in processor.items())


def cores_isa(processor: Mapping[str, tuple[int, float]]) -> str:
    """Return the best instruction set that all cores of a processor have."""
    return min((core_kinds()[kind].isa for kind in processor), key=ORDER.index)
