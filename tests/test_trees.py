"""Trees of tokens in one walk: each path has the logits of the same tokens run as a chain on a fork, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.converters import write_random_bundle
from edgeinfer.runner import DECODE, PROMPT, Segment, Sequence
from edgeinfer.runtime import Session
from tests.sessions import TINY, WINDOWED, session, tokens

MODELS = {"plain": TINY, "windowed": replace(WINDOWED, windows=(5, 0, 3)), "gqa": replace(TINY, num_key_value_heads=1)}
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
    rows = opened.walk([Segment(fork, ids, tuple(range(len(ids))), DECODE)])
    found = [row.tobytes() for row in rows]
    opened.release(fork)
    return found


@pytest.mark.parametrize("base", BASES)
def test_each_path_is_a_chain(opened: Session, base: int) -> None:
    rng = np.random.default_rng(base)
    for n in (2, 9, 33):
        parents, ids, sequence = random_tree(rng, n), tokens(n, seed=n), prompted(opened, base, seed=1)
        expected = [chain_logits(opened, sequence, [ids[i] for i in path_to(parents, node)])[-1] for node in range(n)]
        rows = opened.walk([Segment(sequence, ids, tuple(range(n)), DECODE, parents)])
        assert [row.tobytes() for row in rows] == expected
        opened.truncate(sequence, base)
        if base:  # what was before the tree is as it was
            assert chain_logits(opened, sequence, ids[:1]) == expected[:1]
        opened.release(sequence)


def test_several_trees_and_a_chain_in_one_walk(opened: Session) -> None:
    rng = np.random.default_rng(3)
    trees = [(prompted(opened, base, seed=base), random_tree(rng, n), tokens(n, seed=n))
             for base, n in ((14, 12), (255, 17), (40, 5))]
    chain, words = prompted(opened, 30, seed=7), tokens(9, seed=9)
    expected = [chain_logits(opened, sequence, [ids[i] for i in path_to(parents, node)])[-1]
                for sequence, parents, ids in trees for node in range(len(ids))]
    expected += chain_logits(opened, chain, words)[-1:]
    segments = [Segment(sequence, ids, tuple(range(len(ids))), DECODE, parents) for sequence, parents, ids in trees]
    rows = opened.walk([*segments, Segment(chain, words, (len(words) - 1,), PROMPT)])
    assert [row.tobytes() for row in rows] == expected
    for sequence, _, _ in trees:
        opened.release(sequence)
    opened.release(chain)


def test_a_tree_of_64_and_of_one_line(opened: Session) -> None:
    sequence, ids = prompted(opened, 20, seed=2), tokens(64, seed=5)
    line = list(range(-1, 63))
    expected = chain_logits(opened, sequence, ids)
    assert [row.tobytes() for row in opened.walk([Segment(sequence, ids, tuple(range(64)), DECODE, line)])] == expected
    opened.truncate(sequence, 20)
    star = [-1] * 64
    rows = [row.tobytes() for row in opened.walk([Segment(sequence, ids, tuple(range(64)), DECODE, star)])]
    opened.truncate(sequence, 20)
    assert rows == [chain_logits(opened, sequence, [token])[0] for token in ids]
    opened.release(sequence)


def test_a_chain_in_a_tree_walk_goes_on(opened: Session) -> None:
    """The first nodes of a tree that are a chain may be kept: what follows has the bits of plain decoding."""
    sequence, ids = prompted(opened, 17, seed=4), tokens(6, seed=6)
    plain = chain_logits(opened, sequence, [*ids[:3], 5])
    opened.walk([Segment(sequence, ids, (5,), DECODE, [-1, 0, 1, 1, 0, -1])])
    opened.truncate(sequence, 17 + 3)
    assert opened.decode([sequence], [5])[0].tobytes() == plain[-1]
    opened.release(sequence)


def test_twins_agree_with_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    write_random_bundle(MODELS["windowed"], tmp_path / "bundle")
    with session(tmp_path / "bundle", ctx=320, max_sequences=2) as running:
        sequence = prompted(running, 253, seed=1)
        rng = np.random.default_rng(1)
        running.walk([Segment(sequence, tokens(12), (11,), DECODE, random_tree(rng, 12))])
