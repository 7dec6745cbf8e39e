"""Runs one kernel on memory of its own: ctx, an instruction and regions in NumPy arrays, and its reference beside it.

Memory that nobody has filled holds 0xFF bytes: read as a float that is NaN, so that a kernel which lets padding into
a result shows it. After a run everything outside the reference's arrays and the threads' scratch must be as it was.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edgeinfer.kernels import Kernels, abi, available, reference_of
from edgeinfer.kernels.reference import Expected, InstructionView, compare, write_q8
from edgeinfer.quant import TYPES
from tests import kernel_selection
from tests.helpers.linked import linked

ISAS = kernel_selection.levels()
"""Instruction sets under test, the best first: see tests/kernel_selection.py."""
FIRST_BYTES, SLACK_BYTES = 1 << 12, 256
"""Of a region that nothing was put into: every run copies and compares all of it."""
LEVELS = (-127, -90, -57, -31, -12, 8, 41, 127, 3, 20, -5, 64, 99, -110, 0, -127)
"""Levels in every instruction, the table of a tensor's own."""


def isas(name: str) -> list[str]:
    """Instruction sets that a kernel is tested on; the best is always among them."""
    return [isa for isa in ISAS if kernel_selection.takes(isa, name)]


def weight_types(cases: Sequence[tuple[Any, ...]], *loops: str) -> list[Any]:
    """Give cases that begin with a type and its group, those marked `slow` of which README's tier wants no kernel."""
    ends = [f"{dtype}_g{group}" if group else dtype for dtype, group, *_ in cases]
    kept = [all(kernel_selection.in_tier(f"{loop}_{end}") for loop in loops) for end in ends]
    return [case if keep else pytest.param(*case, marks=pytest.mark.slow)
            for case, keep in zip(cases, kept, strict=True)]


def table_of(dtype: str) -> tuple[int, ...]:
    """Return the levels that a type's codes have in a bench; empty of a uniform grid."""
    row = TYPES[dtype]
    return LEVELS[: 1 << row.bits] if row.fitted else row.table


@functools.cache
def function(isa: str, name: str):
    return kernels(isa).function(name)


def kernels(isa: str) -> Kernels:
    return linked(next(i for i in available() if i.name == isa))


def token_tiles(isa: str) -> tuple[int, ...]:
    """Tokens of an instruction set's blocks: activations are interleaved in these."""
    return next(i.token_tiles for i in available() if i.name == isa)


def q8_memory(codes: np.ndarray, scales: np.ndarray, group: int, isa: str, apart: np.ndarray | None = None
              ) -> np.ndarray:
    """Rows of activations as an instruction set's kernels read them, bytes (T, row bytes); 0xFF after each block."""
    data = write_q8(codes, scales, group, token_tiles(isa), apart)
    used, flat = codes.shape[1] + 8 * scales.shape[1], data.reshape(-1)
    used += 0 if apart is None else 4 * apart.shape[1]
    for first, n in abi.token_blocks(len(codes), token_tiles(isa)):
        flat[first * data.shape[1] + n * used : (first + n) * data.shape[1]] = 0xFF
    return data


def aligned(nbytes: int) -> np.ndarray:
    """0xFF bytes at an address that is a multiple of 64."""
    whole = np.full(nbytes + 64, 0xFF, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + nbytes]


class Bench:
    """Memory for one instruction. `put` and `reserve` give operands, `run` runs."""

    def __init__(self) -> None:
        self.regions = {name: aligned(FIRST_BYTES) for name in abi.REGIONS}
        self.used = dict.fromkeys(abi.REGIONS, 0)
        self._scratch: list[tuple[int, int, int]] = []
        self._known: tuple[object, list[Expected]] | None = None
        self.counts = np.zeros(16, np.int64)
        self._tokens = np.zeros((0, abi.TOKEN_BYTES // 8), np.int64)
        self._tables: list[np.ndarray] = []
        self._others: list[np.ndarray] = []
        self._recent = 0
        self.state_slots: Sequence[int] = ()
        """Offset of each sequence's slot in region ``state``."""
        self.outputs = np.zeros(0, np.int64)
        self.sample_specs = np.zeros(0, np.int64)

    def reserve(self, region: str, nbytes: int) -> int:
        """Take 0xFF bytes of a region, 64-byte aligned; gives their address."""
        start = self.used[region]
        self.used[region] = -(-(start + nbytes + SLACK_BYTES) // 64) * 64
        while self.used[region] > len(self.regions[region]):
            bigger = aligned(max(self.used[region], 2 * len(self.regions[region])))
            bigger[: len(self.regions[region])] = self.regions[region]
            self.regions[region] = bigger
        return abi.REGIONS.index(region) << abi.REGION_SHIFT | start

    def scratch(self, nbytes: int, threads: int = 1) -> int:
        """Take scratch of so many bytes for each thread; gives its address. Nothing else of the region may be
        written."""
        address = self.reserve("scratch", nbytes * threads)
        self._scratch.append((address & ((1 << abi.REGION_SHIFT) - 1), nbytes, threads))
        return address

    def put(self, region: str, data: np.ndarray) -> int:
        """Copy an array into a region; gives its address."""
        data = np.ascontiguousarray(data)
        address = self.reserve(region, data.nbytes)
        self.array(address, np.uint8, (data.nbytes,))[:] = data.reshape(-1).view(np.uint8)
        return address

    def array(self, address: int, dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> np.ndarray:
        """Live view of an address."""
        region = self.regions[abi.REGIONS[address >> abi.REGION_SHIFT]]
        return np.ndarray(shape, dtype, region, address & ((1 << abi.REGION_SHIFT) - 1), strides)

    def tokens(self, positions: Sequence[int], ids=0, sequences=0, slots=0, rows=None, bases=-1, masks=-1,
               roles=-1) -> None:
        """Tokens of the forward pass, chains unless told otherwise; also sets their count."""
        self._tokens = np.full((len(positions), abi.TOKEN_BYTES // 8), -1, np.int64)
        names = (abi.TOKEN_ID, abi.TOKEN_SEQUENCE, abi.TOKEN_POSITION, abi.TOKEN_SLOT, abi.TOKEN_ROW, abi.TOKEN_BASE,
                 abi.TOKEN_MASK, abi.TOKEN_ROLE)
        rows = positions if rows is None else rows
        for name, values in zip(names, (ids, sequences, positions, slots, rows, bases, masks, roles), strict=True):
            self._tokens[:, name // 8] = values
        if self._recent:
            self._tokens[:, abi.TOKEN_SLOT // 8] <<= 32
        self.counts[abi.COUNT_TOKENS] = len(positions)

    def tables(self, tables: Sequence[Sequence[int]], recent: int = 0) -> None:
        """Block table of each sequence, the first or the second of two; the other one names block 0 alone."""
        self._tables = [np.asarray(table, np.int32) for table in tables]
        self._others = [np.zeros_like(table) for table in self._tables]
        self._recent = recent

    def run(
        self, isa: str, name: str, operands: Sequence[int], parameters: Sequence[int], flags: int = 0, threads: int = 1,
        keep: bool = False, reference: Callable[[InstructionView], list[Expected]] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run a kernel, compare with its reference, check that nothing else changed, and return the reference's arrays.

        Arrays of one name (blocks of tokens) come as one, block after block. Memory is put back afterwards unless
        `keep`. `reference` stands in for the kernel's own.
        """
        instruction, ctx, alive = self._instruction(operands, parameters, flags), self._ctx(), self.regions
        before = {region: data.copy() for region, data in alive.items()}
        given = None if reference else (name, tuple(operands), tuple(parameters), flags, self._contents())
        if given is None or self._known is None or self._known[0] != given:
            reference = reference or reference_of(name)
            assert reference, f"{name} has no reference"
            self._known = given, reference(InstructionView(instruction.ctypes.data, ctx.ctypes.data))
        expected = self._known[1]
        self._call(function(isa, name), instruction, ctx, threads)
        message = compare(expected)
        assert message is None, f"{name} on {isa}: {message}"
        self._check_untouched(before, [one.where for one in expected], threads)
        blocks: dict[str, list[np.ndarray]] = {}
        for one in expected:
            blocks.setdefault(one.name, []).append(one.where)
        found = {name: np.concatenate(arrays) for name, arrays in blocks.items()}
        if not keep:
            for region, data in before.items():
                alive[region][:] = data
        return found

    def _contents(self) -> tuple[object, ...]:
        """Return what tells whether a reference would read the same again, as it does for another instruction set."""
        arrays = (self._tokens, self.counts, self.outputs, *self._tables, *self._others)
        regions = tuple((data.ctypes.data, zlib.crc32(data)) for data in self.regions.values())
        specs = object() if self.sample_specs.size else None  # as these point to memory of their own
        return *(data.tobytes() for data in arrays), self._recent, tuple(self.state_slots), regions, specs

    @staticmethod
    def _instruction(operands: Sequence[int], parameters: Sequence[int], flags: int) -> np.ndarray:
        instruction = aligned(abi.INSTRUCTION_BYTES)
        instruction[:] = 0
        instruction[abi.INST_FLAGS : abi.INST_FLAGS + 4].view(np.int32)[:] = flags
        instruction[abi.INST_OPERANDS : abi.INST_OPERANDS + 8 * len(operands)].view(np.int64)[:] = operands
        instruction[abi.INST_PARAMETERS : abi.INST_PARAMETERS + 4 * len(parameters)].view(np.int32)[:] = parameters
        instruction[abi.INST_LEVELS : abi.INST_LEVELS + abi.N_LEVELS].view(np.int8)[:] = LEVELS
        return instruction

    def _ctx(self) -> np.ndarray:
        ctx = aligned(abi.CTX_BYTES)
        ctx[:] = 0
        words = ctx.view(np.int64)
        for i, region in enumerate(abi.REGIONS):
            words[abi.CTX_REGIONS // 8 + i] = self.regions[region].ctypes.data
        words[abi.CTX_COUNTS // 8 :][:16] = self.counts
        self._entries = self._sequences()
        words[abi.CTX_COUNTS // 8 + abi.COUNT_SEQUENCES] = len(self._entries)
        words[abi.CTX_TOKENS // 8] = self._tokens.ctypes.data
        words[abi.CTX_SEQUENCES // 8] = self._entries.ctypes.data
        words[abi.CTX_OUTPUTS // 8] = self.outputs.ctypes.data
        words[abi.CTX_SAMPLES // 8] = self.sample_specs.ctypes.data
        return ctx

    def _sequences(self) -> np.ndarray:
        """The sequence table: block tables, the slot, and which tokens are of which sequence."""
        of = self._tokens[:, abi.TOKEN_SEQUENCE // 8].tolist()
        entries = np.zeros((max(len(self._tables), len(self.state_slots)), abi.SEQUENCE_BYTES // 8), np.int64)
        for number, entry in enumerate(entries):
            if number < len(self._tables):
                pair = [self._tables[number].ctypes.data, self._others[number].ctypes.data]
                entry[:2] = pair[::-1] if self._recent else pair
            if number < len(self.state_slots):
                entry[abi.SEQUENCE_SLOT // 8] = self.state_slots[number]
            entry[abi.SEQUENCE_FIRST // 8] = of.index(number) if number in of else 0
            entry[abi.SEQUENCE_TOKENS // 8] = of.count(number)
        return entries

    @staticmethod
    def _call(kernel, instruction: np.ndarray, ctx: np.ndarray, n: int) -> None:
        status = [1] * n

        def work(tid: int) -> None:
            status[tid] = kernel(instruction.ctypes.data, ctx.ctypes.data, tid, n)

        workers = [threading.Thread(target=work, args=(tid,)) for tid in range(1, n)]
        for worker in workers:
            worker.start()
        work(0)
        for worker in workers:
            worker.join()
        assert status == [0] * n

    def _check_untouched(self, before: dict[str, np.ndarray], written: list[np.ndarray], threads: int) -> None:
        """Everything outside the `written` views, and outside the scratch of these threads, is as it was."""
        operands = [(view, view.__array_interface__["data"][0]) for view in written if view.size]
        for region, data in self.regions.items():
            start, old = data.ctypes.data, before[region].copy()
            for view, address in operands:
                at = address - start
                if 0 <= at < len(data):
                    np.ndarray(view.shape, view.dtype, old, at, view.strides)[...] = view
            for at, nbytes, shares in self._scratch if region == "scratch" else ():
                end = at + nbytes * min(shares, threads)
                old[at:end] = data[at:end]
            if (old.view(np.int64) != data.view(np.int64)).any():
                changed = np.flatnonzero(old != data)
                raise AssertionError(f"{len(changed)} bytes of {region} changed that must not, first at {changed[0]}")
