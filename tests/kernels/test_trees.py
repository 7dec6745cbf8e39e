"""Attention over trees: a path has the bits of the same tokens as a chain, and the kernels agree with their
reference.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi
from tests.helpers.attention_layer import KV, Layer, Sequence
from tests.helpers.kernel_bench import ISAS

LENGTHS = (0, 1, 15, 16, 17, 255, 256, 257)
"""Rows before a tree: around the borders of blocks and splits."""
SHAPES = [((3, 3, 6), 0), ((6, 2, 10), 3), ((8, 2, 40), 17)]
"""(heads, kv_heads, head_dim) with 1, 3 and 4 heads a KV head, and the window: none, shorter than the tree, longer."""


def random_tree(rng: np.random.Generator, nodes: int, reach: int) -> list[int]:
    """Parents, each one of the last `reach` nodes or none: a small reach makes long paths."""
    return [int(rng.integers(max(-1, i - reach), i)) for i in range(nodes)]


def tree(past: int, parents: list[int]) -> Sequence:
    return Sequence(past, len(parents), parents)


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to this one."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def leaves(parents: list[int]) -> list[int]:
    return [i for i in range(len(parents)) if i not in parents]


class Forest:
    """A forward pass over trees and chains, before anything of it is stored."""

    def __init__(self, layer: Layer):
        self.layer = layer
        self.before = {region: data.copy() for region, data in layer.bench.regions.items()}

    def run(self, isa: str, in_splits: bool, threads: int, tile: int = 4) -> np.ndarray:
        """Store K and V of the forward pass and attend, from the beginning."""
        self.layer.store(isa, threads=threads)
        attend = self.layer.attend_in_splits(isa, threads) if in_splits else self.layer.attend(isa, threads, tile)
        self.back()
        return attend

    def back(self) -> None:
        for region, data in self.before.items():
            self.layer.bench.regions[region][:] = data

    def chain(self, isa: str, number: int, path: list[int], in_splits: bool) -> np.ndarray:
        """The outputs of some new tokens of a sequence, run as if nothing else came after its past."""
        layer, sequence = self.layer, self.layer.sequences[number]
        qkv = layer.bench.array(layer.operands[0], np.float32, (len(layer.positions), layer.q_stride // 4))
        first = sum(s.new for s in layer.sequences[:number])
        qkv[: len(path)] = qkv[[first + node for node in path]]
        whole, layer.positions = layer.positions, list(range(sequence.past, sequence.past + len(path)))
        slots = [sequence.blocks[row // 16] * 16 + row % 16 for row in layer.positions]
        layer.bench.tokens(layer.positions, sequences=number, slots=slots, bases=sequence.past)
        layer.store(isa)
        out = layer.attend_in_splits(isa) if in_splits else layer.attend(isa)
        layer.positions = whole
        layer.bench.tokens(**layer.batch)
        self.back()
        return out

    def check_paths(self, isa: str, got: np.ndarray, paths: int, in_splits: bool) -> None:
        """The paths to the last leaves of each tree have the bits of chains."""
        first = 0
        for number, sequence in enumerate(self.layer.sequences):
            for leaf in leaves(sequence.parents)[-paths:] if sequence.parents else ():
                path = path_to(sequence.parents, leaf)
                want = self.chain(isa, number, path, in_splits)
                np.testing.assert_array_equal(got[[first + node for node in path]], want)
            first += sequence.new


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("past", LENGTHS)
@pytest.mark.parametrize("kv", KV)
def test_a_path_has_the_bits_of_its_chain(kv: str, past: int) -> None:
    """Trees in one forward pass with each other and a chain; whole and in splits, on one to three threads."""
    rng = np.random.default_rng(past)
    heads, window = SHAPES[(LENGTHS.index(past) + KV.index(kv)) % len(SHAPES)]
    bushy, deep = random_tree(rng, 13, 13), random_tree(rng, 21, 3)
    layer = Layer(kv, heads, [tree(past, deep), Sequence(40, 3), tree(past + 3, bushy)], window, seed=past)
    forest = Forest(layer)
    for isa in ISAS:
        whole = forest.run(isa, False, threads=1)
        np.testing.assert_array_equal(forest.run(isa, True, threads=3), whole)
        np.testing.assert_array_equal(forest.run(isa, False, threads=2, tile=7), whole)
        forest.check_paths(isa, whole, 2, in_splits=past % 2 == 0)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("past", [15, 223])
@pytest.mark.parametrize("kv", KV)
def test_the_largest_tree(kv: str, past: int) -> None:
    """64 nodes; the longest path crosses blocks, and from 223 on the border of a split."""
    rng = np.random.default_rng(1)
    parents = random_tree(rng, abi.MASK_TOKENS - 1, 2)
    parents.append(abi.MASK_TOKENS - 2)  # so that the last node has a long path
    assert len(path_to(parents, abi.MASK_TOKENS - 1)) > 35
    forest = Forest(Layer(kv, (4, 1, 64), [tree(past, parents)]))
    for isa in ISAS:
        got = forest.run(isa, True, threads=2)
        forest.check_paths(isa, got, 3, in_splits=False)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
def test_a_tree_without_branches_is_a_chain(kv: str, isa: str) -> None:
    straight = list(range(-1, abi.MASK_TOKENS - 1))
    for window in (0, 20):
        forest = Forest(Layer(kv, (6, 2, 10), [tree(250, straight)], window))
        assert (np.asarray(forest.layer.batch["masks"])[:-1] != -1).all()
        got = forest.run(isa, False, threads=1)
        np.testing.assert_array_equal(got, forest.chain(isa, 0, [i + 1 for i in straight], in_splits=True))
