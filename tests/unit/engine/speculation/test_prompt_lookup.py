"""Drafts by prompt lookup are the tokens after the latest occurrence of the last tokens."""

from __future__ import annotations

import random

import pytest

from edgeinfer.engine.speculation.prompt_lookup import LENGTHS, SIZES, Index


def naive(text: list[int]) -> tuple[int, list[int]]:
    """Latest earlier place of as many last tokens as SIZES says, and all that follows it, by looking everywhere."""
    for size in SIZES:
        for place in range(len(text) - 2, size - 2, -1):
            if text[place - size + 1 : place + 1] == text[len(text) - size :]:
                common = next((i for i in range(place + 1) if text[place - i] != text[-1 - i]), place + 1)
                return sum(common >= length for length in LENGTHS), text[place + 1 :]
    return 0, []


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_lookup_finds_the_latest_occurrence(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    text = [rng.randrange(vocabulary) for _ in range(3)]
    index = Index(text)
    for _ in range(600):
        text.extend(rng.randrange(vocabulary) for _ in range(rng.choice((1, 1, 1, 2, 7))))
        level, following = naive(text)
        assert index.level() == level
        if level:
            assert index.continuation(9)[: len(following)] == following[:9]


def test_lookup_of_more_tokens_than_characters_draft_tokens_and_is_no_error() -> None:
    text = [1 << 21, 5, 1 << 30, 7, 0xD800, 3, 1 << 21, 5]  # beyond Unicode, and half of a surrogate pair
    index = Index(text)
    assert index.level() == 1 and index.continuation(3) == [1 << 30, 7, 0xD800]


def test_lookup_repeats_a_period() -> None:
    text = [1, 2, 3] * 3
    index = Index(text)
    assert index.level() == sum(length <= 6 for length in LENGTHS)
    assert index.continuation(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert Index([5]).level() == 0 and Index([5, 5]).level() == 0 and Index([5, 5, 5]).continuation(1) != []
