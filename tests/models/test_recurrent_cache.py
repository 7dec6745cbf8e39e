"""The prefix cache of models with recurrent layers: checkpoints of their state beside KV blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.sessions import HYBRID, session, tokens, write_model
from tests.models.test_recurrent_sequences import OPTIONS, fresh


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hybrid"), HYBRID)


def test_a_checkpoint_whose_block_was_evicted_leaves_the_one_before(bundle: Path) -> None:
    ids, answer = tokens(70), tokens(6, 1)
    with session(bundle, **{**OPTIONS, "max_sequences": 2}) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        opened.cache_prefix(sequence)
        for token in answer:
            opened.decode([sequence], [token])
        opened.cache_prefix(sequence)
        opened.release(sequence)
        text, found = [*ids, *answer, 5], []
        for _ in range(2):
            sequence = opened.from_prefix(text)
            found.append(len(sequence))
            opened.release(sequence)
            for _ in range(opened.free_blocks + 1):  # the last block was released first
                opened.kv.take()
        assert found == [76, 64]


def test_a_cached_end_is_taken_without_what_comes_after_it(bundle: Path) -> None:
    """Its block may have overflowed rows of rejected drafts; its state may be gone and computed again."""
    ids, more = tokens(70), tokens(5, 1)
    with session(bundle, **OPTIONS) as opened:
        states = opened.kv.states
        assert states
        for _ in range(2):
            sequence = opened.new_sequence()
            opened.prefill(sequence, ids[:-1])
            opened.decode([sequence], ids[-1:])
            opened.cache_prefix(sequence)
            for rows in opened.kv._memory._by_row:
                rows[:, :, sequence.blocks[-1], ..., 2:, :] = 0x7E00 if rows.dtype == np.uint16 else 1  # scales of NaN
            states.clear()
        assert opened.prefill(sequence, more).tobytes() == fresh(opened, [*ids, *more])


def test_what_is_known_of_checkpoints_does_not_grow(bundle: Path) -> None:
    with session(bundle, **OPTIONS) as opened:
        states = opened.kv.states
        assert states
        for seed in range(40):
            sequence = opened.new_sequence()
            opened.prefill(sequence, tokens(20, seed))
            opened.decode([sequence], [seed])
            opened.cache_prefix(sequence)
            opened.release(sequence)
        assert 4 <= len(states._tails) <= states.pool.n_blocks
