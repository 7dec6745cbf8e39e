"""The program: an array of fixed-size records, written once and never patched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import KernelError
from edgeinfer.graph import NeuronDown, NeuronGated, Op, Product
from edgeinfer.kernels import abi, catalogue

from ..dataclass import dataclass


@dataclass(frozen=True)
class Record:
    """One step of the program, before it is encoded."""

    kernel: str
    """Name of the kernel, such as ``linear_q4_g32``."""
    label: str
    """What it computes, for people."""
    operands: tuple[tuple[str, int], ...] = ()
    """Where they lie: (region, byte offset)."""
    parameters: tuple[int, ...] = ()
    flags: int = 0
    predicates: tuple[int, ...] = ()
    """Counts that skip the record where one of them is 0."""
    bytes_read: int = 0
    """Weight bytes read per walk."""
    extents: tuple[int, ...] = ()
    """Bytes from each operand on that the kernel reads or writes; 0 = it does not use the operand."""
    op: Op | None = None
    """The operation that it belongs to; None for probes."""
    step: int = 0
    """Which of its operation's records it is; what the operation costs belongs to the first."""
    ticket: int | None = None
    """I/O ticket that it waits for."""

    @property
    def condition(self) -> str:
        """When it runs, and what differs where a walk has one token, for people."""
        if self.op is None:
            return ""
        said = ["decoded tokens only"] if self.op.decoded else ["drawn tokens only"] if self.op.drawn else []
        if self.op.several:
            said.append("not for one token")
        if isinstance(self.op, Product) and self.op.source:
            said.append(f"one token: input from {self.op.source.name}")
        if isinstance(self.op, NeuronGated | NeuronDown) and self.op.dense:
            said.append("dead neurons too")
        return f" ({'; '.join(said)})" if said else ""


@dataclass
class Program:
    """Records in order, and their encoding once the kernels are linked."""

    records: tuple[Record, ...]
    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, abi.RECORD_BYTES // 8), np.int64))
    """int64 array of shape (n_records, 32): what the kernels read."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that the program calls, each once."""
        return tuple(dict.fromkeys(r.kernel for r in self.records))

    @property
    def bytes_read(self) -> int:
        """Weight bytes read per walk."""
        return sum(r.bytes_read for r in self.records)

    def check(self, regions: Mapping[str, int]) -> None:
        """Prove that every operand's extent lies inside its region.

        Parameters
        ----------
        regions : mapping of str to int
            Bytes of each region that there is.

        Raises
        ------
        KernelError
            Naming the first record and operand that do not fit.
        """
        for number, record in enumerate(self.records):
            if record.extents and len(record.extents) != len(record.operands):
                raise KernelError(f"Record {number} ({record.kernel}, {record.label}) has "
                                  f"{len(record.operands)} operands and {len(record.extents)} extents; each needs one.")
            for i, ((region, offset), extent) in enumerate(zip(record.operands, record.extents, strict=False)):
                if extent and not 0 <= offset <= offset + extent <= regions.get(region, 0):
                    family = catalogue.family_of(record.kernel)
                    name = f" ({family.operands[i]})" if family and i < len(family.operands) else ""
                    raise KernelError(
                        f"Operand {i}{name} of record {number} ({record.kernel}, {record.label}) takes {extent} bytes "
                        f"from {offset} on; the region {region} has {regions.get(region, 0)}.")

    def link(self, addresses: dict[str, int]) -> None:
        """Encode the records with the addresses of their kernels."""
        self.words = np.zeros((len(self.records), abi.RECORD_BYTES // 8), np.int64)
        for row, record in zip(self.words, self.records, strict=True):
            row[:] = encode(record, addresses[record.kernel])

    def describe(self) -> Iterator[tuple[int, str, str, int]]:
        """Rows (index, kernel, operation, bytes read)."""
        for i, record in enumerate(self.records):
            yield i, record.kernel, record.label + record.condition, record.bytes_read


def encode(record: Record, address: int) -> NDArray[np.int64]:
    """Write a record as 32 words (kernels/abi/record.py).

    Raises `KernelError` if it has more operands, parameters or predicates than a record has room for, or one that
    does not fit its word.
    """
    for name, values, room in (("operands", record.operands, abi.N_OPERANDS),
                               ("parameters", record.parameters, abi.N_PARAMETERS),
                               ("predicates", record.predicates, abi.N_PREDICATES)):
        if len(values) > room:
            raise KernelError(f"The record {record.kernel} has {len(values)} {name}; a record has room for {room}.")
    raw = np.zeros(abi.RECORD_BYTES, np.uint8)
    words, halves = raw.view(np.int64), raw.view(np.int32)
    words[abi.REC_KERNEL // 8] = address
    halves[abi.REC_FLAGS // 4] = record.flags
    halves[abi.REC_TICKET // 4] = 0 if record.ticket is None else 1 + record.ticket
    halves[abi.REC_PREDICATES // 4 :][: len(record.predicates)] = [count + 1 for count in record.predicates]
    for i, (region, offset) in enumerate(record.operands):
        if not 0 <= offset < 1 << abi.REGION_SHIFT:
            raise KernelError(f"Operand {i} of the record {record.kernel} lies at {offset}; offsets are below 2^48.")
        words[abi.REC_OPERANDS // 8 + i] = abi.REGIONS.index(region) << abi.REGION_SHIFT | offset
    for i, value in enumerate(record.parameters):
        if not -(1 << 31) <= value < 1 << 31:
            raise KernelError(f"Parameter {i} of the record {record.kernel} is {value}; it must fit 32 bits.")
    halves[abi.REC_PARAMETERS // 4 :][: len(record.parameters)] = record.parameters
    return words
