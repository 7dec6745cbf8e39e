"""References of the operations on rows: RMS norm and quantisation of activations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..abi import COUNT_SEVERAL, FUSED_LEFT_OUT, FUSED_NORM, FUSED_ORDERED, unpack_token_tiles
from ..parameters import ROWS
from .expected import Expected
from .q8 import q8_blocks, read_q8, values_apart
from .tolerances import TINY, TOLERANCES
from .view import InstructionView, float_of

Floats = NDArray[np.float32]


def quantise_rows(x: Floats, group: int) -> tuple[Floats, Floats]:
    """Symmetric int8 in groups: scale = max|x| / 127, code = nearest(x * 127 / max|x|), ties to even.

    Every step is one float32 operation, so kernels give the same bits.

    Parameters
    ----------
    x : float32 array of shape (T, n_groups * group)

    Returns
    -------
    codes : float32 array like x
        Not yet rounded.
    scales : float32 array of shape (T, n_groups)
    """
    groups = x.reshape(len(x), x.shape[1] // group, group)
    largest = np.abs(groups).max(axis=2, initial=0)
    inverse = np.float32(127) / np.maximum(largest, np.float32(1e-30))
    return (groups * inverse[..., None]).reshape(x.shape), largest * np.float32(1 / 127)


def rms_norm(x: NDArray, weight: NDArray, eps: float) -> NDArray[np.float64]:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis, in float64 (arXiv 1910.07467, equation 4)."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(np.float64)


def quantised_rows(view: InstructionView, x: Floats, exact: bool, near: NDArray | None = None,
                   skipped: int = 0) -> list[Expected]:
    """Blocks of q8 rows that hold x, which is known up to `near`: codes, scales and -8 x the sums of the codes.

    They begin this many bytes after the beginning of the output.
    """
    p = view.parameters(ROWS)
    padded = np.zeros((len(x), p.scales), np.float32)
    padded[:, : p.width] = x
    codes, scales = quantise_rows(padded, p.group)
    spread = np.zeros(scales.shape)  # of the largest value in a group
    if near is not None:
        loose = np.zeros(padded.shape)
        loose[:, : p.width] = near
        spread = loose.reshape(*scales.shape, p.group).max(axis=2)
    expected = []
    token_tiles = unpack_token_tiles(p.token_tiles)
    start = view.address(1) + skipped
    for block in q8_blocks(start, len(x), p.out_stride, p.scales, p.offsets, p.group, token_tiles):
        rows = slice(block.first, block.first + len(block.codes))
        here, shape = codes[rows].reshape(block.codes.shape), block.scales.shape
        off = None if exact else TOLERANCES["rms_norm"] * scales[rows] + spread[rows] / 127 + TINY
        share = 2 * spread[rows] / np.maximum(scales[rows], TINY)
        tolerance = None if exact else TOLERANCES["code"] + np.repeat(share, p.group, axis=1).reshape(here.shape)
        expected += [
            Expected("codes", block.codes, np.rint(here) if exact else here, exact, tolerance),
            Expected("scales", block.scales, scales[rows], exact, off),
            Expected("offsets", block.offsets, partial(_offsets, block.codes, shape, p.group)),
        ]
    return expected


def _offsets(codes: NDArray[np.int8], shape: tuple[int, ...], group: int) -> NDArray[np.int32]:
    """-8 x the sum of each group of the codes that are stored."""
    return -8 * codes.reshape(*shape, group).sum(axis=2, dtype=np.int32)


def _source(view: InstructionView) -> Floats:
    p = view.parameters(ROWS)
    return view.array(0, np.float32, (view.count(p.rows), p.width), (p.in_stride, 4))


def quantize_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``quantize``: rows, in an order or with values apart, or each head of them to its own rows."""
    p, found = view.parameters(ROWS), []
    for head in range(max(p.heads, 1)):
        shape, at = (view.count(p.rows), p.width), 4 * p.width * head
        x = view.array(0, np.float32, shape, (p.in_stride, 4), at=at)
        x = x[:, view.array(2, np.int32, (p.width,))] if p.ordered else x
        if p.left_out:
            columns = view.array(2, np.int32, (p.left_out,))
            apart = values_apart(view.address(1), len(x), p.out_stride, 2 * p.offsets - p.scales, p.left_out,
                                 unpack_token_tiles(p.token_tiles))
            starts = np.cumsum([0, *map(len, apart)])
            found += [Expected("apart", block, x[start : start + len(block)][:, columns])
                      for start, block in zip(starts, apart, strict=False)]
            x = x.copy()
            x[:, columns] = 0
        found += quantised_rows(view, x, exact=True, skipped=head * p.head_out)
    return found


def _normalised(view: InstructionView) -> NDArray[np.float64]:
    p = view.parameters(ROWS)
    return rms_norm(_source(view), view.array(2, np.float32, (p.width,)), float_of(p.eps))


def rms_norm_f32_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``rms_norm_f32``; rows end in zeros up to a whole vector."""
    p = view.parameters(ROWS)
    y = _normalised(view)
    whole = np.zeros((len(y), -(-p.width // 16) * 16))
    whole[:, : p.width] = y
    out = view.array(1, np.float32, whole.shape, (p.out_stride, 4))
    return [Expected("out", out, whole, exact=False, tolerance=TOLERANCES["rms_norm"] * np.abs(whole) + TINY)]


def rms_norm_q8_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``rms_norm_q8``."""
    return quantised_rows(view, _normalised(view).astype(np.float32), exact=False)


def apart_input(view: InstructionView, p: Any) -> NDArray[np.float64]:
    """Return the values apart of a matmul's x, (T, columns): of the rows, or of a fused input as `quantised_input`."""
    if p.fused and not view.count(COUNT_SEVERAL):
        row = view.array(5, np.float32, (p.width,))
        return row[None, view.array(6, np.int32, (p.left_out,))].astype(np.float64)
    blocks = values_apart(view.address(1), view.count(p.rows), p.x_stride, 2 * p.x_offsets - p.x_scales, p.left_out,
                          unpack_token_tiles(p.token_tiles))
    return np.concatenate(blocks).astype(np.float64)


def quantised_input(
    view: InstructionView, p: Any, padded: int, source: int, norm: int, skipped: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return x of a matmul, dequantised, and the largest deviation of the kernel's factors from it.

    A fused input is row 0 of the operand `source`, times, in the order of, or without the columns in the operand
    `norm`; otherwise x is read as it is stored.

    Parameters
    ----------
    padded : int
        Values of a row of x, padding included.
    skipped : int
        Bytes before the first row of x.

    Returns
    -------
    x, tolerance : float64 arrays of shape (T, padded)
    """
    fused = p.fused if not view.count(COUNT_SEVERAL) else 0
    if fused:
        row = np.zeros((1, padded), np.float32)
        row[0, : p.width] = view.array(source, np.float32, (p.width,))
        if fused == FUSED_ORDERED:
            row[0, : p.width] = row[0, view.array(norm, np.int32, (p.width,))]
        if fused == FUSED_LEFT_OUT:
            row[0, view.array(norm, np.int32, (p.left_out,))] = 0
        if fused == FUSED_NORM:
            row[0, : p.width] = rms_norm(row[0, : p.width], view.array(norm, np.float32, (p.width,)), float_of(p.eps))
        exact, scales = quantise_rows(row, p.group)
        codes = np.rint(exact)
    else:
        offsets = padded + 4 * padded // p.group
        blocks = q8_blocks(view.address(1) + skipped, view.count(p.rows), p.x_stride, padded, offsets, p.group,
                           unpack_token_tiles(p.token_tiles))
        stored, scales = read_q8(blocks)
        exact = codes = stored.reshape(len(scales), padded).astype(np.float32)
    steps = np.repeat(scales.astype(np.float64).reshape(len(codes), padded // p.group), p.group, axis=1)
    x = codes * steps
    if fused != FUSED_NORM:
        return x, np.zeros_like(x)
    near_tie = np.abs(exact - codes) >= 0.5 - TOLERANCES["code"]
    return x, steps * near_tie + TOLERANCES["rms_norm"] * np.abs(x)
