"""The token budget: mixed steps within `max_itl`, whose times vary."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.engine.token_budget import MIN_CHUNK, TokenBudget

MAX_ITL, DECODE, TOKEN = 0.2, 0.02, 0.0015


def steps(spread: float) -> tuple[list[float], list[int]]:
    """Seconds and prompt tokens of steps whose prompt tokens take so much longer or shorter, by the normal
    distribution."""
    budget, random, seconds, tokens = TokenBudget(MAX_ITL, 512), np.random.default_rng(0), [], []
    budget.took(4, 0, DECODE)
    for _ in range(2000):
        tokens.append(budget.prompt_tokens(4))
        seconds.append(DECODE + tokens[-1] * TOKEN * max(0.3, random.normal(1, spread)))
        budget.took(4, tokens[-1], seconds[-1])
    return seconds[20:], tokens[20:]


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.2, 0.3])
def test_few_steps_last_longer_than_the_limit(spread: float) -> None:
    seconds, tokens = steps(spread)
    assert np.percentile(seconds, 99) <= 1.5 * MAX_ITL
    assert np.mean(seconds) >= MAX_ITL * (1 - 2 * spread) - TOKEN, "time is left"
    assert min(tokens) >= MIN_CHUNK


def test_a_crowd_gets_a_whole_tile_however_long_its_steps_last() -> None:
    budget = TokenBudget(MAX_ITL, 512)
    for n in (4, 6, 16):
        budget.took(n, 0, 2 * MAX_ITL)
        budget.took(n, 16, 3 * MAX_ITL)
    assert [budget.prompt_tokens(n) for n in (1, 4, 6, 8, 16)] == [8, 8, 12, 16, 16]


def test_alone_a_prompt_gets_the_whole_pass() -> None:
    assert TokenBudget(MAX_ITL, 512).prompt_tokens(0) == 512
