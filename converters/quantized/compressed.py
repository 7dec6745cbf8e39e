"""Rows of codes of compressed-tensors, and of FP8 by blocks.

Layouts: compressed-tensors (weight_packed [out, in / n], or weight with a code in each byte), transformers' FP8.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError

from .bits import E2M1, E4M3, nibbles, signed, unpacked
from .kinds import PackedKind
from .parts import SCALES, WORDS, groups_of, order_of, ordered, whole_groups
from .scheme import Scheme
from .tensor import Loaded, PackedTensor, Parts, Recent

Codes = NDArray[Any]


def packed(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Codes along the rows of a tensor whose shape is stored beside them; zero points are packed along the outputs."""
    if parts.stored("weight_packed").dtype == "U8":
        return _fp4(name, parts, recent)
    rows, words = parts.check("weight_packed", WORDS, (None, None))
    parts.check("weight_shape", ("I64", "I32"), (2,))
    shape = parts.whole("weight_shape", "<i8" if parts.stored("weight_shape").dtype == "I64" else "<i4").tolist()
    columns = shape[1]
    bits = next((bits for bits in (4, 8) if columns > 0 and -(-columns // (32 // bits)) == words), 0)
    if shape[0] != rows or not bits:
        raise CheckpointError(f"The module {parts.name:.100} in {parts.path} says that its shape is {shape}, but has "
                              f"{rows} rows of {words} words of 32 bits; codes of 4 or 8 bits need others.")
    groups, size = _scale_groups(parts, rows, columns, scheme)
    group_of = order_of(parts, "weight_g_idx", columns, size, groups)
    has_zeros, per = "weight_zero_point" in parts, 32 // bits
    if has_zeros:
        parts.check("weight_zero_point", WORDS, (-(-rows // per), groups))

    def load(parts: Parts) -> Loaded:
        zeros = None
        if has_zeros:
            zeros = unpacked(parts.whole("weight_zero_point", "<u4").T, bits)[:, :rows].T
            zeros = np.ascontiguousarray(zeros)

        def codes(start: int, stop: int) -> Codes:
            found = unpacked(parts.rows("weight_packed", start, stop, "<u4"), bits)[:, :columns]
            return found if has_zeros else signed(found, bits)

        return Loaded(codes, parts.floats("weight_scale").reshape(-1, groups), zeros, None, group_of)

    order, named = ordered(group_of, size)
    kind = PackedKind("compressed-tensors", f"{'u' if has_zeros else ''}int{bits}", size, 1, group_of is not None,
                      named)
    return PackedTensor(name, kind, (rows, columns), parts, load, recent, order)


def bytewise(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """A code of 8 bits for each weight, an integer or a float."""
    if parts.stored("weight").dtype == "F8_E4M3":
        return fp8(name, parts, scheme, recent, "weight_scale")
    rows, columns = parts.check("weight", ("I8",), (None, None))
    groups, size = _scale_groups(parts, rows, columns, scheme)
    group_of = order_of(parts, "weight_g_idx", columns, size, groups)
    has_zeros = "weight_zero_point" in parts
    if has_zeros:
        parts.check("weight_zero_point", ("I8",), parts.stored("weight_scale").shape)

    def load(parts: Parts) -> Loaded:
        zeros = None
        if has_zeros:
            stored = parts.whole("weight_zero_point", "u1").reshape(-1, groups) ^ np.uint8(128)
            zeros = np.ascontiguousarray(np.broadcast_to(stored, (rows, groups)))

        def codes(start: int, stop: int) -> Codes:
            found = parts.rows("weight", start, stop, "u1")
            return found ^ np.uint8(128) if has_zeros else found.view(np.int8)

        return Loaded(codes, parts.floats("weight_scale").reshape(-1, groups), zeros, None, group_of)

    order, named = ordered(group_of, size)
    kind = PackedKind("compressed-tensors", f"{'u' if has_zeros else ''}int8", size, 1, group_of is not None, named)
    return PackedTensor(name, kind, (rows, columns), parts, load, recent, order)


def _fp4(name: str, parts: Parts, recent: Recent) -> PackedTensor:
    """Floats of 4 bits, two in a byte: NVFP4 (16 share an E4M3 scale, divided by one of all) or MXFP4 (32, a power)."""
    rows, nbytes = parts.check("weight_packed", ("U8",), (None, None))
    columns = 2 * nbytes
    size = 16 if "weight_scale" in parts and parts.stored("weight_scale").dtype == "F8_E4M3" else 32
    groups = whole_groups(parts, columns, size)
    parts.check("weight_scale", ("F8_E4M3",) if size == 16 else ("U8", "F8_E8M0"), (rows, groups))
    if size == 16:
        parts.check("weight_global_scale", ("F32",), (1,))

    def load(parts: Parts) -> Loaded:
        scales = parts.floats("weight_scale")
        if size == 16:
            whole = parts.floats("weight_global_scale")[0]
            if whole <= 0:
                raise CheckpointError(f"The module {parts.name:.100} in {parts.path} has a weight_global_scale of "
                                      f"{whole}, which cannot be divided by; download the file again.")
            scales = scales / whole
        return Loaded(lambda start, stop: nibbles(parts.rows("weight_packed", start, stop, "u1")), scales, levels=E2M1)

    kind = PackedKind("NVFP4" if size == 16 else "MXFP4", "e2m1", size)
    return PackedTensor(name, kind, (rows, columns), parts, load, recent)


def fp8(name: str, parts: Parts, scheme: Scheme, recent: Recent, scale: str = "weight_scale_inv") -> PackedTensor:
    """Floats of 8 bits, a scale for each block, each row, each group of columns, or all."""
    rows, columns = parts.check("weight", ("F8_E4M3",), (None, None))
    have = parts.stored(scale).shape if scale in parts else ()
    high, wide = scheme.block
    if scheme.blocks:  # of several groups of modules: the scales tell
        high, wide = next((one for one in scheme.blocks if have == _blocks(rows, columns, one)), (0, 0))
    if prod(have) == 1:
        high, wide, wanted = 1, 0, have
    elif high:
        wanted = _blocks(rows, columns, (high, wide))
    else:
        high, (_, wide), wanted = 1, _scale_groups(parts, rows, columns, scheme, (*SCALES, "U8")), have
    parts.check(scale, (*SCALES, "F8_E8M0", "U8"), wanted)
    group_of = order_of(parts, "weight_g_idx", columns, wide, have[-1] if len(have) == 2 else 1)

    def load(parts: Parts) -> Loaded:
        scales = parts.floats(scale)
        return Loaded(lambda start, stop: parts.rows("weight", start, stop, "u1"),
                      scales.reshape(1 if scales.size == 1 else len(scales), -1), None, None, group_of, E4M3)

    kind = PackedKind("FP8", "e4m3", wide, high, group_of is not None, ordered(group_of, wide)[1])
    return PackedTensor(name, kind, (rows, columns), parts, load, recent)


def _blocks(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


def _scale_groups(parts: Parts, rows: int, columns: int, scheme: Scheme, scales: tuple[str, ...] = SCALES
                  ) -> tuple[int, int]:
    """Groups of a row and their size, which the number of scales tells."""
    have = parts.stored("weight_scale").shape if "weight_scale" in parts else (rows, 1)
    if prod(have) == 1 or have == (rows,) or have == (rows, 1):
        parts.check("weight_scale", scales, have)
        return 1, 0
    sizes = [size for size in scheme.group_sizes if size and have == (rows, -(-columns // size))]
    wanted = (rows, groups_of(columns, sizes[0] if sizes else scheme.group_size))
    parts.check("weight_scale", scales, wanted)
    return wanted[1], sizes[0] if sizes else 0
