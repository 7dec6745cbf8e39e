"""Prompts in stages that end early: cancelled in any forward pass and while it is chosen, or their model closed."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import CancelledError, ClosedError
from edgeinfer.runner import Cancellation
from tests.helpers.pruned import HALF, answer, written
from tests.helpers.sessions import free_blocks, session, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("number", [0, 4, 6, 7, 10, 13])
def test_a_cancelled_prompt_leaves_the_sequence_as_it_was(model: Path, number: int) -> None:
    """In any forward pass of any stage: five chunks, of which the last two stop where they choose, three chunks, ..."""
    with session(model, ctx=256, max_sequences=2, prefill_chunk=32, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(70))
        expected, free = answer(opened, sequence), free_blocks(opened)
        forward, wish, calls = opened.forward_range, Cancellation(), itertools.count()

        def cancelled(*arguments: Any) -> Any:
            if next(calls) == number:
                wish.cancel()
            return forward(*arguments)

        opened.forward_range = cancelled
        with pytest.raises(CancelledError):
            opened.prefill(sequence, tokens(130, seed=1), wish)
        assert len(sequence) == 70 and free_blocks(opened) == free
        assert answer(opened, sequence) == expected
        opened.prefill(sequence, tokens(130, seed=1))
        assert next(calls) == number + 1 + 14


def test_a_cancellation_is_seen_while_tokens_are_ranked(model: Path) -> None:
    with session(model, ctx=256, lazy=HALF) as opened:
        sequence, wish, keys, calls = opened.new_sequence(), Cancellation(), opened.kv.keys, itertools.count()

        def cancelled(*arguments: Any) -> Any:
            next(calls)
            wish.cancel()
            return keys(*arguments)

        opened.kv.keys = cancelled
        with pytest.raises(CancelledError):
            opened.prefill(sequence, tokens(130), wish)
        assert next(calls) == 1 and not len(sequence)  # of two heads


def test_a_model_closed_while_tokens_are_ranked_says_so(model: Path) -> None:
    with session(model, ctx=256, lazy=HALF) as opened:
        closer, choose = threading.Thread(target=opened.close), opened.prefill_strategy.choose

        def closed(*arguments: Any) -> Any:
            closer.start()
            while not opened.executor.ended(None):
                time.sleep(0.001)
            closer.join(0.1)
            return choose(*arguments)

        opened.prefill_strategy.choose = closed
        with pytest.raises(ClosedError):
            opened.prefill(opened.new_sequence(), tokens(130))
        closer.join()
