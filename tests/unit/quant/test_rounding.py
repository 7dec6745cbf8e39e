"""Rounding to every type: least squares against a dense search, GPTQ against the nearest codes, levels of a table."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.errors import BundleError, CheckpointError
from edgeinfer.graph.weight_types import fitting
from edgeinfer.quant import TYPES, InputStatistics, WeightType, layouts, levels, packed, rounding
from edgeinfer.quant.rounding import quantise_matrix

NAMES = [name for name, row in TYPES.items() if row.requested and row.quantised]


def random_weights(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(rows * cols).standard_normal((rows, cols)).astype(np.float32)


def statistics(cols: int, tokens: int = 600) -> InputStatistics:
    """Inputs that depend on each other, of columns of unlike size."""
    rng = np.random.default_rng(cols)
    mixed = rng.standard_normal((cols, cols)) / np.sqrt(cols) + np.diag(np.exp(rng.standard_normal(cols)))
    x = (rng.standard_normal((tokens, cols)) @ mixed).astype(np.float32)
    covariance = x.T @ x / np.float32(tokens)
    return InputStatistics(tokens, np.diagonal(covariance).copy(), None, covariance)


def output_error(weights: np.ndarray, made: rounding.Rounded, covariance: np.ndarray) -> float:
    difference = (weights - packed.values(made.codes, made.factors, made.stored)).astype(np.float64)
    return float(np.einsum("rc,rc->", difference @ covariance, difference))


@pytest.mark.parametrize("name", NAMES)
def test_every_type_holds_what_it_was_rounded_to_and_beats_factors_of_the_range(name: str) -> None:
    weights = random_weights(21, 256)
    made = quantise_matrix(weights, WeightType.of(name), "w", threads=1)
    values = packed.values(made.codes, made.factors, made.stored)
    pack = layouts.pack_tile16(made.codes, name, 32, made.factors.scales) if TYPES[name].simple else \
        packed.pack(made.codes, made.stored, made.factors)
    stored = layouts.unpack_tile16(pack, name, made.stored.group_size, (21, 256), made.stored.levels)
    np.testing.assert_array_equal(stored, values)
    error = float(((weights - values).astype(np.float64) ** 2).sum())
    assert made.errors.squared_error == pytest.approx(error, rel=1e-4)
    assert made.errors.squared_error < made.errors.squared_error_max_based
    assert made.errors.relative < {2: 0.15, 3: 0.03, 4: 0.01, 5: 0.003, 6: 0.0005, 8: 0.0001}[TYPES[name].bits]


@pytest.mark.parametrize("name", ["q5", "iq4", "mxfp4", "tableq", "tableq3"])
def test_scales_are_nearly_the_best_of_a_dense_search(name: str) -> None:
    weights = random_weights(8, 32)
    made = quantise_matrix(weights, WeightType.of(name, 32), "w", threads=1)
    table = np.array(made.stored.table or range(TYPES[name].grid[0], TYPES[name].grid[1] + 1), np.float64)
    best = 0.0
    for row in weights.astype(np.float64):
        scales = np.concatenate([sign * np.linspace(0.4, 1.3, 800) * np.abs(row).max() / np.abs(table).max()
                                 for sign in (1, -1)])
        rounded = np.abs(row[None, :, None] - scales[:, None, None] * table).min(axis=2)
        best += (rounded**2).sum(axis=1).min()
    assert made.errors.squared_error < 1.03 * best


@pytest.mark.parametrize("name", NAMES)
def test_gptq_lowers_the_output_error_of_every_type(name: str) -> None:
    weights, known = random_weights(24, 256), statistics(256)
    assert known.covariance is not None
    made = quantise_matrix(weights, WeightType.of(name), "w", known, threads=1)
    nearest = quantise_matrix(weights, WeightType.of(name), "w", threads=1)
    assert not made.nearest
    assert made.errors.output_error == pytest.approx(output_error(weights, made, known.covariance), rel=1e-3)
    assert made.errors.output_error < 0.8 * output_error(weights, nearest, known.covariance)
    assert made.errors.output_error < 0.8 * made.errors.output_error_plain


@pytest.mark.parametrize("name", ["q4", "q4k", "tableq"])
def test_mean_squares_alone_weigh_errors(name: str) -> None:
    weights, known = random_weights(24, 256), statistics(256)
    made = quantise_matrix(weights, WeightType.of(name, 32), "w",
                           InputStatistics(known.tokens, known.mean_square), threads=1)
    assert made.errors.output_error < made.errors.output_error_plain
    assert made.errors.squared_error > 0


def test_the_last_group_may_be_short_and_dead_columns_are_rounded_too() -> None:
    weights, known = random_weights(5, 75), statistics(75)
    assert known.covariance is not None
    known.covariance[:, 7] = known.covariance[7] = 0
    made = quantise_matrix(weights, WeightType.of("tableq"), "w", known, threads=1)
    assert made.codes.shape == (5, 75) and made.factors.scales.shape == (5, 3)
    assert np.isfinite(packed.values(made.codes, made.factors, made.stored)).all() and made.errors.relative < 0.1


@pytest.mark.parametrize("name", ["q4", "q6", "tableq"])
def test_bytes_do_not_depend_on_the_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "BLOCK_ROWS", 16)
    weights, known = random_weights(36, 256), statistics(256)
    one, many = (quantise_matrix(weights, WeightType.of(name, 32), "w", known, threads=n) for n in (1, 3))
    assert one.stored == many.stored and one.codes.tobytes() == many.codes.tobytes()
    for a, b in zip(one.factors, many.factors, strict=True):
        assert (a is None and b is None) or a.tobytes() == b.tobytes()


def test_moments_that_are_not_positive_definite_are_reported_and_codes_are_the_nearest() -> None:
    weights, known = random_weights(6, 64), statistics(64)
    assert known.covariance is not None
    broken = InputStatistics(600, known.mean_square, None, known.covariance - 3 * np.diag(known.mean_square))
    made = quantise_matrix(weights, WeightType.of("q4", 32), "layers.0.o", broken, threads=1)
    assert made.nearest
    scale = np.repeat(made.factors.scales.astype(np.float32), 32, axis=1)
    assert (np.abs(weights - made.codes * scale) <= np.abs(scale) * np.where(np.abs(made.codes) < 7, 0.501, 9)).all()


def test_values_that_no_scale_holds_are_refused() -> None:
    weights = random_weights(2, 64)
    weights[1, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"The tensor w has the value nan at \[1, 3\]"):
        quantise_matrix(weights, WeightType.of("tableq"), "w")
    weights[1, 3] = 1e12
    with pytest.raises(CheckpointError, match=r"has the value 1e\+12, too large for iq4 with fp16 scales"):
        quantise_matrix(weights, WeightType.of("iq4"), "w")


def test_levels_are_those_that_weights_were_made_of() -> None:
    table = np.array([-127, -80, -71, -60, -44, -31, -19, -9, -2, 5, 17, 30, 46, 66, 90, 121])
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (64, 256))
    codes[:, ::32] = 0
    weights = (table[codes] * np.repeat(np.exp(rng.standard_normal((64, 8))), 32, axis=1)).astype(np.float32)
    found = levels.fit_levels(weights, WeightType.of("tableq"))
    assert list(found) == sorted(set(found)) and np.abs(found).max() == 127
    made = quantise_matrix(weights, WeightType("tableq", 32, levels=found), "w", threads=1)
    plain = quantise_matrix(weights, WeightType.of("iq4"), "w", threads=1)
    assert made.stored.levels == found and made.errors.relative < 0.7 * plain.errors.relative


def test_a_nested_type_gives_way_where_rows_are_no_whole_blocks() -> None:
    instead = {name: fitting(WeightType.of(name), (64, 172)).suffix for name in ("q4k", "q5k", "q6", "iq4k")}
    assert instead == {"q4k": "q4m_g32", "q5k": "q5m_g32", "q6": "int8_g32", "iq4k": "iq4_g32"}
    kept = [fitting(WeightType.of(name), (64, cols)).dtype for name, cols in (("q4k", 512), ("q5", 33))]
    assert kept == ["q4k", "q5"]


def test_levels_that_do_not_fit_a_type_are_refused() -> None:
    for name, some in (("tableq", (1, 2)), ("tableq3", tuple(range(-64, 65, 16))), ("tableq3", (128, *range(7))),
                       ("q4", tuple(range(16)))):
        with pytest.raises(BundleError, match=f"do not fit {name}"):
            WeightType(name, 32, levels=some).checked()
