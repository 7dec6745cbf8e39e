"""Matrix products on every instruction set: against their twins, exact in integers, the same bits for any T."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi, layouts
from edgeinfer.kernels.parameters import ACTIVATIONS, LINEAR, fill
from edgeinfer.kernels.reference import ACTIVATION_FUNCTIONS, linear_reference, quantise_rows
from tests.kernel_bench import ISAS, Bench
from tests.tolerances import ERF, EXP

TOKENS = (1, 2, 3, 7, 9, 33)
WIDTHS = (6, 7, 31, 33, 64, 127, 172, 1023)
WEIGHTS = [("q4", 32), ("q4", 64), ("q4", 128), ("int8", 32), ("int8", 64), ("int8", 128), ("f16", 0), ("f32", 0)]
ROWS = {6: 33, 7: 5, 31: 16, 33: 17, 64: 70, 127: 31, 172: 40, 1023: 50}


def kernel_name(prefix: str, dtype: str, group: int) -> str:
    return f"{prefix}_{dtype}_g{group}" if group else f"{prefix}_{dtype}"


def random_weights(rng: np.random.Generator, dtype: str, group: int, rows: int, cols: int) -> np.ndarray:
    """Bytes in tile16."""
    if not group:
        return layouts.pack_tile16(rng.standard_normal((rows, cols)).astype(np.float32), dtype)
    low, high = (-8, 8) if dtype == "q4" else (-127, 128)
    codes = rng.integers(low, high, (rows, cols), dtype=np.int8)
    scales = (rng.standard_normal((rows, -(-cols // group))) / high).astype(np.float16)
    return layouts.pack_tile16(codes, dtype, group, scales)


def activations(x: np.ndarray, group: int) -> tuple[np.ndarray, int, int, int]:
    """Rows as a product reads them (bytes), their stride and the offsets of scales and sums."""
    tokens, cols = x.shape
    if not group:
        stride = -(-cols // 16) * 64
        rows = np.zeros((tokens, stride // 4), np.float32)
        rows[:, :cols] = x
        return rows.view(np.uint8), stride, 0, 0
    stride, at_scales, at_sums = abi.q8_row_bytes(cols, group)
    padded = np.zeros((tokens, at_scales), np.float32)
    padded[:, :cols] = x
    codes, scales = quantise_rows(padded, group)
    return quantised_rows(np.rint(codes), scales, group, stride), stride, at_scales, at_sums


def quantised_rows(codes: np.ndarray, scales: np.ndarray, group: int, stride: int) -> np.ndarray:
    """q8 rows, bytes."""
    tokens, values = codes.shape
    rows = np.full((tokens, stride), 0xFF, np.uint8)
    rows[:, :values] = codes.astype(np.int8).view(np.uint8)
    n = 4 * scales.shape[1]
    rows[:, values : values + n] = scales.astype(np.float32).view(np.uint8)
    sums = codes.reshape(tokens, -1, group).sum(axis=2).astype(np.int32)
    rows[:, values + n : values + 2 * n] = sums.view(np.uint8)
    return rows


class Product:
    """A bench with one product's operands."""

    def __init__(self, dtype: str, group: int, weights: np.ndarray, rows: int, x, tokens: int, gated: bool = False,
                 bias: np.ndarray | None = None, out: np.ndarray | None = None, **parameters: int):
        self.bench, self.tokens, data = Bench(), tokens, x[0]
        tiles, self.stride = -(-rows // 16), x[1]
        tile_bytes = weights.size // tiles
        line = {"q4": 16 * group + 64, "int8": 32 * group + 64, "f16": 64, "f32": 64}[dtype]
        out_tiles = tiles // 2 if gated else tiles
        self.out_stride, self.width = 64 * out_tiles + 64, 16 * out_tiles
        self.places = [
            self.bench.put("weights", weights), self.bench.put("activations", data),
            self.bench.reserve("activations", tokens * self.out_stride),
            self.bench.put("constants", np.zeros(16 * tiles, np.float32) if bias is None else bias),
            self.bench.reserve("scratch", 3 * abi.GATED_SCRATCH_BYTES),
        ]
        if out is not None:
            self.out()[:] = out
        self.flags = abi.FLAG_BIAS * (bias is not None) | abi.FLAG_RESIDUAL * (out is not None)
        self.parameters = fill(
            LINEAR, tiles=out_tiles, tile_bytes=tile_bytes, records=tile_bytes // line, x_stride=x[1], x_scales=x[2],
            x_sums=x[3], out_stride=self.out_stride, rows=abi.COUNT_TOKENS, chunk=3, scratch=abi.GATED_SCRATCH_BYTES,
        )
        for name, value in parameters.items():
            self.parameters[getattr(LINEAR, name)] = value
        self.name = kernel_name("gated" if gated else "linear", dtype, group)

    def out(self) -> np.ndarray:
        return self.bench.array(self.places[2], np.float32, (self.tokens, self.width), (self.out_stride, 4))

    def run(self, isa: str, first: int = 0, tokens: int | None = None, threads: int = 1) -> np.ndarray:
        """Result of the tokens from `first` on."""
        tokens = self.tokens - first if tokens is None else tokens
        self.bench.tokens([0] * tokens)
        places = list(self.places)
        places[1] += first * self.stride
        places[2] += first * self.out_stride
        return self.bench.run(isa, self.name, places, self.parameters, self.flags, threads)["out"]


def random_product(rng, dtype: str, group: int, rows: int, cols: int, tokens: int, **more) -> Product:
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    weights = random_weights(rng, dtype, group, rows, cols)
    return Product(dtype, group, weights, rows, activations(x, group), tokens, **more)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_linear_agrees_with_its_twin(dtype: str, group: int, width: int) -> None:
    rng = np.random.default_rng(width + group)
    for tokens in TOKENS:
        product = random_product(rng, dtype, group, ROWS[width], width, tokens)
        for isa in ISAS:
            product.run(isa)


@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_no_tokens_write_nothing(dtype: str, group: int) -> None:
    for gated in (False, True):
        product = random_product(np.random.default_rng(0), dtype, group, 32, 33, 2, gated=gated)
        for isa in ISAS:
            assert not product.run(isa, tokens=0).size


@pytest.mark.parametrize("flags", ["bias", "residual", "both"])
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_bias_and_residual(dtype: str, group: int, flags: str) -> None:
    rng = np.random.default_rng(group)
    rows, tokens = 37, 11
    bias = rng.standard_normal(48).astype(np.float32) if flags != "residual" else None
    out = rng.standard_normal((tokens, 48)).astype(np.float32) if flags != "bias" else None
    product = random_product(rng, dtype, group, rows, 127, tokens, bias=bias, out=out)
    for isa in ISAS:
        product.run(isa)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_gated_agrees_with_its_twin(dtype: str, group: int, activation: str) -> None:
    rng = np.random.default_rng(group)
    for tokens, rows, width in ((1, 32, 31), (2, 64, 6), (9, 96, 172), (33, 32, 65)):
        bias = rng.standard_normal(rows).astype(np.float32) if tokens % 2 else None
        product = random_product(
            rng, dtype, group, rows, width, tokens, gated=True, bias=bias, activation=ACTIVATIONS[activation])
        for isa in ISAS:
            product.run(isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_a_row_has_the_same_bits_for_any_number_of_tokens_and_threads(dtype: str, group: int, isa: str) -> None:
    rng = np.random.default_rng(1)
    for more in ({}, {"gated": True, "activation": ACTIVATIONS["silu"]}):
        product = random_product(rng, dtype, group, 64, 172, 33, **more)
        whole = product.run(isa)
        np.testing.assert_array_equal(product.run(isa, threads=3), whole)
        for first, tokens in ((0, 1), (13, 1), (32, 1), (5, 2), (3, 7), (1, 29)):
            np.testing.assert_array_equal(product.run(isa, first, tokens), whole[first : first + tokens])


@pytest.mark.parametrize(("dtype", "group"), WEIGHTS[:6])
@pytest.mark.parametrize("extreme", [False, True])
def test_integer_products_are_exact_on_every_instruction_set(dtype: str, group: int, extreme: bool) -> None:
    """With scales of 1 the result is an integer below 2^24; extremes are where 16-bit sums would saturate."""
    rng = np.random.default_rng(2)
    rows, tokens, cols = 16, 9, 4 * group
    low, high = (-8, 7) if dtype == "q4" else (-127, 127)
    w = rng.integers(low, high + 1, (rows, cols))
    x = rng.integers(-127, 128, (tokens, cols))
    if extreme:
        w[:8], w[8:] = low, high
        x[::2], x[1::2] = 127, -127
    weights = layouts.pack_tile16(w.astype(np.int8), dtype, group, np.ones((rows, 4), np.float16))
    stride, at_scales, at_sums = abi.q8_row_bytes(cols, group)
    data = quantised_rows(x, np.ones((tokens, 4)), group, stride)
    product = Product(dtype, group, weights, rows, (data, stride, at_scales, at_sums), tokens)
    for isa in ISAS:
        np.testing.assert_array_equal(product.run(isa), x @ w.T)


def exact_gate(points: np.ndarray, activation: str, isa: str) -> np.ndarray:
    """act(points) by gated_f32: the gate's row is 1, the up row takes its 1 from a second column."""
    x = np.stack([points, np.ones_like(points)], axis=1)
    w = np.zeros((32, 2), np.float32)
    w[:16, 0] = w[16:, 1] = 1
    product = Product("f32", 0, layouts.pack_tile16(w, "f32"), 32, activations(x, 0), len(points), gated=True,
                      activation=ACTIVATIONS[activation])
    out = product.run(isa)
    assert (out == out[:, :1]).all()
    return out[:, 0].astype(np.float64)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_accuracy_of_activations(activation: str, isa: str) -> None:
    points = np.concatenate([np.linspace(-86, 86, 4001), np.linspace(-1, 1, 2001), [0, 1e-30, -1e-30, 200, -200, 1e4]])
    points = points.astype(np.float32)
    want = ACTIVATION_FUNCTIONS[activation](points.astype(np.float64))
    inner = 1.6 * np.abs(points + 0.045 * points**3) if activation == "gelu_tanh" else 0  # rounding of e's argument
    relative = np.abs(want) * EXP * (1 + inner)
    absolute = ERF * np.abs(points) if activation == "gelu" else 1e-35 + (activation == "gelu_tanh") * 1e-15
    got = exact_gate(points, activation, isa)
    assert (np.abs(got - want) <= relative + absolute).all(), points[np.argmax(np.abs(got - want) - relative)]


def test_linear_reference_is_the_product() -> None:
    x, w = np.array([[1.0, 2.0]]), np.array([[3.0, 4.0], [5.0, -6.0], [0.0, 0.5]])
    y, tolerance = linear_reference(x, w, np.array([0.0, 1.0, 0.0]))
    np.testing.assert_array_equal(y, [[11.0, -6.0, 1.0]])
    assert (tolerance < 1e-3).all()
