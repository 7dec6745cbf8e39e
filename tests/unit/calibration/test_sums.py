"""Sums over the inputs of matrices, and the prior of experts that few tokens chose, against plain NumPy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from edgeinfer.calibration.inputs import PRIOR, MatrixInput, blended
from edgeinfer.calibration.kept import KeptStatistics, StatisticsWriter
from edgeinfer.calibration.sums import BLOCK, ROWS, Sums
from edgeinfer.errors import BundleError
from edgeinfer.quant import InputStatistics

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("width", [3, BLOCK + 8])
@pytest.mark.parametrize("rows", [1, 300])
def test_means_are_those_of_numpy_in_parts_of_any_size(width: int, rows: int) -> None:
    x = RNG.standard_normal((rows, width)).astype(np.float32)
    sums = Sums(width, True, 256)
    for part in np.array_split(x, [rows // 3, rows // 2]):
        sums.add(part)
    found = sums.statistics()
    assert found.tokens == rows
    assert found.largest is not None and (found.largest == np.abs(x).max(axis=0)).all()
    np.testing.assert_allclose(found.mean_square, np.square(x, dtype=np.float64).mean(axis=0), rtol=1e-5)
    assert found.covariance is not None and (found.covariance == found.covariance.T).all()
    np.testing.assert_allclose(found.covariance, x.T.astype(np.float64) @ x / rows, rtol=1e-4, atol=1e-5)


def test_bits_do_not_depend_on_the_parts() -> None:
    x = RNG.standard_normal((700, 40)).astype(np.float32)
    found = []
    for size in (1, 64, 700):
        sums = Sums(40, True, 256)
        for start in range(0, 700, size):
            sums.add(x[start : start + size])
        covariance = sums.statistics().covariance
        assert covariance is not None
        found.append(covariance.tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("width", [256, BLOCK + 256])
def test_bits_do_not_depend_on_the_threads_of_blas(width: int) -> None:
    """Neither those of the sums nor those of the factors by which GPTQ passes errors on."""
    x, found = RNG.standard_normal((2 * ROWS, width)).astype(np.float32), []
    for threads in (1, 2, 3):
        with threadpool_limits(threads, "blas"):
            sums = Sums(width, True)
            sums.add(x)
            statistics = sums.statistics()
            assert statistics.covariance is not None and statistics.feedback is not None
            found.append(statistics.covariance.tobytes() + statistics.feedback.matrix.tobytes())
    assert len(set(found)) == 1


def test_without_a_covariance_there_are_squares_alone() -> None:
    sums = Sums(4, False)
    sums.add(np.full((2, 4), 3, np.float32))
    found = sums.statistics()
    assert found.covariance is None and (found.mean_square == 9).all()


def test_values_that_are_no_numbers_are_noticed() -> None:
    sums = Sums(2, True, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one sentence is said of them, and no warning of NumPy's
        sums.add(np.array([[1, np.nan], [3e38, 3e38]] * 128, np.float32))
    assert not sums.finite


def test_an_expert_without_tokens_has_the_inputs_of_all_and_one_with_many_its_own() -> None:
    ones, fours = np.ones(4, np.float32), np.full(4, 4, np.float32)
    together = InputStatistics(1000, ones, ones, np.diag(ones))
    none = blended(InputStatistics(0, np.zeros(4, np.float32), np.zeros(4, np.float32), np.zeros((4, 4), np.float32)),
                   together)
    assert (none.mean_square == 1).all() and none.covariance is not None and (none.covariance == np.diag(ones)).all()
    as_many = 4 // PRIOR
    half = blended(InputStatistics(as_many, fours, fours, np.diag(fours)), together)
    np.testing.assert_allclose(half.mean_square, 2.5)
    assert half.tokens == as_many and half.largest is fours


def test_what_is_kept_is_read_bit_for_bit(tmp_path) -> None:  # type: ignore[no-untyped-def]
    width = BLOCK + 3
    x = RNG.standard_normal((width, width)).astype(np.float32)
    given = [InputStatistics(5 + i, x[i] ** 2, np.abs(x[i]), x @ x.T) for i in range(2)]
    one = MatrixInput(("layers.0.a", "layers.0.b"), None, 2, width)  # type: ignore[arg-type]
    with StatisticsWriter(tmp_path / "kept") as writer:
        writer.add(one, given)
    kept = KeptStatistics(tmp_path / "kept")
    assert kept.names == one.weights and kept.of("other") is None
    found = kept.of("layers.0.b")
    assert found is not None and len(found) == 2
    for a, b in zip(given, found, strict=True):
        assert a.tokens == b.tokens and a.covariance is not None and b.covariance is not None
        assert b.largest is not None and a.largest is not None and (a.largest == b.largest).all()
        assert (a.mean_square == b.mean_square).all() and (np.tril(a.covariance) == np.tril(b.covariance)).all()
        assert (b.covariance == b.covariance.T).all()


def test_what_was_interrupted_leaves_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one = MatrixInput(("a",), None, 1, 2)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), StatisticsWriter(tmp_path / "kept") as writer:
        writer.add(one, [InputStatistics(1, np.ones(2, np.float32))])
        raise KeyboardInterrupt
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    with pytest.raises(BundleError, match="has no statistics of inputs"):
        KeptStatistics(tmp_path / "kept")
