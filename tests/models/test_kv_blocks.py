"""KV blocks: who holds which, copy-on-write, truncation, exhaustion; and that sharing never shows in the logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.errors import CancelledError, RequestError
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import BlockPool
from edgeinfer.runner import Cancellation, Segment, Sequence
from edgeinfer.runtime import Session
from tests.helpers.sessions import free_blocks, session, tokens, write_model

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 290)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["int8", "f16", "f32"])
def opened(path: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with session(path, kv=request.param, ctx=320, max_sequences=3) as one:
        yield one
        assert free_blocks(one) == one.plan.kv_blocks, "a block was lost"


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_a_pool_gives_each_block_once_and_takes_it_back_after_its_last_holder() -> None:
    pool = BlockPool(5)
    blocks = [pool.take() for _ in range(5)]
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.n_free == 0
    pool.share(blocks[2])
    assert pool.is_shared(blocks[2]) and not pool.is_shared(blocks[1])
    pool.drop(blocks[2])
    assert pool.n_free == 0 and not pool.is_shared(blocks[2])
    pool.drop(blocks[2])
    assert pool.n_free == 1
    assert pool.take() == blocks[2]


def test_an_empty_pool_says_so() -> None:
    pool = BlockPool(2)
    pool.take(), pool.take()
    with pytest.raises(RequestError, match=r"All 2 KV blocks of 16 tokens are in use; .* or release a sequence\.$"):
        pool.take()


def test_random_operations_keep_the_books(path: Path) -> None:
    """After every operation each block has as many holders as block tables name it, and nobody holds a free one."""
    rng = np.random.default_rng(3)
    with session(path, ctx=96, max_sequences=8) as opened:
        kv, alive = opened.kv, [opened.new_sequence()]
        for _ in range(2000):
            one = alive[rng.integers(len(alive))]
            match rng.integers(5):
                case 0 | 1:
                    n = int(rng.integers(1, 40))
                    if len(one) + n <= 96:
                        try:
                            kv.extend(one, n)
                            one.tokens += [0] * n
                        except RequestError:
                            kv.trim(one)
                case 2 if len(alive) < 12:
                    alive.append(kv.fork(one))
                case 3:
                    kv.truncate(one, int(rng.integers(len(one) + 1)))
                case 4 if len(alive) > 1:
                    alive.remove(one)
                    opened.release(one)
            held = np.bincount([b for s in alive for b in s.blocks], minlength=kv.pool.n_blocks)
            assert free_blocks(opened) == (held == 0).sum()
            assert [kv.pool.is_shared(b) for b in range(kv.pool.n_blocks)] == list(held > 1)
            for s in alive:
                assert len(s.blocks) == -(-len(s) // 16)
                assert s.table[: s.listed].tolist() == s.blocks[: s.listed], "an entry of the block table is stale"
            if rng.integers(2):
                opened._tables._list(0, one, 0, 1)
                assert one.table[: len(one.blocks)].tolist() == one.blocks


# -- sequences ---------------------------------------------------------------------------------------------------------


def alone(opened: Session, ids: list[int]) -> bytes:
    """Logits after a prompt that shares nothing."""
    sequence = opened.new_sequence()
    logits = opened.prefill(sequence, ids)
    opened.release(sequence)
    return logits.tobytes()


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("n", LENGTHS)
def test_forks_go_their_own_ways(opened: Session, n: int) -> None:
    """Two forks and their parent continue differently, in turns; each has the logits of a prompt of its own."""
    prompt = tokens(n)
    parent = opened.new_sequence()
    opened.prefill(parent, prompt)
    family = [parent, opened.fork(parent), opened.fork(parent)]
    held = opened.plan.kv_blocks - free_blocks(opened)
    assert held == len(parent.blocks), "a fork takes no block before it writes"
    continued = [tokens(3, seed=10 + i) for i in range(3)]
    for step in range(3):
        for i, sequence in enumerate(family):
            logits = opened.decode([sequence], [continued[i][step]])[0].copy()
            assert sequence.tokens == prompt + continued[i][: step + 1]
            assert logits.tobytes() == alone(opened, sequence.tokens)
    for sequence in family:
        opened.release(sequence)


def test_forks_decode_in_one_pass(opened: Session) -> None:
    """Copies of the shared last block are made within the forward pass that writes to it."""
    prompt = tokens(21)
    parent = opened.new_sequence()
    opened.prefill(parent, prompt)
    family = [parent, opened.fork(parent), opened.fork(parent)]
    logits = opened.decode(family, [5, 6, 7]).copy()
    assert len({sequence.blocks[-1] for sequence in family}) == 3
    assert len({sequence.blocks[0] for sequence in family}) == 1
    for row, sequence in zip(logits, family, strict=True):
        assert row.tobytes() == alone(opened, sequence.tokens)
        opened.release(sequence)


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize(("n", "keep"), [(40, 0), (40, 7), (40, 16), (40, 17), (33, 32), (290, 255), (290, 288)])
def test_a_truncated_sequence_goes_on_as_if_it_had_never_been_longer(opened: Session, n: int, keep: int) -> None:
    prompt, other = tokens(n), tokens(9, seed=1)
    sequence = opened.new_sequence()
    opened.prefill(sequence, prompt)
    reference = opened.fork(sequence)
    opened.truncate(sequence, keep)
    assert len(sequence.blocks) == -(-keep // 16)
    assert opened.prefill(sequence, other).tobytes() == alone(opened, prompt[:keep] + other)
    assert opened.decode([reference], [4])[0].tobytes() == alone(opened,
                                                                 [*prompt, 4]), "the fork still has what was cut"
    opened.release(sequence)
    opened.release(reference)


def test_a_sequence_cannot_be_cut_to_more_than_it_has(opened: Session) -> None:
    sequence = opened.new_sequence()
    opened.prefill(sequence, [1, 2, 3])
    for n in (4, -1):
        with pytest.raises(RequestError, match=f"^Cannot cut a sequence of 3 tokens to {n}\\.$"):
            opened.truncate(sequence, n)
    opened.release(sequence)
    assert len(sequence) == 0 and sequence.blocks == []


def test_an_exhausted_pool_is_said_and_nothing_is_lost(path: Path) -> None:
    with session(path, ctx=64) as opened:
        first, second = opened.new_sequence(), opened.new_sequence()
        logits = opened.prefill(first, tokens(40)).copy()
        opened.prefill(second, tokens(10))
        with pytest.raises(RequestError, match=r"^All 4 KV blocks of 16 tokens are in use"):
            opened.prefill(second, tokens(20))
        assert len(second) == 10 and len(second.blocks) == 1 and free_blocks(opened) == 0
        opened.release(second)
        opened.truncate(first, 39)
        assert opened.decode([first], tokens(40)[39:])[0].tobytes() == logits.tobytes()


def test_forgotten_sequences_give_their_blocks_back_when_they_are_needed(path: Path) -> None:
    with session(path, ctx=64, max_sequences=2) as opened:
        kept = opened.new_sequence()
        opened.prefill(kept, tokens(40))
        reference = opened.fork(kept)
        for _ in range(20):
            opened.prefill(opened.new_sequence(), tokens(50))
        expected = alone(opened, [*tokens(40), 3])
        assert [opened.decode([s], [3])[0].tobytes() for s in (kept, reference)] == [expected] * 2


def test_every_slot_of_the_context_can_be_used(path: Path) -> None:
    """To the last token, with a context that is not a multiple of a block, also by all forks at once."""
    with session(path, ctx=43, max_sequences=4) as opened:
        parent = opened.new_sequence()
        opened.prefill(parent, tokens(35))
        family = [parent, *(opened.fork(parent) for _ in range(3))]
        for step in range(8):
            opened.decode(family, [step, step + 1, step + 2, step + 3])
        assert [len(sequence) for sequence in family] == [43] * 4
        with pytest.raises(RequestError, match=r"^1 tokens after 43 tokens do not fit the context of 43"):
            opened.decode([parent], [1])


def test_what_overflowed_in_a_block_does_not_reach_its_next_holder(opened: Session) -> None:
    ids = tokens(37)
    first = opened.new_sequence()
    expected = opened.prefill(first, ids).copy()
    for planes in opened.kv.planes:
        for plane in planes.arrays:
            plane[:, :, first.blocks] = 0xFF  # NaN, as values and as scales
    opened.release(first)
    again = opened.new_sequence()
    np.testing.assert_array_equal(opened.prefill(again, ids), expected)
    opened.release(again)


def overflow(running: Session, sequence: Sequence, row: int) -> None:
    """Fill the last block of a sequence with NaN from a row on."""
    rows = np.arange(row, abi.BLOCK_TOKENS)
    for part in running.kv._memory._by_row:
        part[:, :, sequence.blocks[-1], ..., rows // 4, rows % 4] = np.iinfo(part.dtype).max  # as floats: NaN


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_forgotten_tokens_reach_no_sequence(path: Path, kv: str) -> None:
    """Rows after the last token may hold NaN, as after an overflow, and a weight of 0 times NaN is NaN."""
    with session(path, kv=kv, max_sequences=2) as running:
        ids = tokens(30)
        whole = running.prefill(running.new_sequence(), ids[:21]).copy()
        sequence = running.new_sequence()
        running.prefill(sequence, ids[:19])
        overflow(running, sequence, 2)
        running.truncate(sequence, 18)
        fork = running.fork(sequence)
        for one in (sequence, fork):
            assert np.array_equal(running.prefill(one, ids[18:21]), whole)


@pytest.mark.parametrize("way", ["reserved", "cancelled", "kept"])
def test_rows_never_accepted_reach_no_sequence(path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens of the model itself, passes that end early, and branches of a tree leave rows after the last
    token.
    """
    with session(path, kv="f32", threads=1) as running:
        ids = tokens(30)
        whole = running.prefill(running.new_sequence(), ids[:21]).copy()
        sequence = running.new_sequence()
        if way == "kept":
            running.prefill(sequence, ids[:16])
            running.forward([Segment(sequence, (7, *ids[16:18]), parents=(-1, -1, 1))])
            running.accept(sequence, 16, (1, 2))
            overflow(running, sequence, 2)
        else:
            running.prefill(sequence, ids[:18])
        if way == "reserved":
            running.reserve(sequence, 3)
            overflow(running, sequence, 2)
            running.truncate(sequence, 18)
        elif way == "cancelled":
            def fail(*given: object) -> None:
                overflow(running, sequence, 2)
                raise CancelledError("Cancelled.")

            with monkeypatch.context() as patched, pytest.raises(CancelledError):
                patched.setattr(running, "_run", fail)
                running.forward([Segment(sequence, ids[18:21])], Cancellation())
        assert np.array_equal(running.prefill(sequence, ids[18:21]), whole)
