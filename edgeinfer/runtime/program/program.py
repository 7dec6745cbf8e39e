"""The program: an array of fixed-size instructions, written once and never patched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.errors import KernelError
from edgeinfer.graph import MatMul, NeuronDown, NeuronGated, Op, Sample
from edgeinfer.kernels import abi, catalogue

from ...base.dataclass import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Instruction:
    """One step of the program, before it is encoded."""

    kernel: str
    """Name of the kernel, such as ``linear_q4_g32``."""
    label: str
    """Description, for people."""
    operands: tuple[tuple[str, int], ...] = ()
    """Operands as (region, byte offset)."""
    parameters: tuple[int, ...] = ()
    flags: int = 0
    predicates: tuple[int, ...] = ()
    """Counts that skip the instruction where one of them is 0."""
    bytes_read: int = 0
    """Weight bytes read per forward pass."""
    extents: tuple[int, ...] = ()
    """Bytes from each operand on that the kernel reads or writes; 0 = it does not use the operand."""
    op: Op | None = None
    """The operation that it belongs to; None for probes."""
    step: int = 0
    """Index among the instructions of its operation; the first one carries the operation's cost."""
    event: int | None = None
    """Completion event that it waits for."""
    levels: tuple[int, ...] = ()
    """Levels of the codes of its matrix, where these are of the tensor."""

    @property
    def condition(self) -> str:
        """Condition under which it runs, and differences for a pass of one token, for display."""
        if self.op is None:
            return ""
        said = ["decoded tokens only"] if self.op.decoded else ["sampled tokens only"] if self.op.sampled else []
        if self.op.several:
            said.append("not for one token")
        if isinstance(self.op, MatMul) and self.op.source:
            said.append(f"one token: input from {self.op.source.name}")
        if isinstance(self.op, NeuronGated | NeuronDown) and self.op.dense:
            said.append("dead neurons too")
        return f" ({'; '.join(said)})" if said else ""


@dataclass
class Program:
    """Instructions in order, and their encoding once the kernels are linked."""

    instructions: tuple[Instruction, ...]
    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, abi.INSTRUCTION_BYTES // 8), np.int64))
    """int64 array of shape (n_records, 32): the kernels read it."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that the program calls, each once."""
        return tuple(dict.fromkeys(r.kernel for r in self.instructions))

    @property
    def first_sample(self) -> int:
        """Index of the first instruction that samples; 0 if none does."""
        return next((i for i, instruction in enumerate(self.instructions) if isinstance(instruction.op, Sample)), 0)

    @property
    def bytes_read(self) -> int:
        """Weight bytes read per forward pass."""
        return sum(r.bytes_read for r in self.instructions)

    def check(self, regions: Mapping[str, int]) -> None:
        """Prove that every operand's extent is inside its region.

        Parameters
        ----------
        regions : mapping of str to int
            Bytes of each region that there is.

        Raises
        ------
        KernelError
            Naming the first instruction and operand that do not fit.
        """
        for number, instruction in enumerate(self.instructions):
            if instruction.extents and len(instruction.extents) != len(instruction.operands):
                raise KernelError(f"Instruction {number} ({instruction.kernel}, {instruction.label}) has "
                                  f"{len(instruction.operands)} operands and {len(instruction.extents)} extents; each "
                                  "needs one.")
            for i, ((region, offset), extent) in enumerate(zip(instruction.operands, instruction.extents,
                                                               strict=False)):
                if extent and not 0 <= offset <= offset + extent <= regions.get(region, 0):
                    family = catalogue.family_of(instruction.kernel)
                    name = f" ({family.operands[i]})" if family and i < len(family.operands) else ""
                    raise KernelError(
                        f"Operand {i}{name} of instruction {number} ({instruction.kernel}, {instruction.label}) takes "
                        f"{extent} bytes "
                        f"from {offset} on; the region {region} has {regions.get(region, 0)}.")

    def link(self, addresses: dict[str, int]) -> None:
        """Encode the instructions with the addresses of their kernels."""
        self.words = np.zeros((len(self.instructions), abi.INSTRUCTION_BYTES // 8), np.int64)
        for row, instruction in zip(self.words, self.instructions, strict=True):
            row[:] = encode(instruction, addresses[instruction.kernel])

    def describe(self) -> Iterator[tuple[int, str, str, int]]:
        """Rows (index, kernel, operation, bytes read)."""
        for i, instruction in enumerate(self.instructions):
            yield i, instruction.kernel, instruction.label + instruction.condition, instruction.bytes_read


def encode(instruction: Instruction, address: int) -> NDArray[np.int64]:
    """Write an instruction as 32 words (kernels/abi/instruction.py).

    Raises `KernelError` if it has more operands, parameters or predicates than an instruction has room for, or one that
    does not fit its word.
    """
    for name, values, room in (("operands", instruction.operands, abi.N_OPERANDS),
                               ("parameters", instruction.parameters, abi.N_PARAMETERS),
                               ("predicates", instruction.predicates, abi.N_PREDICATES)):
        if len(values) > room:
            raise KernelError(f"The instruction {instruction.kernel} has {len(values)} {name}; an instruction has "
                              f"room for {room}.")
    raw = np.zeros(abi.INSTRUCTION_BYTES, np.uint8)
    words, halves = raw.view(np.int64), raw.view(np.int32)
    words[abi.INST_KERNEL // 8] = address
    halves[abi.INST_FLAGS // 4] = instruction.flags
    halves[abi.INST_EVENT // 4] = 0 if instruction.event is None else 1 + instruction.event
    halves[abi.INST_PREDICATES // 4 :][: len(instruction.predicates)] = [count + 1 for count in instruction.predicates]
    for i, (region, offset) in enumerate(instruction.operands):
        if not 0 <= offset < 1 << abi.REGION_SHIFT:
            raise KernelError(f"Operand {i} of the instruction {instruction.kernel} lies at {offset}; offsets are "
                              "below 2^48.")
        words[abi.INST_OPERANDS // 8 + i] = abi.REGIONS.index(region) << abi.REGION_SHIFT | offset
    for i, value in enumerate(instruction.parameters):
        if not -(1 << 31) <= value < 1 << 31:
            raise KernelError(f"Parameter {i} of the instruction {instruction.kernel} is {value}; it must fit 32 bits.")
    halves[abi.INST_PARAMETERS // 4 :][: len(instruction.parameters)] = instruction.parameters
    raw[abi.INST_LEVELS :].view(np.int8)[: len(instruction.levels)] = instruction.levels
    return words
