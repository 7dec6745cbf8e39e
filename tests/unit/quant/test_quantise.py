"""The quantiser: never worse than scales from the largest weight, bounded, and clear about weights it cannot take."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.errors import CheckpointError
from edgeinfer.quant.layouts import dequantise
from edgeinfer.quant.quantise import ErrorSums, check_finite, quantise, to_halves

GRIDS = {"q4": (-8, 7, -8), "int8": (-127, 127, 127)}
SHAPES = [(1, 1), (7, 31), (33, 33), (5, 127), (3, 1023), (64, 256)]


def max_based(weights: np.ndarray, dtype: str, group: int) -> float:
    """Squared error of the usual way, in plain loops."""
    low, high, target = GRIDS[dtype]
    total = 0.0
    for row in weights:
        for start in range(0, len(row), group):
            part = row[start : start + group]
            scale = np.float32(np.float16(part[np.abs(part).argmax()] / target))
            codes = np.clip(np.rint(part / scale), low, high) if scale else np.zeros_like(part)
            total += float(((part - codes * scale).astype(np.float64) ** 2).sum())
    return total


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["q4", "int8"])
def test_never_worse_than_max_based(dtype: str, group: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    weights = (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)
    codes, scales, errors = quantise(weights, dtype, group)
    low, high, _ = GRIDS[dtype]
    assert codes.dtype == np.int8 and codes.shape == shape and low <= codes.min() and codes.max() <= high
    assert scales.dtype == np.float16 and scales.shape == (shape[0], -(-shape[1] // group))
    error = float(((weights - dequantise(codes, scales, group)).astype(np.float64) ** 2).sum())
    np.testing.assert_allclose(errors.squared_error, error, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(errors.squared_error_max_based, max_based(weights, dtype, group), rtol=1e-2, atol=1e-9)
    np.testing.assert_allclose(errors.squared_norm, float((weights.astype(np.float64) ** 2).sum()), rtol=1e-5)
    assert errors.squared_error <= errors.squared_error_max_based


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dtype", ["q4", "int8"])
def test_no_group_is_worse_than_max_based(dtype: str) -> None:
    weights = np.random.default_rng(4).standard_normal((500, 32)).astype(np.float32)
    for row in weights:
        errors = quantise(row[None], dtype, 32)[2]
        assert errors.squared_error <= errors.squared_error_max_based


@pytest.mark.parametrize(("dtype", "group", "gain"), [("q4", 32, 0.10), ("q4", 128, 0.10), ("int8", 32, 0.15)])
def test_gain_on_normal_weights(dtype: str, group: int, gain: float) -> None:
    """The search removes about a tenth of the squared error of 4-bit weights; a change must not lose that."""
    weights = np.random.default_rng(5).standard_normal((256, 1024)).astype(np.float32)
    errors = quantise(weights, dtype, group)[2]
    assert errors.gain > gain
    assert errors.relative < {"q4": 0.0096, "int8": 4e-5}[dtype]


def test_4_bits_are_near_the_best_scale() -> None:
    """Within 0.1 % of an exhaustive search over 4000 scales of both signs."""
    weights = np.random.default_rng(6).standard_normal((40, 32)).astype(np.float32)
    best = 0.0
    for row in weights:
        scales = np.linspace(-0.6, 0.6, 4000).astype(np.float16).astype(np.float32)
        scales = scales[scales != 0][:, None]
        codes = np.clip(np.rint(row / scales), -8, 7)
        best += float(((row - codes * scales) ** 2).sum(axis=1).min())
    assert quantise(weights, "q4", 32)[2].squared_error < 1.001 * best


def test_exact_weights_stay_exact() -> None:
    codes = np.random.default_rng(7).integers(-8, 8, (16, 64)).astype(np.float32)
    codes[:, ::32] = -8
    weights = codes * np.float32(0.25)
    q, scales, errors = quantise(weights, "q4", 32)
    np.testing.assert_array_equal(dequantise(q, scales, 32), weights)
    assert errors.squared_error == 0 and errors.gain == 0


def test_threads_and_blocks_do_not_change_the_result() -> None:
    weights = np.random.default_rng(8).standard_normal((3000, 320)).astype(np.float32)  # several blocks
    one, many = quantise(weights, "q4", 64, threads=1), quantise(weights, "q4", 64, threads=3)
    np.testing.assert_array_equal(one[0], many[0])
    np.testing.assert_array_equal(one[1], many[1])
    assert one[2] == many[2]


def test_zero_groups_and_tiny_weights() -> None:
    weights = np.zeros((3, 64), np.float32)
    weights[1] = 1e-30  # no fp16 scale can hold these
    weights[2] = np.linspace(-2e-7, 2e-7, 64)  # scales below fp16's normal range
    codes, scales, errors = quantise(weights, "q4", 32)
    assert not codes[0].any() and not scales[0].any()
    assert np.isfinite(scales).all()
    assert errors.squared_error <= errors.squared_error_max_based
    assert quantise(np.zeros((2, 5), np.float32), "int8", 32)[2] == ErrorSums()


def test_large_weights_whose_scales_still_fit() -> None:
    weights = np.full((1, 32), 65504 * 8.0, np.float32)
    codes, scales, _ = quantise(weights, "q4", 32)
    np.testing.assert_allclose(dequantise(codes, scales, 32), weights, rtol=0.01)


@pytest.mark.parametrize(("value", "dtype"), [(6e5, "q4"), (-1e7, "int8"), (3e38, "q4")])
def test_too_large_for_fp16_scales(value: float, dtype: str) -> None:
    weights = np.ones((2, 40), np.float32)
    weights[1, 7] = value
    sentence = rf"The tensor w has the value .*, too large for {dtype} with fp16 scales; convert with weights f32\."
    with pytest.raises(CheckpointError, match=sentence):
        quantise(weights, dtype, 32, "w")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(value: float) -> None:
    weights = np.ones((4, 40), np.float32)
    weights[3, 7] = value
    weights[3, 9] = -value
    with pytest.raises(CheckpointError, match=rf"The tensor w has the value {value} at \[3, 7\]; weights must be"):
        check_finite(weights, "w")
    with pytest.raises(CheckpointError, match="The tensor w has the value"):
        quantise(weights, "q4", 32, "w")


def test_error_sums_add_up() -> None:
    total = ErrorSums(1.0, 2.0, 10.0) + ErrorSums(1.0, 2.0, 10.0)
    assert total == ErrorSums(2.0, 4.0, 20.0)
    assert total.relative == 0.1 and total.gain == 0.5
    assert ErrorSums().relative == 0 and ErrorSums().gain == 0


def test_halves_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.standard_normal(20000) * 10.0**k for k in range(-10, 4)]).astype(np.float32)
    ties = np.arange(-5000, 5000).astype(np.float32) * np.float32(2**-25)  # between neighbours below 2^-13
    below = np.nextafter(np.float32(2**-14), np.float32(0))
    edges = np.array([0.0, -0.0, 2**-14, below, 65504, -65504, 65503.5, 1e-45], np.float32)
    values = np.concatenate([values, ties, edges])
    halves, rounded = to_halves(values)
    assert np.array_equal(halves.view(np.uint16), values.astype(np.float16).view(np.uint16))
    assert np.array_equal(rounded, halves.astype(np.float32))
