"""Attention over blocks of which a layer lacks rows (FLAG_PRUNED): as if these rows had never been there."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi
from tests.helpers.attention_layer import GROUPS, KV, Layer, Sequence, chain_of
from tests.helpers.kernel_bench import ISAS
from tests.kernels.test_scores import Scored

PATTERNS = ("scattered", "blocks", "splits", "own")
"""Half of the rows; four blocks of five; the first split and the third; all but each token's own row and the first."""


class Pruned(Layer):
    """A layer without some of the rows before the forward pass."""

    def __init__(self, pattern: str | None, kv: str, heads: tuple[int, int, int], sequences: list[Sequence],
                 window: int = 0):
        super().__init__(kv, heads, sequences, window)
        rng = np.random.default_rng(1)
        self.pruned = np.zeros((max(max(s.blocks) for s in sequences) + 1, 16), np.uint8)
        for s in sequences:
            rows = np.arange(s.past)
            gone = {None: rows < 0, "scattered": rng.random(s.past) < 0.5, "blocks": rows // 16 % 5 > 0,
                    "splits": rows // 256 % 2 == 0, "own": rows > 0}[pattern]
            self.pruned[np.array(s.blocks)[rows[gone] // 16], rows[gone] % 16] = 1
        self.operands += [0] * (6 - len(self.operands)) + [self.bench.put("kv", self.pruned)]
        self.attention_flags = abi.FLAG_PRUNED

    def spoil(self) -> None:
        """Put other K and V, scales aside, into the blocks of which no row is there."""
        for plane in (0, 1):
            shape = self.kv_heads, self.blocks, self.block_bytes
            blocks = self.bench.array(self.part(plane, 0, 0), np.uint8, shape)
            blocks[:, np.flatnonzero(self.pruned.all(axis=1))] = 3


class PrunedScores(Pruned, Scored):
    """Such a layer whose last tokens' scores are wanted."""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
def test_where_nothing_lacks_the_bits_are_those_without_flags(kv: str, isa: str) -> None:
    for heads, window in zip(GROUPS, (0, 37, 300, 0), strict=True):
        plain, flagged = (make(kv, heads, chain_of(9, past=530), window) for make in (
            Layer, lambda *layer: Pruned(None, *layer)))
        np.testing.assert_array_equal(flagged.attend(isa), plain.attend(isa))
        np.testing.assert_array_equal(flagged.attend_in_splits(isa, threads=2), plain.attend_in_splits(isa))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kv", KV)
def test_a_row_has_the_same_bits_however_it_is_computed(kv: str, pattern: str) -> None:
    """And agrees with the reference: whole or in splits, one token or many, any tile and threads, with a window or
    not.
    """
    number = PATTERNS.index(pattern) + KV.index(kv)
    several = [Sequence(530, 5), Sequence(31, 1), Sequence(700, 2)]
    for sequences, window in ((chain_of(9, past=1003), 0), (several, 0), (several, (40, 270)[number % 2])):
        layer = Pruned(pattern, kv, GROUPS[number % 4], sequences, window)
        for isa in ISAS:
            layer.store(isa)
            whole = layer.attend(isa)
            np.testing.assert_array_equal(layer.attend(isa, tile=1, threads=2), whole)
            for threads in (1, 3):
                np.testing.assert_array_equal(layer.attend_in_splits(isa, threads), whole)
        layer.spoil()
        np.testing.assert_array_equal(layer.attend(ISAS[-1]), whole)
        layer.only(len(layer.positions) - 2)
        np.testing.assert_array_equal(layer.attend_in_splits(ISAS[-1]), whole[-2:-1])


@pytest.mark.parametrize("kv", KV)
def test_a_tree_behind_a_pruned_prompt(kv: str) -> None:
    layer = Pruned("scattered", kv, (4, 2, 10), [Sequence(250, 7, [-1, 0, 0, 1, 2, 2, 5])])
    for isa in ISAS:
        layer.store(isa)
        whole = layer.attend(isa)
        np.testing.assert_array_equal(layer.attend_in_splits(isa, threads=2), whole)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kv", KV)
def test_scores_of_what_is_not_there(kv: str, pattern: str) -> None:
    """They agree with their reference, and have the same bits for any number of threads."""
    layer = PrunedScores(pattern, kv, (6, 2, 10), chain_of(4, past=700), (0, 300)[KV.index(kv) % 2])
    for isa in ISAS:
        layer.store(isa)
        for mine, other in zip(layer.scores(isa, 4), layer.scores(isa, 4, threads=2), strict=True):
            np.testing.assert_array_equal(mine, other)
