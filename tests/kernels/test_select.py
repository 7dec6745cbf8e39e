"""Rows of V by choice: the kernels against their references, the same bits however they come about, and what is not
read.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import ATTENTION, fill
from tests.helpers.attention_layer import GROUPS, KV, Sequence, chain_of
from tests.helpers.kernel_bench import ISAS, function
from tests.kernels.test_pruned_mask import PATTERNS, Pruned
from tests.kernels.test_scores import Scored

INSTEAD = (abi.INSTEAD_NOTHING, abi.INSTEAD_SCALE, abi.INSTEAD_MEAN)
EVERYTHING = {"least": -math.inf}
WAYS = ({"most": 400}, {"least": -2.0}, EVERYTHING)


class Selected(Scored):
    """A layer whose last tokens choose rows of V."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        mean = 4 * abi.padded_head_dim(self.head_dim) + 64
        self.operands[6:] = [0, self.bench.reserve("scratch", mean * self.kv_heads * len(self.positions))]

    def select(self, isa: str, wanted: int, threads: int = 1, instead: int = abi.INSTEAD_SCALE, most: int = 0,
               least: float = 0.0) -> np.ndarray:
        """The four instructions of the last `wanted` tokens; gives their rows."""
        self.bench.counts[abi.COUNT_DECODED] = wanted
        parameters = self.parameters()
        for index, value in ((ATTENTION.rows, abi.COUNT_DECODED), (ATTENTION.most, most), (ATTENTION.instead, instead),
                             (ATTENTION.least, fill(ATTENTION, least=least)[ATTENTION.least])):
            parameters[index] = value
        for name in ("scores_" + self.kv, "select", "values_" + self.kv):
            flags, kernel = self.attention_flags, f"attention_{name}"
            self.found = self.bench.run(isa, kernel, self.operands, parameters, flags, threads, keep=True)
        out = self.bench.run(isa, "attention_merge", self.operands, parameters, flags | abi.FLAG_LAST, threads)
        return out["out"]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("past", [3, 100, 255, 256, 900, 2300])
@pytest.mark.parametrize("kv", KV)
def test_chosen_rows_have_the_bits_of_each_token_alone(kv: str, past: int) -> None:
    """All of the pass or its last tokens, on one to three threads, several or one by one; GQA 1, 3, 4, 8; trees."""
    number = KV.index(kv) + past
    heads, instead = GROUPS[number % 4], INSTEAD[number % 3]
    by = ({"least": math.log(0.05)}, {"most": 5}, {"most": 200}, {"least": 0.0})[number // 3 % 4]
    tree = Sequence(past, 7, [-1, 0, 0, 1, -1, 4, 4])
    for sequences in (chain_of(6, past), [Sequence(600, 3), Sequence(past, 1), tree]):
        layer = Selected(kv, heads, sequences)
        n = len(layer.positions)
        for isa in ISAS:
            layer.store(isa)
            whole = layer.select(isa, n, instead=instead, **by)
            assert np.isfinite(whole).all()
            for wanted, threads in ((n, 3), (n - 2, 2), (1, 1)):
                np.testing.assert_array_equal(layer.select(isa, wanted, threads, instead, **by), whole[n - wanted :])
        layer.only(n // 2)
        np.testing.assert_array_equal(layer.select(ISAS[-1], 1, 1, instead, **by)[0], whole[n // 2])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("kv", KV)
def test_where_all_is_wanted_the_bits_are_those_of_attention(kv: str, heads: tuple[int, int, int]) -> None:
    """A share of 0 and a number no less than the context are the same thing, and plain attention."""
    layer = Selected(kv, heads, [Sequence(1290, 2), Sequence(31, 1), Sequence(300, 6, [-1, 0, 0, 2, 1, 3])])
    n, number = len(layer.positions), GROUPS.index(heads) + KV.index(kv)
    for isa in ISAS:
        layer.store(isa)
        plain = layer.attend_in_splits(isa)
        for i, instead in enumerate(INSTEAD):
            by = (EVERYTHING, {"most": 1292})[(i + number) % 2]
            np.testing.assert_array_equal(layer.select(isa, n, instead=instead, **by), plain)


@pytest.mark.parametrize("instead", INSTEAD[:2])
@pytest.mark.parametrize("kv", KV)
def test_what_no_head_wants_is_not_read(kv: str, instead: int) -> None:
    """V of all blocks without one of the three largest scores of a head is another, and nobody notices."""
    layer = Selected(kv, (8, 2, 16), [Sequence(899, 1)])
    for isa in ISAS:
        layer.store(isa)
        good, plain = layer.select(isa, 1, most=3, instead=instead), layer.attend_in_splits(isa)
        before, wanted = {region: data.copy() for region, data in layer.bench.regions.items()}, _wanted_blocks(layer)
        assert 2 <= sum(map(sum, wanted)) <= 2 * 4 * 3
        size = abi.kv_block_bytes(kv, 16)
        for h in range(2):
            for b, block in enumerate(layer.sequences[0].blocks):
                if not wanted[h][b]:
                    layer.bench.array(layer.part(1, h, block), np.uint8, (size,))[:] = 0x44
        assert not np.array_equal(layer.attend_in_splits(isa), plain)
        np.testing.assert_array_equal(layer.select(isa, 1, most=3, instead=instead), good)
        for region, data in before.items():
            layer.bench.regions[region][:] = data


def _wanted_blocks(layer: Selected) -> list[list[bool]]:
    """Of each KV head: the blocks of which its heads want a row, by sorted scores."""
    scores = [layer.bench.array(layer.operands[5] + head * layer.row_bytes, np.float32, (900,)) for head in range(8)]
    wanted = [[False] * 57 for _ in range(2)]
    for head, row in enumerate(scores):
        for position in np.argsort(-row, kind="stable")[:3]:
            wanted[head // 4][position // 16] = True
    return wanted


@pytest.mark.parametrize("most", [1, 16, 17, 300])
def test_of_equal_scores_the_first_are_wanted(most: int) -> None:
    """Queries of zeros score 0 everywhere."""
    layer = Selected("f32", (2, 2, 16), [Sequence(599, 1)])
    layer.bench.array(layer.operands[0], np.float32, (32,))[:] = 0
    v = np.concatenate([layer.bench.array(layer.part(1, 0, block), np.float32, (16, 16))
                        for block in layer.sequences[0].blocks])
    for isa in ISAS:
        out = layer.select(isa, 1, most=most)
        rows = -(-most // 16) * 16  # whole blocks
        np.testing.assert_allclose(out[0, :16], v[:rows].mean(axis=0), rtol=0, atol=1e-6)


def test_a_number_is_met_among_close_and_negative_scores() -> None:
    """Scores from one float to the next, around 0 and far below it: the reference counts."""
    layer = Selected("f32", (1, 1, 16), [Sequence(511, 1)])
    q = layer.bench.array(layer.operands[0], np.float32, (16,))
    q[:] = [4.0] + [0.0] * 15
    for scale, offset in ((1e-7, 0.0), (3.0, -40.0), (1e-6, 5.0)):
        for i, block in enumerate(layer.sequences[0].blocks):
            k = layer.bench.array(layer.part(0, 0, block), np.float32, (16, 16))
            k[:] = 0
            k[0] = offset + scale * np.sin(np.arange(16 * i, 16 * i + 16) * 1.7)
        for most in (1, 2, 100, 511):
            for isa in ISAS:
                layer.select(isa, 1, most=most)


@pytest.mark.parametrize("most", [3, 256])
def test_scores_that_are_nan_choose_no_block_that_is_not_there(most: int) -> None:
    """The selection is then meaningless; below LOWEST, blocks after the context would be read."""
    layer = Selected("f32", (2, 1, 16), [Sequence(256, 1)])
    for isa in ISAS:
        layer.store(isa)
        layer.bench.array(layer.operands[0], np.float32, (16,))[:] = np.nan
        layer.bench.counts[abi.COUNT_DECODED] = 1
        parameters = layer.parameters()
        parameters[ATTENTION.rows], parameters[ATTENTION.most] = abi.COUNT_DECODED, most
        instruction = layer.bench._instruction(layer.operands, parameters, layer.attention_flags)
        for name in ("scores_f32", "select"):
            layer.bench._call(function(isa, f"attention_{name}"), instruction, layer.bench._ctx(), 1)
        choice = layer.operands[5] + layer.splits * (1024 + 64 + 8)
        assert layer.bench.array(choice, np.float32, (1,))[0] > -1e30


class PrunedSelection(Pruned, Selected):
    """Such a layer that lacks rows."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.operands[6] = self.operands.pop()


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kv", KV)
def test_rows_that_a_layer_lacks_are_never_wanted(kv: str, pattern: str) -> None:
    """The references leave them out; with a number above what is there, and a mean of what is there."""
    number = PATTERNS.index(pattern) + KV.index(kv)  # each way with each thing instead, in one of three
    ways = [(instead, WAYS[(i + number) % 3]) for i, instead in enumerate(INSTEAD)]
    for isa in ISAS:
        layer = PrunedSelection(pattern, kv, GROUPS[1], [Sequence(900, 3), Sequence(31, 1)])
        layer.store(isa)
        wholes = [layer.select(isa, 4, 1, instead, **by) for instead, by in ways]
        layer.spoil()
        for (instead, by), whole in zip(ways, wholes, strict=True):
            np.testing.assert_array_equal(layer.select(isa, 4, 3, instead, **by), whole)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_number_around_that_of_the_rows_that_are_there(pattern: str) -> None:
    """The reference says that all are wanted from their number on, without a search, and one less leaves one out."""
    layer = PrunedSelection(pattern, "f32", GROUPS[1], [Sequence(899, 1)])
    there = 899 - int(layer.pruned[np.array(layer.sequences[0].blocks)].sum()) + 1
    for isa in ISAS:
        layer.store(isa)
        plain = layer.attend_in_splits(isa)
        for most in (there - 1, there, there + 1, 899):
            out = layer.select(isa, 1, instead=abi.INSTEAD_MEAN, most=most)
            assert most < there or np.array_equal(out, plain)
