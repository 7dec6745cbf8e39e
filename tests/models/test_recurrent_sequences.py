"""Sequences of models with recurrent layers: whatever happened to one, it goes on with the bits of a fresh prompt."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgeinfer.calibration.hooks import HookedRunner
from edgeinfer.config import Recipe
from edgeinfer.errors import CancelledError, RequestError
from edgeinfer.graph import ModelConfig, RecurrentConfig
from edgeinfer.runner import DECODE, Cancellation, Segment, Sequence
from edgeinfer.runtime import HiddenRows, Session
from tests.helpers.sessions import HYBRID, KIMI, session, tokens, write_model
from tests.kernel_selection import everything

OLMO = replace(HYBRID, model_type="olmo_hybrid", rotary_dim=None, attention_gate=False, recurrent=RecurrentConfig(
    "delta", (0, 2), conv_width=3, heads=4, key_heads=4, key_dim=12, value_dim=20, norm_eps=1e-5, beta_scale=2.0))
OPTIONS = {"ctx": 256, "threads": 2, "max_sequences": 4, "outputs": 64, "draft_tokens": 7, "prefill_chunk": 64}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hybrid"), HYBRID)


def fresh(opened: Session, ids: list[int]) -> bytes:
    """Return the logits after a prompt that a new sequence runs."""
    sequence = opened.new_sequence()
    row = opened.prefill(sequence, ids).tobytes()
    opened.release(sequence)
    return row


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("config", [HYBRID, OLMO, KIMI], ids=lambda config: config.model_type)
@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 33, 64])
def test_bits_do_not_depend_on_chunks(bundle: Path, chunk: int, config: ModelConfig) -> None:
    ids = tokens(100)
    with session(write_model(bundle.parent, config), **OPTIONS) as opened:
        whole = opened.new_sequence()
        rows = np.concatenate([logits.copy() for _, logits in opened.score(whole, ids)])
        parts, found = opened.new_sequence(), []
        for start in range(0, len(ids), chunk):
            some = ids[start : start + chunk]
            found.append(opened.forward([Segment(parts, some, range(len(some)))]).copy())
        assert np.array_equal(np.concatenate(found), rows)


@pytest.mark.parametrize("kept", range(8))
def test_rejected_draft_tokens_leave_nothing_behind(bundle: Path, kept: int) -> None:
    ids, drafts, more = tokens(37), tokens(7, 1), tokens(9, 2)
    with session(bundle, **OPTIONS) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        opened.forward([Segment(sequence, drafts, range(7), DECODE)])
        opened.truncate(sequence, len(ids) + kept)
        row = opened.prefill(sequence, more).tobytes()
        assert row == fresh(opened, [*ids, *drafts[:kept], *more])


def test_a_fork_goes_its_own_way(bundle: Path) -> None:
    ids, one, other = tokens(21), tokens(5, 1), tokens(30, 2)
    with session(bundle, **OPTIONS) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        copy = opened.fork(sequence)
        first, second = opened.prefill(sequence, one).tobytes(), opened.prefill(copy, other).tobytes()
        assert first == fresh(opened, [*ids, *one]) and second == fresh(opened, [*ids, *other])


def test_what_cannot_be_cut_says_so_and_is_run_again(bundle: Path) -> None:
    ids, more = tokens(60), tokens(3, 1)
    with session(bundle, **OPTIONS) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        assert [opened.can_truncate(sequence, n) for n in (60, 48, 47, 0)] == [60, 48, 0, 0]
        with pytest.raises(RequestError, match="cannot be cut to 47: its recurrent state has continued"):
            opened.truncate(sequence, 47)
        opened.rollback(sequence, 47)
        assert opened.prefill(sequence, more).tobytes() == fresh(opened, [*ids[:47], *more])


def test_a_checkpoint_is_gone_back_to(bundle: Path) -> None:
    ids, more = tokens(60), tokens(40, 1)
    with session(bundle, **OPTIONS) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        opened.checkpoint(sequence)
        opened.prefill(sequence, more)
        opened.prefill(sequence, more)
        assert opened.can_truncate(sequence, 60) == 60 and opened.can_truncate(sequence, 61) == 60
        opened.truncate(sequence, 55)
        assert opened.prefill(sequence, more).tobytes() == fresh(opened, [*ids[:55], *more])


def test_the_prefix_cache_hits_where_a_state_is_kept(bundle: Path) -> None:
    ids, more = tokens(70), tokens(20, 1)
    with session(bundle, **OPTIONS) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        opened.cache_prefix(sequence)
        opened.prefill(sequence, more)
        opened.release(sequence)
        for text, hit in (([*ids, *more], 64), (ids[:66], 64), (ids[:64], 0), (ids[:50], 0)):
            expected, found = fresh(opened, text), opened.from_prefix(text)
            assert len(found) == hit
            assert opened.prefill(found, text[hit:]).tobytes() == expected
            opened.release(found)


def test_a_cancelled_pass_leaves_a_sequence_as_it_was(bundle: Path) -> None:
    ids, more = tokens(40), tokens(50, 1)
    with session(bundle, **OPTIONS) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        for n in (1, 7, 50):
            cancel = Cancellation()
            cancel.cancel()
            with pytest.raises(CancelledError):
                opened.forward([Segment(sequence, more[:n], (n - 1,))], cancel)
        assert opened.prefill(sequence, more).tobytes() == fresh(opened, [*ids, *more])


def test_rows_behind_all_layers_and_hooks_take_a_state_along(bundle: Path) -> None:
    """Embeddings and hooks run ranges of instructions, after which a sequence goes on as after a pass."""
    ids, more = tokens(90), tokens(9, 1)
    with session(bundle, recipe=Recipe(()), **OPTIONS) as opened:
        embed = opened.graph.ops[0]
        hidden, hooked, whole = HiddenRows(opened), HookedRunner(opened, {embed: [lambda view: None]}), []
        for chunk in (7, 16, 17, 40, 64):
            sequence, parts = opened.new_sequence(), opened.new_sequence()
            chunks = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
            whole.append(np.concatenate([hidden.run(sequence, some, None) for some in chunks]))
            for some in chunks:
                logits = hooked.forward([Segment(parts, some, (len(some) - 1,))])
            assert np.array_equal(whole[-1], whole[0]) and logits.tobytes() == fresh(opened, ids)
            opened.release(parts)
            opened.rollback(sequence, opened.can_truncate(sequence, len(ids) - 3))
            assert opened.prefill(sequence, more).tobytes() == fresh(opened, [*sequence.tokens[:-9], *more])
            opened.release(sequence)


@pytest.mark.parametrize("n", [5, 40])
def test_reserved_tokens_that_are_called_off_leave_a_state_as_it_was(bundle: Path, n: int) -> None:
    ids, more = tokens(40), tokens(9, 1)
    with session(bundle, **OPTIONS) as opened:
        for before in (0, 40):
            sequence = opened.new_sequence()
            if before:
                opened.prefill(sequence, ids)
            opened.reserve(sequence, n)
            opened.forward_range(Segment(sequence, tokens(n, 2)), 0, len(opened.program.instructions))
            with pytest.raises(RequestError, match=f"append all of them, not {n - 1}"):
                opened.append(sequence, tokens(n - 1, 2))
            opened.truncate(sequence, before)
            assert opened.prefill(sequence, more).tobytes() == fresh(opened, [*ids[:before], *more])


@pytest.mark.parametrize("names", [("_copy",), ("end",), ("end", "settle")])
def test_an_interrupted_pass_leaves_the_state_before_it(bundle: Path, names: tuple[str, ...]) -> None:
    """Ctrl-C before the slot is copied, and after the pass, once or twice."""
    ids, more = tokens(40), tokens(50, 1)
    with session(bundle, **OPTIONS) as opened, ExitStack() as patched:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        for name in names:
            patched.enter_context(mock.patch.object(opened.kv.states, name, side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            opened.forward([Segment(sequence, more)])
        patched.close()
        assert opened.prefill(sequence, more).tobytes() == fresh(opened, [*ids, *more])


@pytest.mark.parametrize("n", [0, 35])
def test_an_interrupted_cut_leaves_state_and_tokens_together(bundle: Path, n: int) -> None:
    ids, more = tokens(40), tokens(50, 1)
    with session(bundle, **OPTIONS) as opened:
        states, sequence = opened.kv.states, opened.new_sequence()
        assert states
        opened.prefill(sequence, ids)
        opened.checkpoint(sequence)
        opened.prefill(sequence, more)
        cut = states.truncate

        def interrupted(*given: Any) -> None:
            patched.stop()
            cut(*given)
            raise KeyboardInterrupt

        patched = mock.patch.object(states, "truncate", interrupted)
        patched.start()
        with pytest.raises(KeyboardInterrupt):
            opened.truncate(sequence, n)
        text = [*sequence.tokens, *more]
        assert opened.prefill(sequence, more).tobytes() == fresh(opened, text)


def test_slots_of_forgotten_sequences_come_back(bundle: Path) -> None:
    with session(bundle, **OPTIONS) as opened:
        for seed in range(30):
            opened.prefill(opened.new_sequence(), tokens(20, seed))


class Walk:
    """Random operations on sequences of a session."""

    def __init__(self, opened: Session, seed: int):
        self.opened, self.rng = opened, np.random.default_rng(seed)
        self.open: list[Sequence] = []

    def step(self, tmp: Path) -> None:
        rng, opened = self.rng, self.opened
        if len(self.open) < 3 and (not self.open or rng.random() < 0.3):
            text = rng.integers(0, 3, int(rng.integers(1, 90))).tolist()  # so that beginnings are shared
            sequence = opened.from_prefix(text)
            self.open.append(sequence)
            self._run(sequence, text[len(sequence) :])
            return
        sequence = self.open[int(rng.integers(len(self.open)))]
        kind = rng.choice(["run", "draft", "cut", "fork", "cache", "release", "cancel", "file", "keep", "both"])
        getattr(self, f"_{kind}")(sequence, *([tmp] if kind == "file" else []))

    def _run(self, sequence: Sequence, ids: list[int] | None = None) -> None:
        room = min(60, 250 - len(sequence))
        ids = ids or self.rng.integers(0, 99, int(self.rng.integers(1, room + 1))).tolist() if room > 0 else []
        if ids:
            row, text = self.opened.prefill(sequence, ids).tobytes(), list(sequence.tokens)
            assert row == fresh(self.opened, text)

    def _draft(self, sequence: Sequence) -> None:
        if (n := min(int(self.rng.integers(1, 8)), 250 - len(sequence))) > 0:
            before, ids = len(sequence), self.rng.integers(0, 99, n).tolist()
            self.opened.forward([Segment(sequence, ids, range(n), DECODE)])
            self.opened.truncate(sequence, before + int(self.rng.integers(0, n + 1)))
            self._run(sequence, [5])

    def _cut(self, sequence: Sequence) -> None:
        self.opened.rollback(sequence, int(self.rng.integers(0, len(sequence) + 1)))
        self._run(sequence)

    def _fork(self, sequence: Sequence) -> None:
        if len(self.open) < 3:
            self.open.append(self.opened.fork(sequence))

    def _cache(self, sequence: Sequence) -> None:
        self.opened.cache_prefix(sequence)

    def _keep(self, sequence: Sequence) -> None:
        self.opened.checkpoint(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.opened.release(sequence)
        self.open.remove(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        n = min(int(self.rng.choice([1, 7, 40])), 250 - len(sequence))
        if n > 0:
            cancel = Cancellation()
            cancel.cancel()
            with pytest.raises(CancelledError):
                self.opened.forward([Segment(sequence, [1] * n)], cancel)
            self._run(sequence, [7])

    def _file(self, sequence: Sequence, tmp: Path) -> None:
        self.opened.save(sequence, tmp / "sequence")
        self._release(sequence)
        self.open.append(self.opened.load(tmp / "sequence"))
        self._run(self.open[-1])

    def _both(self, sequence: Sequence) -> None:
        """One pass over all sequences, prompts and decoded tokens together."""
        ids = {id(one): self.rng.integers(0, 99, int(self.rng.integers(1, 20))).tolist() for one in self.open
               if len(one) < 230}
        taking = [one for one in self.open if id(one) in ids]
        wanted = [(one, len(ids[id(one)])) for one in taking]
        if taking and sum(n for _, n in wanted) <= 64 and self.opened.fits(wanted):
            rows = self.opened.forward([Segment(one, ids[id(one)], (n - 1,)) for one, n in wanted]).copy()
            for row, one in zip(rows, taking, strict=True):
                assert row.tobytes() == fresh(self.opened, list(one.tokens))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_operations_never_change_a_bit(bundle: Path, tmp_path: Path, seed: int) -> None:
    """10,000 of them take 25 s of processor time, so only EDGEINFER_TEST_ALL=1 asks for all."""
    with session(bundle, **{**OPTIONS, "max_sequences": 5}) as opened:
        walk = Walk(opened, seed)
        for _ in range(400 if seed == 0 else 10_000 if everything() else 1500):
            walk.step(tmp_path)


def test_a_shape_without_attention_runs(tmp_path: Path) -> None:
    alone = replace(HYBRID, recurrent=replace(HYBRID.recurrent or RecurrentConfig("delta", (), 4), layers=(0, 1, 2)))
    with session(write_model(tmp_path, alone), **OPTIONS) as opened:
        ids = tokens(50)
        parts = opened.new_sequence()
        for token in ids[:-1]:
            opened.forward([Segment(parts, [token])])
        assert opened.prefill(parts, ids[-1:]).tobytes() == fresh(opened, ids)
