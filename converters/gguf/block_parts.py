"""Parts of the blocks of GGUF tensors, by type: codes as lines of layout tile16, scales and minima.

The contents of a block are in ggml's ggml-common.h; `values.py` reads it as numbers. All of it moves as words of four
columns, a byte each: the nibbles of 16 bytes of Q4_0 are columns 0 to 15 and 16 to 31, so its words have columns 0 .. 3
and 16 .. 19, and two of them become a line's word of columns 0 .. 7 and one of columns 16 .. 23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError
from edgeinfer.quant import TILE_ROWS

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
_LOW, _HIGH, _ONES = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0), np.uint32(0x01010101)
_SIX, _TOP_TWO = np.uint32(0x3F3F3F3F), np.uint32(0x30303030)
_HALF = "<u2"


class Parts(NamedTuple):
    """Blocks of some rows as arrays (tiles, ..., 16 rows)."""

    lines: Words
    """Codes in the order of lines within a record."""
    halves: tuple[NDArray[np.uint16], ...]
    """fp16 numbers: scales, and minima, of groups or of whole blocks."""
    nested: tuple[Bytes, ...] = ()
    """8-bit scales, and minima, of a block's groups: (groups, tiles, blocks, 16)."""


def _bytes(blocks: NDArray[np.void], field: str) -> Bytes:
    """A field of blocks as bytes (tiles, blocks, 16, bytes).

    Copied as items of a structure: copying them as slices of bytes takes ten times as long.
    """
    values = np.ascontiguousarray(blocks[field])
    return values.view(np.uint8).reshape(*blocks.shape, -1)


def _words(blocks: NDArray[np.void], field: str) -> Words:
    """A field of blocks as words (tiles, blocks, words, 16), not yet in the order of memory."""
    return _bytes(blocks, field).view(np.uint32).swapaxes(2, 3)


def _halves(blocks: NDArray[np.void], *fields: str) -> tuple[NDArray[np.uint16], ...]:
    return tuple(np.ascontiguousarray(blocks[field]) for field in fields)


def _both_nibbles(blocks: NDArray[np.void]) -> tuple[Words, Words]:
    """Words of lines of the low nibbles of the codes, and of the high ones, (tiles, blocks, words, 16).

    Each has eight neighbouring columns, from two words of four.
    """
    words = _words(blocks, "codes")
    even, odd = np.ascontiguousarray(words[:, :, ::2]), np.ascontiguousarray(words[:, :, 1::2])
    low = odd & _LOW
    low <<= np.uint32(4)
    low |= even & _LOW
    even >>= np.uint32(4)
    even &= _LOW
    odd &= _HIGH
    even |= odd
    return low, even


def _transposed_bits(words: Words, axis: int, bits: int) -> Words:
    """Field i of each byte of word j as field j of word i, in place; words along `axis`, 8 / `bits` of them.

    As a matrix of this many fields is transposed: blocks off the diagonal are exchanged, of half the size each time.
    """
    for distance, mask in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        if distance >= bits:
            shape = words.shape
            halves = words.reshape(*shape[:axis], -1, 2, distance // bits, *shape[axis + 1 :])
            first, second = (halves.take(i, axis + 1) for i in (0, 1))
            change = (first >> np.uint32(distance) ^ second) & np.uint32(mask)
            first ^= change << np.uint32(distance)
            second ^= change
            words = np.stack([first, second], axis=axis + 1).reshape(shape)
    return words


# -- blocks of 32 columns, or 64 ---------------------------------------------------------------------------------------


def _of_32(*fields: str) -> np.dtype[np.void]:
    sizes = {"scale": _HALF, "minimum": _HALF, "exponent": "u1", "further": "<u4", "codes": "V16", "bytes": "V32"}
    return np.dtype([(field, sizes[field]) for field in fields])


def _simple(*halves: str) -> Callable[[NDArray[np.void], str], Parts]:
    """Blocks of 16 bytes of nibbles and fp16 factors, perhaps with a word of fifth bits."""

    def parts(blocks: NDArray[np.void], name: str) -> Parts:
        further = "further" in (blocks.dtype.names or ())
        lines = _lines(blocks, 4 + further)
        lines[:, :, :2], lines[:, :, 2:4] = _both_nibbles(blocks)
        if further:
            lines[:, :, 4] = _spread(np.ascontiguousarray(blocks["further"]))
        return Parts(lines, _halves(blocks, *halves))

    return parts


def _lines(blocks: NDArray[np.void], *lines: int) -> Words:
    return np.empty((*blocks.shape[:2], *lines, TILE_ROWS), np.uint32)


def _spread(bits: Words) -> Words:
    """Bit 4 s + j as bit s of byte j: fifth bits of 32 columns as a line's word has them."""
    out = np.zeros_like(bits)
    for s in range(8):
        four = bits >> np.uint32(4 * s) & np.uint32(15)
        out |= (four * np.uint32(0x00204081) & _ONES) << np.uint32(s)
    return out


def _q2_0(blocks: NDArray[np.void], name: str) -> Parts:
    """Field s of byte b of a word is column 4 b + s of 16; in a line it is column 4 s + b: rows and columns change."""
    words = np.ascontiguousarray(_words(blocks, "codes"))
    for distance, mask in ((12, 0x0000F0F0), (6, 0x00CC00CC)):
        change = (words >> np.uint32(distance) ^ words) & np.uint32(mask)
        words ^= change << np.uint32(distance)
        words ^= change
    return Parts(words, _halves(blocks, "scale"))


def _bytes_of_32(blocks: NDArray[np.void], name: str) -> Parts:
    codes = np.ascontiguousarray(_words(blocks, "bytes"))
    if codes.view(np.int8).min(initial=0) == -128:
        raise CheckpointError(f"The tensor {name} has an 8-bit code of -128, which llama.cpp does not write and whose "
                              "products overflow in kernels; convert the file again from the original model.")
    return Parts(codes, _halves(blocks, "scale"))


def _mxfp4(blocks: NDArray[np.void], name: str) -> Parts:
    """Scales are powers of two: 2^(exponent - 128) of levels that are twice the values; fp16 has 2^-24 to 2^15."""
    exponent = np.ascontiguousarray(blocks["exponent"]).astype(np.int32) - 128
    odd = (exponent < -24) | (exponent > 15)
    if (_bytes(blocks, "codes")[odd] & np.uint8(0x77)).any():
        raise CheckpointError(f"The tensor {name} has scales of 2^{int(exponent[odd][0])}, and fp16 holds 2^-24 to "
                              "2^15; convert the file with --weights f32, or q4.")
    scales = np.where(odd, 0, np.ldexp(np.float32(1), np.clip(exponent, -24, 15)))  # of zeros any will do
    return Parts(_simple()(blocks, name).lines, (scales.astype(np.float16).view(np.uint16),))


# -- blocks of 256 columns ---------------------------------------------------------------------------------------------


def _q4_k(blocks: NDArray[np.void], name: str) -> Parts:
    lines = _lines(blocks, 8, 4)
    _nibbles_of_k(blocks, lines)
    return Parts(lines, _outer(blocks), _six_bits(blocks))


def _q5_k(blocks: NDArray[np.void], name: str) -> Parts:
    """Bit g of byte c of the further bits belongs to column c of group g."""
    lines = _lines(blocks, 8, 5)
    _nibbles_of_k(blocks, lines)
    lines[:, :, :, 4] = _transposed_bits(np.ascontiguousarray(_words(blocks, "further")), 2, 1)
    return Parts(lines, _outer(blocks), _six_bits(blocks))


def _nibbles_of_k(blocks: NDArray[np.void], lines: Words) -> None:
    """Lines (..., 8 groups, 4 or more, 16): of each 32 bytes the low nibbles are a group, the high ones the next."""
    for i, part in enumerate(_both_nibbles(blocks)):
        lines[:, :, i::2, :4] = part.reshape(*part.shape[:2], 4, 4, TILE_ROWS)


def _outer(blocks: NDArray[np.void]) -> tuple[NDArray[np.uint16], ...]:
    """Return scale and minimum of a block; ours are added and ggml's subtracted, so the sign changes."""
    scale, minimum = _halves(blocks, "scale", "minimum")
    return scale, minimum ^ np.uint16(0x8000)


def _by_groups(factors: Bytes) -> Bytes:
    """Factors (tiles, blocks, 16, groups) by groups: all of one are copied at a stretch, which is several times faster.

    As (groups, tiles, blocks, 16).
    """
    return np.ascontiguousarray(factors.transpose(3, 0, 1, 2))


def _six_bits(blocks: NDArray[np.void]) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minima of 6 bits each from 12 bytes, as `gguf_values` reads them, four at a time."""
    low, middle, top = _words(blocks, "factors").transpose(2, 0, 1, 3)
    scales = low & _SIX, top & _LOW | low >> np.uint32(2) & _TOP_TWO
    minima = middle & _SIX, top >> np.uint32(4) & _LOW | middle >> np.uint32(2) & _TOP_TWO
    return tuple(np.concatenate([_by_groups(four.view(np.uint8).reshape(*four.shape, 4)) for four in parts])
                 for parts in (scales, minima))  # type: ignore[return-value]


def _q6_k(blocks: NDArray[np.void], name: str) -> Parts:
    """Return Q6_K's parts; 128 columns have 64 bytes of nibbles, low ones first, then the pairs of bits of 32 bytes,
    lowest first."""
    lines = _lines(blocks, 2, 2, 4, 3)  # halves, nibbles, groups of 16, lines
    for i, part in enumerate(_both_nibbles(blocks)):
        lines[:, :, :, i, :, :2] = part.reshape(*part.shape[:2], 2, 4, 2, TILE_ROWS)
    words = _words(blocks, "further").reshape(*lines.shape[:2], 2, 2, 4, TILE_ROWS)  # halves, groups, steps
    pairs = _transposed_bits(words, 4, 2)
    for pair in range(4):
        lines[:, :, :, pair // 2, 2 * (pair % 2) : 2 * (pair % 2) + 2, 2] = pairs[:, :, :, :, pair]
    return Parts(lines, _halves(blocks, "scale"), (_by_groups(_bytes(blocks, "factors")),))


def _iq4_xs(blocks: NDArray[np.void], name: str) -> Parts:
    """Eight groups of 16 bytes as in IQ4_NL; scales of 6 bits, 32 too large, low nibbles apart from the other two."""
    lines = _lines(blocks, 8, 4)
    for i, part in enumerate(_both_nibbles(blocks)):
        lines[:, :, :, 2 * i : 2 * i + 2] = part.reshape(*part.shape[:2], 8, 2, TILE_ROWS)
    low, high = _bytes(blocks, "factors"), np.ascontiguousarray(blocks["further"])
    nibbles = np.stack([low & 15, low >> 4], axis=-1).reshape(*blocks.shape, 8)
    pairs = (high[..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    scales = (nibbles | pairs << np.uint8(4)) - np.uint8(32)
    return Parts(lines, _halves(blocks, "scale"), (_by_groups(scales),))


# -- the table ---------------------------------------------------------------------------------------------------------


PARTS: dict[tuple[str, str], tuple[np.dtype[np.void], Callable[[NDArray[np.void], str], Parts]]] = {
    ("Q4_0", "q4"): (_of_32("scale", "codes"), _simple("scale")),
    ("IQ4_NL", "iq4"): (_of_32("scale", "codes"), _simple("scale")),
    ("Q4_1", "q4m"): (_of_32("scale", "minimum", "codes"), _simple("scale", "minimum")),
    ("Q5_0", "q5"): (_of_32("scale", "further", "codes"), _simple("scale")),
    ("Q5_1", "q5m"): (_of_32("scale", "minimum", "further", "codes"), _simple("scale", "minimum")),
    ("Q8_0", "int8"): (_of_32("scale", "bytes"), _bytes_of_32),
    ("Q2_0", "q2"): (_of_32("scale", "codes"), _q2_0),
    ("MXFP4", "mxfp4"): (_of_32("exponent", "codes"), _mxfp4),
    ("Q4_K", "q4k"): (np.dtype([("scale", _HALF), ("minimum", _HALF), ("factors", "V12"), ("codes", "V128")]), _q4_k),
    ("Q5_K", "q5k"): (np.dtype([("scale", _HALF), ("minimum", _HALF), ("factors", "V12"), ("further", "V32"),
                                ("codes", "V128")]), _q5_k),
    ("Q6_K", "q6"): (np.dtype([("codes", "V128"), ("further", "V64"), ("factors", "V16"), ("scale", _HALF)]), _q6_k),
    ("IQ4_XS", "iq4k"): (np.dtype([("scale", _HALF), ("further", "<u2"), ("factors", "V4"), ("codes", "V128")]),
                         _iq4_xs),
}
"""Layout of a block in the file, and its conversion, by the file's type and ours."""
