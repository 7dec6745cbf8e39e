"""Mixtures of experts on every instruction set: routing, sorting, inputs and products against their references."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from edgeinfer.kernels import abi, routes
from edgeinfer.kernels.parameters import ACTIVATIONS, EXPERTS_INPUT, LINEAR, ROUTE, ROWS, fill
from edgeinfer.kernels.reference import choose_experts
from edgeinfer.quant import WeightType
from tests.helpers.kernel_bench import ISAS, Bench, isas, token_tiles, weight_types
from tests.kernels.test_matmul import WEIGHTS, kernel_name, random_weights

STRIDE = 16
CASES = [(dtype, group, isa) for dtype, group in WEIGHTS for isa in isas(kernel_name("experts_gated", dtype, group))]
"""Types of weights, each with the instruction sets that it is tested on."""


def route(isa: str, logits: np.ndarray, active: int, threads: int = 1, bias: np.ndarray | None = None,
          factors: np.ndarray | None = None, **parameters: int | float) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights of each token."""
    bench, (tokens, experts) = Bench(), logits.shape
    width = -(-experts // 16) * 16
    rows = np.full((tokens, width), np.nan, np.float32)
    rows[:, :experts] = logits
    out_stride = -(-active // 4) * 64
    operands = [bench.put("activations", rows), bench.reserve("activations", tokens * out_stride),
              bench.put("constants", np.zeros(width, np.float32) if bias is None else bias),
              bench.scratch(12 * width, 3), 0 if factors is None else bench.put("constants", factors)]
    bench.tokens([0] * tokens)
    values = fill(ROUTE, experts=experts, active=active, in_stride=4 * width, out_stride=out_stride,
                  rows=abi.COUNT_TOKENS, scratch=12 * width,
                  **{"scale": 1.0, "groups": 1, "active_groups": 1, "group_best": 1, **parameters})
    flags = abi.FLAG_BIAS * (bias is not None) | abi.FLAG_SCALED * (factors is not None)
    found = bench.run(isa, "route", operands, values, flags, threads)
    return found["experts"], found["weights"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scores", [routes.SCORE_SOFTMAX, routes.SCORE_SIGMOID])
@pytest.mark.parametrize(("experts", "active"), [(1, 1), (2, 1), (7, 3), (8, 2), (31, 31), (64, 8), (127, 4),
                                                 (512, 10)])
def test_routing_agrees_with_its_reference(isa: str, scores: int, experts: int, active: int) -> None:
    rng = np.random.default_rng(experts)
    for tokens in (1, 7, 33):
        logits = (3 * rng.standard_normal((tokens, experts))).astype(np.float32)
        for normalise, scale in ((0, 1.0), (1, 2.5)):
            ids, weights = route(isa, logits, active, 2, scores=scores, normalise=normalise, scale=scale)
            assert (np.diff(ids, axis=1) > 0).all()
            if normalise:
                np.testing.assert_allclose(weights.sum(axis=1), scale, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("groups", "active_groups", "best"), [(1, 1, 1), (4, 2, 2), (8, 3, 1), (8, 4, 2), (32, 6, 2)])
def test_a_bias_counts_for_the_choice_alone_and_groups_are_chosen_first(
    isa: str, groups: int, active_groups: int, best: int
) -> None:
    rng = np.random.default_rng(groups)
    logits, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((33, 64), 64))
    more = {"scores": routes.SCORE_SIGMOID, "groups": groups, "active_groups": active_groups, "group_best": best}
    ids, weights = route(isa, logits, 6, bias=bias, **more)
    assert (len(set(row // (64 // groups))) <= active_groups for row in ids)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    np.testing.assert_allclose(weights, np.take_along_axis(scores, ids, axis=1), rtol=1e-5)
    assert (ids != route(isa, logits, 6, **more)[0]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_weights_are_multiplied_by_what_each_expert_has(isa: str) -> None:
    rng = np.random.default_rng(5)
    logits, factors = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 33), 33))
    plain, scaled = (route(isa, logits, 4, factors=own, normalise=1) for own in (None, factors))
    np.testing.assert_array_equal(scaled[0], plain[0])
    np.testing.assert_allclose(scaled[1], plain[1] * factors[plain[0]], rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_of_equal_logits_the_first_experts_are_chosen(isa: str) -> None:
    logits = np.zeros((3, 20), np.float32)
    logits[1, ::2] = -0.0
    logits[2, 7:] = 1
    ids, weights = route(isa, logits, 4)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3], [0, 1, 2, 3], [7, 8, 9, 10]])
    np.testing.assert_allclose(weights[0], 1 / 20, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_logits_that_are_no_numbers_still_name_experts(isa: str) -> None:
    """Each once; what they weigh tells whoever looks at the result."""
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        logits = np.full((1, 20), value, np.float32)
        np.testing.assert_array_equal(_ids_without_reference(isa, logits, 5), choose_experts(np.zeros((1, 20)), 5))


def _ids_without_reference(isa: str, logits: np.ndarray, active: int) -> np.ndarray:
    """Experts alone: of such weights no reference knows more than that they are not numbers."""
    from edgeinfer.kernels.reference import Expected, InstructionView

    bench = Bench()
    rows = np.full((1, 32), np.nan, np.float32)
    rows[:, : logits.shape[1]] = logits
    operands = [bench.put("activations", rows), bench.reserve("activations", 256), 0, bench.scratch(384)]
    bench.tokens([0])
    values = fill(ROUTE, experts=logits.shape[1], active=active, in_stride=128, out_stride=256, rows=abi.COUNT_TOKENS,
                  scratch=384, scale=1.0, groups=1, active_groups=1, group_best=1)

    def reference(view: InstructionView) -> list[Expected]:
        out = view.array(1, np.int32, (64,))
        return [Expected("out", out, lambda: out)]

    found = bench.run(isa, "route", operands, values, reference=reference)["out"]
    return found.reshape(-1, 4)[:active, 0][None]


class MoE(NamedTuple):
    """Rows of `route` for some tokens."""

    ids: np.ndarray
    weights: np.ndarray
    experts: int

    @property
    def rows(self) -> np.ndarray:
        """The rows as memory, int32 (T, words)."""
        tokens, active = self.ids.shape
        out = np.full((tokens, -(-active // 4) * STRIDE), -1, np.int32)
        entries = out[:, : 4 * active].reshape(tokens, active, 4)
        entries[:, :, 0], entries[:, :, 1] = self.ids, np.arange(tokens)[:, None]
        entries[:, :, 2] = self.weights.view(np.int32)
        return out

    @property
    def listed(self) -> np.ndarray:
        """The list with its segments, int32 (entries + segments, 4)."""
        _, active = self.ids.shape
        order = np.argsort(self.ids.reshape(-1), kind="stable")
        ids = self.ids.reshape(-1)[order]
        found, first, counts = np.unique(ids, return_index=True, return_counts=True)
        entries = np.full((len(order), 4), -1, np.int32)
        entries[:, 0], entries[:, 1] = ids, order // active
        entries[:, 2] = self.weights.reshape(-1)[order].view(np.int32)
        entries[0, 3] = len(found)
        segments = np.full((len(found), 4), -1, np.int32)
        segments[:, 0], segments[:, 1], segments[:, 2] = found, first, counts
        return np.concatenate([entries, segments])

    def of(self, tokens: slice) -> MoE:
        return MoE(self.ids[tokens], self.weights[tokens], self.experts)


def moe(rng: np.random.Generator, tokens: int, experts: int, active: int, skew: float = 0.0) -> MoE:
    """Random routes; with a skew the first experts are wanted more."""
    wish = rng.random((tokens, experts)) + skew * np.linspace(1, 0, experts)
    ids = np.sort(np.argsort(-wish, axis=1)[:, :active], axis=1)
    return MoE(ids.astype(np.int32), rng.random((tokens, active)).astype(np.float32), experts)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("experts", "active"), [(1, 1), (5, 2), (8, 8), (64, 6), (512, 10)])
def test_tokens_are_sorted_by_expert(isa: str, experts: int, active: int) -> None:
    rng = np.random.default_rng(experts)
    for tokens in (2, 7, 33, 513):
        mix = moe(rng, tokens, experts, active, skew=0.5)
        bench, rows = Bench(), mix.rows
        operands = [bench.put("activations", rows), bench.reserve("activations", 32 * tokens * active), 0,
                  bench.scratch(4 * experts + 64, 3)]
        bench.tokens([0] * tokens)
        values = fill(ROUTE, experts=experts, active=active, in_stride=rows.shape[1] * 4, rows=abi.COUNT_TOKENS,
                      scratch=4 * experts + 64)
        found = bench.run(isa, "sort_routes", operands, values, threads=3)
        np.testing.assert_array_equal(found["segments"], mix.listed[tokens * active :, :3])
        np.testing.assert_array_equal(found["tokens"], mix.listed[: tokens * active, 1])


class Layer:
    """The experts of a layer, and what a test gives them."""

    def __init__(self, rng: np.random.Generator, dtype: str, group: int, mix: MoE, hidden: int, width: int,
                 bias: bool = False):
        whole = WeightType(dtype, group).padded_columns(1)
        if whole > 2 * group > 0:  # types whose scales are nested exist in whole instructions only
            hidden, width = whole, whole
        self.dtype, self.group, self.mix, self.hidden, self.width, self.bias = dtype, group, mix, hidden, width, bias
        self.input_group = WeightType(dtype, group).input_group
        tokens, _ = mix.ids.shape
        self.tiles, self.out_tiles = -(-width // 16), -(-hidden // 16)
        self.gate_up, self.down = (
            np.concatenate([random_weights(rng, dtype, group, 16 * tiles, columns) for _ in range(mix.experts)])
            for tiles, columns in ((2 * self.tiles, hidden), (self.out_tiles, width)))
        self.x = np.zeros((tokens, -(-hidden // 16) * 16), np.float32)
        self.x[:, :hidden] = rng.standard_normal((tokens, hidden))
        self.residual = rng.standard_normal((tokens, 16 * self.out_tiles)).astype(np.float32)
        self.inner, self.outer = (rng.standard_normal((mix.experts, 16 * tiles)).astype(np.float32)
                                  for tiles in (2 * self.tiles, self.out_tiles))

    def _rows(self, width: int) -> tuple[int, int, int]:
        if self.group:
            return abi.q8_row_bytes(width, self.input_group)
        return 4 * (-(-width // 16) * 16), 0, 0

    def run(self, isa: str, tokens: slice = slice(None), threads: int = 1, chunk: int = 3,
            activation: str = "silu", limit: float = 0.0,
            in_slots: bool = False, onto: bool = True) -> np.ndarray:
        """The layer's output for some of the tokens, instruction by instruction, each against its reference.

        With `in_slots` matrices lie in no order, and each product is two instructions; `onto` the residual, or zeros.
        """
        bench, mix, x = Bench(), self.mix.of(tokens), self.x[tokens]
        n, active = mix.ids.shape
        several, pairs = n > 1, n * active
        bench.tokens([0] * n)
        bench.counts[abi.COUNT_SEVERAL] = n if several else 0
        tiles_of = abi.pack_token_tiles(token_tiles(isa))
        rows, listed = bench.put("activations", mix.rows), bench.put("activations", mix.listed)
        source = bench.put("activations", x)
        residual = bench.put("activations", self.residual[tokens])
        widths = (self.hidden, self.width)
        strides = [self._rows(width) for width in widths]
        inputs = [bench.reserve("activations", pairs * stride[0]) for stride in strides]
        f_stride = 64 * self.tiles
        f = bench.reserve("activations", pairs * f_stride)
        room = abi.GATED_SCRATCH_BYTES + active * max(stride[0] for stride in strides) if self.group \
            else abi.GATED_SCRATCH_BYTES
        scratch = bench.scratch(room, 3)
        suffix = kernel_name("x", self.dtype, self.group)[2:]

        def lay(step: int, given: int, stride: int, gather: int) -> None:
            row, scales, offsets = strides[step]
            values = fill(EXPERTS_INPUT, width=widths[step], in_stride=stride, out_stride=row, rows=abi.COUNT_TOKENS,
                          active=active, gather=gather, scales=scales, offsets=offsets, group=self.input_group,
                          token_tiles=tiles_of)
            name = "experts_input_q8" if self.group else "experts_input_f32"
            bench.run(isa, name, [given, inputs[step], listed], values, threads=threads, keep=True)

        def multiply(step: int, name: str, weights: np.ndarray, tiles: int, out: int, given: int, stride: int, to: int,
                     bias: np.ndarray) -> None:
            row, scales, offsets = strides[step]
            stored = WeightType(self.dtype, self.group)
            values = fill(LINEAR, tiles=tiles, tile_bytes=stored.tile_bytes(widths[step]),
                          records=stored.tile_records(widths[step]), x_stride=row,
                          x_scales=scales, x_offsets=offsets, out_stride=out, rows=abi.COUNT_TOKENS, chunk=chunk,
                          activation=ACTIVATIONS[activation], limit=limit, scratch=room, token_tiles=tiles_of,
                          fused=abi.FUSED_QUANTISE if self.group else 0, width=widths[step], group=self.input_group,
                          active=active, source_stride=stride)
            x_operand = inputs[step] if self.group or step == 0 else given
            operands = [bench.put("weights", weights), x_operand, to, bench.put("constants", bias), scratch, given,
                        rows,
                      listed]
            flags = abi.FLAG_BIAS * self.bias | abi.FLAG_RESIDUAL * (onto and step)
            if not in_slots:
                weights = apart(weights, mix.experts)
                operands[0], values[LINEAR.expert_bytes] = bench.put("weights", weights), weights.shape[1]
                bench.run(isa, name + suffix, operands, values, flags, threads, keep=True)
                return
            slots, table = scattered(weights, mix.experts, routes.LOCATION_DOWN if step else routes.LOCATION_GATE_UP)
            operands = [bench.put("weights", slots), *operands[1:], bench.put("constants", table)]
            for since, until in ((0, mix.experts // 2), (mix.experts // 2, mix.experts)):
                values[LINEAR.since], values[LINEAR.until] = since, until
                bench.run(isa, name + suffix, operands, values, flags | routes.FLAG_SLOTS, threads, keep=True)
                flags |= abi.FLAG_RESIDUAL * step

        if several:
            lay(0, source, 4 * x.shape[1], 1)
        multiply(0, "experts_gated_", self.gate_up, self.tiles, f_stride, source, 0, f, self.inner)
        if several and self.group:
            lay(1, f, f_stride, 0)
        multiply(1, "experts_down_", self.down, self.out_tiles, 4 * self.residual.shape[1], f, f_stride, residual,
                 self.outer)
        return bench.array(residual, np.float32, (n, self.residual.shape[1])).copy()


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize(("dtype", "group"), weight_types(WEIGHTS, "experts_gated"))
@pytest.mark.parametrize(("tokens", "experts", "active", "hidden", "width"), [
    (1, 5, 2, 33, 17), (1, 64, 8, 70, 33), (2, 3, 2, 31, 6), (7, 4, 1, 64, 40), (33, 8, 3, 127, 50), (40, 2, 1, 40, 96),
])
def test_matmuls_of_experts_agree_with_their_references(
    dtype: str, group: int, tokens: int, experts: int, active: int, hidden: int, width: int
) -> None:
    rng = np.random.default_rng(tokens)
    layer = Layer(rng, dtype, group, moe(rng, tokens, experts, active, 0.7), hidden, width, bias=tokens % 2 == 1)
    for isa in isas(kernel_name("experts_gated", dtype, group)):
        layer.run(isa, threads=2)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("dtype", "group", "isa"), weight_types(CASES, "experts_gated"))
def test_a_token_has_the_same_bits_in_any_pass(dtype: str, group: int, isa: str) -> None:
    """Alone, with some or with all; on one thread or three; in chunks of any size."""
    rng = np.random.default_rng(5)
    layer = Layer(rng, dtype, group, moe(rng, 33, 6, 3, 0.5), 65, 38, bias=True)
    whole = layer.run(isa)
    for chunk, threads in ((1, 3), (2, 2), (7, 1)):
        np.testing.assert_array_equal(layer.run(isa, threads=threads, chunk=chunk), whole)
    for tokens in (*(slice(t, t + 1) for t in range(0, 33, 4)), slice(1, 3), slice(5, 12), slice(20, 33)):
        np.testing.assert_array_equal(layer.run(isa, tokens), whole[tokens])


@pytest.mark.parametrize(("dtype", "group"), [("mxfp4", 32), ("f32", 0)])
def test_clamped_gates_of_experts(dtype: str, group: int) -> None:
    """gpt-oss's activation, with gates and ups on both sides of the limit."""
    rng = np.random.default_rng(3)
    for tokens in (1, 33):
        layer = Layer(rng, dtype, group, moe(rng, tokens, 5, 2), 70, 40, bias=True)
        for isa in ISAS:
            outs = [layer.run(isa, activation="swiglu_oai", limit=limit) for limit in (0.5, 1e30)]
            assert np.abs(outs[0] - outs[1]).max() > 0.1


def apart(weights: np.ndarray, experts: int) -> np.ndarray:
    """Bytes of each expert's matrices, with what is none of theirs between them."""
    own = weights.reshape(-1).view(np.uint8).reshape(experts, -1)
    return np.concatenate([own, np.full((experts, 3 * routes.LINE), 0xFF, np.uint8)], axis=1)


def scattered(weights: np.ndarray, experts: int, field: int) -> tuple[np.ndarray, np.ndarray]:
    """The experts' matrices in another order with gaps, and the table that says where."""
    own = weights.reshape(-1).view(np.uint8).reshape(experts, -1)
    room = own.shape[1] + 3 * routes.LINE
    slots, table = np.full((experts, room), 0xFF, np.uint8), np.full((experts, routes.LOCATION_BYTES // 4), -1,
                                                                     np.int32)
    for e, slot in enumerate(np.random.default_rng(0).permutation(experts)):
        slots[slot, : own.shape[1]] = own[e]
        table[e, field // 4] = slot * room // routes.LINE
    return slots, table


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "group"), [("q4", 32), ("int8", 32), ("f32", 0)])
def test_matrices_in_slots_give_the_bits_of_those_in_order(dtype: str, group: int, isa: str) -> None:
    rng = np.random.default_rng(7)
    layer = Layer(rng, dtype, group, moe(rng, 20, 7, 3, 0.5), 65, 38, bias=True)
    for tokens in (slice(None), slice(3, 4), slice(0, 2)):
        for onto in (True, False):
            whole = layer.run(isa, tokens, onto=onto)
            for threads in (1, 3):
                np.testing.assert_array_equal(layer.run(isa, tokens, threads, in_slots=True, onto=onto), whole)
        added = layer.run(isa, tokens) - layer.residual[tokens]
        np.testing.assert_allclose(added, whole, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_the_gate_of_a_shared_expert(isa: str) -> None:
    rng = np.random.default_rng(0)
    for tokens, width in ((1, 7), (7, 33), (33, 127)):
        bench, padded = Bench(), -(-width // 16) * 16
        gates = np.full((tokens, 16), np.nan, np.float32)
        gates[:, 0] = 4 * rng.standard_normal(tokens)
        rows = rng.standard_normal((tokens, padded)).astype(np.float32)
        operands = [bench.put("activations", gates), bench.put("activations", rows)]
        bench.tokens([0] * tokens)
        values = fill(ROWS, width=width, in_stride=64, out_stride=4 * padded, rows=abi.COUNT_TOKENS)
        out = bench.run(isa, "sigmoid_gate", operands, values, threads=2)["out"]
        np.testing.assert_allclose(out, rows / (1 + np.exp(-gates[:, :1])), rtol=1e-5)
