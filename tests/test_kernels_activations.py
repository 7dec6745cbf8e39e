"""Quantised activations: blocks of tokens interleaved in memory, and products that quantise their input themselves."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import LADDER, abi
from edgeinfer.kernels.parameters import ROWS, fill
from edgeinfer.kernels.reference import Expected, RecordView, q8_blocks, read_q8, write_q8
from tests.kernel_bench import ISAS, heights
from tests.test_kernels_linear import TOKENS, WEIGHTS, random_product

HEIGHTS = sorted({isa.heights for isa in LADDER} | {(6, 2), (4, 2), (8, 3)})


@pytest.mark.parametrize("pair", HEIGHTS)
def test_blocks_of_tokens_cover_all_of_them_in_order(pair: tuple[int, int]) -> None:
    """Large blocks while they fit, then small ones, then single tokens."""
    large, small = pair
    for n_tokens in range(100):
        blocks = abi.token_blocks(n_tokens, pair)
        assert [t for first, n in blocks for t in range(first, first + n)] == list(range(n_tokens))
        sizes = [n for _, n in blocks]
        assert sizes == sorted(sizes, reverse=True) and set(sizes) <= {large, small, 1}
        assert sizes.count(large) == n_tokens // large
        assert sizes.count(small) == n_tokens % large // small
        assert sizes.count(1) == n_tokens % large % small


def test_blocks_of_a_walk_of_nine() -> None:
    assert abi.token_blocks(9, (6, 2)) == [(0, 6), (6, 2), (8, 1)]
    assert abi.token_blocks(9, (4, 2)) == [(0, 4), (4, 4), (8, 1)]
    assert abi.token_blocks(0, (6, 2)) == []


@pytest.mark.parametrize("pair", HEIGHTS)
def test_heights_go_through_a_parameter(pair: tuple[int, int]) -> None:
    assert abi.unpack_heights(abi.pack_heights(pair)) == pair


@pytest.mark.parametrize("pair", HEIGHTS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_memory_of_quantised_rows_is_what_the_abi_says(group: int, pair: tuple[int, int]) -> None:
    """Byte by byte by the formulas of `abi.token_blocks`; reading gives back what was written."""
    rng = np.random.default_rng(group)
    for tokens in TOKENS:
        stride, at_scales, at_sums = abi.q8_row_bytes(3 * group - 5, group)
        codes = rng.integers(-127, 128, (tokens, at_scales)).astype(np.int8)
        scales = rng.random((tokens, 4)).astype(np.float32)
        data = write_q8(codes, scales, group, pair)
        assert data.shape == (tokens, stride)
        flat = data.reshape(-1)
        for first, n in abi.token_blocks(tokens, pair):
            base = first * stride
            for t in range(first, first + n):
                k, g, j = np.arange(at_scales), np.arange(4), t - first
                np.testing.assert_array_equal(flat[base + k // 4 * 4 * n + 4 * j + k % 4].view(np.int8), codes[t])
                words = [flat[base + n * at + 4 * (g * n + j) + np.arange(4)[:, None]].T for at in (at_scales, at_sums)]
                np.testing.assert_array_equal(np.ascontiguousarray(words[0]).view(np.float32)[:, 0], scales[t])
                sums = codes[t].reshape(4, group).sum(axis=1, dtype=np.int32)
                np.testing.assert_array_equal(np.ascontiguousarray(words[1]).view(np.int32)[:, 0], -8 * sums)
        blocks = q8_blocks(data.ctypes.data, tokens, stride, at_scales, at_sums, group, pair)
        for have, want in zip(read_q8(blocks), (codes, scales), strict=True):
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("width", [172, 33])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS[:6])
def test_a_single_token_that_products_quantise_for_themselves(dtype: str, group: int, norm: bool, width: int) -> None:
    """The bits are those of the record before, whose rows are not read; the scratch is no larger than the planner's."""
    rng = np.random.default_rng(group)
    stride, scales, sums = abi.q8_row_bytes(width, group)
    floats = rng.standard_normal((1, -(-width // 16) * 16 + 16)).astype(np.float32)
    floats[:, width:] = np.nan
    for gated in (False, True):
        product = random_product(rng, dtype, group, 96, width, 1, gated=gated)
        bench, scratch = product.bench, abi.GATED_SCRATCH_BYTES + stride + 4 * (-(-width // 16) * 16)
        product.places[4], product.values["scratch"] = bench.scratch(scratch, 2), scratch
        weight = bench.put("constants", rng.standard_normal(width).astype(np.float32))
        places = [bench.put("activations", floats), product.places[1], weight, bench.scratch(floats.nbytes)]
        bench.tokens([0])
        for isa in ISAS:
            rows = fill(
                ROWS, width=width, in_stride=floats.nbytes, out_stride=stride, rows=abi.COUNT_TOKENS,
                scales=scales, sums=sums, group=group, padded=scales, eps=1e-5, scratch=floats.nbytes,
                heights=abi.pack_heights(heights(isa)))
            bench.array(product.places[1], np.uint8, (stride,))[:] = 0xFF
            bench.run(isa, "rms_norm_q8" if norm else "quantize", places, rows, keep=True)
            run = (isa, product.name, product.places, product.parameters(isa))
            bench.counts[abi.COUNT_MANY] = 1  # a walk of several: the rows are there, the record before is not read
            want = bench.run(*run, abi.FLAG_OWN_INPUT, earlier=([0], [0], 0))["out"]
            bench.counts[abi.COUNT_MANY] = 0
            bench.array(product.places[1], np.uint8, (stride,))[:] = 0xFF

            def own(view: RecordView, want: np.ndarray = want, step: int = product.out_stride) -> list[Expected]:
                return [Expected("out", view.array(2, np.float32, want.shape, (step, 4)), want)]

            earlier = places, rows, abi.FLAG_NORM * norm
            for threads in (1, 2):
                bench.run(*run, abi.FLAG_OWN_INPUT, threads, twin=own, earlier=earlier)
