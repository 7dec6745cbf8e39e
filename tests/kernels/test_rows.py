"""Operations on rows on every instruction set: embedding, RMS norm, quantisation, gathering; and the bench itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeinfer.kernels import abi, reference_of
from edgeinfer.kernels.parameters import ROWS, fill
from edgeinfer.kernels.reference import REFERENCES, Expected, InstructionView, compare, quantise_rows, rms_norm
from edgeinfer.quant import WeightType, layouts
from tests.helpers import kernel_bench
from tests.helpers.kernel_bench import ISAS, Bench, isas, token_tiles, weight_types
from tests.kernels.test_matmul import TOKENS, WEIGHTS, kernel_name, random_weights, whole

WIDTHS = (6, 7, 31, 33, 64, 127, 172, 1023)
GROUPS = (32, 64, 128)


class Rows:
    """A bench with rows of floats, each followed by NaN up to the stride."""

    def __init__(self, x: np.ndarray, group: int = 0, weight: np.ndarray | None = None, eps: float = 1e-5,
                 apart: int = 0):
        self.bench, (tokens, self.width), self.group = Bench(), x.shape, group
        self.in_stride = 4 * (-(-self.width // 16) * 16) + 64
        rows = np.full((tokens, self.in_stride // 4), np.nan, np.float32)
        rows[:, : self.width] = x
        stride, scales, offsets = abi.q8_row_bytes(self.width, group, apart) if group else (self.in_stride, 0, 0)
        self.out_stride = stride
        self.operands = [
            self.bench.put("activations", rows), self.bench.reserve("activations", tokens * stride),
            self.bench.put("constants", np.ones(self.width, np.float32) if weight is None else weight),
            self.bench.scratch(4 * (-(-self.width // 16) * 16), 3),
        ]
        self.values = {
            "width": self.width, "in_stride": self.in_stride, "out_stride": stride, "rows": abi.COUNT_TOKENS,
            "scales": scales, "offsets": offsets, "group": group, "eps": eps,
            "scratch": 4 * (-(-self.width // 16) * 16),
        }
        self.bench.tokens([0] * tokens)

    def run(
        self, isa: str, name: str, threads: int = 1, first: int = 0, tokens: int | None = None, **parameters: int
    ) -> dict[str, np.ndarray]:
        """Run over the rows from `first` on; blocks of tokens come back as rows, codes as (T, values)."""
        operands, whole = list(self.operands), int(self.bench.counts[abi.COUNT_TOKENS])
        operands[0] += first * self.in_stride
        operands[1] += first * self.out_stride
        self.bench.tokens([0] * (whole - first if tokens is None else tokens))
        values = {**self.values, "token_tiles": abi.pack_token_tiles(token_tiles(isa)), **parameters}
        out = self.bench.run(isa, name, operands, fill(ROWS, **values), threads=threads)
        self.bench.tokens([0] * whole)
        return {name: rows.reshape(len(rows), rows[:1].size) for name, rows in out.items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], first: int = 0) -> None:
    """Equal bits; of the other, as many rows from `first` on."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name][first : first + len(values)], err_msg=name)


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group", GROUPS)
def test_quantize(group: int, width: int) -> None:
    """Bit for bit, offsets included, whatever the instruction set and its blocks."""
    rng = np.random.default_rng(width)
    for tokens in TOKENS:
        x = rng.standard_normal((tokens, width)).astype(np.float32) * 10.0 ** rng.integers(-6, 6)
        x[0, : width // 2] = 0
        rows = Rows(x, group)
        found = [rows.run(isa, "quantize", threads) for isa in ISAS for threads in (1, 2)]
        for other in found[1:]:
            same(found[0], other)


@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_in_an_order(width: int) -> None:
    """The bits of rows that were put in that order before."""
    rng = np.random.default_rng(width)
    for tokens in TOKENS:
        x, order = rng.standard_normal((tokens, width)).astype(np.float32), rng.permutation(width).astype(np.int32)
        rows, wanted = Rows(x, 32, order), Rows(x[:, order], 32)
        for isa in ISAS:
            for threads in (1, 3):
                same(wanted.run(isa, "quantize"), rows.run(isa, "quantize", threads, ordered=1))


@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_without_outliers(width: int) -> None:
    """The bits of rows that had zeros there before; and those elements as they were."""
    rng = np.random.default_rng(width)
    for tokens in TOKENS:
        x = rng.standard_normal((tokens, width)).astype(np.float32)
        columns = np.sort(rng.permutation(width)[: 1 + width // 9]).astype(np.int32)
        x[:, columns] *= 100
        zeroed = x.copy()
        zeroed[:, columns] = 0
        rows, wanted = Rows(x, 32, columns, apart=len(columns)), Rows(zeroed, 32)
        for isa in ISAS:
            for threads in (1, 3):
                found = rows.run(isa, "quantize", threads, left_out=len(columns))
                np.testing.assert_array_equal(found.pop("apart"), x[:, columns])
                same(wanted.run(isa, "quantize"), found)


def test_quantize_rounds_ties_to_even_and_zeros_to_zero() -> None:
    ties = np.arange(-126.5, 127, 1.0)[:127]
    x = np.zeros((2, 128), np.float32)
    x[0] = [127.0, *ties]
    for isa in ISAS:
        out = Rows(x, 128).run(isa, "quantize")
        np.testing.assert_array_equal(out["codes"][0, 1:128], np.rint(ties))
        assert out["scales"][0, 0] == 1
        assert out["offsets"][0, 0] == -8 * np.rint(x[0]).sum()
        assert not out["codes"][1].any() and not out["scales"][1].any() and not out["offsets"][1].any()


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int) -> None:
    rng = np.random.default_rng(width)
    for i, tokens in enumerate(TOKENS):
        x = rng.standard_normal((tokens, width)).astype(np.float32) * 10.0 ** rng.integers(-3, 3)
        weight = rng.standard_normal(width).astype(np.float32)
        for name, group in (("rms_norm_f32", 0), ("rms_norm_q8", GROUPS[(i + WIDTHS.index(width)) % len(GROUPS)])):
            rows = Rows(x, group, weight)
            for isa in ISAS:
                whole = rows.run(isa, name)
                same(whole, rows.run(isa, name, threads=3))
                for t in {0, tokens // 2, tokens - 1}:
                    same(rows.run(isa, name, first=t, tokens=1), whole, t)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["quantize", "rms_norm_q8"])
def test_a_quantised_row_has_the_same_bits_in_any_block(name: str, group: int, isa: str) -> None:
    rng = np.random.default_rng(group)
    rows = Rows(rng.standard_normal((33, 172)).astype(np.float32), group, rng.standard_normal(172).astype(np.float32))
    whole = rows.run(isa, name)
    same(whole, rows.run(isa, name, threads=3))
    for tokens in TOKENS:
        for first in range(33 - tokens + 1) if tokens == 1 else (0, 33 - tokens):
            same(rows.run(isa, name, first=first, tokens=tokens), whole, first)


def test_a_reference_is_asked_again_where_it_would_read_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(kernel_bench, "reference_of", lambda name: asked.append(name) or reference_of(name))
    rows = Rows(np.ones((3, 40), np.float32))
    for threads in (1, 2):
        rows.run(ISAS[0], "rms_norm_f32", threads)
    assert len(asked) == 1
    rows.bench.array(rows.operands[0], np.float32, (3, 40), (rows.in_stride, 4))[1, 7] = 2
    rows.run(ISAS[0], "rms_norm_f32")
    assert len(asked) == 2
    rows.run(ISAS[0], "rms_norm_f32", tokens=2)
    assert len(asked) == 3


@pytest.mark.parametrize("name", ["quantize", "rms_norm_f32", "rms_norm_q8", "gather_outputs"])
def test_no_rows_write_nothing(name: str) -> None:
    rows = Rows(np.ones((2, 33), np.float32), 32)
    rows.bench.tokens([])
    for isa in ISAS:
        assert not any(values.size for values in rows.run(isa, name).values())


def test_rms_norm_of_zeros_is_zero() -> None:
    for isa in ISAS:
        assert not Rows(np.zeros((1, 33), np.float32)).run(isa, "rms_norm_f32")["out"].any()


def test_rms_norm_reference() -> None:
    np.testing.assert_allclose(rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 0.0), [[0.84852814, 2.2627417]])


@pytest.mark.parametrize("width", WIDTHS)
def test_gather_outputs(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = Rows(rng.standard_normal((33, width)).astype(np.float32))
    for chosen in ([32], [0, 31, 7], list(range(33))):
        rows.bench.outputs = np.array(chosen, np.int64)
        rows.bench.tokens([0] * len(chosen))
        for isa in ISAS:
            rows.run(isa, "gather_outputs", threads=2)


def embed(bench: Bench, isa: str, name: str, table: int, tile_bytes: int, width: int, ids: list[int]) -> np.ndarray:
    stride = 4 * width + 68
    operands = [table, bench.reserve("activations", len(ids) * stride)]
    bench.tokens([0] * len(ids), ids=ids)
    parameters = fill(ROWS, width=width, out_stride=stride, rows=abi.COUNT_TOKENS, tile_bytes=tile_bytes)
    return bench.run(isa, name, operands, parameters, threads=2)["out"]


@pytest.mark.slow(keep=16)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "group"), weight_types(WEIGHTS, "embed"))
def test_embed(dtype: str, group: int, width: int) -> None:
    if width > 64 and whole(dtype, 1) > 1:
        pytest.skip("rows are whole blocks of 256 columns")
    rng, width = np.random.default_rng(width), whole(dtype, width)
    bench, rows, name = Bench(), 43, kernel_name("embed", dtype, group)
    table = bench.put("weights", random_weights(rng, dtype, group, rows, width))
    tile_bytes = WeightType(dtype, group).tile_bytes(width)
    for tokens in TOKENS:
        ids = rng.integers(0, rows, tokens).tolist()
        for isa in isas(name):
            embed(bench, isa, name, table, tile_bytes, width, ids)


@pytest.mark.parametrize(("dtype", "group"), [("q4", 32), ("int8", 32), ("f16", 0), ("f32", 0)])
def test_rows_that_are_tiles(dtype: str, group: int) -> None:
    """A token's row lies in the 16 rows of a tile, one after the other; the last ones are short, or padding."""
    rng, piece, vocabulary = np.random.default_rng(0), 64, 7
    stored, bench, name = WeightType(dtype, group), Bench(), kernel_name("embed", dtype, group)
    table = bench.put("weights", random_weights(rng, dtype, group, 16 * vocabulary, piece))
    for width in (1, 64, 100, 16 * 64):
        ids, stride = [6, 0, 3, 3, 5], 4 * width + 68
        operands = [table, bench.reserve("activations", len(ids) * stride)]
        bench.tokens([0] * len(ids), ids=ids)
        parameters = fill(ROWS, width=width, out_stride=stride, rows=abi.COUNT_TOKENS, piece=piece,
                          tile_bytes=stored.tile_bytes(piece))
        for isa in isas(name):
            bench.run(isa, name, operands, parameters, threads=2)


@pytest.mark.parametrize(("dtype", "group"), [("q4", 32), ("int8", 32), ("f16", 0), ("f32", 0)])
def test_tables_longer_than_16_bits_count(dtype: str, group: int) -> None:
    """Rows around and beyond 2^16 are themselves, not those that a 16-bit index would name."""
    rows, width, tile_bytes = 151_936, 2, WeightType(dtype, group).tile_bytes(2)
    bench, name = Bench(), kernel_name("embed", dtype, group)
    table = bench.reserve("weights", rows // 16 * tile_bytes)
    ids = [65535, 65536, 65537, 131073, rows - 1, 1]
    for i in ids:
        values = np.zeros((16, width), np.int8)
        values[i % 16] = i % 7 + 1, -(i % 5) - 1
        scales = np.ones((16, 1), np.float16) if group else None
        tile = layouts.pack_tile16(values, dtype, group, scales)
        bench.array(table + i // 16 * tile_bytes, np.uint8, (tile_bytes,))[:] = tile
        for isa in ISAS:  # each while its own tile is the last written
            out = embed(bench, isa, name, table, tile_bytes, width, [i])
            np.testing.assert_array_equal(out, [[i % 7 + 1, -(i % 5) - 1]])


@pytest.mark.parametrize("isa", ISAS)
def test_widening_of_every_fp16(isa: str) -> None:
    """All finite bit patterns, subnormals and both zeros included, bit for bit."""
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 2048)
    values = patterns.view(np.float16)
    values = np.where(np.isfinite(values), values, np.float16(0))
    bench = Bench()
    table = bench.put("weights", layouts.pack_tile16(values, "f16"))
    out = embed(bench, isa, "embed_f16", table, 2048 * 32, 2048, list(range(32)))
    np.testing.assert_array_equal(out.view(np.uint32), values.astype(np.float32).view(np.uint32))


# -- probes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", ISAS)
def test_int8_peak_stores_all_it_has_computed(isa: str, threads: int) -> None:
    """16 vectors (1024 bytes) a thread: start + rounds x line . 4 values, times the line read as floats."""
    rng, bench, rounds = np.random.default_rng(0), Bench(), 5
    line = rng.integers(0, 64, 64, dtype=np.uint8)
    operands = [bench.put("weights", line), bench.reserve("activations", 1024 * threads)]
    dots = line.reshape(16, 4).astype(np.int64)
    sums = line.view(np.int32).astype(np.int64)[:, None] + rounds * dots @ dots.T  # (value, lane)
    want = sums.astype(np.float32) * line.view(np.float32)[:, None]

    def reference(view: InstructionView) -> list[Expected]:
        return [Expected("out", view.array(1, np.float32, (threads, 16, 16)), np.stack([want] * threads))]

    bench.run(isa, "int8_peak", operands, [rounds], threads=threads, reference=reference)


@pytest.mark.parametrize("isa", ISAS)
def test_stream_read_adds_up_all_that_it_reads(isa: str) -> None:
    bench, data = Bench(), np.random.default_rng(0).integers(-(2**31), 2**31, 7 * 512 // 4, dtype=np.int32)
    operands = [bench.put("weights", data), bench.reserve("activations", 64)]

    def reference(view: InstructionView) -> list[Expected]:
        return [Expected("sum", view.array(1, np.int32, (1,)), data.sum(dtype=np.int32, keepdims=True))]

    bench.run(isa, "stream_read", operands, [512, 7], reference=reference)


@pytest.mark.parametrize("size", [64, 192, 256, 1088])
@pytest.mark.parametrize("isa", ISAS)
def test_random_read_adds_up_the_pieces_that_the_list_names(isa: str, size: int) -> None:
    rng, bench, batch, batches, ahead = np.random.default_rng(0), Bench(), 3, 4, 2
    data = rng.integers(-(2**31), 2**31, (20, size // 4), dtype=np.int32)
    names = rng.integers(0, 20, batch * batches + ahead, dtype=np.int32)
    operands = [bench.put("weights", data), bench.put("constants", names), bench.reserve("activations", 64)]

    def reference(view: InstructionView) -> list[Expected]:
        wanted = data[names[: batch * batches]].sum(dtype=np.int32, keepdims=True).reshape(1)
        return [Expected("sum", view.array(2, np.int32, (1,)), wanted)]

    bench.run(isa, "random_read", operands, [size, batch, batches, ahead, min(size, 256)], reference=reference)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", ISAS)
def test_f32_peak_stores_all_it_has_computed(isa: str, threads: int) -> None:
    """12 vectors of whole numbers (6 where registers are few), halved and increased 3 times: exact in f32."""
    bench, chains = Bench(), 12 if "avx512" in isa else 6
    start = np.arange(12 * 16, dtype=np.float32)
    head = np.zeros(16, np.float32)
    head[:3] = 0.5, 2.0, 1.0
    operands = [bench.put("weights", np.concatenate([head, start])), bench.reserve("activations", 1024 * threads)]
    want = (start / 8 + 2 * (1 + 0.5 + 0.25))[: 16 * chains]

    def reference(view: InstructionView) -> list[Expected]:
        stored = view.array(1, np.float32, (threads, 256))[:, : 16 * chains]
        return [Expected("out", stored, np.stack([want] * threads))]

    bench.run(isa, "f32_peak", operands, [3], threads=threads, reference=reference)


# -- comparison --------------------------------------------------------------------------------------------------------


def test_compare_names_the_largest_deviation() -> None:
    where = np.zeros((2, 3), np.float32)
    where[1, 2], where[0, 1] = 3.0, 1.0
    message = compare([Expected("good", where, where.copy()), Expected("out", where, np.zeros((2, 3)), False, 0.5)])
    assert message == "out[1, 2] is 3, its reference gives 0 (tolerance 0.5); 2 of 6 values deviate."


@pytest.mark.parametrize(
    ("have", "want", "exact", "tolerance", "equal"),
    [
        (np.float32(1.0), 1.0 + 1e-7, False, 1e-6, True),
        (np.float32(1.0), 1.0 + 1e-7, True, None, False),
        (np.float32(np.nan), 1.0, False, 1.0, False),
        (np.float32(1.0), np.nan, False, 1.0, False),
        (np.float32(np.inf), np.inf, True, None, True),
        (np.float32(np.inf), 1.0, False, 1.0, False),
        (np.int8(3), 3.4999, False, 1e-3, True),
        (np.int8(3), 3.5001, False, 1e-3, True),
        (np.int8(4), 3.4995, False, 1e-3, True),
        (np.int8(3), 3.502, False, 1e-3, False),
        (np.int8(3), 4.0, True, None, False),
    ],
)
def test_compare(have, want: float, exact: bool, tolerance: float | None, equal: bool) -> None:
    where = np.array([have])
    assert (compare([Expected("x", where, lambda: np.array([want]), exact, tolerance)]) is None) == equal


def test_compare_sees_a_wrong_shape() -> None:
    message = compare([Expected("x", np.zeros(3), np.zeros(2))])
    assert message == "x: the reference expects shape (2,), memory has (3,)."


def test_quantise_rows_reference() -> None:
    codes, scales = quantise_rows(np.array([[0.0, 1.0, -2.0, 0.5]], np.float32), 2)
    np.testing.assert_allclose(codes, [[0.0, 127.0, -127.0, 31.75]])
    np.testing.assert_allclose(scales, [[1 / 127, 2 / 127]], rtol=1e-7)


@pytest.mark.parametrize("fault", ["value", "stray write"])
def test_the_bench_notices_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """References that expect another value, or a row less than what the kernel writes."""
    right = REFERENCES["rms_norm_f32"]

    def wrong(view: InstructionView) -> list[Expected]:
        (one,) = right(view)
        if fault == "value":
            return [replace(one, values=one.values + 1)]
        return [replace(one, where=one.where[1:], values=one.values[1:], tolerance=one.tolerance[1:])]

    monkeypatch.setitem(REFERENCES, "rms_norm_f32", wrong)
    sentence = "its reference gives 2" if fault == "value" else "bytes of activations changed that must not"
    with pytest.raises(AssertionError, match=sentence):
        Rows(np.ones((2, 64), np.float32), eps=0.0).run(ISAS[0], "rms_norm_f32")


def test_the_bench_notices_other_blocks_and_too_little_scratch() -> None:
    x = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    with pytest.raises(AssertionError, match=r"quantize on .*: codes\["):
        Rows(x, 32).run(ISAS[0], "quantize", token_tiles=abi.pack_token_tiles((3, 2)))
    rows = Rows(x, 32)
    rows.bench._scratch[0] = rows.bench._scratch[0][0], 64 * 4 - 16, 3
    with pytest.raises(AssertionError, match="bytes of scratch changed that must not"):
        rows.run(ISAS[0], "rms_norm_q8")
