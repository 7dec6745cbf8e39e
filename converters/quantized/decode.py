"""From the parts of a quantised module to rows of codes: one function for each way of packing.

Layouts: AutoGPTQ and GPTQModel (qweight [in / n, out], packed along the inputs; qzeros [groups, out / n]), AutoAWQ's
gemm (qweight [in, out / 8], packed along the outputs, interleaved), compressed-tensors (weight_packed [out, in / n]),
MLX (weight [out, in / n] of uint32), transformers' FP8 by blocks, MXFP4 and BitNet (weight [out / 4, in]).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError

from .bits import AWQ_ORDER, E2M1, E4M3, nibbles, signed, unpacked
from .kinds import PackedKind
from .parts import SCALES, WORDS, groups_of, order_of, ordered, size_of, whole_groups
from .scheme import Scheme
from .tensor import Loaded, PackedTensor, Parts, Recent

Codes = NDArray[Any]


def gptq(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Codes of several inputs in a word, a zero point for each group; inputs may be in groups in any order."""
    bits, per = scheme.bits, 32 // scheme.bits
    words, rows = parts.check("qweight", WORDS, (None, None))
    columns = words * per
    groups = groups_of(columns, scheme.group_size)
    parts.check("qzeros", WORDS, (groups, -(-rows // per)))
    parts.check("scales", SCALES, (groups, rows))
    group_of = order_of(parts, "g_idx", columns, scheme.group_size, groups)

    def load(parts: Parts) -> Loaded:
        packed = parts.whole("qweight", "<u4")
        zeros = _gptq_zeros(parts, scheme, rows)

        def codes(start: int, stop: int) -> Codes:
            found = unpacked(packed[:, start:stop].T, bits)
            return found if zeros is not None else signed(found, bits)

        return Loaded(codes, np.ascontiguousarray(parts.floats("scales").T), zeros, None, group_of)

    order, named = ordered(group_of, scheme.group_size)
    kind = PackedKind("GPTQ", f"{'' if scheme.symmetric else 'u'}int{bits}", size_of(columns, scheme.group_size),
                      1, group_of is not None, named)
    return PackedTensor(name, kind, (rows, columns), parts, load, recent, order)


def _gptq_zeros(parts: Parts, scheme: Scheme, rows: int) -> NDArray[np.uint8] | None:
    """Zero points (rows, groups); None if all are half of the range, as the config says.

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
    groups = whole_groups(parts, columns, scheme.group_size)
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

    kind = PackedKind("AWQ", "uint4", size_of(columns, scheme.group_size))
    return PackedTensor(name, kind, (rows, columns), parts, load, recent)


def _awq_outputs(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Codes (n, outputs) in the order of the outputs."""
    return unpacked(words, 4).reshape(len(words), -1, 8)[..., AWQ_ORDER].reshape(len(words), -1)


def mlx(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Codes along the rows, with a scale and a minimum (called bias) for each group; those of experts are stacked."""
    bits, size, mode = scheme.of_module(name.removesuffix(".weight"))
    if mode != "affine":
        return _mlx_floats(name, parts, mode, size, recent)
    stacked = len(parts.stored("weight").shape) == 3
    *leading, words = parts.check("weight", ("U32",), (None,) * (2 + stacked))
    columns = words * 32 // bits
    groups = whole_groups(parts, columns, size)
    parts.check("scales", SCALES, (*leading, groups))
    parts.check("biases", SCALES, (*leading, groups))

    def load(parts: Parts) -> Loaded:
        def codes(start: int, stop: int) -> Codes:
            return unpacked(parts.rows("weight", start, stop, "<u4", len(leading)), bits)

        scales, minima = parts.floats("scales"), parts.floats("biases", "bias")
        return Loaded(codes, scales.reshape(-1, groups), None, minima.reshape(-1, groups))

    return PackedTensor(name, PackedKind("MLX", f"uint{bits}", size), (*leading, columns), parts, load, recent)


def _mlx_floats(name: str, parts: Parts, mode: str, size: int, recent: Recent) -> PackedTensor:
    """MLX's mxfp4, nvfp4 and mxfp8: floats of 4 or 8 bits, with a scale that is a float of 8 bits for each group."""
    stacked = len(parts.stored("weight").shape) == 3
    *leading, words = parts.check("weight", ("U32",), (None,) * (2 + stacked))
    columns = words * (4 if mode == "mxfp8" else 8)
    groups = whole_groups(parts, columns, size)
    parts.check("scales", ("U8",), (*leading, groups))

    def load(parts: Parts) -> Loaded:
        def codes(start: int, stop: int) -> Codes:
            return unpacked(parts.rows("weight", start, stop, "<u4", len(leading)), 8 if mode == "mxfp8" else 4)

        scales = E4M3[parts.whole("scales", "u1")] if mode == "nvfp4" else parts.floats("scales")
        if np.isnan(scales).any():
            raise CheckpointError(f"The scales of {parts.name:.100} in {parts.path} have one that is NaN; download the "
                                  "file again.")
        return Loaded(codes, scales.reshape(-1, groups), levels=E4M3 if mode == "mxfp8" else E2M1)

    kind = PackedKind(mode.upper(), "e4m3" if mode == "mxfp8" else "e2m1", size)
    return PackedTensor(name, kind, (*leading, columns), parts, load, recent)


HALVES = (2.0**-24, 65504.0)
"""Least and largest positive value of fp16."""


def bitnet(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Codes -1 to 2, less one in fields of 2 bits: field i of a byte is of the i-th quarter of the rows; one scale."""
    quarter, columns = parts.check("weight", ("U8",), (None, None))
    parts.check("weight_scale", SCALES, (1,))

    def load(parts: Parts) -> Loaded:
        scale = parts.floats("weight_scale").reshape(1, 1)
        (low, high), held = ((1 / HALVES[1], 1 / HALVES[0]), "its reciprocal") if scheme.divided else (HALVES, "it")
        if not low <= scale[0, 0] <= high:
            raise CheckpointError(f"The scale of {parts.name:.100} in {parts.path} is {scale[0, 0]:g}; it must be from "
                                  f"{low:.3g} to {high:.3g}, so that fp16 holds {held}: download the file again.")

        def codes(start: int, stop: int) -> Codes:
            runs = [(i, max(start - i * quarter, 0), min(stop - i * quarter, quarter)) for i in range(4)]
            fields = [parts.rows("weight", low, high, "u1") >> np.uint8(2 * i) for i, low, high in runs if low < high]
            return (np.concatenate(fields) & np.uint8(3)).view(np.int8) - np.int8(1)

        return Loaded(codes, np.reciprocal(scale) if scheme.divided else scale)

    return PackedTensor(name, PackedKind("BitNet", "int2"), (4 * quarter, columns), parts, load, recent)


def bitnet_online(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Floats that training rounds: the scale is the mean of |w|, codes are w / scale, -1 to 1 (arXiv 2402.17764)."""
    rows, columns = parts.check("weight", ("F32", "F16", "BF16"), (None, None))

    def load(parts: Parts) -> Loaded:
        mean = np.abs(parts.floats("weight", "weight")).mean(dtype=np.float64)
        inverse = np.float32(1) / np.float32(max(mean, 1e-5))

        def codes(start: int, stop: int) -> Codes:
            return np.clip(np.rint(parts.float_rows("weight", start, stop) * inverse), -1, 1).astype(np.int8)

        return Loaded(codes, np.reciprocal(inverse).reshape(1, 1))

    return PackedTensor(name, PackedKind("BitNet", "int2"), (rows, columns), parts, load, recent)


def mxfp4(name: str, parts: Parts, scheme: Scheme, recent: Recent) -> PackedTensor:
    """Floats of 4 bits; 32 of them share an exponent; matrices of experts are stacked."""
    leading = parts.stored("blocks").shape[:-1]
    parts.check("blocks", ("U8",), (*leading, 16) if len(leading) > 1 else (None, None, 16))
    parts.check("scales", ("U8",), leading)
    groups = leading[-1]

    def load(parts: Parts) -> Loaded:
        scales = parts.floats("scales").reshape(-1, groups)

        def codes(start: int, stop: int) -> Codes:
            return nibbles(parts.rows("blocks", start, stop, "u1", len(leading) - 1).reshape(-1, groups * 16))

        return Loaded(codes, scales, levels=E2M1)

    return PackedTensor(name, PackedKind("MXFP4", "e2m1", 32), (*leading[:-1], groups * 32), parts, load, recent)
