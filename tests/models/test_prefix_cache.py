"""The prefix cache in a session: hits with the bits of a whole prompt, and no block that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.config import Recipe
from edgeinfer.errors import RequestError
from edgeinfer.runner import DECODE, GONE, Segment
from edgeinfer.runtime import Session
from tests.helpers.crowd import BLOCKS, CTX, POOL, Crowd
from tests.helpers.sessions import TINY, running, session, tokens, write_model
from tests.models.test_offload import made
from tests.models.test_windows import MODEL as WINDOWED
from tests.models.test_windows import interrupted


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opened(models: Path) -> Iterator[Session]:
    with session(write_model(models), **POOL) as one:
        yield one


def run(opened: Session, ids: list[int], hit: int) -> bytes:
    """Run a prompt of which so much is found, cache and release it; returns the logits after it."""
    sequence = opened.from_prefix(ids)
    assert len(sequence) == hit and sequence.tokens == ids[:hit]
    row = opened.prefill(sequence, ids[hit:]).tobytes()
    opened.cache_prefix(sequence)
    opened.release(sequence)
    return row


def hit(opened: Session, ids: list[int]) -> int:
    """Return how many tokens of a prompt are found."""
    sequence = opened.from_prefix(ids)
    n = len(sequence)
    opened.release(sequence)
    return n


# -- hits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_a_hit_has_the_bits_of_the_whole_prompt(models: Path, kv: str) -> None:
    """Whole blocks, and never the last token, whose logits are wanted."""
    with session(write_model(models), kv=kv, **POOL) as opened:
        for n in (1, 15, 16, 17, 32, 33, 100):
            ids = tokens(n, seed=n)
            first = run(opened, ids, 0)
            assert run(opened, ids, (n - 1) // 16 * 16) == first
            longer = [*ids, *tokens(40)]
            found = run(opened, longer, n // 16 * 16)
            opened.drop_prefixes()
            assert run(opened, longer, 0) == found
        opened.drop_prefixes()
        assert (opened.free_blocks, opened.n_blocks, opened.prefix_blocks) == (BLOCKS, BLOCKS, 0)


def test_what_was_decoded_is_found_by_the_next_turn(opened: Session) -> None:
    """Tokens of a text, of a draft tree, and of passes that take steps by themselves have rows like a prompt's."""
    ids = tokens(60)
    sequence = opened.new_sequence()
    opened.prefill(sequence, ids[:30])
    for token in ids[30:50]:
        opened.decode([sequence], [token])
    opened.forward([Segment(sequence, [7, *ids[50:60]], role=DECODE, parents=[-1, -1, *range(1, 10)])])
    opened.accept(sequence, 50, range(1, 11))
    assert sequence.decoded == 30
    opened.cache_prefix(sequence)
    opened.release(sequence)
    found = run(opened, [*ids, 5], 48)
    opened.drop_prefixes()
    assert run(opened, [*ids, 5], 0) == found


def test_a_salt_keeps_prompts_apart(opened: Session) -> None:
    ids, sequence = tokens(40), opened.new_sequence()
    opened.prefill(sequence, ids)
    opened.cache_prefix(sequence, b"one")
    assert [len(opened.from_prefix(ids, salt)) for salt in (b"", b"two", b"one")] == [0, 0, 32]


def test_a_prompt_that_no_pass_would_take_is_refused(opened: Session) -> None:
    for ids, why in (([], "The prompt is empty"), ([1, 99], "Token id 99 is outside"), ([-1], "Token id -1 is outside"),
                     ([1] * 241, "241 tokens do not fit the context of 240"), (["a"], "they must be integers")):
        with pytest.raises(RequestError, match=why):
            opened.from_prefix(ids)


def test_only_sequences_of_this_model_are_cached(models: Path, opened: Session) -> None:
    with session(write_model(models), **POOL) as other, pytest.raises(RequestError, match=r"^The sequence belongs to"):
        opened.cache_prefix(other.new_sequence())


def test_a_cached_block_is_never_written(opened: Session) -> None:
    """Not where its sequence was cut in the middle of it, or keeps another branch of a tree there."""
    ids = tokens(48)
    expected = run(opened, ids, 0)
    for way in ("cut", "tree", "fork"):
        sequence = opened.from_prefix([*ids, 1])
        assert len(sequence) == 48
        if way == "cut":
            opened.truncate(sequence, 37)
            opened.prefill(sequence, tokens(11, seed=1))
        elif way == "tree":
            opened.truncate(sequence, 40)
            opened.forward([Segment(sequence, [1, 2, 3, 4], parents=[-1, -1, 1, 2])])
            opened.accept(sequence, 40, [1, 2, 3])
        else:
            fork = opened.fork(sequence)
            opened.truncate(fork, 17)
            opened.decode([fork], [9])
            opened.release(fork)
        opened.release(sequence)
        assert run(opened, ids, 32) == expected, way


def test_sequences_that_ran_beside_each_other_hold_one_beginning(opened: Session) -> None:
    ids, sequences = tokens(70), [opened.new_sequence() for _ in range(3)]
    for sequence in sequences:
        opened.prefill(sequence, ids)
    assert opened.free_blocks == BLOCKS - 15
    for sequence in sequences:
        opened.cache_prefix(sequence)
    assert opened.free_blocks == BLOCKS - 7 and opened.prefix_blocks == 4
    rows = opened.decode(sequences, [5] * 3)
    assert len({row.tobytes() for row in rows}) == 1
    for sequence in sequences:
        opened.release(sequence)
    opened.drop_prefixes()
    assert rows[0].tobytes() == run(opened, [*ids, 5], 0)


def test_what_can_be_evicted_counts_as_room(opened: Session) -> None:
    for seed in range(4):
        run(opened, tokens(240, seed), 0)
    assert opened.prefix_blocks == 60 and opened.free_blocks == 4
    sequences = [opened.new_sequence() for _ in range(5)]
    assert opened.fits([(sequence, 200) for sequence in sequences[:4]])
    assert not opened.fits([(sequence, 208) for sequence in sequences])
    assert opened.room(sequences, 1000) == 192
    held = opened.from_prefix([*tokens(239), 1])  # what a sequence holds cannot
    assert not opened.fits([(sequence, 200) for sequence in sequences[:4]])
    assert opened.fits([(held, 16), *((sequence, 192) for sequence in sequences[:4])])
    assert not opened.fits([(held, 17)]), "more than the context"


def test_the_end_of_a_text_is_evicted_before_its_beginning(opened: Session) -> None:
    run(opened, tokens(240), 0)
    for blocks in (14, 13, 9, 1, 0):
        others = []
        while opened.prefix_blocks > blocks:
            others.append(opened.new_sequence())
            opened.prefill(others[-1], tokens(16, seed=1))
        assert hit(opened, tokens(240)) == 16 * blocks
        for sequence in others:
            opened.release(sequence)


def test_approximated_tokens_are_left_out(models: Path) -> None:
    """Prompts are the exact model's, whatever neurons decoded tokens leave out."""
    path = made(models / "sparse")
    for mode, blocks in (("exact", 3), ("predict", 1)):
        with session(path, recipe=Recipe.parse(f"fuse_input+sparse:mode={mode}"), **POOL) as opened:
            sequence = opened.new_sequence()
            opened.prefill(sequence, tokens(30))
            for token in tokens(30, seed=1):
                opened.decode([sequence], [token])
            opened.cache_prefix(sequence)
            assert opened.prefix_blocks == blocks
            opened.truncate(sequence, 30)
            opened.prefill(sequence, tokens(10, seed=1))
            opened.cache_prefix(sequence)
            assert opened.prefix_blocks == (2 if mode == "predict" else 3), "the prompt goes on where text was cut"


def test_pruned_prompts_are_not_cached(models: Path) -> None:
    with session(write_model(models), lazy="keep=0.5", **POOL) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(100))
        opened.cache_prefix(sequence)
        assert opened.prefix_blocks == 0 and len(opened.from_prefix(tokens(101))) == 0


def test_a_loaded_prompt_is_cached(opened: Session, tmp_path: Path) -> None:
    sequence = opened.new_sequence()
    opened.prefill(sequence, tokens(50))
    opened.save(sequence, tmp_path / "cache")
    opened.release(sequence)
    loaded = opened.load(tmp_path / "cache")
    opened.cache_prefix(loaded)
    opened.release(loaded)
    assert run(opened, tokens(50), 48) == run(opened, tokens(50), 48)
    opened.save(opened.from_prefix(tokens(50)), tmp_path / "again")
    assert opened.load(tmp_path / "again").tokens == tokens(50)[:48]


# -- layers with a window ----------------------------------------------------------------------------------------------


def test_a_hit_needs_the_last_window(models: Path) -> None:
    """Of a text that went on, the cache has the blocks that its sequence still had; each pool evicts by itself."""
    ids = tokens(230)
    with session(write_model(models, WINDOWED), prefill_chunk=32, ctx=CTX, max_sequences=2) as opened:
        assert opened.kv.recent
        windowed, pool = opened.kv.recent.windowed, opened.kv.recent.pool
        first = run(opened, ids, 0)
        kept = windowed.sequence_blocks
        assert opened.prefix_blocks == 14 and pool.n_cached == kept - 1, "the last block is not full"
        assert run(opened, ids, 224) == first
        low = 15 - kept + windowed.window // 16 + 1  # the first block after a window that is there
        for blocks in range(1, 15):
            sequence = opened.from_prefix([*ids[: 16 * blocks], 1])
            assert len(sequence) == (16 * blocks if blocks >= low else 0)
            if len(sequence):
                assert sequence.recent and sequence.recent.blocks.count(GONE) == sequence.recent.gone > 0
                assert opened.can_truncate(sequence, len(sequence) - 16) == 0
                row = opened.prefill(sequence, ids[16 * blocks :][:6]).tobytes()
                opened.release(sequence)
                opened.drop_prefixes()
                assert run(opened, ids[: 16 * blocks + 6], 0) == row
                opened.drop_prefixes()
                run(opened, ids, 0)
        while pool.n_free:
            pool.take()
        while pool.n_cached > 3:  # those before the last window go first
            pool.take()
        assert hit(opened, ids) == 224
        pool.take()
        assert hit(opened, ids) == 0 and opened.prefix_blocks == 14


def test_room_of_windows_is_that_of_several_passes(models: Path) -> None:
    with session(write_model(models, WINDOWED), prefill_chunk=32, ctx=CTX, max_sequences=2) as opened:
        first, second, third = (opened.new_sequence() for _ in range(3))
        assert opened.fits([(first, 230), (second, 230)])
        assert not opened.fits([(one, 150) for one in (first, second, third)])
        opened.prefill(first, tokens(230))
        opened.cache_prefix(first)
        assert opened.fits([(first, 10), (second, 230)])
        opened.prefill(second, tokens(230, seed=1))
        assert not opened.fits([(third, 100)])
        opened.release(first)
        assert opened.fits([(third, 230)])
        opened.prefill(third, tokens(230, seed=2))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("what", ["enter", "share", "hit", "evict", "recount", "drop"])
@pytest.mark.parametrize("model", [TINY, WINDOWED], ids=["tiny", "windows"])
def test_an_interruption_never_frees_what_is_named(models: Path, what: str, model: Any) -> None:
    """Ctrl-C at every line: later requests have the right bits, and in the end no block is missing."""
    ids, line, reached = tokens(100, seed=9), 0, True
    with session(write_model(models, model), ctx=CTX, prefill_chunk=32, max_sequences=2) as opened:
        expected, pool = run(opened, ids, 0), opened.kv.pool
        while reached:
            opened.drop_prefixes()
            run(opened, tokens(200, seed=1) if what == "enter" else ids, 0)
            one = opened.new_sequence()
            opened.prefill(one, ids if what in ("enter", "share") else tokens(200, seed=2))
            seeds = count(10)
            while what == "evict" and pool.n_free > 1:
                run(opened, tokens(100, seed=next(seeds)), 0)
            while what == "recount" and pool.n_available:  # forgotten, some of them cached
                forgotten = opened.from_prefix([*ids, 1])
                opened.prefill(forgotten, tokens(min(100, 16 * pool.n_available - 15), seed=next(seeds)))
                opened.cache_prefix(forgotten)
            forgotten, new = None, list[Any]()
            line += 1 if line < 40 else 7  # of loops not every turn
            reached = interrupted(line, {
                "enter": lambda one=one: opened.cache_prefix(one),
                "share": lambda one=one: opened.cache_prefix(one),
                "hit": lambda new=new: new.append(opened.from_prefix(ids)),
                "evict": lambda one=one: opened.kv.extend(one, 32),
                "recount": lambda one=one: opened.kv.extend(one, 32),
                "drop": lambda: opened.drop_prefixes()}[what])
            Crowd(opened, [], []).check_named(opened.kv._living)
            again = opened.from_prefix(ids)
            assert again.tokens == ids[: len(again)]
            assert opened.prefill(again, ids[len(again) :]).tobytes() == expected
            for sequence in (one, again, *new):
                opened.release(sequence)
            new.clear()
            del sequence
        assert line > 10
        opened.drop_prefixes()
        everything = [opened.new_sequence() for _ in range(2)]
        for sequence in everything:
            opened.prefill(sequence, tokens(CTX))


# -- onnxruntime -------------------------------------------------------------------------------------------------------


def test_pages_are_cached_too(models: Path) -> None:
    with running(write_model(models, TINY, "f32"), "pages", ctx=96, max_sequences=2) as opened:
        ids = tokens(70)
        sequence = opened.from_prefix(ids)
        assert len(sequence) == 0
        row = opened.prefill(sequence, ids).copy()
        opened.cache_prefix(sequence)
        opened.release(sequence)
        assert opened.prefix_blocks == 4 and opened.free_blocks == opened.n_blocks - 4
        again = opened.from_prefix(ids)
        assert again.tokens == ids[:64]
        assert abs(opened.prefill(again, ids[64:]) - row).max() < 1e-4
        assert not opened.fits([(again, 27)]) and opened.fits([(again, 26), (opened.new_sequence(), 96)])
        opened.release(again)
        opened.drop_prefixes()
        assert opened.free_blocks == opened.n_blocks


def test_slots_have_no_prefix_cache(models: Path) -> None:
    with running(write_model(models, replace(TINY, head_dim=8), "f32"), "onnx-cpu", ctx=96, max_sequences=2) as opened:
        first, second = opened.new_sequence(), opened.new_sequence()
        opened.prefill(first, tokens(40))
        opened.cache_prefix(first)
        assert len(opened.from_prefix(tokens(40))) == opened.prefix_blocks == 0
        assert opened.fits([(first, 56), (second, 96)]) and not opened.fits([(second, 1), (opened.new_sequence(), 1)])
        assert (opened.free_blocks, opened.n_blocks) == (1, 2)
