"""Predicted share of V that is read if rows are selected: against sampled scores and counts."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.graph.topn_cost import MEAN_ROWS, SHARED, SKEW, TopNCost


def drawn_rows(topn: TopNCost, depth: int, seed: int) -> float:
    """Rows of V that heads with drawn scores read, block by block."""
    rng = np.random.default_rng(seed)
    wanted = np.zeros(depth // 16, bool)
    for _ in range(int(topn.group)):
        common = np.sqrt(SHARED) * rng.standard_normal((depth // 16, 1))
        scores = topn.skew * (common + np.sqrt(1 - SHARED) * rng.standard_normal((depth // 16, 16)))
        least = np.sort(scores, axis=None)[-topn.top] if topn.top else scores.max() + np.log(topn.eps)
        wanted |= (scores >= least).any(axis=1)
    return min(depth, 16 * float(wanted.sum()) + MEAN_ROWS)


@pytest.mark.parametrize("topn", [
    TopNCost(0.01, 0, 1), TopNCost(0.01, 0, 8), TopNCost(0.001, 0, 1, 4.0), TopNCost(0.0, 32, 4),
    TopNCost(0.0, 500, 1)])
@pytest.mark.parametrize("depth", [1024, 16384])
def test_drawn_scores_read_as_much(topn: TopNCost, depth: int) -> None:
    drawn = np.mean([drawn_rows(topn, depth, seed) for seed in range(40)])
    assert topn.rows(depth) == pytest.approx(drawn, rel=0.1)


@pytest.mark.parametrize(("group", "depth", "share"), [
    (1, 4096, 0.34), (1, 16384, 0.146), (1, 32768, 0.126), (8, 4096, 0.99), (8, 32768, 0.56)])
def test_what_kernels_counted(group: int, depth: int, share: float) -> None:
    """The table of docs/explanation/long-context.md: 7B and 1.1B shapes, eps 0.01."""
    assert TopNCost(0.01, 0, group).rows(depth) / depth == pytest.approx(share, rel=0.2)


def test_where_all_is_wanted_all_is_read() -> None:
    assert TopNCost(0.0, 0, 1).rows(5000) == TopNCost(0.0, 5000, 1).rows(5000) == 5000
    assert TopNCost(1.0, 0, 1).rows(0) == 0 and TopNCost(0.5, 0, 1).rows(100) == 100
    assert TopNCost(1.0, 0, 1, SKEW).rows(1 << 20) < 2 * MEAN_ROWS


def test_rows_of_a_mean_are_read_where_one_stands_for_the_rest() -> None:
    scaled, mean = (TopNCost(0.01, 0, 1, mean=mean).rows(16384) for mean in (False, True))
    assert mean - scaled == MEAN_ROWS
