"""Sequences with pruned rows: stale rows show nowhere, and forks, truncation and turns account for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeinfer.errors import RequestError
from edgeinfer.runner import Segment, Sequence
from edgeinfer.runtime import Session
from tests.helpers.pruned import HALF, answer, written
from tests.helpers.sessions import free_blocks, session, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"))


def test_what_was_left_behind_is_as_if_it_had_never_been_there(model: Path) -> None:
    """Beside a forward pass of the same instructions over the tokens that are left alone, at their own places."""
    ids = tokens(200)
    with session(model, ctx=256, kv="f32", max_sequences=2, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        lacking = opened.kv.lacking(sequence, 200)
        assert [int(n) for n in (~lacking).sum(axis=1)] == [100, 50] == list(opened.prefill_strategy.last.tokens[1:])
        assert (lacking[0] <= lacking[1]).all() and not lacking[:, [0, *range(184, 200)]].any()
        expected = answer(opened, sequence)
        for layer, stage in ((2, 0), (4, 1)):  # garbage where nothing is: no result may notice
            (planes,) = opened.kv.planes
            keys = planes.arrays[0][layer]
            for row in np.flatnonzero(lacking[stage]):
                assert not opened.kv.keys(sequence, layer, 0)[row].any()
                lines = keys[:, sequence.blocks[row // 16]].view(np.float32).reshape(2, -1, 16)
                assert np.shares_memory(lines, keys)
                lines[..., row % 16] = 7.0
        assert answer(opened, sequence) == expected


def test_forks_copies_and_truncation_know_what_is_there(model: Path) -> None:
    ids = tokens(150)
    with session(model, ctx=256, max_sequences=3, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        expected, lacking = answer(opened, sequence), opened.kv.lacking(sequence, 150)
        fork = opened.fork(sequence)
        opened.decode([fork], [5])  # copies the last block, flags too
        assert fork.blocks[-1] != sequence.blocks[-1]
        assert (opened.kv.lacking(fork, 150) == lacking).all()
        opened.release(fork)
        together = [opened.fork(sequence) for _ in range(2)]
        rows = [opened.decode(together, [token] * 2).copy() for token in tokens(4, seed=9)]
        assert b"".join(row[0].tobytes() for row in rows) == b"".join(row[1].tobytes() for row in rows) == expected
        for one in together:
            opened.release(one)
        # what stands where a pruned token stood before is there
        opened.truncate(sequence, 75)
        assert lacking[:, 75:80].any()
        opened.forward([Segment(sequence, tokens(10, seed=3))])
        assert (opened.kv.lacking(sequence, 85)[:, :75] == lacking[:, :75]).all()
        assert not opened.kv.lacking(sequence, 85)[:, 75:].any()
        opened.release(sequence)
        other, plain = opened.new_sequence(), None
        opened.forward([Segment(other, ids[:60])])
        assert not opened.kv.lacking(other, 60).any()
        plain = answer(opened, other)
    with session(model, ctx=256, max_sequences=3) as opened:
        other = opened.new_sequence()
        opened.forward([Segment(other, ids[:60])])
        assert answer(opened, other) == plain


def test_a_conversation_goes_on_and_short_parts_are_dense(model: Path) -> None:
    def turns(opened: Session) -> Sequence:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(100))
        opened.decode([sequence], [3])
        opened.prefill(sequence, tokens(20, seed=1))
        return sequence

    with session(model, ctx=512, max_sequences=2, lazy=HALF) as opened:
        sequence = turns(opened)
        assert opened.prefill_strategy.last.tokens == (20,)
        said = str(opened.prefill_strategy.last)
        assert said.startswith("New prompt tokens: 20, fewer than 64, so all of them went through")
        assert str(opened.prefill_strategy.last._replace(tokens=(1,))).startswith("New prompt tokens: 1, fewer than 64")
        before = opened.kv.lacking(sequence, 121)
        assert before[:, :100].any() and not before[:, 100:].any()
        opened.prefill(sequence, tokens(80, seed=2))
        assert opened.prefill_strategy.last.tokens == (80, 40, 20)
        after = opened.kv.lacking(sequence, 201)
        assert (after[:, :121] == before).all() and after[1, 121:].sum() == 60
        expected = answer(opened, sequence)
    with session(model, ctx=512, max_sequences=2, lazy=HALF, prefill_chunk=11, threads=2) as opened:
        sequence = turns(opened)
        opened.prefill(sequence, tokens(80, seed=2))
        assert answer(opened, sequence) == expected


def test_a_pool_without_room_refuses_the_prompt_and_goes_on(model: Path) -> None:
    with session(model, ctx=160, max_sequences=2, own_tokens=16, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(100))
        other, free = opened.new_sequence(), free_blocks(opened)
        with pytest.raises(RequestError, match="KV blocks of 16 tokens are in use"):
            opened.prefill(other, tokens(120, seed=1))
        assert not len(other) and free_blocks(opened) == free  # so that others go on
        opened.release(sequence)
        opened.prefill(other, tokens(120, seed=1))
