"""Quantised activations as the kernels store them: blocks of tokens, interleaved by 4 bytes (abi.token_blocks)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..abi import q8_row_bytes, token_blocks
from .view import memory


class Q8Block(NamedTuple):
    """Live views of the memory of one block of n tokens."""

    first: int
    """First token of the block."""
    codes: NDArray[np.int8]
    """(n, values / 4, 4)."""
    scales: NDArray[np.float32]
    """(n, groups)."""
    offsets: NDArray[np.int32]
    """(n, groups): -8 x the sum of a group's codes."""


def q8_blocks(
    address: int, n_tokens: int, stride: int, padded: int, offsets: int, group: int, token_tiles: tuple[int, ...]
) -> list[Q8Block]:
    """The blocks of n tokens that start at an address.

    Parameters
    ----------
    stride : int
        Bytes of a row.
    padded : int
        Values of a row, which is the offset of the scales, too.
    offsets : int
        Offset of the offsets in a row.
    """
    blocks = []
    for first, n in token_blocks(n_tokens, token_tiles):
        base = address + first * stride
        groups = padded // group
        blocks.append(Q8Block(
            first,
            memory(base, np.int8, (n, padded // 4, 4), (4, 4 * n, 1)),
            memory(base + n * padded, np.float32, (n, groups), (4, 4 * n)),
            memory(base + n * offsets, np.int32, (n, groups), (4, 4 * n)),
        ))
    return blocks


def read_q8(blocks: list[Q8Block]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes (T, values) and scales (T, groups) of all blocks, copied."""
    if not blocks:
        return np.zeros((0, 0), np.int8), np.zeros((0, 0), np.float32)
    return (np.concatenate([b.codes.reshape(len(b.codes), -1) for b in blocks]),
            np.concatenate([b.scales for b in blocks]))


def values_apart(address: int, n_tokens: int, stride: int, skipped: int, width: int, token_tiles: tuple[int, ...]
                 ) -> list[NDArray[np.float32]]:
    """Live views of the values apart, (n, width), of each block of n tokens.

    Parameters
    ----------
    skipped : int
        Their offset in a row.
    """
    return [memory(address + first * stride + n * skipped, np.float32, (n, width), (4, 4 * n))
            for first, n in token_blocks(n_tokens, token_tiles)]


def write_q8(codes: NDArray[Any], scales: NDArray[Any], group: int, token_tiles: tuple[int, ...],
             apart: NDArray[Any] | None = None) -> NDArray[np.uint8]:
    """Rows of codes (T, values, padding included), scales (T, groups) and values apart (T, columns) as memory: uint8
    (T, row bytes)."""
    apart = np.zeros((len(codes), 0), np.float32) if apart is None else apart
    stride, padded, offsets = q8_row_bytes(codes.shape[1], group, apart.shape[1])
    out = np.zeros((len(codes), stride), np.uint8)
    totals = codes.reshape(len(codes), padded // group, group).sum(axis=2).astype(np.int32)
    for block in q8_blocks(out.ctypes.data, len(codes), stride, padded, offsets, group, token_tiles):
        rows = slice(block.first, block.first + len(block.codes))
        block.codes[:] = codes[rows].reshape(block.codes.shape)
        block.scales[:], block.offsets[:] = scales[rows], -8 * totals[rows]
    first = 0
    for own in values_apart(out.ctypes.data, len(codes), stride, 2 * offsets - padded, apart.shape[1], token_tiles):
        own[:] = apart[first : first + len(own)]
        first += len(own)
    return out
