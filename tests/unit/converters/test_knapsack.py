"""Choices of the knapsack beside all choices there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from edgeinfer.converters.knapsack import choose


def some_items(random: np.random.Generator, items: int) -> list[list[tuple[int, float]]]:
    return [[(int(random.integers(1, 50)), float(random.random())) for _ in range(random.integers(1, 5))]
            for _ in range(items)]


@pytest.mark.parametrize("seed", range(40))
def test_a_choice_is_near_the_best_and_its_bound_below(seed: int) -> None:
    random = np.random.default_rng(seed)
    items = some_items(random, int(random.integers(1, 6)))
    least, most = (sum(end(nbytes for nbytes, _ in options) for options in items) for end in (min, max))
    limit = int(random.integers(least, most + 1))
    best = min(sum(cost for _, cost in taken) for taken in product(*items)
               if sum(nbytes for nbytes, _ in taken) <= limit)
    choice = choose(items, limit)
    assert choice.nbytes == sum(options[i][0] for options, i in zip(items, choice.options, strict=True)) <= limit
    assert choice.bound <= best + 1e-12 <= choice.cost + 2e-12
    assert choice.cost <= 1.02 * best


def test_many_items_fill_the_limit_and_the_gap_is_small() -> None:
    random = np.random.default_rng(0)
    items = []
    for weights in random.choice([4e6, 16e6, 45e6], 200):
        effect = np.exp(random.normal())
        items.append([(int(weights * bits / 8), effect * 4.0**-bits) for bits in (3.25, 3.5, 4.5, 5.5, 6.5625, 8.5)])
    limit = int(sum(options[0][0] for options in items) / 3.25 * 4.4)
    choice = choose(items, limit)
    assert 0.999 * limit < choice.nbytes <= limit and choice.gap < 0.002


def test_less_than_the_smallest_options_is_refused() -> None:
    with pytest.raises(ValueError, match="smallest options take 3 bytes more than the limit of 5"):
        choose([[(8, 1.0), (9, 0.5)]], 5)
    assert choose([[(8, 0.0)], [(2, 0.0)]], 10).gap == 0
