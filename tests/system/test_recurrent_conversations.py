"""Conversations with a model that has recurrent layers: what was computed once is not computed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from edgeinfer import LLM
from tests.helpers.sessions import HYBRID, tokens, write_model

TURNS, USER, ANSWER, BLOCK = 10, 21, 37, 16


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    config = replace(HYBRID, vocab_size=300, max_position_embeddings=4096)
    with LLM(write_model(tmp_path_factory.mktemp("conversation"), config), ctx=2048, threads=1) as opened:
        yield opened


def turn(llm: LLM, ids: list[int]) -> tuple[list[int], int]:
    """Return the ids of an answer, and how many tokens of the prompt were computed."""
    done = llm.complete(ids, max_tokens=ANSWER, temperature=0, ignore_eos=True, reuse=True)
    assert done.token_ids == llm.complete(ids, max_tokens=ANSWER, temperature=0, ignore_eos=True).token_ids
    return list(done.token_ids), len(ids) - done.cached_tokens


def test_each_token_is_computed_once(llm: LLM) -> None:
    """An answer's last token is sampled and not run, so the next turn has it beside the user's."""
    ids = tokens(100, 1, 300)
    answer, computed = turn(llm, ids)
    assert computed == 100
    for number in range(2, TURNS + 1):
        ids = [*ids, *answer, *tokens(USER, number, 300)]
        answer, computed = turn(llm, ids)
        assert computed == USER + 1


def test_stripped_reasoning_costs_a_block_at_most(llm: LLM) -> None:
    """Of each answer the history keeps the last tokens: the rest was reasoning."""
    ids, kept = tokens(100, 51, 300), 12
    answer, _ = turn(llm, ids)
    new = computed = 0
    for number in range(2, TURNS + 1):
        said = [*answer[-kept:], *tokens(USER, 50 + number, 300)]
        ids, new = [*ids, *said], new + len(said)
        answer, n = turn(llm, ids)
        assert n < len(said) + BLOCK
        computed += n
    assert computed <= new + (TURNS - 1) * BLOCK / 2 + BLOCK
