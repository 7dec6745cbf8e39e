"""From the parts of a quantised module to rows of codes: one function for each way of packing.

Layouts: AutoGPTQ and GPTQModel (qweight [in / n, out], packed along the inputs; qzeros [groups, out / n]), AutoAWQ's
gemm (qweight [in, out / 8], packed along the outputs, interleaved), compressed-tensors (weight_packed [out, in / n]),
MLX (weight [out, in / n] of uint32), transformers' FP8 by blocks and MXFP4.
"""

from __future__ import annotations

import hashlib
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError

from .packed_bits import AWQ_ORDER, E2M1, E4M3, nibbles, signed, unpacked
from .packed_config import Scheme
from .packed_kinds import PackedKind
from .packed_tensor import Loaded, PackedTensor, Parts, Recent

WORDS, SCALES = ("I32", "U32"), ("F16", "BF16", "F32")
Codes = NDArray[Any]


def gptq(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Codes of several inputs in a word, a zero point for each group; inputs may be in groups in any order."""
    bits, per = scheme.bits, 32 // scheme.bits
    words, rows = parts.check("qweight", WORDS, (None, None))
    columns = words * per
    groups = _groups(columns, scheme.group_size)
    parts.check("qzeros", WORDS, (groups, -(-rows // per)))
    parts.check("scales", SCALES, (groups, rows))
    group_of = _order(parts, "g_idx", columns, scheme.group_size, groups)

    def load(parts: Parts) -> Loaded:
        packed = parts.whole("qweight", "<u4")
        zeros = _gptq_zeros(parts, scheme, rows)

        def codes(start: int, stop: int) -> Codes:
            found = unpacked(packed[:, start:stop].T, bits)
            return found if zeros is not None else signed(found, bits)

        return Loaded(codes, np.ascontiguousarray(parts.floats("scales").T), zeros, None, group_of)

    order, named = _ordered(group_of, scheme.group_size)
    kind = PackedKind("GPTQ", f"{'' if scheme.symmetric else 'u'}int{bits}", _size(columns, scheme.group_size),
                      1, group_of is not None, named)
    return PackedTensor(name, kind, (rows, columns), parts, load, recent, order)


def _gptq_zeros(parts: Parts, scheme: Scheme, rows: int) -> NDArray[np.uint8] | None:
    """Zero points (rows, groups); None where all are half of the range, as the config says.

    Zero points of 8 appear in files that say they store them less one (vllm-project/vllm#38966): symmetric are both.
    """
    half, most = 1 << scheme.bits - 1, (1 << scheme.bits) - 1
    stored = unpacked(parts.whole("qzeros", "<u4"), scheme.bits)[:, :rows].T
    if scheme.symmetric:
        if (stored == half).all() or (scheme.stored_minus_one and (stored == half - 1).all()):
            return None
        raise CheckpointError(f"The module {parts.name:.100} in {parts.path} has other zero points than {half}, but "
                              "the config says sym; set sym to false if its weights are not symmetric.")
    if not scheme.stored_minus_one:
        return np.ascontiguousarray(stored)
    if stored.max(initial=0) == most:
        raise CheckpointError(f"The module {parts.name:.100} in {parts.path} has a zero point of {most + 1}, beyond "
                              f"{scheme.bits} bits, which programs read as {most + 1} or as 0; quantise the model "
                              "again, with checkpoint_format gptq_v2.")
    return stored + np.uint8(1)


def awq(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Codes of 8 outputs in a word, in an order of their own, a zero point for each group."""
    columns, words = parts.check("qweight", WORDS, (None, None))
    groups = _whole_groups(parts, columns, scheme.group_size)
    rows = words * 8
    parts.check("qzeros", WORDS, (groups, words))
    parts.check("scales", SCALES, (groups, rows))

    def load(parts: Parts) -> Loaded:
        packed = parts.whole("qweight", "<u4")

        def codes(start: int, stop: int) -> Codes:
            first = start // 8
            found = _awq_outputs(packed[:, first : -(-stop // 8)])
            return np.ascontiguousarray(found[:, start - first * 8 : stop - first * 8].T)

        zeros = np.ascontiguousarray(_awq_outputs(parts.whole("qzeros", "<u4")).T)
        return Loaded(codes, np.ascontiguousarray(parts.floats("scales").T), zeros)

    kind = PackedKind("AWQ", "uint4", _size(columns, scheme.group_size))
    return PackedTensor(name, kind, (rows, columns), parts, load, recent)


def _awq_outputs(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Codes (n, outputs) in the order of the outputs."""
    return unpacked(words, 4).reshape(len(words), -1, 8)[..., AWQ_ORDER].reshape(len(words), -1)


def mlx(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Codes along the rows, with a scale and a minimum (called bias) for each group; those of experts are stacked."""
    bits, size = scheme.of_module(name.removesuffix(".weight"))
    stacked = len(parts.stored("weight").shape) == 3
    *leading, words = parts.check("weight", ("U32",), (None,) * (2 + stacked))
    columns = words * 32 // bits
    groups = _whole_groups(parts, columns, size)
    parts.check("scales", SCALES, (*leading, groups))
    parts.check("biases", SCALES, (*leading, groups))

    def load(parts: Parts) -> Loaded:
        def codes(start: int, stop: int) -> Codes:
            return unpacked(parts.rows("weight", start, stop, "<u4", len(leading)), bits)

        scales, minima = parts.floats("scales"), parts.floats("biases", "bias")
        return Loaded(codes, scales.reshape(-1, groups), None, minima.reshape(-1, groups))

    return PackedTensor(name, PackedKind("MLX", f"uint{bits}", size), (*leading, columns), parts, load, recent)


def compressed_packed(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Codes along the rows of a tensor whose shape is stored beside them; zero points are packed along the outputs."""
    rows, words = parts.check("weight_packed", WORDS, (None, None))
    parts.check("weight_shape", ("I64", "I32"), (2,))
    shape = parts.whole("weight_shape", "<i8" if parts.stored("weight_shape").dtype == "I64" else "<i4").tolist()
    columns = shape[1]
    bits = next((bits for bits in (4, 8) if columns > 0 and -(-columns // (32 // bits)) == words), 0)
    if shape[0] != rows or not bits:
        raise CheckpointError(f"The module {parts.name:.100} in {parts.path} says that its shape is {shape}, but has "
                              f"{rows} rows of {words} words of 32 bits; codes of 4 or 8 bits need others.")
    groups, size = _compressed_groups(parts, rows, columns, scheme)
    group_of = _order(parts, "weight_g_idx", columns, size, groups)
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

    order, named = _ordered(group_of, size)
    kind = PackedKind("compressed-tensors", f"{'u' if has_zeros else ''}int{bits}", size, 1, group_of is not None,
                      named)
    return PackedTensor(name, kind, (rows, columns), parts, load, recent, order)


def compressed(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """A code of 8 bits for each weight, an integer or a float."""
    if parts.stored("weight").dtype == "F8_E4M3":
        return fp8(name, parts, scheme, recent, "weight_scale")
    rows, columns = parts.check("weight", ("I8",), (None, None))
    groups, size = _compressed_groups(parts, rows, columns, scheme)
    group_of = _order(parts, "weight_g_idx", columns, size, groups)
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

    order, named = _ordered(group_of, size)
    kind = PackedKind("compressed-tensors", f"{'u' if has_zeros else ''}int8", size, 1, group_of is not None, named)
    return PackedTensor(name, kind, (rows, columns), parts, load, recent, order)


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
        high, (_, wide), wanted = 1, _compressed_groups(parts, rows, columns, scheme), have
    parts.check(scale, (*SCALES, "F8_E8M0"), wanted)
    group_of = _order(parts, "weight_g_idx", columns, wide, have[-1] if len(have) == 2 else 1)

    def load(parts: Parts) -> Loaded:
        scales = parts.floats(scale)
        return Loaded(lambda start, stop: parts.rows("weight", start, stop, "u1"),
                      scales.reshape(1 if scales.size == 1 else len(scales), -1), None, None, group_of, E4M3)

    kind = PackedKind("FP8", "e4m3", wide, high, group_of is not None, _ordered(group_of, wide)[1])
    return PackedTensor(name, kind, (rows, columns), parts, load, recent)


def _blocks(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


def mxfp4(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Floats of 4 bits, 32 of which share an exponent; matrices of experts are stacked."""
    leading = parts.stored("blocks").shape[:-1]
    parts.check("blocks", ("U8",), (*leading, 16) if len(leading) > 1 else (None, None, 16))
    parts.check("scales", ("U8",), leading)
    groups = leading[-1]

    def load(parts: Parts) -> Loaded:
        exponents = parts.whole("scales", "u1").reshape(-1, groups)
        if (exponents == 255).any():
            raise CheckpointError(f"The tensor {parts.name:.100}_scales in {parts.path} has a scale that is NaN; "
                                  "download the file again.")

        def codes(start: int, stop: int) -> Codes:
            return nibbles(parts.rows("blocks", start, stop, "u1", len(leading) - 1).reshape(-1, groups * 16))

        return Loaded(codes, np.ldexp(np.float32(1), exponents.astype(np.int32) - 127), levels=E2M1)

    return PackedTensor(name, PackedKind("MXFP4", "e2m1", 32), (*leading[:-1], groups * 32), parts, load, recent)


def _size(columns: int, size: int) -> int:
    """Columns of a group; 0 where a row is one."""
    return size if size < columns else 0


def _groups(columns: int, size: int) -> int:
    return -(-columns // size) if size else 1


def _whole_groups(parts: Parts, columns: int, size: int) -> int:
    """Number of groups of a row, which they fill."""
    if size and columns % size:
        raise CheckpointError(f"The module {parts.name:.100} in {parts.path} has rows of {columns} weights, which "
                              f"groups of {size} do not fill; the config and the tensors do not fit together.")
    return _groups(columns, size)


def _compressed_groups(parts: Parts, rows: int, columns: int, scheme: Scheme) -> tuple[int, int]:
    """Groups of a row and their size, which the number of scales tells."""
    have = parts.stored("weight_scale").shape if "weight_scale" in parts else (rows, 1)
    if prod(have) == 1 or have == (rows,) or have == (rows, 1):
        parts.check("weight_scale", SCALES, have)
        return 1, 0
    sizes = [size for size in scheme.group_sizes if size and have == (rows, -(-columns // size))]
    wanted = (rows, _groups(columns, sizes[0] if sizes else scheme.group_size))
    parts.check("weight_scale", SCALES, wanted)
    return wanted[1], sizes[0] if sizes else 0


def _order(parts: Parts, part: str, columns: int, size: int, groups: int) -> NDArray[np.intp] | None:
    """The group of each column; None where the columns of a group follow each other."""
    if part not in parts:
        return None
    parts.check(part, ("I32", "I64"), (columns,))
    found = parts.whole(part, "<i4" if parts.stored(part).dtype == "I32" else "<i8").astype(np.intp)
    if found.min() < 0 or found.max() >= groups:
        bad = found.min() if found.min() < 0 else found.max()
        raise CheckpointError(f"The {part} of the module {parts.name:.100} in {parts.path} has the group {bad}; there "
                              f"are groups 0 to {groups - 1}.")
    return None if np.array_equal(found, np.arange(columns) // (size or columns)) else found


def _ordered(group_of: NDArray[np.intp] | None, size: int) -> tuple[NDArray[np.int32] | None, str]:
    """Columns by their groups, in their own order within one, and a name for this; none where groups are not full."""
    if group_of is None:
        return None, ""
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    if not np.array_equal(group_of[order], np.arange(len(order)) // (size or len(order))):
        return None, ""
    return order, hashlib.sha256(order.tobytes()).hexdigest()[:16]
