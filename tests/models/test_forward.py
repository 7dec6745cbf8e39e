"""Forward passes of segments: several sequences, wanted rows and trees in one pass, how it is described, and what is
refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import ClosedError, RequestError
from edgeinfer.kernels import abi
from edgeinfer.runner import DECODE, Segment, Sequence
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, free_blocks, logits_of, own_threads, scored, session, tokens, write_model

FIELDS = {name: getattr(abi, f"TOKEN_{name.upper()}") // 8
          for name in ("id", "sequence", "position", "slot", "mask", "row", "base", "role")}  # fmt: skip
DESCRIBED_S = 1e-3
"""Time that describing a forward pass of 2048 tokens and 64 sequences may take on a quiet machine."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"), replace(TINY, max_position_embeddings=4096))


@pytest.fixture
def opened(path: Path) -> Iterator[Session]:
    with session(path, ctx=600, max_sequences=4, outputs=8, threads=2, prefill_chunk=100) as one:
        yield one


def prompted(opened: Session, n: int, seed: int = 0) -> Sequence:
    sequence = opened.new_sequence()
    opened.prefill(sequence, tokens(n, seed))
    return sequence


def described(opened: Session, n: int) -> dict[str, list[int]]:
    """The token table of the last forward pass, by field."""
    return {name: opened._tables.tokens[:n, word].tolist() for name, word in FIELDS.items()}


def test_prompts_and_decodes_in_one_pass_have_the_bits_of_their_own(opened: Session) -> None:
    """Lengths around a block and a split; rows come in the order of segments, then of their outputs."""
    first, second, third, fourth = (prompted(opened, n, seed=n) for n in (255, 16, 31, 1))
    before = [list(sequence.tokens) for sequence in (first, second, third, fourth)]
    segments = [Segment(first, [3], (0,), DECODE), Segment(second, tokens(40, seed=8), (39, 0, 17)),
                Segment(third, tokens(20, seed=9)), Segment(fourth, [5, 6], (1,))]  # fmt: skip
    rows = opened.forward(segments).copy()
    expected = []
    for segment, past in zip(segments, before, strict=True):
        assert segment.sequence.tokens == past + list(segment.ids)
        alone = scored(opened, [*past, *segment.ids])[len(past) :] if len(past) < 200 else \
            logits_of(opened, [*past, *segment.ids], n_decoded=1)[1:]
        expected += [alone[output] for output in segment.outputs]
    assert rows.tobytes() == np.stack(expected).tobytes()
    table = described(opened, 1)
    opened.forward(segments[2:3])
    opened.forward([Segment(first, [3], (), DECODE), Segment(fourth, [5])])
    table = described(opened, 2)
    assert table["role"] == [abi.ROLE_PROMPT, abi.ROLE_DECODE]  # whatever the order of segments


def test_logits_are_views_until_the_next_pass(opened: Session) -> None:
    sequence = prompted(opened, 3)
    kept = opened.decode([sequence], [1])
    copy = kept.copy()
    assert kept.base is not None and kept.shape == (1, TINY.vocab_size)
    assert opened.decode([sequence], [2])[0].ctypes.data == kept.ctypes.data and (kept != copy).any()
    assert opened.forward([Segment(sequence, [3])]).shape == (0, TINY.vocab_size)


# -- the description ---------------------------------------------------------------------------------------------------


def test_a_chain_is_described_by_rows(opened: Session) -> None:
    """Positions are rows, everything before is seen, blocks are those of the sequence; alone and beside another."""
    first, second = prompted(opened, 30, 1), prompted(opened, 5, 2)
    for segments in ([Segment(first, [1, 2, 3])], [Segment(first, [4]), Segment(second, [5, 6], (), DECODE)],
                     [Segment(second, [7], (), DECODE), Segment(first, [8])],
                     [Segment(first, [9, 10], (), DECODE, (-1, 0))]):
        opened.forward(segments)
        segments = sorted(segments, key=lambda segment: segment.role == DECODE)
        bases = [len(segment.sequence) - len(segment.ids) for segment in segments]
        table = described(opened, sum(len(segment.ids) for segment in segments))
        rows = [base + i for base, segment in zip(bases, segments, strict=True) for i in range(len(segment.ids))]
        of = [segment for segment in segments for _ in segment.ids]
        assert table["row"] == table["position"] == rows and table["mask"] == [-1] * len(rows)
        assert table["id"] == [token for segment in segments for token in segment.ids]
        assert table["sequence"] == [segments.index(segment) for segment in of]
        assert table["role"] == [segment.role for segment in of]
        assert table["base"] == [bases[segments.index(segment)] for segment in of]
        slots = [segment.sequence.blocks[row // 16] * 16 + row % 16 for segment, row in zip(of, rows, strict=True)]
        assert table["slot"] == [slot << 32 | slot for slot in slots], "one by each of two tables, which are one"
        for i, segment in enumerate(segments):
            first = sum(len(before.ids) for before in segments[:i])
            assert opened._tables.sequences[i].tolist() == [*2 * [segment.sequence.table.ctypes.data], 0, first,
                                                            len(segment.ids)]
            n = len(segment.sequence.blocks)
            assert segment.sequence.table[:n].tolist() == segment.sequence.blocks


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_is_described_by_its_ancestors(opened: Session, seed: int) -> None:
    """Random trees of up to 64 tokens beside a chain: depths are positions, rows go in order, masks are paths."""
    rng = np.random.default_rng(seed)
    n = 64 if seed == 0 else int(rng.integers(2, 65))
    parents = [int(rng.integers(-1, i)) for i in range(n)]
    parents[1] = -1  # no chain
    base = int(rng.integers(1, 40))
    chain, tree = prompted(opened, 10), prompted(opened, base)
    opened.forward([Segment(chain, [1, 2, 3]), Segment(tree, tokens(n), (), DECODE, parents)])
    table = described(opened, 3 + n)
    assert table["mask"][:3] == [-1] * 3 and table["row"][3:] == list(range(base, base + n))
    for i in range(n):
        path, at = set(), i
        while at >= 0:
            path.add(at)
            at = parents[at]
        assert {j for j in range(64) if table["mask"][3 + i] >> j & 1} == path
        assert table["position"][3 + i] == base + len(path) - 1
    assert len(tree) == base + n and len(tree.blocks) == -(-(base + n) // 16)
    opened.truncate(tree, base)
    assert opened.decode([tree], [4])[0].tobytes() == logits_of(opened, [*tokens(base), 4])[0].tobytes()


@pytest.mark.timing
def test_a_large_pass_is_described_within_a_millisecond(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of several, and a factor of two, because the machine may be busy: it takes 0.4 ms."""
    with session(path, ctx=2048, prefill_chunk=2048, max_sequences=64) as opened:
        monkeypatch.setattr(opened.executor, "run", lambda first, stop, cancel, further: None)
        sequences = [opened.new_sequence() for _ in range(64)]
        seconds = []
        for _ in range(20):
            segments = [Segment(sequence, tokens(32), (31,)) for sequence in sequences]
            begin = time.perf_counter()
            opened.forward(segments)
            seconds.append(time.perf_counter() - begin)
        print(f"{1e3 * min(seconds):.3f} ms")
        assert min(seconds) < 2 * DESCRIBED_S


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_is_refused(opened: Session) -> None:
    sequence, other = prompted(opened, 20), prompted(opened, 2)
    held = opened.plan.kv_blocks - free_blocks(opened)
    many = [Segment(opened.new_sequence(), [1]) for _ in range(5)]
    for segments, sentence in [
        ([], "0 sequences with 0 tokens"),
        (many,
         "5 sequences with 5 tokens and 0 rows of logits do not fit one forward pass, which takes 1 to 4 sequences "
         "(max_"
               "sequences), 100 tokens (prefill_chunk) and 8 rows (outputs)."),
        ([Segment(sequence, tokens(101))], "1 sequences with 101 tokens"),
        ([Segment(sequence, tokens(9), range(9))], "1 sequences with 9 tokens and 9 rows"),
        ([Segment(sequence, [1]), Segment(sequence, [2])], "A sequence occurs twice in one forward pass; fork it."),
        ([Segment(sequence, [])], "The prompt is empty"),
        ([Segment(other, [1]), Segment(sequence, [99])], "Token id 99 is outside the vocabulary"),
        ([Segment(sequence, [1], (), 7)], "The role of a segment is 7; it is PROMPT or DECODE."),
        ([Segment(sequence, [1], (1,))], "Logits are wanted after tokens [1] of 1; count from 0."),
        ([Segment(sequence, [1], (-1,))], "Logits are wanted after tokens [-1] of 1; count from 0."),
        ([Segment(sequence, tokens(65), (), DECODE, [-1] * 65)], "A tree has 65 tokens and 65 parents; it takes one "
                                                                 "parent for each of at most 64 tokens."),
        ([Segment(sequence, [1, 2], (), DECODE, [-1])], "A tree has 2 tokens and 1 parents"),
        ([Segment(sequence, [1, 2], (), DECODE, [-1, 1])], "Token 1 of a tree has the parent 1; a parent stands before "
                                                           "it, and -1 is the sequence's last token."),
        ([Segment(sequence, [1], (), DECODE, [-2])], "Token 0 of a tree has the parent -2"),
    ]:  # fmt: skip
        with pytest.raises(RequestError) as caught:
            opened.forward(segments)
        assert str(caught.value).startswith(sentence)
    assert (len(sequence), len(other)) == (20, 2) and opened.plan.kv_blocks - free_blocks(opened) == held


# -- two sessions on one pool ------------------------------------------------------------------------------------------


def test_a_sequence_of_another_session_is_refused(path: Path, opened: Session, tmp_path: Path) -> None:
    """Its blocks have numbers of another pool: they would be read, written and given back here."""
    with session(path, ctx=64) as other:
        sequence = prompted(other, 20)
        expected = other.decode([other.fork(sequence)], [5])[0].tobytes()
        for call in (
            lambda: opened.decode([sequence], [5]), lambda: opened.reserve(sequence, 5),
            lambda: opened.forward_range(Segment(sequence, [5]), 0, 1), lambda: opened.fork(sequence),
            lambda: opened.truncate(sequence, 1), lambda: opened.release(sequence),
            lambda: opened.save(sequence, tmp_path / "prompt"), lambda: opened.prefill(Sequence(), [5]),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=r"^The sequence belongs to another model that is open; "):
                call()
        assert free_blocks(opened) == opened.plan.kv_blocks and not list(tmp_path.iterdir())
        assert other.decode([sequence], [5])[0].tobytes() == expected


@pytest.mark.parametrize("host_first", [True, False])
def test_two_models_take_turns_on_one_pool_of_threads(path: Path, tmp_path: Path, host_first: bool) -> None:
    """Each gives its own bits, forward pass by forward pass, and either may be closed first."""
    from edgeinfer.models import demo_path

    prompts = tokens(90), tokens(90, vocab_size=4000)
    with session(path, ctx=128, threads=2) as opened:
        expected = [logits_of(opened, prompts[0], n_decoded=6).tobytes()]
    with session(demo_path(), ctx=128, threads=2) as opened:
        expected += [logits_of(opened, prompts[1], n_decoded=6).tobytes()]
    before = own_threads()
    host = Session(Bundle.open(path), RuntimeConfig(ctx=128, threads=2))
    with pytest.raises(RequestError, match=r"^The session whose threads are shared has 2, and 1 are asked for; leave"):
        Session(Bundle.open(demo_path()), RuntimeConfig(threads=1), host=host)
    guest = Session(Bundle.open(demo_path()), RuntimeConfig(ctx=128, prefill_chunk=64), host=host)
    assert guest.config.threads == 2 and guest.executor.pool is host.executor.pool
    both, sequences = (host, guest), (host.new_sequence(), guest.new_sequence())
    rows: list[list[np.ndarray]] = [[], []]
    for i in range(2):
        rows[i].append(both[i].prefill(sequences[i], prompts[i][:84]).copy())
    for step in range(84, 90):
        for i in (1, 0):
            rows[i].append(both[i].decode([sequences[i]], [prompts[i][step]])[0].copy())
    assert [np.stack(each).tobytes() for each in rows] == expected
    closing = both if host_first else both[::-1]
    closing[0].close()
    left = both.index(closing[1])
    closing[1].release(sequences[left])
    assert logits_of(closing[1], prompts[left], n_decoded=6).tobytes() == expected[left]
    assert own_threads() >= before + 2
    closing[1].close(), closing[0].close()
    assert own_threads() == before


# -- sessions that fail to open ----------------------------------------------------------------------------------------


def test_threads_of_a_closed_session_are_not_lent(path: Path) -> None:
    with session(path, ctx=64) as host:
        pass
    before = own_threads()
    with pytest.raises(ClosedError, match=r"The model whose threads are to be shared was closed; open it again"):
        Session(Bundle.open(path), RuntimeConfig(ctx=64), host=host)
    assert own_threads() <= before  # threads of earlier sessions may end meanwhile


@pytest.mark.parametrize("what", ["session.Lowering", "session.KVCache", "session.load", "execution.forward.Executor"])
def test_a_session_that_fails_to_open_leaves_nothing_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The thread that brings in the KV pool ends, and the pool with it."""
    from edgeinfer.runtime import memory

    failing = threading.Event()

    def fail(*arguments: object) -> None:
        failing.set()
        raise EdgeInferErrorForTest

    class EdgeInferErrorForTest(Exception):
        pass

    parts: list[int] = []

    def slowly(region: np.ndarray, advice: int) -> bool:
        parts.append(region.nbytes)
        if threading.current_thread() is not threading.main_thread():
            failing.wait(60)  # however long opening takes
            time.sleep(0.05)
        return True

    monkeypatch.setattr(memory, "_populate", slowly)
    monkeypatch.setattr(memory, "PREFAULT_BYTES", 1 << 20)
    monkeypatch.setattr(f"edgeinfer.runtime.{what}", fail)
    before = own_threads()
    with pytest.raises(EdgeInferErrorForTest), session(path, ctx=4096, max_sequences=64):
        pass
    assert own_threads() == before
    n = len(parts)
    time.sleep(0.12)
    assert len(parts) == n < 60, "of 65"


def test_closing_in_the_middle_of_a_pass_from_two_threads(path: Path) -> None:
    """A thread in a forward pass gets the error that the model was closed; memory is freed only after the pass."""
    from edgeinfer.errors import ClosedError

    for delay in (0.0, 0.01, 0.03):
        with session(path, ctx=4096, threads=2, prefill_chunk=2048) as opened:
            closers = [threading.Timer(delay, opened.close) for _ in range(2)]
            for closer in closers:
                closer.start()
            with pytest.raises(ClosedError, match=r"^The model was closed; open it again\.$"):
                while True:
                    sequence = opened.new_sequence()
                    opened.prefill(sequence, tokens(4000))
                    opened.release(sequence)
            for closer in closers:
                closer.join()
