"""The program: an array of fixed-size records, written once and never patched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeinfer.kernels import abi


@dataclass(frozen=True)
class Record:
    """One step of the program, before it is encoded."""

    kernel: str
    """Name of the kernel, such as ``linear_q4_g32``."""
    op: str
    """What it computes, in the graph's words."""
    places: tuple[tuple[str, int], ...] = ()
    """Operands: (region, byte offset)."""
    parameters: tuple[int, ...] = ()
    flags: int = 0
    predicate: int | None = None
    """Count that skips the record where it is 0."""
    bytes_read: int = 0
    """Weight bytes read per walk."""


@dataclass
class Program:
    """Records in order, and their encoding once the kernels are linked."""

    records: tuple[Record, ...]
    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 16), np.int64))
    """int64 array of shape (n_records, 16): what the kernels read."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that the program calls, each once."""
        return tuple(dict.fromkeys(r.kernel for r in self.records))

    @property
    def bytes_read(self) -> int:
        """Weight bytes read per walk."""
        return sum(r.bytes_read for r in self.records)

    def link(self, addresses: dict[str, int]) -> None:
        """Encode the records with the addresses of their kernels."""
        self.words = np.zeros((len(self.records), abi.RECORD_BYTES // 8), np.int64)
        for row, record in zip(self.words, self.records, strict=True):
            row[:] = encode(record, addresses[record.kernel])

    def describe(self) -> Iterator[tuple[int, str, str, int]]:
        """Rows (index, kernel, operation, bytes read)."""
        for i, record in enumerate(self.records):
            yield i, record.kernel, record.op, record.bytes_read


def encode(record: Record, address: int) -> NDArray[np.int64]:
    """A record as 16 words (kernels/abi.py)."""
    raw = np.zeros(abi.RECORD_BYTES, np.uint8)
    words, halves = raw.view(np.int64), raw.view(np.int32)
    words[abi.REC_KERNEL // 8] = address
    halves[abi.REC_FLAGS // 4] = record.flags
    halves[abi.REC_PREDICATE // 4] = 0 if record.predicate is None else record.predicate + 1
    for i, (region, offset) in enumerate(record.places):
        words[abi.REC_PLACES // 8 + i] = abi.REGIONS.index(region) << abi.REGION_SHIFT | offset
    halves[abi.REC_PARAMETERS // 4 :][: len(record.parameters)] = record.parameters
    return words
