"""First steps of every kernel: reading its instruction and ctx, and claiming chunks of work."""

from __future__ import annotations

from typing import Any

from numba import njit

from ..abi import (
    ABANDONED,
    CTX_CANCEL,
    CTX_COUNTS,
    CTX_ERROR,
    CTX_TOKENS,
    CTX_WORK,
    INST_FLAGS,
    INST_OPERANDS,
    INST_PARAMETERS,
    REGION_SHIFT,
    TOKEN_BYTES,
)
from .memory import load_i32, load_i64
from .scalars import f32_from_bits
from .targets import atomic_add, atomic_load, atomic_store

inline = njit(forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator of helper functions; LLVM inlines them into the kernels."""

OUTLINED: list[Any] = []
"""Functions made by `outlined`: none of them is inlined."""


def outlined(function: Any) -> Any:
    """Decorator of helper functions that are called once a row or a split: copies would swell the code.

    Numba passes `forceinline` on to helpers that an inlined helper calls, unless they set it themselves.
    """
    made = njit(forceinline=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    OUTLINED.append(made)
    return made


_OFFSET_MASK = (1 << REGION_SHIFT) - 1
_NONE_LEFT = 1 << 40


@inline
def operand(inst, ctx, index):
    """Address of operand `index`: the region's base (from ctx) + the instruction's offset."""
    word = load_i64(inst + INST_OPERANDS + 8 * index)
    return load_i64(ctx + ((word >> REGION_SHIFT) << 3)) + (word & _OFFSET_MASK)


@inline
def parameter(inst, index):
    """Integer parameter `index` of the instruction."""
    return load_i32(inst + INST_PARAMETERS + 4 * index)


@inline
def float_parameter(inst, index):
    """Parameter `index` read as float32."""
    return f32_from_bits(load_i32(inst + INST_PARAMETERS + 4 * index))


@inline
def flags(inst):
    """FLAG_* bits."""
    return load_i32(inst + INST_FLAGS)


@inline
def count(ctx, index):
    """Dynamic count (COUNT_*)."""
    return load_i64(ctx + CTX_COUNTS + 8 * index)


@inline
def claim(ctx):
    """Number of the next chunk that no thread has taken; the barrier sets it back to 0.

    After a cancellation there are none left, so that a long instruction ends soon. The thread still goes to the barrier
    (leaving alone would strand the others), and the error makes sure that the instruction does not count as done.
    """
    if atomic_load(ctx + CTX_CANCEL):
        atomic_store(ctx + CTX_ERROR, ABANDONED)
        return _NONE_LEFT
    return atomic_add(ctx + CTX_WORK, 1)


@inline
def token(ctx, t, field):
    """Field TOKEN_* of token t of the forward pass."""
    return load_i64(load_i64(ctx + CTX_TOKENS) + TOKEN_BYTES * t + field)


@inline
def round_up_16(n):
    """Smallest multiple of 16 that is at least n."""
    return (n + 15) & -16
