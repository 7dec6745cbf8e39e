"""The runner on onnxruntime's CPU provider: sequences in slots against the oracle, and whatever it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import PROVIDERS, OnnxRunner
from edgeinfer.backends.onnx.flavour import Heads
from edgeinfer.backends.onnx.slabs import Slabs
from edgeinfer.backends.onnx.slots import LAYOUT
from edgeinfer.backends.onnx.step import Step
from edgeinfer.errors import BundleError, CancelledError, ClosedError, EdgeInferError, RequestError
from edgeinfer.graph import RopeConfig
from edgeinfer.runner import DECODE, Cancellation, Segment
from tests.helpers.onnx_models import difference, expected
from tests.helpers.sessions import TINY, WINDOWED, logits_of, running, scored, session, tokens, write_model

pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
F32, F16 = 1e-5, 2e-2
"""Of the largest logit; f16 for these random models, whose attention is sharp (tests/models/test_onnx_graph.py)."""


@contextmanager
def runner(path: Path, **options: Any) -> Iterator[OnnxRunner]:
    """An open runner; one thread and a small chunk unless asked otherwise."""
    with running(path, "onnx-cpu", **{"prefill_chunk": 16, "ctx": 96, **options}) as opened:
        assert isinstance(opened, OnnxRunner)
        yield opened


def last(opened: OnnxRunner, ids: list[int]) -> np.ndarray:
    """The oracle's logits after a text."""
    return np.asarray(expected(opened.bundle, ids)[-1])


@pytest.mark.parametrize("ctx", [64, 65])
def test_longrope_follows_the_context_of_the_run(ctx: int, tmp_path: Path) -> None:
    """As on our own kernels: short factors up to the context of the training, long ones beyond it."""
    pairs = TINY.head_dim // 2
    rope = RopeConfig(300.0, "longrope", 4.0, 64, short_factors=(1.3,) * pairs, long_factors=(3.0,) * pairs)
    path, ids = write_model(tmp_path, replace(TINY, model_type="phi3", rope=rope), "f32"), tokens(20)
    with runner(path, ctx=ctx, kv="f32", outputs=20) as opened, session(path, ctx=ctx, kv="f32", outputs=20) as own:
        assert difference(scored(opened, ids), scored(own, ids)) < F32


@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["llama", "mistral with windows"])
def test_prompts_decodes_and_scores_are_the_oracles(config: Any, tmp_path: Path) -> None:
    """A prompt of six chunks, token by token after it, and rows of several chunks; up to a full context."""
    ids = tokens(96, 3)
    with runner(write_model(tmp_path, config), outputs=7) as opened:
        want = expected(opened.bundle, ids)
        assert difference(logits_of(opened, ids, 6), want[89:]) < F32  # type: ignore[arg-type]
        assert difference(scored(opened, ids), want) < F32  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="1 tokens after 96 tokens do not fit the context of 96"):
            sequence = opened.new_sequence()
            opened.prefill(sequence, ids)
            opened.decode([sequence], [1])


def test_f16(tmp_path: Path) -> None:
    ids = tokens(40, 3)
    with runner(write_model(tmp_path), kv="f16") as opened:
        assert opened.slabs.dtype is np.float16
        assert difference(logits_of(opened, ids, 3)[-1], last(opened, ids)) < F16  # type: ignore[arg-type]


def test_slots_decode_in_any_order_beside_idle_and_full_ones(tmp_path: Path) -> None:
    """Ragged decodes over ranges with gaps; an idle slot keeps its rows, and a full one parts the range."""
    with runner(write_model(tmp_path), max_sequences=4, ctx=64) as opened:
        texts = [tokens(n, n) for n in (5, 61, 17, 1)]
        held = [opened.new_sequence() for _ in texts]
        for sequence, ids in zip(held, texts, strict=True):
            opened.prefill(sequence, ids)
        assert [sequence.blocks for sequence in held] == [[0], [1], [2], [3]]
        for step, order in enumerate(([3, 0, 2, 1], [2, 0], [0, 3], [1], [1, 2], [2, 0], [0], [3, 0])):
            new = tokens(len(order), 50 + step)
            rows = opened.decode([held[i] for i in order], new)
            for i, token, row in zip(order, new, rows, strict=True):
                texts[i].append(token)
                assert difference(row, last(opened, texts[i])) < F32, (step, i)
        assert len(texts[1]) == 64, "the last forward passes go around a full slot"
        assert [sequence.tokens for sequence in held] == texts


def test_a_pass_of_prompts_draft_tokens_and_decodes(tmp_path: Path) -> None:
    """Rows come in the order of segments and of their outputs, whichever calls make them."""
    with runner(write_model(tmp_path), max_sequences=3, outputs=8, prefill_chunk=32) as opened:
        before = [tokens(9, 1), tokens(4, 2)]
        held = [opened.new_sequence() for _ in range(3)]
        for sequence, ids in zip(held, before, strict=False):
            opened.prefill(sequence, ids)
        new = [tokens(1, 3), tokens(5, 4), tokens(1, 5)]
        rows = opened.forward([Segment(held[0], new[0], (0,), DECODE), Segment(held[1], new[1], (4, 0, 2), DECODE),
                            Segment(held[2], new[2], (0,))])
        all_of = expected(opened.bundle, before[1] + new[1])
        want = np.stack([last(opened, before[0] + new[0]), *all_of[[8, 4, 6]], last(opened, new[2])])
        assert difference(rows, want) < F32
        assert difference(opened.decode([held[1]], [6])[0], last(opened, [*before[1], *new[1], 6])) < F32, "its rows"
        opened.truncate(held[1], 9)
        assert opened.forward([Segment(held[0], [1, 2, 3])]).shape == (0, TINY.vocab_size)
        opened.truncate(held[0], 10)
        assert difference(opened.decode([held[0]], [7])[0], last(opened, [*before[0], *new[0], 7])) < F32


def test_forks_go_their_own_ways_and_slots_are_used_again(tmp_path: Path) -> None:
    with runner(write_model(tmp_path), max_sequences=2) as opened:
        ids = tokens(21, 8)
        first = opened.new_sequence()
        opened.prefill(first, ids)
        second = opened.fork(first)
        rows = opened.decode([first, second], [4, 5])
        assert difference(rows, np.stack([last(opened, [*ids, 4]), last(opened, [*ids, 5])])) < F32
        with pytest.raises(RequestError, match="All 2 slots for sequences are held; release one, or open the model"):
            opened.fork(first)
        third = opened.new_sequence()
        with pytest.raises(RequestError, match="All 2 slots"):
            opened.prefill(third, ids)
        assert not third.tokens and not third.blocks
        opened.release(first)
        assert difference(opened.prefill(third, tokens(30, 9)), last(opened, tokens(30, 9))) < F32
        assert third.blocks == [0]
        del second  # as after an interruption: nobody released it
        opened.fork(third)
        assert not opened.fork(opened.new_sequence()).blocks


def test_steps_take_no_more_than_the_plan_has(tmp_path: Path) -> None:
    """Whichever slots decode: ranges of the same length have their logits in one place."""
    with runner(write_model(tmp_path), max_sequences=4, ctx=64) as opened:
        held = [opened.new_sequence() for _ in range(4)]
        for sequence in held:
            opened.prefill(sequence, tokens(3))
        for first, end in combinations(range(5), 2):
            opened.decode(held[first:end], tokens(end - first))
        steps = opened._calls._steps.values()
        assert len(steps) == 10
        held = {id(value): value.numpy().nbytes for step in steps for value in step._outputs.values()}
        a_row = 4 * TINY.vocab_size + min(64, TINY.vocab_size) * (4 + 8)
        assert sum(held.values()) == opened.plan.region("steps").nbytes == (1 + 2 + 3 + 4) * a_row


def test_recorded_steps_begin_at_slot_0_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So there are about as many graphs as slots; a full slot that is idle has no room for the row that is written."""
    path, given = write_model(tmp_path), [tokens(5, seed) for seed in range(4)]
    monkeypatch.setitem(PROVIDERS, "onnx-cpu", PROVIDERS["onnx-cpu"]._replace(graphs=True))
    with runner(path, max_sequences=4, ctx=16) as opened:
        held = [opened.new_sequence() for _ in range(4)]
        for sequence, ids in zip(held, given, strict=True):
            opened.prefill(sequence, ids)
        for slot in (3, 1, 2, 3, 0, 2):
            new = tokens(1, 10 + slot)
            given[slot] += new
            assert difference(opened.decode([held[slot]], new)[0], last(opened, given[slot])) < 1e-5
        assert sorted(opened._calls._steps) == [(0, 1), (0, 2), (0, 3), (0, 4)]
        opened.prefill(held[0], tokens(16 - len(held[0])))
        opened.decode([held[2]], tokens(1))
        assert (1, 2) in opened._calls._steps


def test_a_first_prompt_is_not_written_over_by_the_single_tokens_of_its_pass(tmp_path: Path) -> None:
    """Its slot is between those of the others, idle, and its sequence has no tokens yet."""
    with runner(write_model(tmp_path), max_sequences=3, outputs=3) as opened:
        before, between, after = (opened.new_sequence() for _ in range(3))
        for sequence in (before, between, after):
            opened.prefill(sequence, tokens(5))
        opened.release(between)
        opened.forward([Segment(between, [7, 8]), Segment(before, [3]), Segment(after, [4])])
        assert between.blocks == [1]
        assert difference(opened.decode([between], [1])[0], last(opened, [7, 8, 1])) < F32


def test_trees_are_refused_and_chains_kept(tmp_path: Path) -> None:
    with runner(write_model(tmp_path), outputs=4) as opened:
        ids, sequence = tokens(9), opened.new_sequence()
        opened.prefill(sequence, ids)
        with pytest.raises(RequestError, match=r"This model cannot run the tree \[-1, -1\]; run its tokens"):
            opened.forward([Segment(sequence, [3, 4], (0, 1), DECODE, parents=(-1, -1))])
        opened.forward([Segment(sequence, [3, 4, 5], (0, 1), DECODE, parents=(-1, 0, 1))])
        with pytest.raises(RequestError, match=r"cannot keep the branch \[0, 2\] of a tree; run its tokens"):
            opened.accept(sequence, 9, [0, 2])
        opened.accept(sequence, 9, [0, 1])
        assert sequence.tokens == [*ids, 3, 4]


def test_a_cancelled_pass_leaves_its_sequence_as_it_was(tmp_path: Path) -> None:
    with runner(write_model(tmp_path)) as opened:
        cancel, sequence, ids = Cancellation(), opened.new_sequence(), tokens(40)
        opened.prefill(sequence, ids)
        run = opened.sessions.model.run_with_iobinding

        def cancelling(*given: Any) -> None:
            run(*given)
            cancel.cancel()

        opened.sessions.model.run_with_iobinding = cancelling
        with pytest.raises(CancelledError, match="The run was cancelled"):
            opened.prefill(sequence, tokens(40, 5), cancel)
        del opened.sessions.model.run_with_iobinding
        assert len(sequence) == 56, "a chunk went through"
        opened.truncate(sequence, 40)
        with pytest.raises(CancelledError):
            opened.decode([sequence], [1], cancel)
        assert difference(opened.decode([sequence], [1])[0], last(opened, [*ids, 1])) < F32


def test_closing_ends_a_pass_of_another_thread(tmp_path: Path) -> None:
    with runner(write_model(tmp_path), ctx=64, prefill_chunk=4) as opened:
        found: list[BaseException] = []
        sequence, begun = opened.new_sequence(), threading.Event()

        def forward() -> None:
            try:
                while True:
                    opened.prefill(sequence, tokens(60))
                    opened.truncate(sequence, 0)
                    begun.set()
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=forward)
        thread.start()
        assert begun.wait(60)
        opened.close()
        thread.join(600)
        assert not thread.is_alive() and isinstance(found[0], ClosedError), found
        opened.close()
        with pytest.raises(ClosedError, match="The model was closed; open it again"):
            opened.prefill(opened.new_sequence(), [1])


def test_a_failure_of_onnxruntime_is_one_sentence(tmp_path: Path) -> None:
    with runner(write_model(tmp_path)) as opened:
        sequence, ids = opened.new_sequence(), tokens(5)

        def lost(*given: Any) -> None:
            raise RuntimeError("CUDA failure 700: an illegal memory access\nwas encountered")

        opened.sessions.model.run_with_iobinding = lost
        with pytest.raises(EdgeInferError, match=r"^onnxruntime failed on CPUExecutionProvider, which ends the "
                                                 r"request: CUDA failure 700: an illegal memory access was enc"):
            opened.prefill(sequence, ids)
        del opened.sessions.model.run_with_iobinding
        assert not sequence.tokens and opened.kv.pool.n_free == 1
        opened.prefill(sequence, ids)


def test_a_failure_on_the_way_to_or_from_a_device_is_one_sentence(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a GPU was lost: what a step copies fails before it runs; and memory that a device has not."""
    with runner(write_model(tmp_path)) as opened:
        sequence, ids = opened.new_sequence(), tokens(5)
        opened.prefill(sequence, ids)
        for part in ("write", "logits"):
            def lost(*given: Any) -> None:
                raise RuntimeError("CUDA failure 700")

            with monkeypatch.context() as patch:
                patch.setattr(Step, part, lost)
                with pytest.raises(EdgeInferError, match=r"^onnxruntime failed on CPUExecutionProvider, which "
                                                         r"ends the request: CUDA failure 700 If that persists"):
                    opened.decode([sequence], [1])
            assert sequence.tokens == ids
        assert difference(opened.decode([sequence], [1])[0], last(opened, [*ids, 1])) < F32
    with pytest.raises(EdgeInferError, match=r"^onnxruntime cannot take 512 bytes of cuda's memory for a part of the "):
        Slabs(LAYOUT, {0: Heads(1, 1, 16)}, 1, 16, "f16", PROVIDERS["cuda"])


def test_slabs_on_a_gpu_take_what_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel for GPUs has a setting for that, which has to be made before the first of them."""
    from onnxruntime.capi import _pybind_state as native

    set_before = list[str]()
    strategies = SimpleNamespace(kSameAsRequested="as requested", kNextPowerOfTwo="rounded")
    monkeypatch.setattr(native, "ArenaExtendStrategy", strategies, raising=False)
    monkeypatch.setattr(native, "set_arena_extend_strategy", set_before.append, raising=False)
    monkeypatch.setattr(Slabs, "_zeros", lambda self, shape: set_before.append("slab"))
    Slabs(LAYOUT, {0: Heads(1, 1, 16)}, 1, 16, "f16", PROVIDERS["cuda"])
    assert set_before == ["as requested", "slab", "slab"]


def test_sequences_of_others_and_bad_passes_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with runner(path) as opened, runner(path) as other:
        sequence = opened.new_sequence()
        with pytest.raises(RequestError, match="belongs to another model that is open"):
            other.prefill(sequence, [1])
        for segment, said in ((Segment(sequence, [99]), r"Token id 99 is outside the vocabulary \(0 to 98\)"),
                              (Segment(sequence, [1] * 17), "do not fit one forward pass, which takes"),
                              (Segment(sequence, [1], (1,)), r"Logits are wanted after tokens \[1\] of 1"),
                              (Segment(sequence, [1], (0,), 7), "The role of a segment is 7"),
                              (Segment(sequence, [1], (0,), sample_specs=(1, 2)),
                               "2 sample specs are given for 1 rows"),
                              (Segment(sequence, []), "The prompt is empty")):
            with pytest.raises(RequestError, match=said):
                opened.forward([segment])
        with pytest.raises(RequestError, match="Cannot cut a sequence of 0 tokens to 3"):
            opened.truncate(sequence, 3)
        with pytest.raises(RequestError, match="This model cannot save prompts, so x was not written"):
            opened.save(sequence, "x")
        with pytest.raises(BundleError, match="This model cannot read the prompt cache x"):
            opened.load("x")
