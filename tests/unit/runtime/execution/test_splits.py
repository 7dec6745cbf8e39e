"""The tokens whose attention is split: those for which threads would wait, draft tokens, and no chunk of a prompt."""

from __future__ import annotations

import pytest

from edgeinfer.kernels import abi
from edgeinfer.runner import DECODE, PROMPT, Segment, Sequence
from edgeinfer.runtime.execution.splits import SPLIT_ROWS, tokens_to_split

MOST = abi.ATTENTION_TOKENS
DEEP = 16 * SPLIT_ROWS


def after(depth: int, n: int = 1, role: int = DECODE) -> Segment:
    return Segment(Sequence([0] * depth), [0] * n, (), role)


def split(*segments: Segment, threads: int = 2, kv_heads: int = 3, offset: int = 0) -> int:
    return tokens_to_split(segments, offset, threads, 3 * kv_heads, kv_heads)


@pytest.mark.parametrize("chunk", [(), (after(0, 64, PROMPT),)], ids=["alone", "beside a prompt"])
def test_as_many_single_tokens_as_fill_the_wait_for_one(chunk: tuple[Segment, ...]) -> None:
    """Of one thread none; the more threads wait the more, at most as many as there is room for."""
    for n in (1, 2, 5):
        assert [split(*chunk, *[after(DEEP)] * n, threads=threads) for threads in (1, 2, 4, 7, 32)] == [
            0, 1, 1, min(2, n), n]
    assert split(*chunk, *[after(DEEP)] * 40, threads=64) == MOST
    assert split(*chunk, *[after(DEEP)] * 40, threads=2) == 0, "the wait for one of 120 is short"


def test_a_deep_sequence_is_split_in_any_order() -> None:
    shallow = [after(100)] * 7
    assert split(after(DEEP), *shallow) == 8
    assert split(*shallow, after(DEEP)) == 1
    assert split(after(DEEP), *[after(DEEP // 4)] * 8) == 2


def test_draft_tokens_read_a_context_together() -> None:
    """As many whole segments as there is room for, of one thread too; a long segment in decode role is a chunk."""
    for threads in (1, 2):
        assert split(after(DEEP, 5), threads=threads) == 5
        assert split(after(DEEP, 7), after(DEEP, 6), after(DEEP, 5), after(DEEP, 4), threads=threads) == 15
        assert split(after(0, 64, PROMPT), after(DEEP, 7), after(DEEP, 6), threads=threads) == 13
        assert split(after(DEEP, MOST + 1), threads=threads) == 0
        assert split(after(DEEP, 2), after(DEEP, MOST + 1), threads=threads) == 0
    assert split(after(DEEP, 2), after(DEEP), threads=1) == 3


def test_a_prompt_of_few_tokens_is_split_if_threads_would_wait() -> None:
    assert [split(after(DEEP, 9, PROMPT), threads=threads) for threads in (1, 2)] == [0, 9]
    assert split(after(DEEP, MOST + 1, PROMPT)) == 0
    assert split(after(300, 9, PROMPT), *[after(DEEP)] * 4) == 1


@pytest.mark.parametrize(("n", "rows"), [(1, SPLIT_ROWS), (4, SPLIT_ROWS), (5, 2 * SPLIT_ROWS)])
def test_short_contexts_are_not_split(n: int, rows: int) -> None:
    """Contexts of one segment of n tokens; rows count up to the last token."""
    assert split(after(rows - n, n), threads=8) == 0
    assert split(after(rows - n + 1, n), threads=8) == n
    assert split(after(rows - n - 5, n), threads=8, offset=6) == n
