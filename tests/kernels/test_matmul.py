"""Matmuls on every instruction set: against their references, exact in integers, the same bits for any T."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from edgeinfer.kernels import abi, catalogue, reference_of
from edgeinfer.kernels.parameters import ACTIVATIONS, LINEAR, PAIRED, fill
from edgeinfer.kernels.reference import ACTIVATION_FUNCTIONS, Expected, InstructionView, linear_values, quantise_rows
from edgeinfer.quant import KV_TYPES, TYPES, WeightType, layouts, packed
from tests.helpers.kernel_bench import ISAS, Bench, isas, q8_memory, table_of, token_tiles, weight_types
from tests.helpers.tolerances import ERF, EXP

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 33)
WIDTHS = (6, 7, 31, 33, 64, 127, 172, 1023)
TAKEN = [(name, group) for name, row in TYPES.items() if not row.usual for group in row.groups]
"""Types that few models have."""
QUANTISED = [(name, group) for name, row in TYPES.items() for group in row.groups]
WEIGHTS = [*QUANTISED, ("f16", 0), ("f32", 0)]
ROWS = {6: 33, 7: 5, 31: 16, 33: 17, 64: 70, 127: 31, 172: 40, 1023: 50}


def kernel_name(prefix: str, dtype: str, group: int) -> str:
    return f"{prefix}_{dtype}_g{group}" if group else f"{prefix}_{dtype}"


def whole(dtype: str, cols: int) -> int:
    """Columns, rounded up to what rows of a type must have."""
    return -(-cols // 256) * 256 if TYPES[dtype].nested else cols


def random_factors(rng: np.random.Generator, dtype: str, group: int, rows: int, cols: int) -> packed.Factors:
    """Scales of both signs and minima, so that weights are about 1."""
    row, groups = TYPES[dtype], -(-cols // group)

    def halves(n: int, size: float) -> np.ndarray:
        return (rng.standard_normal((rows, n)) / size).astype(np.float16)

    largest = max(map(abs, table_of(dtype) or row.grid))
    if not row.nested:
        return packed.Factors(halves(groups, largest), halves(groups, 2) if row.minimum else None)
    low, high, kind = (-128, 128, np.int8) if row.scale == "i8*f16" else (0, 64, np.uint8)
    inner = [rng.integers(low, high, (rows, groups)).astype(kind) for _ in range(row.factors)]
    outer = [halves(cols // 256, size) for size in (high * largest, 2 * high)[: row.factors]]
    return packed.Factors(*inner, *outer) if row.minimum else packed.Factors(inner[0], None, outer[0])


def random_weights(rng: np.random.Generator, dtype: str, group: int, rows: int, cols: int) -> np.ndarray:
    """Bytes in tile16."""
    if (dtype, group) in TAKEN:
        row = TYPES[dtype]
        codes = rng.integers(0, 1 << row.bits, (rows, cols)).astype(np.int8) - np.int8(row.offset)
        return packed.pack(codes, WeightType(dtype, group), random_factors(rng, dtype, group, rows, cols))
    if not group:
        return layouts.pack_tile16(rng.standard_normal((rows, cols)).astype(np.float32), dtype)
    low, high = TYPES[dtype].grid[0], TYPES[dtype].grid[1] + 1
    codes = rng.integers(low, high, (rows, cols), dtype=np.int8)
    scales = (rng.standard_normal((rows, -(-cols // group))) / high).astype(np.float16)
    return layouts.pack_tile16(codes, dtype, group, scales)


class Activations(NamedTuple):
    """Rows of a product's input, before they are laid out for an instruction set."""

    values: np.ndarray
    """Codes (T, values) with the padding, or floats (T, padded)."""
    scales: np.ndarray | None = None
    """(T, groups) of codes."""
    group: int = 0
    apart: np.ndarray | None = None
    """(T, columns) of floats."""

    def layout(self) -> tuple[int, int, int]:
        """Row bytes, operands of the scales and the offsets."""
        apart = 0 if self.apart is None else self.apart.shape[1]
        width = self.values.shape[1]
        return abi.q8_row_bytes(width, self.group, apart) if self.group else (4 * width, 0, 0)

    def memory(self, isa: str, rows: slice) -> np.ndarray:
        """Some of the rows as the kernels of an instruction set read them, bytes."""
        if self.scales is None:
            return self.values[rows].reshape(-1).view(np.uint8)
        apart = None if self.apart is None else self.apart[rows]
        return q8_memory(self.values[rows], self.scales[rows], self.group, isa, apart).reshape(-1)


def activations(x: np.ndarray, group: int) -> Activations:
    """Floats with zeros up to whole vectors, or quantised in groups."""
    tokens, cols = x.shape
    width = abi.q8_row_bytes(cols, group)[1] if group else -(-cols // 16) * 16
    padded = np.zeros((tokens, width), np.float32)
    padded[:, :cols] = x
    if not group:
        return Activations(padded)
    codes, scales = quantise_rows(padded, group)
    return Activations(np.rint(codes).astype(np.int8), scales, group)


class MatMul:
    """A bench with one product's operands."""

    def __init__(self, dtype: str, group: int, weights: np.ndarray, rows: int, x: Activations, gated: bool = False,
                 bias: np.ndarray | None = None, out: np.ndarray | None = None, **parameters: int):
        self.bench, self.x, self.tokens = Bench(), x, len(x.values)
        tiles, (stride, scales, offsets) = -(-rows // 16), x.layout()
        tile_bytes = weights.size // tiles
        line = WeightType(dtype, group).record_bytes
        out_tiles = tiles // 2 if gated else tiles
        self.out_stride, self.width = 64 * out_tiles + 64, 16 * out_tiles
        self.operands = [
            self.bench.put("weights", weights), self.bench.reserve("activations", self.tokens * stride),
            self.bench.reserve("activations", self.tokens * self.out_stride),
            self.bench.put("constants", np.zeros(16 * tiles, np.float32) if bias is None else bias),
            self.bench.scratch(abi.GATED_SCRATCH_BYTES, 3) if gated else 0,
        ]
        if x.apart is not None:
            columns = np.random.default_rng(1).standard_normal((rows, x.apart.shape[1])).astype(np.float32)
            self.operands += [0, 0, self.bench.put("weights", layouts.pack_tile16(columns, "f16"))]
            parameters["left_out"] = columns.shape[1]
        if out is not None:
            self.out()[:] = out
        self.flags = abi.FLAG_BIAS * (bias is not None) | abi.FLAG_RESIDUAL * (out is not None) \
            | abi.FLAG_APART * (x.apart is not None)
        self.values = {
            "tiles": out_tiles, "tile_bytes": tile_bytes, "records": tile_bytes // line, "x_stride": stride,
            "x_scales": scales, "x_offsets": offsets, "out_stride": self.out_stride, "rows": abi.COUNT_TOKENS,
            "chunk": 3, "scratch": abi.GATED_SCRATCH_BYTES, **parameters,
        }
        self.name = kernel_name("gated" if gated else "linear", dtype, group)
        self._expected: dict[tuple[int, int], list[Expected]] = {}

    def out(self) -> np.ndarray:
        return self.bench.array(self.operands[2], np.float32, (self.tokens, self.width), (self.out_stride, 4))

    def parameters(self, isa: str, **more: int) -> list[int]:
        return fill(LINEAR, **{**self.values, "token_tiles": abi.pack_token_tiles(token_tiles(isa)), **more})

    def run(
        self, isa: str, first: int = 0, tokens: int | None = None, threads: int = 1, bits: np.ndarray | None = None,
        **parameters: int,
    ) -> np.ndarray:
        """Result of the tokens from `first` on, whose activations are laid out again.

        With `bits` of all tokens it is compared with these, else with the reference, which instruction sets share.
        """
        tokens = self.tokens - first if tokens is None else tokens
        part = first, first + tokens

        def expected(view: InstructionView) -> list[Expected]:
            if bits is not None:
                return [Expected("out", self.out()[slice(*part)], bits[slice(*part)])]
            if part not in self._expected:
                reference = reference_of(self.name)
                assert reference
                self._expected[part] = reference(view)
            return self._expected[part]

        self.bench.tokens([0] * tokens)
        operands = list(self.operands)
        operands[2] += first * self.out_stride
        data = self.x.memory(isa, slice(*part))
        x = self.bench.array(operands[1], np.uint8, (self.tokens * self.x.layout()[0],))
        x[:], x[: data.size] = 0xFF, data
        return self.bench.run(isa, self.name, operands, self.parameters(isa, **parameters), self.flags, threads,
                              reference=expected)["out"]


def random_matmul(rng, dtype: str, group: int, rows: int, cols: int, tokens: int, apart: int = 0, **more) -> MatMul:
    """A matmul of random operands; `apart` columns are multiplied as floats besides."""
    cols = whole(dtype, cols)
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    weights = random_weights(rng, dtype, group, rows, cols)
    made = activations(x, WeightType(dtype, group).input_group)
    if apart:
        made = made._replace(apart=(100 * rng.standard_normal((tokens, apart))).astype(np.float32))
    return MatMul(dtype, group, weights, rows, made, **more)


@pytest.mark.slow(keep=18)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "group"), weight_types(WEIGHTS, "linear"))
def test_linear_agrees_with_its_reference(dtype: str, group: int, width: int) -> None:
    if width not in (33, 1023) and whole(dtype, 1) > 1:
        pytest.skip("rows are whole blocks of 256 columns")
    rng = np.random.default_rng(width + group)
    for tokens in TOKENS:
        matmul = random_matmul(rng, dtype, group, ROWS[width], width, tokens)
        for isa in isas(matmul.name):
            matmul.run(isa)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize(("dtype", "group"), weight_types(WEIGHTS, "linear", "gated"))
def test_tiles_left_over_by_blocks_and_chunks(dtype: str, group: int, tiles: int) -> None:
    """Blocks of two and four row tiles, in chunks of any size, all streams or half: what they leave has the same bits.
    """
    rng = np.random.default_rng(tiles)
    for tokens in (1, 2, 3, 4, 7, 14):
        for gated in (False, True):
            rows = 16 * tiles * (1 + gated)
            matmul = random_matmul(rng, dtype, group, rows, 65, tokens, gated=gated)
            for isa in isas(matmul.name):
                whole = matmul.run(isa, chunk=2 * tiles)
                for chunk in (1, 2, 3, 4, 7):
                    matmul.run(isa, chunk=chunk, threads=1 + chunk % 2, bits=whole, halved=chunk % 2)


@pytest.mark.parametrize(("dtype", "group"), weight_types(WEIGHTS, "linear", "gated"))
def test_no_tokens_write_nothing(dtype: str, group: int) -> None:
    for gated in (False, True):
        matmul = random_matmul(np.random.default_rng(0), dtype, group, 32, 33, 2, gated=gated)
        for isa in isas(matmul.name):
            assert not matmul.run(isa, tokens=0).size


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("flags", ["bias", "residual", "both"])
@pytest.mark.parametrize(("dtype", "group"), weight_types(WEIGHTS, "linear"))
def test_bias_and_residual(dtype: str, group: int, flags: str) -> None:
    rng = np.random.default_rng(group)
    rows, tokens = 37, 11
    bias = rng.standard_normal(48).astype(np.float32) if flags != "residual" else None
    out = rng.standard_normal((tokens, 48)).astype(np.float32) if flags != "bias" else None
    matmul = random_matmul(rng, dtype, group, rows, 127, tokens, bias=bias, out=out)
    for isa in isas(matmul.name):
        matmul.run(isa)


@pytest.mark.slow(keep=16)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("dtype", "group"), weight_types(WEIGHTS, "gated"))
def test_gated_agrees_with_its_reference(dtype: str, group: int, activation: str) -> None:
    rng = np.random.default_rng(group)
    sizes = dict(zip(TOKENS, [(32, 31), (64, 6), (32, 33), (32, 64), (96, 127), (32, 7)] * 2, strict=False))
    for tokens, (rows, width) in {**sizes, 9: (96, 172), 33: (32, 65)}.items():
        bias = rng.standard_normal(rows).astype(np.float32) if tokens % 2 else None
        matmul = random_matmul(
            rng, dtype, group, rows, width, tokens, gated=True, bias=bias, activation=ACTIVATIONS[activation],
            limit=0.25)
        for isa in isas(matmul.name):
            matmul.run(isa)


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("dtype", "group"), weight_types(QUANTISED, "linear", "gated"))
def test_values_apart_are_multiplied_as_floats(dtype: str, group: int, gated: bool) -> None:
    """Beside a bias and, of a linear layer, a residual; a row has the same bits in any block."""
    rng = np.random.default_rng(group)
    bias, out = rng.standard_normal(96).astype(np.float32), rng.standard_normal((33, 96)).astype(np.float32)
    more = {"gated": True, "activation": ACTIVATIONS["silu"]} if gated else {"out": out}
    for apart in (1, 6):
        matmul = random_matmul(rng, dtype, group, 96, 65, 33, apart=apart, bias=bias, **more)
        for isa in isas(matmul.name):
            if gated:
                whole = matmul.run(isa)
                for first, tokens in ((0, 1), (5, 2), (30, 3), (7, 4), (19, 14)):
                    matmul.run(isa, first, tokens, threads=2, chunk=2, bits=whole)
            else:
                for tokens in (33, 7, 4, 3, 2, 1):
                    matmul.out()[:] = out
                    matmul.run(isa, 0, tokens, threads=2)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "group"), weight_types(WEIGHTS, "linear", "gated"))
def test_a_row_has_the_same_bits_for_any_number_of_tokens_and_threads(dtype: str, group: int, isa: str) -> None:
    """Whatever block a token falls into, and whether it went alone."""
    rng = np.random.default_rng(1)
    for more in ({}, {"gated": True, "activation": ACTIVATIONS["silu"]}):
        matmul = random_matmul(rng, dtype, group, 96, 172, 33, chunk=5, **more)
        if isa not in isas(matmul.name):
            continue
        whole = matmul.run(isa)
        matmul.run(isa, threads=3, bits=whole)
        for first, tokens in (*((t, 1) for t in range(33)), (5, 2), (30, 3), (7, 4), (11, 5), (3, 6), (3, 7), (25, 8),
                              (1, 9), (2, 12), (19, 14), (1, 29)):
            matmul.run(isa, first, tokens, bits=whole)


def plain_factors(dtype: str, group: int, rows: int, cols: int) -> packed.Factors:
    """All 1."""
    row, groups = TYPES[dtype], -(-cols // group)
    kind = {"f16": np.float16, "u8*f16": np.uint8, "i8*f16": np.int8}[row.scale]
    inner, outer = np.ones((rows, groups), kind), np.ones((rows, cols // 256), np.float16) if row.nested else None
    return packed.Factors(inner, inner if row.minimum else None, outer, outer if row.minimum else None)


@pytest.mark.parametrize(("dtype", "group"), weight_types(QUANTISED, "linear"))
@pytest.mark.parametrize("extreme", [False, True])
def test_integer_products_are_exact_on_every_instruction_set(dtype: str, group: int, extreme: bool) -> None:
    """With scales of 1 the result is an integer below 2^24; extremes are where 16-bit sums would saturate."""
    rng = np.random.default_rng(2)
    row, rows, cols = TYPES[dtype], 48, whole(dtype, 4 * group)
    groups = -(-cols // group)
    low, high = (0, (1 << row.bits) - 1) if row.indexed else row.grid
    for tokens in TOKENS:
        w = rng.integers(low, high + 1, (rows, cols))
        x = rng.integers(-127, 128, (tokens, cols))
        if extreme:
            table = table_of(dtype)
            w[0::2], w[1::2] = (np.argmin(table), np.argmax(table)) if row.indexed else (low, high)
            x[::2], x[1::2] = 127, -127
        if row.simple:
            weights = layouts.pack_tile16(w.astype(np.int8), dtype, group, np.ones((rows, groups), np.float16))
        else:
            weights = packed.pack(w.astype(np.int8), WeightType(dtype, group), plain_factors(dtype, group, rows, cols))
        levels = (np.array(table_of(dtype))[w] if row.indexed else w) + row.minimum
        own = WeightType(dtype, group).input_group
        ones = np.ones((tokens, cols // own), np.float32)
        matmul = MatMul(dtype, group, weights, rows, Activations(x.astype(np.int8), ones, own))
        for isa in isas(matmul.name):
            np.testing.assert_array_equal(matmul.run(isa), x @ levels.T)


@pytest.mark.parametrize(("dtype", "group"), QUANTISED)
def test_an_instruction_is_as_large_as_its_weights(dtype: str, group: int) -> None:
    """The offsets of an instruction's parts, and the sizes in headers, follow from a row in two ways."""
    row, stored = TYPES[dtype], WeightType(dtype, group)
    assert row.record_bytes(group) == stored.record_bytes
    assert row.run_steps * row.bits == 8 * row.run_lines and row.first_lines <= row.run_lines
    assert row.group_runs(group) * row.run_steps * 4 == group


def test_lists_of_kernels_follow_from_the_types() -> None:
    simple = ("q4_g32", "q4_g64", "q4_g128", "int8_g32", "int8_g64", "int8_g128")
    assert simple == catalogue.SCREENED and {*simple, "f16", "f32", "q6_g16"} < set(catalogue.WEIGHTS)
    assert set(catalogue.FOREIGN) == {kernel_name("", *taken)[1:] for taken in TAKEN}
    assert abi.NEURON_TYPES == ("q4", "int8", "q2") and tuple(KV_TYPES) == catalogue.KV


def exact_gate(points: np.ndarray, activation: str, isa: str) -> np.ndarray:
    """act(points) by gated_f32: the gate's row is 1, the up row takes its 1 from a second column."""
    x = np.stack([points, np.ones_like(points)], axis=1)
    w = np.zeros((32, 2), np.float32)
    w[:16, 0] = w[16:, 1] = 1
    matmul = MatMul("f32", 0, layouts.pack_tile16(w, "f32"), 32, activations(x, 0), gated=True,
                      activation=ACTIVATIONS[activation])
    out = matmul.run(isa)
    assert (out == out[:, :1]).all()
    return out[:, 0].astype(np.float64)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in PAIRED])
def test_accuracy_of_activations(activation: str, isa: str) -> None:
    points = np.concatenate([np.linspace(-86, 86, 4001), np.linspace(-1, 1, 2001), [0, 1e-30, -1e-30, 200, -200, 1e4]])
    points = points.astype(np.float32)
    want = ACTIVATION_FUNCTIONS[activation](points.astype(np.float64))
    inner = 1.6 * np.abs(points + 0.045 * points**3) if activation == "gelu_tanh" else 0  # rounding of e's argument
    relative = np.abs(want) * EXP * (1 + inner)
    absolute = ERF * np.abs(points) if activation == "gelu" else 1e-35 + (activation == "gelu_tanh") * 1e-15
    got = exact_gate(points, activation, isa)
    assert (np.abs(got - want) <= relative + absolute).all(), points[np.argmax(np.abs(got - want) - relative)]


def test_linear_reference_is_the_matmul() -> None:
    x, w = np.array([[1.0, 2.0]]), np.array([[3.0, 4.0], [5.0, -6.0], [0.0, 0.5]])
    y, tolerance = linear_values(x, w, np.array([0.0, 1.0, 0.0]))
    np.testing.assert_array_equal(y, [[11.0, -6.0, 1.0]])
    assert (tolerance < 1e-3).all()
