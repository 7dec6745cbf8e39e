"""Quantised activations: blocks of tokens interleaved in memory, and products that quantise their input themselves."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import ISA_LEVELS, abi
from edgeinfer.kernels.parameters import ACTIVATIONS, NEURON_GATED, ROWS, fill
from edgeinfer.kernels.reference import q8_blocks, read_q8, write_q8
from edgeinfer.quant import WeightType
from tests.helpers.kernel_bench import ISAS, Bench, isas, token_tiles, weight_types
from tests.kernels.test_matmul import QUANTISED, TOKENS, random_matmul, whole
from tests.kernels.test_neuron import random_ffn

LEFT_OUT = 5
"""Columns of outliers."""
TOKEN_TILES = sorted({isa.token_tiles for isa in ISA_LEVELS} | {(6, 2), (4, 2), (8, 3), (15, 8, 7, 5, 4, 3, 2)})


@pytest.mark.parametrize("heights", TOKEN_TILES)
def test_blocks_of_tokens_cover_all_of_them_in_order(heights: tuple[int, ...]) -> None:
    """The largest blocks while they fit, then the next smaller ones, single tokens in the end."""
    for n_tokens in range(100):
        blocks = abi.token_blocks(n_tokens, heights)
        assert [t for first, n in blocks for t in range(first, first + n)] == list(range(n_tokens))
        sizes, left = [n for _, n in blocks], n_tokens
        assert sizes == sorted(sizes, reverse=True)
        for height in (*heights, 1):
            assert sizes.count(height) == left // height
            left %= height


def test_blocks_of_a_pass_of_nine() -> None:
    assert abi.token_blocks(9, (6, 2)) == [(0, 6), (6, 2), (8, 1)]
    assert abi.token_blocks(15, (8, 6, 4, 3, 2)) == [(0, 8), (8, 6), (14, 1)]
    assert abi.token_blocks(9, (4, 2)) == [(0, 4), (4, 4), (8, 1)]
    assert abi.token_blocks(0, (6, 2)) == []


@pytest.mark.parametrize("heights", TOKEN_TILES)
def test_tokens_of_blocks_go_through_a_parameter(heights: tuple[int, ...]) -> None:
    assert abi.unpack_token_tiles(abi.pack_token_tiles(heights)) == heights


@pytest.mark.parametrize("heights", TOKEN_TILES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_memory_of_quantised_rows_is_what_the_abi_says(group: int, heights: tuple[int, ...]) -> None:
    """Byte by byte by the formulas of `abi.token_blocks`; reading gives back what was written."""
    rng = np.random.default_rng(group)
    for tokens in TOKENS:
        stride, at_scales, at_offsets = abi.q8_row_bytes(3 * group - 5, group)
        codes = rng.integers(-127, 128, (tokens, at_scales)).astype(np.int8)
        scales = rng.random((tokens, 4)).astype(np.float32)
        data = write_q8(codes, scales, group, heights)
        assert data.shape == (tokens, stride)
        flat = data.reshape(-1)
        for first, n in abi.token_blocks(tokens, heights):
            base = first * stride
            for t in range(first, first + n):
                k, g, j = np.arange(at_scales), np.arange(4), t - first
                np.testing.assert_array_equal(flat[base + k // 4 * 4 * n + 4 * j + k % 4].view(np.int8), codes[t])
                operands = [base + n * at + 4 * (g * n + j) + np.arange(4)[:, None] for at in (at_scales, at_offsets)]
                words = [flat[place].T for place in operands]
                np.testing.assert_array_equal(np.ascontiguousarray(words[0]).view(np.float32)[:, 0], scales[t])
                sums = codes[t].reshape(4, group).sum(axis=1, dtype=np.int32)
                np.testing.assert_array_equal(np.ascontiguousarray(words[1]).view(np.int32)[:, 0], -8 * sums)
        blocks = q8_blocks(data.ctypes.data, tokens, stride, at_scales, at_offsets, group, heights)
        for have, want in zip(read_q8(blocks), (codes, scales), strict=True):
            np.testing.assert_array_equal(have, want)


def run_fused(isa: str, kind: int, bench: Bench, name: str, operands: list[int], width: int, group: int,
              parameters: list[int], source: int = -2) -> dict[str, np.ndarray]:
    """Run a product with operands source and norm or order: on rows quantised before, then by itself.

    The bits are the same, and the rows are not read in the second case.
    """
    left_out = LEFT_OUT * (kind == abi.FUSED_LEFT_OUT)
    stride, scales, offsets = abi.q8_row_bytes(width, group, left_out)
    flags = abi.FLAG_APART * (left_out > 0)
    floats = 4 * (-(-width // 16) * 16)
    rows = fill(ROWS, width=width, in_stride=floats, out_stride=stride, rows=abi.COUNT_TOKENS, scales=scales,
                offsets=offsets, group=group, eps=1e-5, scratch=floats,
                ordered=int(kind == abi.FUSED_ORDERED), left_out=left_out,
                token_tiles=abi.pack_token_tiles(token_tiles(isa)))
    bench.tokens([0])
    bench.array(operands[1], np.uint8, (stride,))[:] = 0xFF
    scratch = bench.scratch(floats)
    maker = "rms_norm_q8" if kind == abi.FUSED_NORM else "quantize"
    bench.run(isa, maker, [operands[source], operands[1], operands[source + 1], scratch], rows, keep=True)
    bench.counts[abi.COUNT_SEVERAL] = 1  # a forward pass of several: the rows are there
    want = bench.run(isa, name, operands, parameters, flags)
    bench.counts[abi.COUNT_SEVERAL] = 0
    bench.array(operands[1], np.uint8, (stride,))[:] = 0xFF
    for threads in (1, 2):
        found = bench.run(isa, name, operands, parameters, flags, threads)
        for array, values in want.items():
            np.testing.assert_array_equal(found[array], values, err_msg=array)
    return want


def fused_operands(rng: np.random.Generator, bench: Bench, width: int, group: int, kind: int
                   ) -> tuple[list[int], dict[str, int | float]]:
    """Operands of source and norm, order or outliers, and the parameters of a fused input; NaN follows the source."""
    left_out = LEFT_OUT * (kind == abi.FUSED_LEFT_OUT)
    stride, scales, offsets = abi.q8_row_bytes(width, group, left_out)
    floats = rng.standard_normal(-(-width // 16) * 16 + 16).astype(np.float32)
    floats[width:] = np.nan
    some = {abi.FUSED_ORDERED: width, abi.FUSED_LEFT_OUT: LEFT_OUT}.get(kind)
    weight = bench.put("constants", rng.permutation(width)[:some].astype(np.int32) if some else
                       rng.standard_normal(width).astype(np.float32))
    return [bench.put("activations", floats), weight], {
        "width": width, "group": group, "eps": 1e-5, "x_stride": stride, "x_scales": scales, "x_offsets": offsets,
        "fused": kind, **({"left_out": left_out} if left_out else {})}


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize("width", [172, 33])
@pytest.mark.parametrize("kind", [abi.FUSED_QUANTISE, abi.FUSED_NORM, abi.FUSED_ORDERED, abi.FUSED_LEFT_OUT])
@pytest.mark.parametrize(("dtype", "group"), weight_types(QUANTISED, "linear", "gated"))
def test_a_single_token_that_matmuls_quantise_for_themselves(dtype: str, group: int, kind: int, width: int) -> None:
    """The bits are those of quantised rows; the scratch is no larger than the planner's."""
    rng, width = np.random.default_rng(group), whole(dtype, width)
    own = WeightType(dtype, group).input_group
    for gated in (False, True):
        apart = LEFT_OUT * (kind == abi.FUSED_LEFT_OUT)
        matmul = random_matmul(rng, dtype, group, 96, width, 1, apart=apart, gated=gated)
        operands, fused = fused_operands(rng, matmul.bench, width, own, kind)
        scratch = abi.GATED_SCRATCH_BYTES + int(fused["x_stride"]) + 4 * (-(-width // 16) * 16)
        operands = [*matmul.operands[:4], matmul.bench.scratch(scratch, 2), *operands, *matmul.operands[7:]]
        for isa in isas(matmul.name):
            parameters = matmul.parameters(isa, scratch=scratch, **fused)
            run_fused(isa, kind, matmul.bench, matmul.name, operands, width, own, parameters, 5)


@pytest.mark.parametrize("kind", [abi.FUSED_QUANTISE, abi.FUSED_NORM])
@pytest.mark.parametrize(("dtype", "group"), QUANTISED[:6])
def test_a_single_token_that_neuron_kernels_quantise_for_themselves(dtype: str, group: int, kind: int) -> None:
    rng, width = np.random.default_rng(group), 172
    ffn = random_ffn(rng, dtype, group, 96, width, 1)
    operands, fused = fused_operands(rng, ffn.bench, width, group, kind)
    operands = [ffn.weights, ffn.x_operand, ffn.f_operand, ffn.masks, ffn.scratch_operand, ffn.bias, ffn.sums,
                *operands]
    for isa in ISAS:
        parameters = fill(
            NEURON_GATED, **{**ffn.values, **fused}, out_stride=ffn.f_stride, chunk=3, activation=ACTIVATIONS["silu"],
            token_tiles=abi.pack_token_tiles(token_tiles(isa)))
        want = run_fused(isa, kind, ffn.bench, f"neuron_gated_{dtype}", operands, width, group, parameters)
        assert np.abs(want["f"]).max() > 0
