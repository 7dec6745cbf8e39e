"""Predictors of live neurons against their definitions, and thresholds against trying all of them."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.bundle import Predictor
from edgeinfer.sparse import low_rank, scorer, thresholds
from edgeinfer.sparse.fitting import _spread, harm_of
from edgeinfer.sparse.predictors import ALWAYS, pack_matrix, pack_signs, rounded, unpack_matrix
from edgeinfer.sparse.refine import refine

RNG = np.random.default_rng(3)


def matrix(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("hidden", [1, 63, 64, 65, 100])
def test_signs_are_counted_as_they_are_packed(hidden: int) -> None:
    x, gate = matrix(9, hidden), matrix(20, hidden)
    x[0], gate[3, 0] = 0, -0.0
    signs = pack_signs(gate)
    assert signs.shape == (20, -(-hidden // 64)) and signs.dtype == np.uint64
    scores = scorer(Predictor("sign", 0, signs=(signs,)), 0, gate, "relu")(x)
    by_hand = [[sum(1 if (a < 0) == (b < 0) else -1 for a, b in zip(row, w, strict=True)) for w in gate] for row in x]
    assert np.array_equal(scores, by_hand)


def test_low_rank_is_the_best_for_the_inputs_that_come() -> None:
    mix = matrix(24, 24) * np.geomspace(3, 0.01, 24)
    x, gate = matrix(4000, 24) @ mix.T.astype(np.float32), matrix(50, 24)
    covariance = x.T @ x / len(x)

    def error(approximation: np.ndarray) -> float:
        return float(((x @ (gate - approximation).T) ** 2).mean())

    outer, inner = low_rank(gate, covariance, 6)
    u, s, v = np.linalg.svd(gate, full_matrices=False)
    assert error(outer @ inner) < 0.5 * error(u[:, :6] * s[:6] @ v[:6])
    values = np.linalg.svd(gate @ np.linalg.cholesky(covariance), compute_uv=False)
    assert error(outer @ inner) == pytest.approx((values[6:] ** 2).sum() / 50, rel=1e-3)  # no rank 6 is better
    less_outer, less_inner = low_rank(gate, covariance, 3)
    np.testing.assert_allclose(less_outer @ less_inner, outer[:, :3] @ inner[:3], atol=1e-4)
    whole = low_rank(gate, covariance, 24)
    np.testing.assert_allclose(whole[0] @ whole[1], gate, atol=1e-3)
    low_rank(gate, np.zeros((24, 24), np.float32), 4)  # a text that never lit this input


def test_low_rank_scores_are_matmuls_of_int8() -> None:
    gate, x = matrix(40, 70), matrix(5, 70)
    outer, inner = matrix(40, 33), matrix(33, 70)
    made = Predictor("lowrank", 33, inner=(pack_matrix(inner),), outer=(pack_matrix(outer),))
    scores = scorer(made, 0, gate, "relu")(x)
    exact = rounded(x @ unpack_matrix(made.inner[0], (33, 70)).T) @ unpack_matrix(made.outer[0], (40, 33)).T
    np.testing.assert_allclose(scores, exact, rtol=1e-5, atol=1e-4)
    assert np.corrcoef(scores.ravel(), (x @ inner.T @ outer.T).ravel())[0, 1] > 0.999


def test_the_gate_itself_decides_where_nothing_is_zero() -> None:
    gate, x = matrix(7, 12), matrix(3, 12)
    g = (x @ gate.T).astype(np.float64)
    scores = scorer(Predictor("threshold", 0), 0, gate, "silu")(x)
    np.testing.assert_allclose(scores, np.abs(g / (1 + np.exp(-g))), rtol=1e-4)


@pytest.mark.parametrize("one", [False, True])
def test_thresholds_leave_out_what_is_not_worth_its_harm(one: bool) -> None:
    scores = RNG.integers(-4, 5, (12, 3)).astype(np.float32)  # with equal ones
    harm = np.maximum(matrix(12, 3), 0) * np.maximum(scores, 0.05)
    lambdas = np.array([1.0, 0.2, 1e-9])
    found = thresholds(scores, harm, lambdas, one)
    assert found.shape == (3, 1 if one else 3) and found.dtype == np.float32

    def worth(lambda_: float, column: np.ndarray, damage: np.ndarray, threshold: float) -> float:
        out = column <= threshold
        return float(out.sum() - damage[out].sum() / lambda_)

    columns = [(scores.ravel(), harm.ravel())] if one else list(zip(scores.T, harm.T, strict=True))
    for i, lambda_ in enumerate(lambdas):
        for j, (column, damage) in enumerate(columns):
            best = max(worth(lambda_, column, damage, t) for t in (ALWAYS, *column))
            assert worth(lambda_, column, damage, found[i, j]) == pytest.approx(best, rel=1e-5)
    assert np.all(np.diff(found, axis=0) <= 0)  # a lower lambda leaves out less


def test_training_costs_less_than_the_closed_form_and_repeats_itself() -> None:
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((6144, 48)) * np.geomspace(3, 0.3, 48)).astype(np.float32)
    gate, up = (rng.standard_normal((96, 48)).astype(np.float32) for _ in range(2))
    gate[::2] *= 3  # half of the neurons have large gates and hardly ever fire, of the others a tenth does
    scores = x @ gate.T
    f = np.maximum(scores - np.where(np.arange(96) % 2, 1.3, 3.5) * scores.std(axis=0), 0) * (x @ up.T)
    harm, lambda_ = harm_of(f, up), 2e-3

    def cost(outer: np.ndarray, inner: np.ndarray) -> float:
        """Neurons computed and the harm of others, of tokens that were not trained on."""
        found = rounded(x[4096:] @ inner.T) @ outer.T
        chosen = found > thresholds(found, harm[4096:], np.array([lambda_]))[0]
        return float(chosen.sum() + harm[4096:][~chosen].sum() / lambda_)

    closed = low_rank(gate, x.T @ x / len(x), 12)
    trained = refine(*closed, x[:4096], harm[:4096], lambda_, 3)
    assert cost(*trained) < 0.97 * cost(*closed)
    again = refine(*closed, x[:4096], harm[:4096], lambda_, 3)
    assert all(np.array_equal(a, b) for a, b in zip(trained, again, strict=True))


def test_a_sample_comes_from_the_whole_text() -> None:
    assert _spread(range(100), 30, 10) == [*range(10), *range(30, 40), *range(60, 70)]
    assert _spread(range(25), 22, 10) == list(range(22)) and _spread(range(7), 30, 10) == list(range(7))
