"""A prompt run stage by stage: all chunks through a range of instructions, the residual kept aside, then the next
one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import CancelledError, RequestError
from edgeinfer.runner import Cancellation, Segment
from edgeinfer.runtime import Session
from tests.helpers.pruned import kv_rows
from tests.helpers.sessions import TINY, free_blocks, session, tokens

MODEL = replace(TINY, num_hidden_layers=3)
PROMPT = 150
BEFORE = 21
"""Tokens that the sequence holds when the prompt comes."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model for each layout of the FFN."""
    root = tmp_path_factory.mktemp("models")
    for layout in ("tile16", "neuron"):
        write_random_bundle(MODEL, root / layout, ffn_layout=layout)
    return {layout: root / layout for layout in ("tile16", "neuron")}


def cuts(opened: Session) -> list[int]:
    """Indices of the first instruction of each layer but the first, and of the program's ends."""
    layers = [instruction.op.layer for instruction in opened.program.instructions if instruction.op]
    return [0, *(layers.index(k) for k in (1, 2)), len(layers)]


def residual(opened: Session, n: int) -> np.ndarray:
    """The first n rows of the residual, in place."""
    at = opened.plan.allocations["x.0"]
    rows = opened.executor.regions["activations"][at.offset :][: n * at.stride]
    return rows.view(np.float32).reshape(n, -1)[:, : MODEL.hidden_size]


@pytest.mark.parametrize("layout", ["tile16", "neuron"])
@pytest.mark.parametrize("chunk", [1, 37, 64])
def test_stages_have_the_bits_of_the_whole_pass(paths: dict[str, Path], layout: str, chunk: int) -> None:
    with session(paths[layout], ctx=256, threads=2, prefill_chunk=chunk, max_sequences=2) as opened:
        past, ids = tokens(BEFORE, seed=1), tokens(PROMPT)
        plain, staged = opened.new_sequence(), opened.new_sequence()
        opened.prefill(plain, past)
        opened.prefill(staged, past)
        expected = opened.prefill(plain, ids).copy()
        opened.reserve(staged, len(ids))
        kept: dict[int, np.ndarray] = {}
        ends = cuts(opened)
        for first, stop in itertools.pairwise(ends):
            for start in range(0, len(ids), chunk):
                part = ids[start : start + chunk]
                if start in kept:
                    residual(opened, len(part))[:] = kept[start]
                last = stop == ends[-1] and start + len(part) == len(ids)
                logits = opened.forward_range(Segment(staged, part, (len(part) - 1,) if last else ()), first, stop,
                                              start)
                kept[start] = residual(opened, len(part)).copy()
                residual(opened, len(part))[:] = np.nan
        assert len(staged) == BEFORE
        assert logits.shape == (1, MODEL.vocab_size) and logits[0].tobytes() == expected.tobytes()
        opened.append(staged, ids)
        assert staged.tokens == plain.tokens and kv_rows(opened, staged) == kv_rows(opened, plain)
        alone, after = (opened.decode([one], [5])[0].tobytes() for one in (plain, staged))
        assert alone == after


def test_what_is_reserved_can_be_called_off(paths: dict[str, Path]) -> None:
    with session(paths["tile16"], ctx=128, max_sequences=2) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(10))
        expected = opened.decode([opened.fork(sequence)], [7])[0].tobytes()
        opened.reserve(sequence, 60)
        held = opened.plan.kv_blocks - free_blocks(opened)
        segment = Segment(sequence, tokens(30))
        cancelled = Cancellation()
        cancelled.cancel()
        with pytest.raises(CancelledError):
            opened.forward_range(segment, 0, 5, cancel=cancelled)
        for call in (lambda: opened.forward_range(segment, 0, 5, offset=31),
                     lambda: opened.append(sequence, tokens(61))):
            with pytest.raises(RequestError, match=r"the 60 reserved ones"):
                call()
        opened.forward_range(segment, 0, 5, offset=30)
        assert opened.plan.kv_blocks - free_blocks(opened) == held
        opened.truncate(sequence, 10)
        assert len(sequence.blocks) == 1
        assert opened.decode([sequence], [7])[0].tobytes() == expected


def test_what_lies_outside_the_program_or_the_context_is_refused(paths: dict[str, Path]) -> None:
    """Threads believe what they are given: an instruction after the last one, or a row of another token, is memory."""
    with session(paths["tile16"], ctx=100) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(20))
        expected, free, n = opened.decode([opened.fork(sequence)], [7])[0].tobytes(), free_blocks(opened), cuts(opened)
        for wanted in (81, 0, -10):
            with pytest.raises(RequestError, match=f"^{wanted} tokens cannot be reserved; .* room for 1 to 80 more"):
                opened.reserve(sequence, wanted)
        assert free_blocks(opened) == free and not sequence.reserved
        opened.reserve(sequence, 10)
        for first, stop in ((0, n[-1] + 1), (-1, 5), (5, 4)):
            with pytest.raises(RequestError,
                               match=f"^The program has no instructions {first} to {stop - 1}; it has 0 to "):
                opened.forward_range(Segment(sequence, [1, 2]), first, stop)
        with pytest.raises(RequestError, match="2 tokens -5 after the end do not fit"):
            opened.forward_range(Segment(sequence, [1, 2]), 0, n[-1], offset=-5)
        opened.truncate(sequence, 20)
        assert opened.decode([sequence], [7])[0].tobytes() == expected
