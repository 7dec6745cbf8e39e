"""The division of a KV pool of a given size: a context first, then windows, then all that is left."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from edgeinfer.memory_planner import Request, largest
from edgeinfer.memory_planner.kv_pool import pool_sizes

CTX, SEQUENCES = 8192, 16
REQUEST = Request(CTX, "int8", 1, 256, 16, SEQUENCES)
CONTEXT, USUAL = CTX // 16, 2048 // 16
"""Blocks of a context, and of a sequence of usual length."""


def costing(block: int, window: int, memory: int) -> Callable[[int, int], bool]:
    return lambda blocks, windows: block * blocks + window * windows <= memory


@pytest.mark.parametrize("most", [0, 1, 2, 7, 100])
def test_the_largest_number_that_fits(most: int) -> None:
    for limit in range(most + 3):
        assert largest(lambda n, limit=limit: n <= limit, most) == min(limit, most)


@pytest.mark.parametrize(("memory", "sizes"), [
    (0, (1, 1)),  # one block, which the caller refuses
    (5 * 40 + 300, (40, 1)),
    (5 * CONTEXT - 1 + 300, (391, 3)),  # no whole context fits, so three may be shorter
    (5 * CONTEXT + 300, (CONTEXT, 1)),
    (5 * CONTEXT + 4 * 300, (CONTEXT, 4)),
    (5 * 6 * USUAL + 6 * 300, (6 * USUAL, 6)),
    (5 * 6 * USUAL + 6 * 300 + 17, (6 * USUAL + 3, 6)),
    (10**6, (10_000, SEQUENCES)),
])
def test_a_context_comes_first_then_windows_then_blocks(memory: int, sizes: tuple[int, int]) -> None:
    assert pool_sizes(costing(5, 300, memory), REQUEST, 10_000) == sizes


def test_nothing_more_fits() -> None:
    chance = random.Random(5)
    for _ in range(300):
        block, window, memory = chance.randint(1, 50), chance.randint(0, 900), chance.randint(1000, 200_000)
        fits = costing(block, window, memory)
        blocks, windows = pool_sizes(fits, REQUEST, 10**9)
        assert fits(blocks, windows) or (blocks, windows) == (1, 1)
        assert not fits(blocks + 1, windows)
        assert blocks >= CONTEXT or not fits(CONTEXT, 1)
        first = CONTEXT if fits(CONTEXT, 1) else 0
        assert windows == SEQUENCES or not fits(max(first, (windows + 1) * USUAL), windows + 1)


@pytest.mark.parametrize(("options", "blocks", "windows"), [
    ({}, 16 * (CONTEXT + 1), 16), ({"kv_tokens": 1}, 1, 1), ({"kv_tokens": 16}, 1, 1), ({"kv_tokens": 17}, 2, 1),
    ({"kv_tokens": 5000, "own_tokens": 30}, 313, 3), ({"kv_tokens": 10**6}, 62_500, 16),
    ({"kv_tokens": 5000, "kv_windows": 9}, 313, 9), ({"own_tokens": 30}, 510 + 16 * 3, 16),
])
def test_a_request_has_the_pool_that_it_gives(options: dict[str, int], blocks: int, windows: int) -> None:
    """Also where beams give their sequences tokens of their own."""
    request = Request(CTX, "int8", 1, 256, 16, SEQUENCES, **options)
    assert (request.kv_blocks, request.windows) == (blocks, windows)
    assert request.full_pool.kv_blocks == 16 * (CONTEXT + 1)


def test_short_contexts_are_of_usual_length() -> None:
    assert Request(512, "int8", 1, 256, 16, SEQUENCES, kv_tokens=1024).windows == 2
