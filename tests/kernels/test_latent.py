"""Latent attention on every instruction set: products of heads, what is stored of a token, attention whose V is K's."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.graph import RopeConfig, rope_tables
from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import ATTENTION, LATENT, LINEAR, ROWS, SCREEN, fill
from edgeinfer.quant import KV_TYPES, WeightType
from edgeinfer.quant import kv as kv_layout
from tests.helpers.attention_layer import KV, Layer, Sequence, chain_of
from tests.helpers.kernel_bench import ISAS, Bench, isas, token_tiles
from tests.kernels.test_matmul import kernel_name, random_weights

SIZES = [(3, 16, 6), (16, 64, 16), (5, 48, 10)]
"""(heads, rank, rotated dimensions)."""


class LatentLayer(Layer):
    """A layer whose blocks hold K alone."""

    def __init__(self, kv: str, size: tuple[int, int, int], sequences: list[Sequence], seed: int = 0):
        self.rank, self.turning = size[1:]
        super().__init__(kv, (size[0], 1, sum(size[1:])), sequences, seed=seed)
        self.turned = -(-self.scratch_bytes // 64) * 64
        self.scratch_bytes = self.turned + abi.SPLIT_BLOCKS * abi.kv_block_bytes(kv, self.rank)  # no more than it needs
        self.operands[3] = self.bench.scratch(self.scratch_bytes, 3)

    def _stale_blocks(self, rng: np.random.Generator) -> np.ndarray:
        whole, keys = super()._stale_blocks(rng), self.blocks * self.block_bytes
        return np.concatenate([whole[:keys], whole[2 * keys :]])

    def parameters(self, tile: int | None = None) -> list[int]:
        given = super().parameters(tile)
        given[ATTENTION.values], given[ATTENTION.turned] = self.rank, self.turned
        return given


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv", KV)
def test_latent_attention_agrees_with_its_reference(kv: str, size: tuple[int, int, int]) -> None:
    tree = Sequence(250, 9, [-1, 0, 0, 1, 1, 2, 4, 4, 3])
    for sequences in (chain_of(1), chain_of(3, 30), chain_of(19, 245), [Sequence(270, 1), tree, Sequence(5, 2)]):
        layer = LatentLayer(kv, size, sequences)
        for isa in ISAS:
            whole = layer.attend(isa)
            np.testing.assert_array_equal(layer.attend(isa, threads=2, tile=1), whole)
            np.testing.assert_array_equal(layer.attend_in_splits(isa), whole)
            np.testing.assert_array_equal(layer.attend_in_splits(isa, threads=3), whole)


@pytest.mark.parametrize("kv", KV)
def test_v_that_is_made_of_k_gives_the_bits_of_v_that_is_stored(kv: str) -> None:
    """Blocks that hold the beginning of K once more, as V, with the scales of K."""
    heads, rank, turning = 4, 32, 16
    latent, n = LatentLayer(kv, (heads, rank, turning), chain_of(3, 290)), rank + turning
    stored = Layer(kv, (heads, 1, n), chain_of(3, 290))
    bench, size = stored.bench, stored.block_bytes
    k = latent.bench.array(latent.operands[2], np.uint8, (latent.blocks, size))
    kind = KV_TYPES[kv]
    planes = bench.array(stored.operands[2], np.uint8, (2, latent.blocks, size))
    planes[0], planes[1] = k, kv_layout.pack_values(kv_layout.unpack_keys(k, kind, 16), kind)
    scales = 64 * latent.blocks if kind.scaled else 0
    bench.array(stored.operands[2] + 2 * k.size, np.uint8, (scales,))[:] = \
        latent.bench.array(latent.operands[2] + k.size, np.uint8, (scales,))
    q = latent.bench.array(latent.operands[0], np.uint8, (3 * latent.q_stride,))
    bench.array(stored.operands[0], np.uint8, (3 * stored.q_stride,))[:] = q
    for isa in ISAS:
        want = stored.attend(isa).reshape(3, heads, n)[..., :rank]
        np.testing.assert_array_equal(latent.attend(isa).reshape(3, heads, rank), want)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("still", [0, 1])
def test_what_is_stored_of_a_token_agrees_with_its_reference(kv: str, size: tuple[int, int, int], still: int) -> None:
    (heads, rank, turning), tokens, rng = size, 19, np.random.default_rng(3)
    n, bench, blocks = rank + turning, Bench(), 7
    positions = np.arange(tokens) + 5
    slots = rng.permutation(16 * blocks)[:tokens]
    bench.tokens(positions, slots=slots)
    half, padded = turning // 2, -(-(turning // 2) // 16) * 16
    table = np.full((1 if still else tokens + 5, 2, padded), np.nan, np.float32)
    table[:, 0, :half], table[:, 1, :half] = rope_tables(RopeConfig(theta=1e4), turning, len(table))
    stride, q_stride, c_stride = 4 * (heads + 1) * n + 64, 4 * heads * (24 + turning) + 64, 4 * (n + 3) + 64
    floats = [rng.standard_normal((tokens, width // 4)).astype(np.float32) for width in (q_stride, c_stride)]
    block_bytes = abi.kv_block_bytes(kv, n)
    operands = [bench.reserve("activations", tokens * stride), *(bench.put("activations", x) for x in floats),
              bench.put("constants", table), bench.put("kv", np.zeros(blocks * (block_bytes + 64), np.uint8)),
              bench.put("constants", rng.standard_normal(rank).astype(np.float32))]
    parameters = fill(LATENT, stride=stride, q_stride=q_stride, q_first=24 * heads, c_stride=c_stride, c_first=3,
                      heads=heads, rank=rank, rotary=turning, table_stride=8 * padded, block_bytes=block_bytes,
                      blocks=blocks, eps=1e-6, still=still)
    for isa in ISAS:
        one = bench.run(isa, f"store_latent_{kv}", operands, parameters)
        two = bench.run(isa, f"store_latent_{kv}", operands, parameters, threads=2)
        for name, values in one.items():
            np.testing.assert_array_equal(values, two[name], err_msg=name)


@pytest.mark.parametrize(("dtype", "group"), [("f32", 0), ("f16", 0), ("int8", 32), ("q4", 128), ("q4m", 32)])
def test_matmuls_of_heads(dtype: str, group: int) -> None:
    """Each head's own matrix times its own part of a row, quantised where the weights are; columns between are left."""
    heads, cols, rows, gap, rng = 3, 40, 48, 24, np.random.default_rng(1)
    name = kernel_name("linear", dtype, group)
    for isa in isas(name):
        for tokens in (1, 2, 5, 19):
            bench = Bench()
            bench.tokens(range(tokens))
            bench.counts[abi.COUNT_SEVERAL] = tokens if tokens > 1 else 0
            wide = heads * cols + 8
            x = bench.put("activations", rng.standard_normal((tokens, wide)).astype(np.float32))
            weights = random_weights(rng, dtype, group, heads * rows, cols)
            tile_bytes, given = weights.size // (heads * 3), {"x_stride": 4 * wide, "head_x": 4 * cols}
            if group:
                stride, scales, offsets = abi.q8_row_bytes(cols, group)
                quantised = bench.reserve("activations", heads * tokens * stride)
                packed = abi.pack_token_tiles(token_tiles(isa))
                given = {"x_stride": stride, "head_x": tokens * stride, "x_scales": scales, "x_offsets": offsets,
                         "group": group, "token_tiles": packed}
                bench.run(isa, "quantize", [x, quantised], fill(
                    ROWS, width=cols, in_stride=4 * wide, out_stride=stride, scales=scales, offsets=offsets,
                    group=group, token_tiles=packed, heads=heads, head_out=tokens * stride), threads=2, keep=True)
                x = quantised
            out_stride = heads * (4 * rows + gap)
            operands = [bench.put("weights", weights), x, bench.reserve("activations", tokens * out_stride), 0,
                      bench.scratch(8192, 2)]
            parameters = fill(LINEAR, tiles=heads * 3, tile_bytes=tile_bytes, chunk=3, scratch=8192,
                              records=WeightType(dtype, group).tile_records(cols), out_stride=out_stride, head_tiles=3,
                              head_gap=gap, **given)
            one = bench.run(isa, name, operands, parameters)
            two = bench.run(isa, name, operands, parameters, threads=2)
            for key, values in one.items():
                np.testing.assert_array_equal(values, two[key], err_msg=key)


def test_instructions_of_a_screened_head_have_no_heads() -> None:
    """Its products are those of `linear`, which look for heads after all that such an instruction has."""
    assert max(SCREEN) < LINEAR.head_tiles
