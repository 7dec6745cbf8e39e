"""Delta rule, selective scan and their journal on every instruction set, pass after pass on one state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import RULE, fill
from tests.helpers.kernel_bench import ISAS
from tests.kernels.test_causal_conv import Texts, row_bytes

DELTA, ROWS, SCAN = "delta_rule", "delta_rule_rows", "selective_scan"
SHAPES = ((2, 1, 16, 32), (4, 2, 7, 5), (3, 3, 33, 48), (2, 1, 1, 17), (6, 3, 64, 33), (1, 1, 128, 128))
"""Heads, heads that share a key, and rows and columns of each state."""
SMALL = (4, 2, 9, 40)
SPANS = ([(0, 1)], [(0, 16), (0, 17), (0, 5)], [(0, 40), (0, 1)])
"""First position and tokens of each text."""
START = 3
"""First column of the gates."""
JOURNAL = abi.JOURNAL_TOKENS


class Rule(Texts):
    """Texts with their states. Keys are of length 1, as a delta rule's are."""

    def __init__(self, seed: int, name: str, shape: tuple[int, int, int, int], spans: Sequence[tuple[int, int]],
                 gate: float = 2.0, a_log: tuple[float, float] = (-3.0, 2.0), **options: float):
        rng = np.random.default_rng(seed)
        self.name, self.heads, self.group, self.key_dim, self.value_dim = name, *shape
        delta, by_row = name != SCAN, name == ROWS
        keys, values = shape[0] // shape[1] * shape[2], shape[0] * shape[3]
        decays = self.heads * self.key_dim if by_row else self.heads
        self.gates = -(-self.heads // 16) * 16 + decays if by_row else (1 + delta) * self.heads
        self.sizes = (self.heads, self.key_dim, self.value_dim)
        super().__init__(rng, spans, 2 * keys + values, abi.rule_state_bytes(*self.sizes, keys + values, self.gates))
        total, start = sum(map(len, self.texts)), 0 if delta else values
        for text in self.texts:
            heads = text[:, start : start + 2 * keys].reshape(len(text), -1, self.key_dim)
            heads = heads / np.sqrt((heads**2).sum(-1, keepdims=True))
            text[:, start : start + 2 * keys] = heads.reshape(len(text), -1)
        self.raw = [rng.uniform(-gate, gate, (len(text), self.gates)).astype(np.float32) for text in self.texts]
        self.constants = [
            self.bench.put("constants", vector.astype(np.float32))
            for vector in (-np.exp(rng.uniform(*a_log, self.heads)), rng.standard_normal(decays),
                           rng.standard_normal(self.heads))]
        self.inputs = self.bench.reserve("activations", total * row_bytes(START + self.gates))
        self.out = self.bench.reserve("activations", total * row_bytes(values))
        scratch = abi.rule_scratch(self.key_dim, by_row)
        self.scratch = self.bench.scratch(scratch, 3)
        own = {"first": keys, "keys": 0, "values": keys, "queries": 0, "beta_scale": 1.0}
        if not delta:
            own = {"keys": values, "values": 0, "queries": values + keys, "low": 0.0, "high": float("inf")}
        self.parameters = fill(
            RULE, heads=self.heads, group=self.group, key_dim=self.key_dim, value_dim=self.value_dim,
            x_stride=self.stride, out_stride=row_bytes(values), gates_stride=row_bytes(START + self.gates),
            gate_start=START, columns=keys + values, gate_columns=self.gates, stamps=abi.rule_stamps(*self.sizes),
            journal=abi.rule_journal(*self.sizes), scratch=scratch, **{**own, **options})

    def tiles(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tiles of a text, and the positions that they stand at."""
        tiles, at = abi.rule_tiles(self.heads, self.value_dim), self.state + self.slots[number]
        return (self.bench.array(at, np.float32, (tiles, self.key_dim, abi.STATE_TILE_COLUMNS)),
                self.bench.array(at + abi.rule_stamps(*self.sizes), np.int64, (tiles,)))

    def run(self, isa: str, runs: Sequence[tuple[int, int, int]], threads: int = 1, keep: bool = False) -> np.ndarray:
        """Run the rule and its journal; gives the outputs of all tokens."""
        self.begin(runs)
        rows = np.concatenate([self.raw[number][base - self.spans[number][0] :][:tokens]
                               for number, base, tokens in runs])
        raw = self.bench.array(self.inputs, np.float32, (len(rows), row_bytes(START + self.gates) // 4))
        raw[:], raw[:, START : START + self.gates] = np.nan, rows
        operands = [self.x, self.inputs, self.out, *self.constants, self.state, self.scratch]
        out = self.bench.run(isa, self.name, operands, self.parameters, threads=threads, keep=keep)["out"].copy()
        self.bench.run(isa, "state_journal", operands, self.parameters, threads=threads, keep=keep)
        return out

    def feed(self, isa: str, passes: Sequence[tuple[int, int]], threads: int = 1) -> np.ndarray:
        """Run the first text in passes of some tokens, of which some stay; gives the outputs of those."""
        outs, base = [], 0
        for tokens, kept in passes:
            outs.append(self.run(isa, [(0, base, tokens)], threads, keep=True)[:kept])
            base += kept
        return np.concatenate(outs)


def whole(*tokens: int) -> list[tuple[int, int]]:
    """Passes whose tokens all stay."""
    return [(n, n) for n in tokens]


each = pytest.mark.parametrize("name", [DELTA, ROWS, SCAN])


@pytest.mark.slow(keep=8)
@each
@pytest.mark.parametrize("spans", SPANS, ids=lambda spans: "-".join(str(tokens) for _, tokens in spans))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_rules(shape: tuple[int, int, int, int], spans: list[tuple[int, int]], name: str) -> None:
    """Reference and bits from the first token on: any threads, a sequence alone or among others."""
    for isa in ISAS:
        rule = Rule(1, name, shape, spans)
        found, first = rule.run(isa, rule.whole), 0
        np.testing.assert_array_equal(found, rule.run(isa, rule.whole, threads=3))
        for run in rule.whole:
            np.testing.assert_array_equal(found[first : first + run[2]], rule.run(isa, [run]))
            first += run[2]


PASSES = {
    "one by one": whole(*[1] * 72),
    "around the journal": whole(16, 17, 15, 1, 9),
    "long": whole(40, 1, 17),
    "replays": whole(7, 9, 16, 10, 16),
    "drafts": [(16, 3), (1, 1), (16, 16), (12, 1), (9, 7), (16, 4), (10, 10), (16, 0), (16, 16)],
    "long drafts": [(33, 32), (17, 16), (24, 18), (6, 5)],
    "blocks": whole(9, 70, 71),
}
"""Tokens of each pass, and of these tokens that stay."""


@pytest.mark.slow(keep=7)
@each
@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("shape", [SMALL, *SHAPES[1:4]], ids=lambda shape: "x".join(map(str, shape)))
def test_passes_do_not_change_bits(shape: tuple[int, int, int, int], kind: str, name: str) -> None:
    """A text at once, in passes of any size, and with drafted tokens of which only some stay."""
    n = sum(kept for _, kept in PASSES[kind])
    for isa in ISAS:
        expected = Rule(2, name, shape, [(0, 150)]).feed(isa, whole(n))
        for threads in (1, 3):
            found = Rule(2, name, shape, [(0, 150)]).feed(isa, PASSES[kind], threads)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@each
def test_instruction_sets_with_fused_operations_agree(name: str) -> None:
    """So that they share prompt caches, however many vectors of a row they have in work."""
    fused = [isa for isa in ISAS if isa.startswith("avx")] or ISAS[:1]
    found = [Rule(8, name, SHAPES[4], [(0, 40)]).feed(isa, whole(3, 37)) for isa in fused]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@each
def test_several_sequences_are_at_different_positions(name: str) -> None:
    """One begins, one decodes from its journal, one goes on with a long prompt."""
    for isa in ISAS:
        rule = Rule(3, name, SMALL, [(0, 50)] * 3)
        alone = [rule.run(isa, [(number, 0, 50)]) for number in range(3)]
        rule.run(isa, [(2, 0, 20), (1, 0, 9)], keep=True)
        found = rule.run(isa, [(0, 0, 3), (1, 9, 4), (2, 20, 30)], threads=2, keep=True)
        expected = [alone[0][:3], alone[1][9:13], alone[2][20:]]
        np.testing.assert_array_equal(found, np.concatenate(expected))
        found = rule.run(isa, [(1, 13, 16), (0, 3, 2)], keep=True)
        np.testing.assert_array_equal(found, np.concatenate([alone[1][13:29], alone[0][3:5]]))


@each
def test_tiles_may_be_at_two_positions(name: str) -> None:
    """As after a pass that was cancelled: each tile replays what it lacks."""
    for isa in ISAS:
        expected = Rule(4, name, SMALL, [(0, 40)]).feed(isa, whole(40))
        rule = Rule(4, name, SMALL, [(0, 40)])
        rule.feed(isa, whole(6))
        tiles, stamps = rule.tiles(0)
        assert stamps.tolist() == [0] * len(stamps)
        before = tiles.copy()
        rule.run(isa, [(0, 6, 5)], keep=True)
        assert stamps.tolist() == [6] * len(stamps)
        tiles[::3], stamps[::3] = before[::3], 0
        np.testing.assert_array_equal(rule.run(isa, [(0, 6, 5)]), expected[6:11])


@each
@pytest.mark.parametrize(("gate", "a_log"), [(100.0, (-3.0, 2.0)), (3.0, (-20.0, -15.0)), (3.0, (15.0, 20.0))])
def test_large_gates(gate: float, a_log: tuple[float, float], name: str) -> None:
    """Nothing is forgotten, or all of it at once."""
    for isa in ISAS:
        rule = Rule(5, name, SMALL, [(0, 40)], gate, a_log)
        assert np.isfinite(rule.feed(isa, whole(5, 35))).all()


@pytest.mark.parametrize("name", [DELTA, ROWS])
def test_beta_up_to_two(name: str) -> None:
    """A delta rule that turns states around (OLMo Hybrid)."""
    for isa in ISAS:
        found = [Rule(6, name, SMALL, [(0, 40)], beta_scale=scale).feed(isa, whole(3, 37)) for scale in (1.0, 2.0)]
        assert (found[0] != found[1]).all()


def test_rows_that_decay_alike() -> None:
    """With the same gates in all rows a head forgets as a whole, but for rounding."""
    for isa in ISAS:
        rows, heads = (Rule(9, name, SMALL, [(0, 40)]) for name in (ROWS, DELTA))
        n, each = rows.heads, rows.heads * rows.key_dim
        heads.texts[0][:], heads.raw[0][:, :n] = rows.texts[0], rows.raw[0][:, :n]
        rows.raw[0][:, -each:] = np.repeat(heads.raw[0][:, n:], rows.key_dim, 1)
        for rule, shift in ((rows, np.repeat(np.arange(n), rows.key_dim)), (heads, np.arange(n))):
            for at, vector in zip(rule.constants, (-np.ones(n), shift / n), strict=False):
                rule.bench.array(at, np.float32, (len(vector),))[:] = vector
        expected, found = (rule.feed(isa, whole(3, 37)) for rule in (heads, rows))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_time_limits() -> None:
    """A scan's time step is clipped: with equal limits its input no longer counts."""
    for isa in ISAS:
        limits = {"low": 0.25, "high": 0.5}
        found = Rule(7, SCAN, SMALL, [(0, 40)], **limits).feed(isa, whole(20, 20))
        assert (found != Rule(7, SCAN, SMALL, [(0, 40)]).feed(isa, whole(20, 20))).any()
        rule = Rule(7, SCAN, SMALL, [(0, 40)], low=0.5, high=0.5)
        expected = rule.feed(isa, whole(40))
        rule.raw[0] *= -1
        np.testing.assert_array_equal(rule.feed(isa, whole(40)), expected)
