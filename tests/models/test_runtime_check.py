"""EDGEINFER_CHECK=1: every instruction beside its NumPy reference, in every storage; deviations are named."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import CancelledError, EdgeInferError, KernelError
from edgeinfer.graph import ModelConfig
from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import ROWS, SCREEN
from edgeinfer.kernels.reference import REFERENCES, Expected, InstructionView
from edgeinfer.runner import Cancellation
from edgeinfer.runtime import Session
from tests.helpers.sessions import SPLIT, TINY, WINDOWED, logits_of, own_threads, session, tokens, write_model

ENTRY = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
NORMED = replace(TINY, model_type="qwen3", hidden_act="relu2", tie_word_embeddings=True)
BIASED = replace(TINY, model_type="qwen2", hidden_act="gelu", attention_bias=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")


def both_ways(path: Path, monkeypatch: pytest.MonkeyPatch, n: int, kv: str) -> None:
    """A run under check has the bits of one without; it covers prefill, decode, and two sequences in a forward pass."""
    results = []
    for check in ("0", "1"):
        monkeypatch.setenv("EDGEINFER_CHECK", check)
        with session(path, kv=kv, threads=2, prefill_chunk=150, max_sequences=2, ctx=320) as opened:
            assert bool(opened.executor.pool.workers) == (check == "0")
            rows = [logits_of(opened, tokens(n), n_decoded=3).tobytes()]
            first = opened.new_sequence()
            opened.prefill(first, tokens(11))
            rows.append(opened.decode([first, opened.fork(first)], [3, 4]).tobytes())
            results.append(rows)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("weights", "group_size"),
    [("q4", 32), pytest.param("q4", 64, marks=pytest.mark.slow), ("q4", 128), ("int8", 32),
     pytest.param("int8", 64, marks=pytest.mark.slow), ("int8", 128), ("f16", 32), ("f32", 32)],
)
def test_every_weight_type(weights: str, group_size: int, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways(write_model(models, TINY, weights, group_size), monkeypatch, 20, "int8")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("config", "kv"),
    [(TINY, "int8"), (TINY, "f16"), (TINY, "f32"), (WINDOWED, "int8"), (NORMED, "f16"), (BIASED, "f32")],
)
def test_every_kv_type_with_splits(
    config: ModelConfig, kv: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of two attention splits, so that decoding merges them."""
    both_ways(write_model(models, config), monkeypatch, SPLIT + 5, kv)


def instruction_of(opened: Session, kernel: str) -> int:
    """Number of the first instruction of a kernel."""
    return next(i for i, instruction in enumerate(opened.program.instructions) if instruction.kernel.startswith(kernel))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    "kernel", ["embed_", "rms_norm_", "quantize", "linear_", "gated_", "rope_store_", "attention_"]
)
def test_a_kernel_that_does_nothing_is_named(kernel: str, models: Path) -> None:
    with session(write_model(models)) as opened:
        i = instruction_of(opened, kernel)
        nothing = ENTRY(lambda inst, ctx, tid, n: 0)
        opened.program.words[i, 0] = ctypes.cast(nothing, ctypes.c_void_p).value
        instruction = opened.program.instructions[i]
        with pytest.raises(KernelError) as caught:
            opened.prefill(opened.new_sequence(), tokens(5))
    text = str(caught.value)
    assert text.startswith(f"Instruction {i} ({instruction.kernel}, {instruction.label}) disagrees with its "
                           "reference: ")
    assert "its reference gives" in text and "tolerance" in text


@pytest.mark.usefixtures("checked")
def test_a_small_deviation_is_measured(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value that is off."""
    reference: Callable[[InstructionView], list[Expected]] = REFERENCES["gated_q4_g32"]

    def damaged(view: InstructionView) -> list[Expected]:
        expected: list[Any] = reference(view)
        values = expected[0].values() if callable(expected[0].values) else expected[0].values
        values[3, 7] = 1.01 * values[3, 7] + 1
        return [replace(expected[0], values=values), *expected[1:]]

    monkeypatch.setitem(REFERENCES, "gated_q4_g32", damaged)
    with session(write_model(models)) as opened, pytest.raises(KernelError) as caught:
        opened.prefill(opened.new_sequence(), tokens(5))
    assert "gated layers.0." in str(caught.value) and "[3, 7] is " in str(caught.value)
    assert "; 1 of 400 values deviate." in str(caught.value)  # 5 tokens, 72 neurons in tiles of 16


@pytest.mark.usefixtures("checked")
def test_status_cancel_and_the_next_pass(models: Path) -> None:
    with session(write_model(models)) as opened:
        expected = logits_of(opened, tokens(5)).tobytes()
        i = instruction_of(opened, "gated_")
        good = int(opened.program.words[i, 0])

        def cancelled(inst: int, ctx: int, tid: int, n: int) -> int:
            cancellation.cancel()
            return ENTRY(good)(inst, ctx, tid, n)

        failing, cancelling = ENTRY(lambda inst, ctx, tid, n: 7), ENTRY(cancelled)
        sequence, cancellation = opened.new_sequence(), Cancellation()
        for entry, kind in ((failing, KernelError), (cancelling, CancelledError)):
            opened.program.words[i, 0] = ctypes.cast(entry, ctypes.c_void_p).value
            with pytest.raises(kind):
                opened.prefill(sequence, tokens(5), cancellation)
            opened.program.words[i, 0] = good
            assert len(sequence) == 0 and sequence.blocks == []
            assert logits_of(opened, tokens(5)).tobytes() == expected
        with pytest.raises(CancelledError):
            opened.prefill(sequence, tokens(5), cancellation)
        assert opened.prefill(sequence, tokens(5), Cancellation()).tobytes() == expected
        before = own_threads()
        opened.close()
        assert own_threads() == before


@pytest.mark.usefixtures("checked")
def test_events_are_honoured(models: Path) -> None:
    """An instruction waits for its data; it does not run where that will not come, or where the pass ends meanwhile."""
    with session(write_model(models)) as opened:
        expected = logits_of(opened, tokens(5)).tobytes()
        i, sequence, ran = instruction_of(opened, "gated_"), opened.new_sequence(), []
        good = int(opened.program.words[i, 0])

        def noted(inst: int, ctx: int, tid: int, n: int) -> int:
            ran.append(opened.executor.events[2])
            return ENTRY(good)(inst, ctx, tid, n)

        entry = ENTRY(noted)
        opened.program.words[i, 0] = ctypes.cast(entry, ctypes.c_void_p).value
        opened.program.words.view(np.int32)[i, abi.INST_EVENT // 4] = 1 + 2
        cancellation = Cancellation()
        for call, arguments, kind in ((opened.executor.redeem, (2, False), EdgeInferError),
                                      (cancellation.cancel, (), CancelledError)):
            opened.executor.events[2] = 0
            timer = threading.Timer(0.05, call, arguments)
            timer.start()
            with pytest.raises(kind):
                opened.prefill(sequence, tokens(5), cancellation)
            timer.join()
            assert not ran and len(sequence) == 0
        timer = threading.Timer(0.05, opened.executor.redeem, (2,))
        timer.start()
        assert opened.prefill(sequence, tokens(5)).tobytes() == expected
        assert ran == [1]
        timer.join()


@pytest.mark.usefixtures("checked")
def test_one_token_takes_the_path_of_real_decoding(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products normalise and quantise one token themselves, and are compared while they do; the norm does not run."""
    seen: list[tuple[str, int]] = []
    for name in ("rms_norm_q8", "linear_q4_g32", "gated_q4_g32"):
        def noted(view: InstructionView, name: str = name, reference: Callable[...,
                                                                          list[Expected]] = REFERENCES[name]) -> Any:
            seen.append((name, view.count(abi.COUNT_SEVERAL)))
            return reference(view)

        monkeypatch.setitem(REFERENCES, name, noted)
    with session(write_model(models)) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(5))
        assert {("rms_norm_q8", 5), ("linear_q4_g32", 5), ("gated_q4_g32", 5)} <= set(seen)
        seen.clear()
        opened.decode([sequence], [3])
        assert {("linear_q4_g32", 0), ("gated_q4_g32", 0)} <= set(seen)
        assert seen.count(("rms_norm_q8", 0)) == 1, "only that of the head, whose input is gathered"


def test_parameters_have_the_names_of_their_own_family() -> None:
    """Two families of one length are equal as tuples of indices."""
    assert len(ROWS) == len(SCREEN)
    instruction = np.zeros(abi.INSTRUCTION_BYTES, np.uint8)
    instruction[abi.INST_PARAMETERS :].view(np.int32)[: abi.N_PARAMETERS] = range(7, 7 + abi.N_PARAMETERS)
    view = InstructionView(instruction.ctypes.data, 0)
    for family in (SCREEN, ROWS, SCREEN):
        found = view.parameters(family)
        assert type(found) is type(family) and tuple(found) == tuple(range(7, 7 + len(family)))
