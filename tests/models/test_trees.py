"""Trees of tokens in one pass: a path has the logits of the same tokens as a chain on a fork, and goes on like it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import RequestError
from edgeinfer.graph import AlibiConfig
from edgeinfer.kernels import abi
from edgeinfer.quant import KV_TYPES
from edgeinfer.runner import DECODE, GONE, PROMPT, Segment, Sequence
from edgeinfer.runner.block_tables import BlockTables
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, WINDOWED, free_blocks, held_in, session, tokens

MODELS = {"plain": TINY, "windowed": replace(WINDOWED, windows=(5, 0, 3)), "gqa": replace(TINY, num_key_value_heads=1),
          "alibi": replace(TINY, model_type="falcon", num_key_value_heads=6, rotary_dim=0,
                           alibi=AlibiConfig(bfloat16=True))}
BASES = (0, 1, 15, 16, 17, 250, 256, 257)
"""Tokens before the tree: around a block and around a split."""


@pytest.fixture(params=[(name, kv) for name in MODELS for kv in ("int8", "f16", "f32")], ids="-".join, scope="module")
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    name, kv = request.param
    path: Path = tmp_path_factory.mktemp(name) / "bundle"
    write_random_bundle(MODELS[name], path)
    with session(path, kv=kv, threads=2, ctx=512, max_sequences=6, outputs=64, prefill_chunk=128) as running:
        yield running


def random_tree(rng: np.random.Generator, n: int) -> list[int]:
    """Parents of n nodes: runs, branches and roots."""
    return [int(rng.integers(max(-1, i - 4), i)) if i else -1 for i in range(n)]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def prompted(opened: Session, base: int, seed: int) -> Sequence:
    sequence = opened.new_sequence()
    if base:
        opened.prefill(sequence, tokens(base, seed=seed))
    return sequence


def chain_logits(opened: Session, sequence: Sequence, ids: list[int]) -> list[bytes]:
    """Logits after each of the tokens, run as a chain on a fork."""
    fork = opened.fork(sequence)
    rows = opened.forward([Segment(fork, ids, tuple(range(len(ids))), DECODE)])
    found = [row.tobytes() for row in rows]
    opened.release(fork)
    return found


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("base", BASES)
def test_each_path_is_a_chain(opened: Session, base: int) -> None:
    rng = np.random.default_rng(base)
    for n in (2, 9, 33):
        parents, ids, sequence = random_tree(rng, n), tokens(n, seed=n), prompted(opened, base, seed=1)
        expected = [chain_logits(opened, sequence, [ids[i] for i in path_to(parents, node)])[-1] for node in range(n)]
        rows = opened.forward([Segment(sequence, ids, tuple(range(n)), DECODE, parents)])
        assert [row.tobytes() for row in rows] == expected
        opened.truncate(sequence, base)
        if base:  # what was before the tree is as it was
            assert chain_logits(opened, sequence, ids[:1]) == expected[:1]
        opened.release(sequence)


def test_several_trees_and_a_chain_in_one_pass(opened: Session) -> None:
    rng = np.random.default_rng(3)
    trees = [(prompted(opened, base, seed=base), random_tree(rng, n), tokens(n, seed=n))
             for base, n in ((14, 12), (255, 17), (40, 5))]
    chain, words = prompted(opened, 30, seed=7), tokens(9, seed=9)
    expected = [chain_logits(opened, sequence, [ids[i] for i in path_to(parents, node)])[-1]
                for sequence, parents, ids in trees for node in range(len(ids))]
    expected += chain_logits(opened, chain, words)[-1:]
    segments = [Segment(sequence, ids, tuple(range(len(ids))), DECODE, parents) for sequence, parents, ids in trees]
    rows = opened.forward([*segments, Segment(chain, words, (len(words) - 1,), PROMPT)])
    assert [row.tobytes() for row in rows] == expected
    for sequence, _, _ in trees:
        opened.release(sequence)
    opened.release(chain)


def test_a_tree_of_64_and_of_one_line(opened: Session) -> None:
    sequence, ids = prompted(opened, 20, seed=2), tokens(64, seed=5)
    line = list(range(-1, 63))
    expected = chain_logits(opened, sequence, ids)
    assert [row.tobytes() for row in opened.forward([Segment(sequence, ids, tuple(range(64)), DECODE,
                                                             line)])] == expected
    opened.truncate(sequence, 20)
    star = [-1] * 64
    rows = [row.tobytes() for row in opened.forward([Segment(sequence, ids, tuple(range(64)), DECODE, star)])]
    opened.truncate(sequence, 20)
    assert rows == [chain_logits(opened, sequence, [token])[0] for token in ids]
    opened.release(sequence)


def test_a_chain_in_a_tree_pass_goes_on(opened: Session) -> None:
    """The first nodes of a tree that are a chain may be kept: what follows has the bits of plain decoding."""
    sequence, ids = prompted(opened, 17, seed=4), tokens(6, seed=6)
    plain = chain_logits(opened, sequence, [*ids[:3], 5])
    opened.forward([Segment(sequence, ids, (5,), DECODE, [-1, 0, 1, 1, 0, -1])])
    opened.truncate(sequence, 17 + 3)
    assert opened.decode([sequence], [5])[0].tobytes() == plain[-1]
    opened.release(sequence)


def test_references_agree_with_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    write_random_bundle(MODELS["windowed"], tmp_path / "bundle")
    with session(tmp_path / "bundle", ctx=320, max_sequences=2) as running:
        sequence = prompted(running, 253, seed=1)
        rng = np.random.default_rng(1)
        parents = random_tree(rng, 12)
        running.forward([Segment(sequence, tokens(12), (11,), DECODE, parents)])
        running.accept(sequence, 253, nodes_to_keep(rng, parents)[1])
        running.decode([sequence], [5])


# -- what is kept ------------------------------------------------------------------------------------------------------


def stored(opened: Session, sequence: Sequence) -> list[bytes]:
    """K, V and scales of all tokens, of each layer; with a window those that the last token sees."""
    model, plan, out = opened.model, opened.plan, []
    kind = KV_TYPES[plan.request.kv]
    half, width, together = abi.kv_block_bytes(plan.request.kv, model.head_dim), kind.piece, kind.alternating
    for number, layer in plan.kv_layers.items() if len(sequence) else ():
        region, blocks = opened.executor.regions["kv"][layer.offset :][: layer.nbytes], plan.kv_pool(number)
        held = [block for block in held_in(opened, sequence, number) if block != GONE]
        missing = 16 * (len(sequence.blocks) - len(held))
        seen = plan.windowed.window if plan.windowed and number in plan.windowed.layers else len(sequence)
        planes = np.split(region, [model.num_key_value_heads * blocks * half * n for n in (1, 2)])
        k, v, scales = (plane.reshape(model.num_key_value_heads, blocks, -1)[:, held].swapaxes(0, 1)
                        for plane in planes)
        shape = k.shape[:2]
        for by_token in (k.reshape(*shape, half // width // 16, 16, width).transpose(0, 3, 1, 2, 4),
                         v.reshape(*shape, 16 // together, -1, together).transpose(0, 2, 4, 1, 3)
                         .reshape(len(k), 16, shape[1], -1),
                         scales.reshape(*shape, scales.shape[2] // 32, 16, 2).transpose(0, 3, 1, 2, 4)):
            rows = by_token.reshape(16 * len(k), *by_token.shape[2:])[: len(sequence) - missing]
            out.append(rows[-seen:].tobytes())
    return out


def as_chain(opened: Session, sequence: Sequence, words: list[int], then: list[int]) -> tuple[list[bytes], list[bytes]]:
    """Return the cache's contents after tokens run by a fork, and the logits of its next tokens."""
    fork = opened.fork(sequence)
    if words:
        opened.forward([Segment(fork, words, (), DECODE)])
    found = stored(opened, fork), [opened.decode([fork], [token])[0].tobytes() for token in then]
    opened.release(fork)
    return found


def nodes_to_keep(rng: np.random.Generator, parents: list[int]) -> list[list[int]]:
    """Nothing, the longest path of a tree, and that to some other node."""
    paths = [path_to(parents, node) for node in range(len(parents))]
    return [[], max(paths, key=len), paths[int(rng.integers(len(paths)))]]


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("base", BASES)
def test_a_path_that_is_kept_is_as_if_it_had_been_run_alone(opened: Session, base: int) -> None:
    """Cache and logits, with forks alive that were made before the tree and after it; those stay as they are."""
    rng, then, held = np.random.default_rng(base), tokens(3, seed=8), free_blocks(opened)
    for n in (9, 33):
        parents, ids, sequence = random_tree(rng, n), tokens(n, seed=n), prompted(opened, base, seed=1)
        before = opened.fork(sequence)
        opened.forward([Segment(sequence, ids, (), DECODE, parents)])
        for path in nodes_to_keep(rng, parents):
            tree = opened.fork(sequence)
            beside = stored(opened, before), stored(opened, sequence)
            words = [ids[node] for node in path]
            rows, logits = as_chain(opened, before, words, then)
            opened.accept(tree, base, path)
            assert tree.tokens == before.tokens + words
            assert (len(tree.blocks), tree.decoded) == (-(-len(tree) // 16), base if path else None)
            assert stored(opened, tree) == rows
            assert [opened.decode([tree], [token])[0].tobytes() for token in then] == logits
            assert (stored(opened, before), stored(opened, sequence)) == beside
            opened.release(tree)
        opened.release(before)
        opened.release(sequence)
    assert free_blocks(opened) == held


def test_several_trees_of_a_pass_are_kept(opened: Session) -> None:
    rng, then = np.random.default_rng(5), tokens(2, seed=3)
    trees = [(prompted(opened, base, seed=base), random_tree(rng, n), tokens(n, seed=n)) for base, n in
             ((10, 11), (255, 19), (31, 6))]
    paths = [nodes_to_keep(rng, parents)[1] for _, parents, _ in trees]
    want = [as_chain(opened, sequence, [ids[node] for node in path], then)
            for (sequence, _, ids), path in zip(trees, paths, strict=True)]
    opened.forward([Segment(sequence, ids, (), DECODE, parents) for sequence, parents, ids in trees])
    for (sequence, _, ids), path in zip(trees, paths, strict=True):
        opened.accept(sequence, len(sequence) - len(ids), path)
    assert [stored(opened, sequence) for sequence, _, _ in trees] == [rows for rows, _ in want]
    for step, token in enumerate(then):
        rows = opened.decode([sequence for sequence, _, _ in trees], [token] * len(trees))
        assert [row.tobytes() for row in rows] == [logits[step] for _, logits in want]
    for sequence, _, _ in trees:
        opened.release(sequence)


def test_a_role_follows_the_tokens_that_are_kept(opened: Session) -> None:
    """Decoded tokens may have gone through an approximation, and a saved sequence instructions that."""
    sequence = prompted(opened, 3, seed=1)
    opened.forward([Segment(sequence, tokens(5), (), PROMPT, [-1, -1, 0, 0, 2])])
    opened.accept(sequence, 3, [0, 2, 4])
    assert sequence.decoded is None
    opened.forward([Segment(sequence, tokens(5), (), DECODE, [-1, -1, 0, 1, 1])])
    opened.accept(sequence, 3, [1, 2, 4, 6])  # the last two of them are decoded ones
    assert (len(sequence), sequence.decoded) == (7, 5)
    opened.accept(sequence, 2, [1, 2])
    assert sequence.decoded is None
    opened.release(sequence)


def test_what_cannot_be_kept_is_refused(opened: Session) -> None:
    sequence = prompted(opened, 4, seed=1)
    opened.forward([Segment(sequence, tokens(4), (), DECODE, [-1, -1, 0, 0])])
    before = list(sequence.tokens), stored(opened, sequence)
    for n_before, path in ((4, [4]), (4, [1, 1]), (4, [2, 0]), (4, [-1]), (9, []), (-1, [0])):
        with pytest.raises(RequestError, match=r"Tokens .* cannot be kept; count a path from 0"):
            opened.accept(sequence, n_before, path)
    with pytest.raises(RequestError, match=r"The path of a segment are 'ab'|they must be integers"):
        opened.accept(sequence, 4, "ab")  # type: ignore[arg-type]
    fork, taken = opened.fork(sequence), opened.new_sequence()
    BlockTables.extend(opened.kv, taken, 16 * free_blocks(opened))  # the blocks of layers that keep all
    taken.tokens += [0] * 16 * len(taken.blocks)
    with pytest.raises(RequestError, match=r"KV blocks of 16 tokens are in use"):
        opened.accept(sequence, 4, [1])  # moves a row of a block that the fork shares
    opened.accept(fork, 4, [0])  # moves nothing
    assert (sequence.tokens, stored(opened, sequence)) == before
    for one in (fork, taken, sequence):
        opened.release(one)
