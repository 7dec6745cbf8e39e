"""Layouts byte for byte against the loops of the oracle, at odd sizes, and the way back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import BundleError
from edgeinfer.kernels.reference.rope import head_views
from edgeinfer.quant import KV_TYPES, TYPES, KvType, WeightType, kv, packed
from edgeinfer.quant.layouts import (
    dequantise,
    neuron_codes,
    pack_neuron,
    pack_tile16,
    tile16_codes,
    unpack_neuron,
    unpack_tile16,
)
from tests.helpers import layouts_oracle as oracle

SHAPES = [(1, 1), (7, 31), (31, 33), (33, 7), (16, 64), (17, 127), (127, 33), (1, 1023), (1023, 1), (48, 160)]
GROUPS = (32, 64, 128)


def random_codes(shape: tuple[int, ...], dtype: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sum(shape) + group)
    low, high = TYPES[dtype].grid
    codes = rng.integers(low, high + 1, shape, dtype=np.int8)
    scales = rng.standard_normal((*shape[:-1], -(-shape[-1] // group))).astype(np.float16)
    return codes, scales


@pytest.mark.slow(keep=20)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", ["q4", "int8"])
def test_tile16_codes(dtype: str, group: int, shape: tuple[int, int]) -> None:
    codes, scales = random_codes(shape, dtype, group)
    packed = pack_tile16(codes, dtype, group, scales)
    assert packed.tobytes() == oracle.tile16(codes, dtype, group, scales)
    assert packed.size == WeightType(dtype, group).nbytes(shape)
    back_codes, back_scales = tile16_codes(packed, dtype, group, shape)
    np.testing.assert_array_equal(back_codes, codes)
    np.testing.assert_array_equal(back_scales, scales)
    spread = np.repeat(scales.astype(np.float32), group, axis=1)[:, : shape[1]]
    np.testing.assert_array_equal(unpack_tile16(packed, dtype, group, shape), codes * spread)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_tile16_floats(dtype: str, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    packed = pack_tile16(values, dtype)
    assert packed.tobytes() == oracle.tile16(values, dtype)
    assert packed.size == WeightType(dtype).nbytes(shape)
    want = values.astype(np.float16).astype(np.float32) if dtype == "f16" else values
    np.testing.assert_array_equal(unpack_tile16(packed, dtype, 0, shape), want)


@pytest.mark.parametrize("dtype", ["q4", "int8"])
def test_tile16_packs_by_blocks_of_rows(dtype: str) -> None:
    codes, scales = random_codes((55, 70), dtype, 32)
    blocks = [pack_tile16(codes[i : i + 32], dtype, 32, scales[i : i + 32]) for i in (0, 32)]
    np.testing.assert_array_equal(np.concatenate(blocks), pack_tile16(codes, dtype, 32, scales))


@pytest.mark.parametrize("hidden", [1, 7, 31, 33, 127, 160, 1023])
@pytest.mark.parametrize(("dtype", "group"), [(name, group) for name, row in TYPES.items()
                                              for group in row.neuron_groups])
def test_neuron(dtype: str, group: int, hidden: int) -> None:
    shape = (5, 3, hidden)
    codes, scales = random_codes(shape, dtype, group)
    packed = pack_neuron(codes, dtype, group, scales)
    assert packed.tobytes() == oracle.neuron(codes, dtype, group, scales)
    assert packed.size == WeightType(dtype, group, "neuron").nbytes(shape)
    back_codes, back_scales = neuron_codes(packed, dtype, group, shape)
    np.testing.assert_array_equal(back_codes, codes)
    np.testing.assert_array_equal(back_scales, scales)
    spread = np.repeat(scales.astype(np.float32), group, axis=2)[..., :hidden]
    np.testing.assert_array_equal(unpack_neuron(packed, dtype, group, shape), codes * spread)


@pytest.mark.parametrize("name", [name for name, row in TYPES.items() if row.scale and not row.usual])
@pytest.mark.parametrize("shape", [(7, 31), (33, 96), (16, 256), (17, 512), (48, 160)])
def test_tile16_of_types_that_files_have(name: str, shape: tuple[int, int]) -> None:
    """Byte for byte, the way back, and the weights: level x scale + minimum."""
    row, rng = TYPES[name], np.random.default_rng(shape[1])
    own = tuple(range(-63, (1 << row.bits) - 63)) if row.fitted else ()
    stored, (rows, cols) = replace(WeightType.of(name), levels=own), shape
    if row.nested and cols % 256:
        with pytest.raises(BundleError, match=rf"does not fit type {name}, whose rows are whole blocks of 256 columns"):
            stored.nbytes(shape)
        return
    kind = {"f16": np.float16, "u8*f16": np.uint8, "i8*f16": np.int8}[row.scale]
    groups, inner, outer = -(-cols // stored.group_size), [], []
    for _ in range(row.factors):
        inner.append(rng.integers(0, 100, (rows, groups)).astype(kind) - kind(40))
        outer += [rng.standard_normal((rows, cols // 256)).astype(np.float16)] if row.nested else []
    held = rng.integers(0, 1 << row.bits, shape).astype(np.uint8)
    codes = (held - np.uint8(row.offset)).view(np.int8)
    factors = packed.Factors(inner[0], inner[1] if row.minimum else None, *outer)
    data = packed.pack(codes, stored, factors)
    padded = np.full((rows, groups * stored.group_size), row.offset, np.uint8)
    padded[:, :cols] = held
    assert data.tobytes() == oracle.tile16_packed(padded, row.bits, stored.group_size, inner, outer)
    assert data.size == stored.nbytes(shape)
    back, found = packed.unpack(data, stored, shape)
    np.testing.assert_array_equal(back, codes)
    for have, want in zip(found, factors, strict=True):
        assert (have is None) == (want is None)
        np.testing.assert_array_equal(have, want)
    spread = [np.repeat(part.astype(np.float64), stored.group_size, axis=1)[:, :cols] for part in inner]
    if row.nested:
        spread = [part * np.repeat(whole.astype(np.float64), 256, axis=1)
                  for part, whole in zip(spread, outer, strict=True)]
    levels = np.array(stored.table)[held] if row.indexed else held.astype(np.float64) - row.offset
    weights = levels * spread[0] + (spread[1] if row.minimum else 0)
    np.testing.assert_allclose(unpack_tile16(data, name, stored.group_size, shape, own), weights, rtol=1e-5, atol=1e-4)


def test_more_than_65536_columns() -> None:
    codes, scales = random_codes((1, 65537), "q4", 32)
    packed = pack_tile16(codes, "q4", 32, scales)
    np.testing.assert_array_equal(
        unpack_tile16(packed, "q4", 32, (1, 65537)), dequantise(codes, scales, 32)
    )


def test_scales_must_belong_to_the_codes() -> None:
    codes, scales = random_codes((4, 40), "q4", 32)
    with pytest.raises(ValueError, match=r"q4 codes of shape \(4, 40\) need float16 scales for each group of 32"):
        pack_tile16(codes, "q4", 32)
    with pytest.raises(ValueError, match="need float16 scales"):
        pack_neuron(codes[None, :3], "q4", 32, scales[None, :3].astype(np.float32))


def test_bytes_must_belong_to_the_shape() -> None:
    codes, scales = random_codes((4, 40), "q4", 32)
    packed = pack_tile16(codes, "q4", 32, scales)
    with pytest.raises(ValueError, match=r"the layout needs 1728 bytes, but \(576,\) of uint8 were given"):
        unpack_tile16(packed, "q4", 32, (4, 140))


KV = {**KV_TYPES, "int4": KvType(4, scale_bytes=2)}
"""Types of KV, and one that no kernel stores yet: where its bytes lie follows from its row."""


def kv_byte(kind: KvType, token: int, element: int, padded: int, values: bool) -> int:
    """The byte of a block of 16 tokens in which an element begins, by counting, as rope_store's kernels place it."""
    at = element * kind.bits // 8
    if not kind.scaled:
        size = kind.bits // 8
        return (token * padded + element) * size if values else (element * 16 + token) * size
    row = padded * kind.bits // 8
    return token // 4 * 4 * row + 4 * at + token % 4 if values else at // 4 * 64 + 4 * token + at % 4


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("name", KV)
def test_kv_blocks_byte_by_byte(name: str, values: bool) -> None:
    kind, padded, rng = KV[name], 48, np.random.default_rng(4)
    rows = rng.integers(-kind.highest, kind.highest + 1, (16, padded)) if kind.scaled else rng.random((16, padded))
    rows = rows.astype(kv.element_type(kind))
    pack, unpack = (kv.pack_values, kv.unpack_values) if values else (kv.pack_keys, kv.unpack_keys)
    data = pack(rows, kind)
    assert data.shape == (kind.element_bytes(16 * padded),)
    np.testing.assert_array_equal(unpack(data, kind, 16), rows)
    for token, element in ((0, 0), (1, 0), (0, 1), (5, 7), (15, 47), (3, 18)):
        at, size = kv_byte(kind, token, element, padded, values), max(kind.bits // 8, 1)
        found = data[at : at + size].view(kv.element_type(kind))[0]
        if kind.bits == 4:
            found = np.int8(found << 4 >> 4 if element % 2 == 0 else found >> 4)
        assert found == rows[token, element]


@pytest.mark.parametrize("name", KV)
def test_a_token_is_seen_where_its_row_lies(name: str) -> None:
    """Live views, by which references of stores go, and the rows of whole blocks are the same elements."""
    kind, heads, head_dim, blocks, rng = KV[name], 2, 20, 3, np.random.default_rng(5)
    block_bytes = kind.element_bytes(16 * 32)
    memory = rng.integers(0, 256, 2 * heads * blocks * (block_bytes + 64), np.uint8)
    k, v = memory[: 2 * heads * blocks * block_bytes].reshape(2, heads, blocks, block_bytes)
    view: Any = SimpleNamespace(array=lambda operand, dtype, shape, strides, at: np.ndarray(
        shape, dtype, memory, at, strides))
    for slot in (0, 17, 47):
        k_at, v_at, *_scales = head_views(view, kind, head_dim, block_bytes, blocks, heads, slot)
        for found, planes, unpack in ((k_at, k, kv.unpack_keys), (v_at, v, kv.unpack_values)):
            want = unpack(np.ascontiguousarray(planes[:, slot // 16]), kind, 16)[:, slot % 16]
            whole = kv.elements(found, kind) if kind.bits < 8 else found
            assert whole.reshape(heads, -1).tobytes() == np.ascontiguousarray(want).tobytes()
