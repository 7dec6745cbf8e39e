"""The FFN in layout neuron on every instruction set: against its references, and the same bits whatever is skipped."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import ACTIVATIONS, NEURON_DOWN, NEURON_GATED, PAIRED, fill
from edgeinfer.kernels.reference import REFERENCES, Expected
from edgeinfer.quant import TYPES, layouts
from tests.helpers.kernel_bench import ISAS, Bench, token_tiles
from tests.kernels.test_matmul import Activations, activations

WEIGHTS = [("q4", 32), ("q4", 64), ("q4", 128), ("int8", 32), ("int8", 64), ("int8", 128),
           *(pytest.param("q2", group, marks=pytest.mark.slow) for group in (128, 64))]
LEVELS = {name: TYPES[name].grid for name in ("q4", "int8", "q2")}
WIDTHS = (6, 33, 64, 172, 288, 576, 1023)
NEURONS = {6: 1, 33: 9, 64: 20, 172: 17, 288: 8, 576: 40, 1023: 11}
TOKENS = (1, 2, 3, 4, 6, 7, 13)


def random_neurons(rng: np.random.Generator, dtype: str, group: int, neurons: int, width: int,
                   parts: int = 3) -> np.ndarray:
    """Bytes in layout neuron."""
    low, high = LEVELS[dtype]
    codes = rng.integers(low, high + 1, (neurons, parts, width), dtype=np.int8)
    scales = (rng.standard_normal((neurons, parts, -(-width // group))) / (high + 1)).astype(np.float16)
    return layouts.pack_neuron(codes, dtype, group, scales)


class Ffn:
    """A bench with the operands of both halves of an FFN."""

    def __init__(self, dtype: str, group: int, weights: np.ndarray, neurons: int, width: int,
                 x: Activations, masks: np.ndarray | None = None, bias: np.ndarray | None = None,
                 threshold: float | None = None, parts: int = 3, norm: np.ndarray | None = None):
        self.bench, self.x, self.dtype, self.group = Bench(), x, dtype, group
        self.neurons, self.width, self.tokens = neurons, width, len(x.values)
        self.roles: list[int] = [abi.ROLE_DECODE] * self.tokens
        self.f_stride, self.out_stride = 64 * -(-neurons // 16) + 64, 64 * -(-width // 16) + 64
        x_bytes = self.tokens * x.layout()[0]
        scratch = abi.neuron_gated_scratch_bytes(width, group, dtype) + 64
        self.scratch = max(scratch, abi.neuron_down_scratch_bytes() + 64) // 64 * 64
        self.weights = self.bench.put("weights", weights)
        self.x_operand = self.bench.reserve("activations", x_bytes)
        self.f_operand = self.bench.reserve("activations", self.tokens * self.f_stride)
        self.out_operand = self.bench.reserve("activations", self.tokens * self.out_stride)
        stored = np.full((self.tokens, abi.neuron_mask_bytes(neurons) + 8), 0xA5, np.uint8)  # what follows is not read
        if masks is not None:
            bits = np.packbits(np.pad(masks, ((0, 0), (0, -neurons % 64)), constant_values=True), 1, "little")
            stored[:, : bits.shape[1]] = bits
        self.mask_stride, self.masks = stored.shape[1], self.bench.put("activations", stored)
        if threshold is not None:
            self.masks, self.mask_stride = self.bench.put("constants", np.full(1, threshold, np.float32)), 0
        self.bias = self.bench.put("constants", np.zeros(1, np.float32) if bias is None else bias)
        self.norm = self.bench.put("constants", np.zeros(1, np.float32) if norm is None else norm)
        self.sums = self.bench.reserve("activations", abi.neuron_sums_bytes(neurons, width, group, dtype))
        self.scratch_operand = self.bench.scratch(self.scratch, 3)
        self.flags = abi.FLAG_MASK * (masks is not None) | abi.FLAG_BIAS * (bias is not None)
        self.flags |= abi.FLAG_THRESHOLD * (threshold is not None) | abi.FLAG_NORM_OF_F * (norm is not None)
        self.values = {"neurons": neurons, "part_bytes": weights.size // (parts * neurons), "ungated": 3 - parts,
                       "groups": -(-width // group), "group": group, "rows": abi.COUNT_TOKENS,
                       "scratch": self.scratch, "block": abi.neuron_block(neurons)}

    def gated(self, isa: str, activation: str = "relu", first: int = 0, tokens: int | None = None, threads: int = 1,
              chunk: int = 3, keep: bool = False) -> np.ndarray:
        """f of the tokens from `first` on, whose x is laid out again."""
        tokens = self.tokens - first if tokens is None else tokens
        self.bench.tokens([0] * tokens, roles=self.roles[first : first + tokens])
        stride = self.x.layout()[0]
        data = self.x.memory(isa, slice(first, first + tokens))
        x = self.bench.array(self.x_operand, np.uint8, (self.tokens * stride,))
        x[:], x[: data.size] = 0xFF, data
        parameters = fill(NEURON_GATED, **self.values, x_stride=stride, out_stride=self.f_stride, chunk=chunk,
                          activation=ACTIVATIONS[activation], limit=0.25, mask_stride=self.mask_stride,
                          token_tiles=abi.pack_token_tiles(token_tiles(isa)))
        operands = [self.weights, self.x_operand, self.f_operand + first * self.f_stride,
                  self.masks + first * self.mask_stride, self.scratch_operand, self.bias, self.sums, 0, 0, 0, 0,
                  self.norm]
        return self.bench.run(isa, f"neuron_gated_{self.dtype}", operands, parameters, self.flags, threads, keep)["f"]

    def down(self, isa: str, f: np.ndarray, threads: int = 1, chunk: int = 2,
             residual: np.ndarray | None = None) -> np.ndarray:
        """Outputs of rows f (T, neurons). One row alone: of the sums that `gated` has left."""
        tokens = len(f)
        self.bench.tokens([0] * tokens)
        self.bench.array(self.f_operand, np.float32, f.shape, (self.f_stride, 4))[:] = f
        if residual is not None:
            shape = (tokens, 16 * -(-self.width // 16))
            self.bench.array(self.out_operand, np.float32, shape, (self.out_stride, 4))[:] = residual
        parameters = fill(NEURON_DOWN, **self.values, x_stride=self.f_stride, out_stride=self.out_stride,
                          width=self.width, chunk=chunk, eps=1e-5)
        operands = [self.weights, self.f_operand, self.out_operand, self.scratch_operand, self.bias, self.sums, 0, 0,
                    self.norm]
        flags = self.flags | abi.FLAG_RESIDUAL * (residual is not None)
        return self.bench.run(isa, f"neuron_down_{self.dtype}", operands, parameters, flags, threads)["out"]

    def outputs(self, isa: str, activation: str = "relu", first: int = 0, tokens: int | None = None, threads: int = 1,
                chunk: int = 2) -> np.ndarray:
        """Both halves, one after the other."""
        f = self.gated(isa, activation, first, tokens, threads, chunk, keep=True)
        return self.down(isa, f, threads, chunk)


def random_ffn(rng: np.random.Generator, dtype: str, group: int, neurons: int, width: int, tokens: int,
               **more) -> Ffn:
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    weights = random_neurons(rng, dtype, group, neurons, width, more.get("parts", 3))
    return Ffn(dtype, group, weights, neurons, width, activations(x, group), **more)


def sparse(rng: np.random.Generator, shape: tuple[int, int], share: float) -> np.ndarray:
    """Floats of which so many are not zero; some of the zeros are negative."""
    values = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.random(shape) < share, values, np.float32(-0.0) * values.clip(-1, 1))


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_both_halves_agree_with_their_references(dtype: str, group: int, width: int) -> None:
    rng = np.random.default_rng(width + group)
    for tokens in TOKENS:
        ffn = random_ffn(rng, dtype, group, NEURONS[width], width, tokens)
        f = sparse(rng, (tokens, NEURONS[width]), (0.0, 0.3, 1.0)[tokens % 3])
        for isa in ISAS:
            ffn.gated(isa, keep=True)
            ffn.down(isa, f)


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in PAIRED])
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_activations_and_biases(dtype: str, group: int, activation: str) -> None:
    rng = np.random.default_rng(group)
    for tokens in (1, 5):
        bias = rng.standard_normal(2 * 24).astype(np.float32)
        ffn = random_ffn(rng, dtype, group, 24, 160, tokens, bias=bias)
        more = random_ffn(rng, dtype, group, 24, 31, tokens, bias=bias)
        residual = rng.standard_normal((tokens, 32)).astype(np.float32)
        for isa in ISAS:
            ffn.gated(isa, activation)
            more.gated(isa, activation, keep=True)
            more.down(isa, sparse(rng, (tokens, 24), 0.5), residual=residual)


@pytest.mark.parametrize("parts", [3, 2])
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS[1::5])
def test_columns_are_multiplied_by_a_norm_of_f(dtype: str, group: int, parts: int) -> None:
    """Both halves agree with their references; one token, several and threads have the same bits."""
    rng = np.random.default_rng(9)
    neurons, width, tokens = 150, 288, 6  # three blocks, the last not whole
    norm = rng.uniform(0.5, 2, neurons).astype(np.float32)
    ffn = random_ffn(rng, dtype, group, neurons, width, tokens, parts=parts, norm=norm)
    for isa in ISAS:
        whole = ffn.outputs(isa, "relu2")
        f = ffn.gated(isa, "relu2", keep=True)
        assert (f == 0).any(axis=1).all() and np.abs(whole).max() > 0
        normed = f * norm / np.sqrt((f.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
        weights = ffn.bench.array(ffn.weights, np.uint8, (parts * neurons * ffn.values["part_bytes"],))
        columns = layouts.unpack_neuron(weights, dtype, group, (neurons, parts, width))[:, -1]
        np.testing.assert_allclose(whole[:, :width], normed @ columns, rtol=1e-3, atol=1e-3 * np.abs(whole).max())
        for first, n in ((0, 1), (5, 1), (1, 2), (2, 4)):
            np.testing.assert_array_equal(ffn.outputs(isa, "relu2", first, n, 2), whole[first : first + n])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_the_same_bits_for_any_tokens_threads_and_chunks(dtype: str, group: int, isa: str) -> None:
    rng = np.random.default_rng(3)
    ffn = random_ffn(rng, dtype, group, 70, 288, 13)
    for activation in ("relu", "silu"):
        f, whole = ffn.gated(isa, activation), ffn.outputs(isa, activation)
        assert whole.any()
        for threads, chunk in ((2, 1), (3, 9), (2, 16)):
            np.testing.assert_array_equal(ffn.outputs(isa, activation, threads=threads, chunk=chunk), whole)
        for first, tokens in ((0, 1), (5, 2), (3, 3), (4, 4), (1, 7), (12, 1), (2, 11)):
            rows = slice(first, first + tokens)
            np.testing.assert_array_equal(ffn.gated(isa, activation, first, tokens), f[rows])
            np.testing.assert_array_equal(ffn.outputs(isa, activation, first, tokens, 1 + tokens % 2), whole[rows])


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_a_mask_computes_its_neurons_alone_with_the_same_bits(dtype: str, group: int, isa: str) -> None:
    """Each decoded token has the bits that it has alone, whatever other tokens choose; prompts are dense."""
    rng = np.random.default_rng(4)
    neurons, width, tokens = 150, 288, 7  # three blocks
    x = activations(rng.standard_normal((tokens, width)).astype(np.float32), group)
    weights = random_neurons(rng, dtype, group, neurons, width)
    dense = Ffn(dtype, group, weights, neurons, width, x)
    masks = rng.random((tokens, neurons)) < np.array([0, 1, 0.02, 0.1, 0.3, 0.9, 0.5])[:, None]
    masks[2, [63, 64, 149]] = True
    some = Ffn(dtype, group, weights, neurons, width, x, masks)
    some.roles[5] = abi.ROLE_PROMPT
    masks[5] = True  # which is what its role says
    for activation in ("relu", "silu"):
        f = dense.gated(isa, activation) * masks
        np.testing.assert_array_equal(some.gated(isa, activation, threads=2), f)
        whole = some.outputs(isa, activation)
        np.testing.assert_array_equal(whole, dense.down(isa, f))
        for first, n in ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (2, 4), (3, 3)):
            for threads, chunk in ((1, 2), (3, 9)):
                got = some.outputs(isa, activation, first, n, threads, chunk)
                np.testing.assert_array_equal(got, whole[first : first + n])


@pytest.mark.parametrize("activation", ["relu", "relu2", "silu"])
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS[::3])
def test_computing_dead_neurons_too_changes_no_bit(dtype: str, group: int, activation: str) -> None:
    rng = np.random.default_rng(8)
    ffn = random_ffn(rng, dtype, group, 150, 288, 6)
    for isa in ISAS:
        for first, n in ((0, 6), (2, 1)):
            ffn.flags = 0
            want = ffn.outputs(isa, activation, first, n)
            ffn.flags = abi.FLAG_DENSE
            np.testing.assert_array_equal(ffn.outputs(isa, activation, first, n, 2), want)


@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_dead_neurons_are_not_read(dtype: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that are NaN in the up rows and down columns of dead neurons change nothing, unless all are computed."""
    rng = np.random.default_rng(5)
    neurons, width = 40, 288
    low, high = LEVELS[dtype]
    codes = rng.integers(low, high + 1, (neurons, 3, width), dtype=np.int8)
    scales = (rng.random((neurons, 3, -(-width // group))) / (high + 1)).astype(np.float16)
    packed = layouts.pack_neuron(codes, dtype, group, scales)
    for tokens in (1, 2):
        x = activations(np.repeat(rng.standard_normal((1, width)).astype(np.float32), tokens, axis=0), group)
        ffn = Ffn(dtype, group, packed, neurons, width, x)
        f = ffn.gated("generic" if "generic" in ISAS else ISAS[0])
        assert 0 < (f[0] == 0).sum() < neurons
        damaged = scales.copy()
        damaged[f[0] == 0, 1:] = np.nan
        memory = ffn.bench.array(ffn.weights, np.uint8, packed.shape)
        for isa in ISAS:
            want = ffn.outputs(isa, tokens=tokens)
            memory[:] = layouts.pack_neuron(codes, dtype, group, damaged)
            with monkeypatch.context() as patch, np.errstate(invalid="ignore"):
                for name in ("gated", "down"):  # references multiply with all weights
                    patch.setitem(REFERENCES, f"neuron_{name}_{dtype}", unchecked(REFERENCES[f"neuron_{name}_{dtype}"]))
                np.testing.assert_array_equal(ffn.outputs(isa, tokens=tokens), want)
                if isa != "generic":  # whose conversion of halves knows finite numbers alone
                    ffn.flags |= abi.FLAG_DENSE
                    assert np.isnan(ffn.outputs(isa, tokens=tokens)).all()
                    ffn.flags = 0
            memory[:] = packed


def unchecked(reference):
    """A reference that knows where a kernel writes and believes what it finds there."""

    def believe(view):
        return [Expected(one.name, one.where, lambda one=one: one.where.copy()) for one in reference(view)]

    return believe


@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_integer_products_are_exact_on_every_instruction_set(dtype: str, group: int) -> None:
    """With scales of 1 all sums are integers below 2^24; extremes are where 16-bit sums would saturate."""
    rng = np.random.default_rng(6)
    neurons, width = 12, 4 * group
    low, high = LEVELS[dtype]
    for tokens in TOKENS:
        w = rng.integers(low, high + 1, (neurons, 3, width))
        x = rng.integers(-127, 128, (tokens, width))
        w[0], w[1], x[0] = low, high, 127
        w[::, 1] = 0
        w[:, 1, 0], x[:, 0] = 1, 1  # the up row gives 1
        weights = layouts.pack_neuron(w.astype(np.int8), dtype, group, np.ones((neurons, 3, 4), np.float16))
        codes = Activations(x.astype(np.int8), np.ones((tokens, 4), np.float32), group)
        ffn = Ffn(dtype, group, weights, neurons, width, codes)
        want = np.maximum(x @ w[:, 0].T, 0)
        f = rng.integers(-9, 9, (tokens, neurons)).astype(np.float32)
        for isa in ISAS:
            np.testing.assert_array_equal(ffn.gated(isa), want)
            if tokens > 1:
                np.testing.assert_array_equal(ffn.down(isa, f), f @ w[:, 2])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS[::3])
def test_more_neurons_than_are_searched_at_a_time(dtype: str, group: int) -> None:
    rng = np.random.default_rng(7)
    neurons = 33 * abi.NEURON_WINDOW + 37
    ffn = random_ffn(rng, dtype, group, neurons, 32, 3)
    f = sparse(rng, (3, neurons), 0.01)
    f[:, abi.NEURON_WINDOW : 2 * abi.NEURON_WINDOW] = 0
    for isa in ISAS[:1]:
        whole = ffn.outputs(isa, threads=2, chunk=50)
        np.testing.assert_array_equal(ffn.outputs(isa, first=1, tokens=1), whole[1:2])
        ffn.down(isa, f)


def test_no_tokens_write_nothing() -> None:
    ffn = random_ffn(np.random.default_rng(0), "q4", 32, 16, 33, 2)
    for isa in ISAS:
        assert not ffn.gated(isa, tokens=0).size
        assert not ffn.down(isa, np.zeros((0, 16), np.float32)).size


@pytest.mark.parametrize("hidden", [32, 172, 4096])
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_chunks_fit_their_scratch(dtype: str, group: int, hidden: int) -> None:
    for neurons in (1, 64, 768, 11008, 1 << 20):
        assert neurons <= 64 or abi.neuron_block(neurons) % abi.NEURON_BATCH == 0
        assert abi.neuron_block(neurons) <= abi.NEURON_WINDOW
        for threads in (1, 2, 64):
            lines = abi.neuron_lines(hidden, group, dtype)
            rows, lines = abi.neuron_chunks(neurons, 3 * hidden, lines, threads, dtype)
            assert rows >= 1 and 2 <= lines <= abi.NEURON_LINES and lines % 2 == 0
            assert lines * abi.neuron_line_columns(dtype) <= abi.NEURON_COLUMNS


@pytest.mark.parametrize("dtype", ["q4", "int8"])
def test_a_threshold_takes_small_activations_of_decoded_tokens_for_zero(dtype: str) -> None:
    rng = np.random.default_rng(3)
    for tokens in (1, 2, 7):
        ffn = random_ffn(rng, dtype, 32, 40, 172, tokens, threshold=0.4)
        weights = ffn.bench.array(ffn.weights, np.uint8, (3 * 40 * ffn.values["part_bytes"],))
        free = Ffn(dtype, 32, weights.copy(), 40, 172, ffn.x)
        ffn.roles[1:2] = [abi.ROLE_PROMPT] * (tokens > 1)
        for isa in ISAS:
            some, whole = ffn.gated(isa, "silu"), free.gated(isa, "silu")
            kept = some != 0
            assert np.array_equal(some[kept], whole[kept])
            assert 0 < kept[0].mean() < 0.9
            if tokens > 1:
                assert np.array_equal(some[1], whole[1])


@pytest.mark.parametrize("isa", ISAS)
def test_tokens_that_are_not_there_are_zeros(isa: str) -> None:
    """They are multiplied too: denormal numbers where their x would lie made two tokens cost more than four."""
    from edgeinfer.kernels.ops.neuron_ffn.neuron_batch import AREAS  # by way of Numba

    ffn = random_ffn(np.random.default_rng(3), "q4", 32, 17, 288, 2)
    ffn.bench.array(ffn.scratch_operand, np.uint8, (ffn.scratch,))[:] = 1
    ffn.gated(isa, keep=True)
    n = (4 if "avx512" in isa else 2) * abi.neuron_lines(288, 32, "q4") * 256
    x = ffn.bench.array(ffn.scratch_operand + AREAS, np.int32, (n // 4,))
    assert (x != 0x01010101).all() and (x[: n // 8] != 0).any()
