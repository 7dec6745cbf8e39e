"""Round matrices to stored types: scales by least squares, codes to the nearest level or by GPTQ.

The output error of a matrix W with inputs whose second moments are C is tr(dW C dW^T). With C = R R^T, R upper
triangular, it is the squared norm of dW R, whose column j is dW_j R_jj plus the contribution of the columns before. So
columns are rounded in order, each after adding (sum over i < j of dW_i R_ij) / R_jj, and the rest counts R_jj^2: the
rounding of GPTQ (arXiv 2210.17323) and LDLQ (arXiv 2307.13304). Here dW_j is the whole difference to the original
weight, so that nothing is updated in place: a block of columns takes one product with all that was rounded before it.
Scales of a group are fitted, with the weights R_jj^2, when its turn comes, to the part that is then left to round.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError

from ..base.dataclass import dataclass
from ..base.process import usable_cores
from . import packed
from .blas import one_thread
from .fitting import FP16_MAX, Fit, Floats, Grid, inverse
from .group_factors import GroupFactors
from .input_statistics import DAMPING, Feedback, InputStatistics
from .levels import fit_levels
from .quantise import ErrorSums, check_finite, quantise
from .table import SUPER_COLUMNS
from .types import WeightType

BLOCK_ROWS = 512
"""Rows that one thread rounds at a time."""
PLAIN_ROWS = 8
"""One row of so many of a large matrix is rounded plainly, to report the gain."""


@dataclass(frozen=True)
class RoundingErrors(ErrorSums):
    """Squared errors of a rounded tensor, and those of its output over the calibration text."""

    output_error: float = 0.0
    """tr(dW C dW^T), or the sum of dW^2 times the mean square of the input where C is not known."""
    output_error_plain: float = 0.0
    """The same, had scales been fitted and each weight been rounded without looking at inputs; of a large matrix
    estimated from some rows."""


class Rounded(NamedTuple):
    """A matrix as its type stores it."""

    codes: NDArray[np.int8]
    factors: packed.Factors
    errors: RoundingErrors
    stored: WeightType
    """The type; of fitted levels with them."""
    nearest: bool = False
    """True if a covariance is not positive definite, so that codes are the nearest ones."""


def quantise_matrix(
    weights: Floats, stored: WeightType, name: str = "weights", statistics: InputStatistics | None = None,
    threads: int | None = None, plain: bool = True,
) -> Rounded:
    """Round a matrix to a type.

    Parameters
    ----------
    weights : float32 array of shape (rows, cols)
    stored : WeightType
        A quantised type. A nested one needs whole blocks of 256 columns. Levels that it leaves to the tensor are fitted
        to these rows unless it has them; `fit_levels` fits those of a matrix that is rounded in blocks of rows.
    name : str
        For the error message.
    statistics : InputStatistics, optional
        Of the matrix's inputs. With a covariance codes are chosen by GPTQ; with mean squares alone errors are weighted
        by them; without either all weights count the same, and q4 and int8 are those of `quantise`.
    threads : int, optional
        Default: the cores that this process may use. The result does not depend on them.
    plain : bool
        Whether the errors of plain rounding are found too; without statistics they always are for q4 and int8.

    Returns
    -------
    Rounded
        Pack it with ``packed.pack(codes, stored, factors)``, q4 and int8 as ever.

    Raises
    ------
    CheckpointError
        If a weight is NaN or infinite, or so large that its scale exceeds fp16.
    """
    check_finite(weights, name)
    feedback, by = None, None
    if statistics is not None:
        by = _damped(statistics.mean_square)
        if statistics.covariance is not None:
            feedback = statistics.feedback
            by = feedback.by if feedback else by
    if statistics is None and stored.storage.simple:
        codes, scales, errors = quantise(weights, stored.dtype, stored.group_size, name, threads)
        return Rounded(codes, packed.Factors(scales), RoundingErrors(**vars(errors)), stored)
    if stored.storage.fitted and not stored.levels:
        stored = replace(stored, levels=fit_levels(weights, stored, by))
    grid = Grid.of(stored)
    _check_size(weights, stored, name)
    codes, factors, passed_on = _round(weights, stored, grid, by, feedback, threads)
    errors = _errors(weights, codes, factors, stored, None if feedback else statistics)
    if feedback:
        errors = replace(errors, output_error=max(passed_on - feedback.damping * errors.squared_error, 0.0))
    if plain:
        some = weights[:: PLAIN_ROWS if len(weights) > PLAIN_ROWS * 16 else 1]
        found = _errors(some, *_round(some, stored, grid, None, None, threads, search=statistics is not None)[:2],
                        stored, statistics)
        share = float(np.einsum("rc,rc->", some, some))
        times = errors.squared_norm / share if share else 0.0
        errors = replace(errors, squared_error_max_based=times * found.squared_error,
                         output_error_plain=times * found.output_error)
    return Rounded(codes, factors, errors, stored,
                   statistics is not None and statistics.covariance is not None and feedback is None)


def _round(weights: Floats, stored: WeightType, grid: Grid, by: Floats | None, feedback: Feedback | None,
           threads: int | None, search: bool = True) -> tuple[NDArray[np.int8], packed.Factors, float]:
    """Codes and factors of all rows, in blocks that threads share, and the squared norm of dW R."""
    codes = np.empty(weights.shape, np.int8)
    counts = np.ones(weights.shape[1], np.float32) if by is None else by

    def block(start: int) -> tuple[packed.Factors, float]:
        rows = slice(start, start + BLOCK_ROWS)
        factors = GroupFactors(stored, grid, len(codes[rows]), weights.shape[1], search)
        return _round_rows(weights[rows], factors, counts, feedback, codes[rows])

    starts = range(0, len(weights), BLOCK_ROWS)
    n_threads = min(threads or usable_cores(), len(starts))
    # Each thread multiplies for itself: BLAS's own threads would wait for one another wherever a core is busy.
    with one_thread(), ThreadPoolExecutor(n_threads) as pool:
        found = list(pool.map(block, starts)) if n_threads > 1 else [block(start) for start in starts]
    return codes, packed.Factors.joined([factors for factors, _ in found]), sum(norm for _, norm in found)


def _round_rows(weights: Floats, factors: GroupFactors, by: Floats, feedback: Feedback | None,
                codes: NDArray[np.int8]) -> tuple[packed.Factors, float]:
    """Round some rows, into `codes`; gives their factors, and the squared norm of their dW R."""
    (rows, cols), stored, grid = weights.shape, factors.stored, factors.grid
    group = stored.group_size
    span = SUPER_COLUMNS if stored.storage.nested else max(group, 128)
    width = -(-cols // group) * group
    w = np.zeros((width, rows), np.float32)
    w[:cols] = weights.T
    counts = np.zeros((width, 1), np.float32)
    counts[:cols, 0] = by
    left, chosen, passed_on = np.zeros_like(w), np.zeros((width, rows), np.int8), 0.0
    for start in range(0, width, span):
        stop = min(start + span, width)
        target, end = w[start:stop].copy(), min(stop, cols)
        before = np.zeros((end - start, rows), np.float32)
        if feedback is not None and start:
            before = feedback.matrix[:start, start:end].T @ left[:start]
            target[: end - start] += before
        factors.begin(start, target, counts[start:stop])
        for at in range(start, stop, group):
            here = slice(at, min(at + group, stop))
            part = target[at - start : at - start + group]
            if feedback is not None and at > start:
                last = min(here.stop, cols)
                part[: last - at] += feedback.matrix[start:at, at:last].T @ left[start:at]
            fit = factors.choose(at // group, part, counts[here])
            _choose_codes(part, w[here], left[here], chosen[here], fit, grid,
                          None if feedback is None else feedback.matrix[at : here.stop, at : here.stop])
        if feedback is not None:
            before += feedback.matrix[start:end, start:end].T @ left[start:end]
            passed_on += feedback.scale * float(feedback.by[start:end] @ np.einsum("cr,cr->c", before, before))
    codes[:] = chosen[:cols].T
    return factors.finished(), passed_on


def _choose_codes(target: Floats, w: Floats, left: Floats, codes: NDArray[np.int8], fit: Fit, grid: Grid,
                  matrix: Floats | None) -> None:
    """Compute the codes of a group, column by column if the error of one is carried to the next; `left` is w less its
    rounding."""
    unit = inverse(fit.scale)
    minimum = fit.minimum if fit.minimum is not None else np.float32(0)
    if matrix is None:
        codes[:] = grid.codes_of((target - minimum) * unit)
        left[:] = w - (grid.values(codes) * fit.scale + minimum)
        return
    for j in range(len(target)):
        x = target[j] - minimum
        if 0 < j < len(matrix):
            x += matrix[:j, j] @ left[:j]
        x *= unit
        codes[j] = grid.codes_of(x)
        value = grid.values(codes[j]) * fit.scale
        value += minimum
        np.subtract(w[j], value, out=left[j])


def _damped(mean_square: Floats) -> Floats:
    """Return the weights of the squared errors of columns; those of columns that were always zero are small."""
    mean = float(mean_square.mean(dtype=np.float64))
    return np.asarray(mean_square / np.float32(mean) + np.float32(DAMPING), np.float32) if mean > 0 else \
        np.ones_like(mean_square)


def _check_size(weights: Floats, stored: WeightType, name: str) -> None:
    """Refuse weights whose scales do not fit fp16."""
    row = stored.storage
    largest = float(np.abs(weights).max(initial=0.0))
    levels = stored.table or row.grid
    if largest / max(map(abs, levels)) > FP16_MAX or (row.minimum and largest > FP16_MAX):
        raise CheckpointError(f"The tensor {name} has the value {largest:.3g}, too large for {stored.dtype} with fp16 "
                              "scales; convert with weights f32.")


def _errors(weights: Floats, codes: NDArray[np.int8], factors: packed.Factors, stored: WeightType,
            statistics: InputStatistics | None) -> RoundingErrors:
    """Errors without those of plain rounding."""
    squares = output = norm = 0.0
    for start in range(0, len(weights), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        difference = weights[rows] - packed.values(codes[rows], factors.of_rows(rows), stored)
        squares += float(np.einsum("rc,rc->", difference, difference))
        output += statistics.error_of(difference) if statistics else 0.0
        norm += float(np.einsum("rc,rc->", weights[rows], weights[rows]))
    return RoundingErrors(squares, squares, norm, output)
