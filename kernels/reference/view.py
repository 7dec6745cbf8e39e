"""Instructions and ctx as NumPy arrays over live memory, for references."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import WeightType

from .. import abi

Family = TypeVar("Family", bound=tuple[int, ...])


def memory(address: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> NDArray[Any]:
    """Live view of memory; `strides` in bytes, by default one element after the other.

    Nothing keeps the memory alive or checks that it is there: the caller owns it. References call this for every row.
    """
    kind = np.dtype(dtype)
    if 0 in shape:
        return np.empty(shape, kind)
    if strides is None:
        nbytes = kind.itemsize * math.prod(shape)
    else:
        nbytes = kind.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    buffer: Any = (ctypes.c_uint8 * int(nbytes)).from_address(address)
    return np.ndarray(shape, kind, buffer, 0, strides)


class InstructionView:
    """An instruction and the ctx that it runs with.

    Parameters
    ----------
    instruction, ctx : int
        Addresses, as a kernel gets them.
    """

    def __init__(self, instruction: int, ctx: int):
        self.instruction, self.ctx = instruction, ctx
        self._named: dict[type, Any] = {}  # by type: as tuples of indices families of one length are equal

    def _word(self, address: int) -> int:
        return ctypes.c_int64.from_address(address).value

    @property
    def flags(self) -> int:
        """FLAG_* bits."""
        return ctypes.c_int32.from_address(self.instruction + abi.INST_FLAGS).value

    def address(self, index: int) -> int:
        """Address of operand `index`."""
        word = self._word(self.instruction + abi.INST_OPERANDS + 8 * index)
        base = self._word(self.ctx + abi.CTX_REGIONS + 8 * (word >> abi.REGION_SHIFT))
        return base + (word & ((1 << abi.REGION_SHIFT) - 1))

    def array(
        self, index: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, at: int = 0
    ) -> NDArray[Any]:
        """Live view of operand `index`, from `at` bytes after its start."""
        return memory(self.address(index) + at, dtype, shape, strides)

    def parameters(self, family: Family) -> Family:
        """Parameters by name: a tuple like LINEAR of kernels.parameters, with the instruction's values."""
        kind = type(family)
        if kind not in self._named:
            words = (ctypes.c_int32 * abi.N_PARAMETERS).from_address(self.instruction + abi.INST_PARAMETERS)[:]
            self._named[kind] = kind(*(words[i] for i in family))  # type: ignore[arg-type]
        return self._named[kind]

    def stored(self, dtype: str, group: int) -> WeightType:
        """Type of the instruction's matrix, with its levels if these are of the tensor."""
        stored = WeightType(dtype, group)
        if not stored.quantised or not stored.storage.fitted:
            return stored
        levels = (ctypes.c_int8 * (1 << stored.storage.bits)).from_address(self.instruction + abi.INST_LEVELS)
        return WeightType(dtype, group, levels=tuple(levels))

    def count(self, index: int) -> int:
        """Dynamic count (COUNT_*)."""
        return self._word(self.ctx + abi.CTX_COUNTS + 8 * index)

    def tokens(self, field: int) -> NDArray[np.int64]:
        """Field TOKEN_* of each token of the forward pass."""
        n = self.count(abi.COUNT_TOKENS)
        return memory(self._word(self.ctx + abi.CTX_TOKENS) + field, np.int64, (n,), (abi.TOKEN_BYTES,)).copy()

    def outputs(self, n: int) -> NDArray[np.int64]:
        """Numbers of the tokens whose logits are wanted."""
        return memory(self._word(self.ctx + abi.CTX_OUTPUTS), np.int64, (n,)).copy()

    def sample_specs(self, n: int) -> list[int]:
        """Addresses of the sample specs of n rows of logits, 0 for none."""
        return [int(address) for address in memory(self._word(self.ctx + abi.CTX_SAMPLES), np.int64, (n,))]

    def slots(self, recent: int) -> NDArray[np.int32]:
        """Return the slot of each token's K and V in the forward pass, by one of the block tables."""
        n, at = self.count(abi.COUNT_TOKENS), abi.TOKEN_SLOT + 4 * recent
        return memory(self._word(self.ctx + abi.CTX_TOKENS) + at, np.int32, (n,), (abi.TOKEN_BYTES,)).copy()

    def block_table(self, sequence: int, n_blocks: int, recent: int) -> NDArray[np.int32]:
        """The first blocks of a sequence, by one of its tables."""
        entry = self._word(self.ctx + abi.CTX_SEQUENCES) + abi.SEQUENCE_BYTES * sequence
        return memory(self._word(entry + abi.SEQUENCE_BLOCKS + 8 * recent), np.int32, (n_blocks,)).copy()


def float_of(bits: int) -> float:
    """The float32 whose bits an int32 parameter holds."""
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
