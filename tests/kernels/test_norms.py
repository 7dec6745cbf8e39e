"""Norms beyond the plain one, functions of single values and learned positions, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import POSITIONS, VALUE_FUNCTIONS, VALUES, fill
from edgeinfer.quant import layouts
from tests.helpers.kernel_bench import ISAS, Bench
from tests.kernels.test_matmul import TOKENS
from tests.kernels.test_rows import GROUPS, WIDTHS, Rows, same

KINDS = {"centred": abi.FLAG_CENTRED, "centred with bias": abi.FLAG_CENTRED | abi.FLAG_BIAS, "plain": 0}


class Norms(Rows):
    """Rows with a bias, and flags."""

    def __init__(self, x: np.ndarray, group: int, rng: np.random.Generator, flags: int):
        super().__init__(x, group, rng.standard_normal(x.shape[1]).astype(np.float32))
        self.operands.append(self.bench.put("constants", rng.standard_normal(self.width).astype(np.float32)))
        run = self.bench.run
        self.bench.run = lambda *args, **options: run(*args, flags=flags, **options)  # type: ignore[method-assign]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, kind: str) -> None:
    """Reference and bits: any threads, a row alone or among others."""
    rng = np.random.default_rng(width)
    for i, tokens in enumerate(TOKENS):
        x = rng.standard_normal((tokens, width)).astype(np.float32) * 10.0 ** rng.integers(-3, 3)
        x += rng.standard_normal((tokens, 1)).astype(np.float32)
        for name, group in (("norm_f32", 0), ("norm_q8", GROUPS[(i + WIDTHS.index(width)) % len(GROUPS)])):
            rows = Norms(x, group, rng, KINDS[kind])
            for isa in ISAS:
                whole = rows.run(isa, name)
                same(whole, rows.run(isa, name, threads=3))
                for t in {0, tokens - 1}:
                    same(rows.run(isa, name, first=t, tokens=1), whole, t)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_is_added_to_a_row(width: int) -> None:
    rng = np.random.default_rng(width)
    for isa in ISAS:
        for tokens in (1, 5):
            rows = Norms(rng.standard_normal((tokens, width)).astype(np.float32), 0, rng, abi.FLAG_RESIDUAL)
            before = rng.standard_normal((tokens, rows.out_stride // 4)).astype(np.float32)
            out = rows.bench.array(rows.operands[1], np.float32, before.shape)
            out[:] = before
            rows.run(isa, "norm_f32")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_part_of_a_row_is_normalised_in_place(width: int) -> None:
    """The bytes after the part are unchanged, which the bench checks."""
    rng = np.random.default_rng(width)
    for isa in ISAS:
        rows = Norms(rng.standard_normal((5, width)).astype(np.float32), 0, rng, 0)
        rows.operands[1] = rows.operands[0]
        rows.run(isa, "norm_f32", out_stride=rows.in_stride)


@pytest.mark.parametrize("width", [10, 64, 127])
def test_parts_of_a_row_are_normed_one_by_one(width: int) -> None:
    """Added to what is there; the next part is not touched, whatever its address in a vector."""
    rng, parts = np.random.default_rng(width), 5
    for isa in ISAS:
        rows = Norms(rng.standard_normal((7, parts * width)).astype(np.float32), 0, rng, abi.FLAG_RESIDUAL)
        before = rng.standard_normal((7, rows.out_stride // 4)).astype(np.float32)
        whole = []
        for threads in (1, 3):
            rows.bench.array(rows.operands[1], np.float32, before.shape)[:] = before
            whole.append(rows.run(isa, "norm_f32", threads, width=width, parts=parts))
        same(*whole)


@pytest.mark.parametrize("width", [10, 64, 127])
def test_heads_of_a_row_are_normed_in_place(width: int) -> None:
    """By layer norm with a bias; what stands after the heads is as it was, which the bench checks."""
    rng, parts = np.random.default_rng(width), 5
    for isa in ISAS:
        x = rng.standard_normal((7, parts * width + 3)).astype(np.float32) + 1
        rows = Norms(x, 0, rng, abi.FLAG_CENTRED | abi.FLAG_BIAS)
        rows.operands[1], whole = rows.operands[0], []
        for threads in (1, 3):
            rows.bench.array(rows.operands[0], np.float32, (7, rows.in_stride // 4))[:, : x.shape[1]] = x
            whole.append(rows.run(isa, "norm_f32", threads, width=width, parts=parts, out_stride=rows.in_stride))
        same(*whole)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sum_is_multiplied_by_a_number(width: int) -> None:
    rng = np.random.default_rng(width)
    for isa in ISAS:
        x = rng.standard_normal((5, width)).astype(np.float32)
        rows = Norms(x, 0, rng, abi.FLAG_RESIDUAL | abi.FLAG_SCALED)
        rows.operands.append(rows.bench.put("constants", np.array([-0.37], np.float32)))
        before = rng.standard_normal((5, rows.out_stride // 4)).astype(np.float32)
        rows.bench.array(rows.operands[1], np.float32, before.shape)[:] = before
        rows.run(isa, "norm_f32")


def values(bench: Bench, isa: str, address: int, shape: tuple[int, int], stride: int, function: str, factor: float,
           threads: int) -> np.ndarray:
    bench.tokens([0] * shape[0])
    parameters = fill(VALUES, width=shape[1], stride=stride, rows=abi.COUNT_TOKENS,
                      function=VALUE_FUNCTIONS[function], factor=factor)
    return bench.run(isa, "activate", [address], parameters, threads=threads, keep=False)["rows"]


@pytest.mark.parametrize("function", VALUE_FUNCTIONS)
def test_functions_of_values(function: str) -> None:
    rng = np.random.default_rng(0)
    for width in (1, 7, 31, 33, 127, 1023, 2048, 65537):
        tokens, stride = (3 if width < 5000 else 1), 4 * (-(-width // 16) * 16) + 64
        rows = rng.standard_normal((tokens, stride // 4)).astype(np.float32) * np.float32(4)
        bench = Bench()
        address = bench.put("activations", rows)
        for isa in ISAS:
            found = [values(bench, isa, address, (tokens, width), stride, function, 1.75, n) for n in (1, 3)]
            np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("width", [1, 16, 33, 2500])
def test_values_are_multiplied_by_a_part_of_other_rows(width: int) -> None:
    """From any offset on; after a row's end nothing of them counts, were it not a number."""
    rng, tokens, stride, by_stride = np.random.default_rng(width), 3, 4 * (-(-width // 16) * 16) + 64, 4 * width + 132
    for isa in ISAS:
        bench = Bench()
        by = np.full((tokens, by_stride // 4), np.nan, np.float32)
        by[:, 5 : 5 + width] = rng.standard_normal((tokens, width))
        operands = [bench.put("activations", rng.standard_normal((tokens, stride // 4)).astype(np.float32)),
                  bench.put("activations", by) + 20]
        bench.tokens([0] * tokens)
        parameters = fill(VALUES, width=width, stride=stride, rows=abi.COUNT_TOKENS, by_stride=by_stride,
                          function=VALUE_FUNCTIONS["gelu_tanh"])
        found = [bench.run(isa, "activate", operands, parameters, abi.FLAG_TIMES, n, keep=False)["rows"]
                 for n in (1, 3)]
        np.testing.assert_array_equal(*found)
        assert not np.isnan(found[0]).any()


def test_a_soft_cap_is_never_passed() -> None:
    for isa in ISAS:
        bench = Bench()
        address = bench.put("activations", np.array([[0, 1e-6, 5, -50, 1e4, -1e30, 30, 3e38] + [0] * 24], np.float32))
        out = values(bench, isa, address, (1, 16), 128, "soft_cap", 30.0, 1)[0]
        np.testing.assert_allclose(out[:4], [0, 1e-6, 30 * np.tanh(5 / 30), 30 * np.tanh(-50 / 30)], atol=1e-5)
        np.testing.assert_array_equal(out[4:6], [30, -30])
        assert np.abs(out).max() == 30


@pytest.mark.parametrize("width", WIDTHS)
def test_positions_are_added(width: int) -> None:
    rng = np.random.default_rng(width)
    for isa in ISAS:
        for tokens, threads in ((1, 1), (7, 2), (33, 3)):
            bench, stride = Bench(), 4 * (-(-width // 16) * 16) + 64
            rows = rng.standard_normal((tokens, stride // 4)).astype(np.float32)
            table = layouts.pack_tile16(rng.standard_normal((tokens + 9, width)).astype(np.float32), "f32")
            operands = [bench.put("activations", rows), bench.put("weights", table)]
            bench.tokens(list(range(6, 6 + tokens))[::-1])
            parameters = fill(POSITIONS, width=width, stride=stride, rows=abi.COUNT_TOKENS, offset=2,
                              tile_bytes=64 * width)
            bench.run(isa, "add_positions", operands, parameters, threads=threads)
