"""Columns of inputs far larger than others, whose weights a matrix of their own has in f16 (arXiv 2208.07339).

Quantised activations share a scale by group, and beside a value a hundred times as large the others become zeros. So
the columns of outliers are left out of the quantised matrix, where they are zeros, and a small matrix multiplies them
as floats. Where inputs come from a norm, factors (scaling.py) do the same at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError
from edgeinfer.graph import GatedLinear, Graph, Linear, TypeOf, Weight
from edgeinfer.quant import InputStatistics, WeightType

from .calibration import ByOption, Calibration

Columns = NDArray[np.int32]
Of = Callable[[Weight], Sequence[InputStatistics] | None]
AUTO = "auto"
FAR = 6.0
"""Root mean square of an outlier's column over the median of all columns, at least."""
MAX_FOUND = 0.02
"""Largest share of the columns, if the outliers are found."""
MAX_ASKED = 0.1
"""Largest share that can be asked for."""


@dataclass(frozen=True)
class Outliers:
    """Columns by the names of matrices, and the graph's weights that hold them."""

    columns: dict[str, Columns]
    """Columns of each weight in rising order."""
    matrices: dict[str, Weight]
    """The matrix that a matrix of outliers belongs to, by the latter's name."""

    def whole(self, weight: Weight) -> Weight:
        """Return the weight whose rows are read for a weight."""
        return self.matrices.get(weight.name, weight)

    def apply(self, weight: Weight, block: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return stored rows of a weight from those of the whole matrix."""
        if main := self.matrices.get(weight.name):
            return np.ascontiguousarray(block[:, self.columns[main.name]])
        if (own := self.columns.get(weight.name)) is not None:
            block = block.copy()
            block[:, own] = 0
        return block

    def stored(self, weight: Weight) -> Iterator[NDArray[np.uint8]] | None:
        """Return the bytes of a vector of columns; None for any other weight."""
        own = {f"{name}_columns": columns for name, columns in self.columns.items()}.get(weight.name)
        return None if own is None else iter((own.astype("<i4").view(np.uint8),))

    def of(self, statistics: Of) -> Of:
        """Return the statistics of inputs in which outliers are zeros."""
        def without(weight: Weight) -> Sequence[InputStatistics] | None:
            found, own = statistics(weight), self.columns.get(weight.name)
            return found if found is None or own is None else [_without(one, own) for one in found]

        return without

    def rounded(self, weight: Weight, rows: NDArray[np.float32], inputs: InputStatistics | None
                ) -> tuple[NDArray[np.float32], InputStatistics | None]:
        """Return the part of some rows of a whole matrix that is rounded, and the statistics of its inputs."""
        own = self.columns.get(weight.name)
        return self.apply(weight, rows), inputs if inputs is None or own is None else _without(inputs, own)

    def types(self, type_of: TypeOf) -> TypeOf:
        """Return the types of weights, those of outliers included."""
        def typed(weight: Weight) -> WeightType:
            if weight.kind == "outliers":
                return WeightType("f16")
            own = self.columns.get(weight.name)
            return type_of(weight) if own is None else replace(type_of(weight), outliers=len(own))

        return typed


def share_of(asked: str) -> float | None:
    """Return the share of columns that an option's text asks for; None for ``auto``, which finds outliers.

    Raises
    ------
    UsageError
        It is neither ``auto`` nor a percentage that can be.
    """
    if asked == AUTO:
        return None
    try:
        share = float(asked.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= MAX_ASKED:
        raise UsageError(f"--outliers is {asked!r:.40}; give auto, or a percentage of the columns above 0 and up to "
                         f"{MAX_ASKED:.0%}, such as 0.5%.")
    return share


def with_outliers(calibration: Callable[[Any], Calibration] | None, asked: str) -> Callable[[Any], Calibration]:
    """Return a conversion's calibration that stores outliers apart, as an option's text asks.

    Raises
    ------
    UsageError
        Inputs are not known, or the text is none of an option's.
    """
    share_of(asked)  # or it is refused
    if calibration is None:
        raise UsageError(f"--outliers {asked} needs to know the inputs of matrices; also give --calibrate, or "
                         "--imatrix FILE.")
    return ByOption(lambda checkpoint: replace(calibration(checkpoint), outliers=asked),
                    getattr(calibration, "option", "--calibrate"), outliers=True)


def find_outliers(graph: Graph, free: Callable[[Weight], bool], statistics: Of, share: float | None) -> Outliers:
    """Find the columns of outliers of a model's matrices, by the root mean squares of their inputs.

    Parameters
    ----------
    graph : Graph
    free : callable
        Says of a weight whether it is rounded.
    statistics : callable
        Returns the statistics of a weight's input.
    share : float or None
        Share of the columns of each matrix; None: those that are `FAR` beyond the median, up to `MAX_FOUND`.
    """
    columns = {}
    weights = {weight.name: weight for weight in graph.weights}  # whose sources are named as the checkpoint does
    for op in graph.ops:
        if type(op) not in (Linear, GatedLinear) or not isinstance(op, Linear | GatedLinear):
            continue
        weight = weights.get(op.weight.name)
        if weight and weight.kind == "matrix" and not weight.ordered and free(weight):
            known = statistics(weight)
            if known and len(known) == 1 and len(own := _outliers(known[0], share)):
                columns[weight.name] = own
    return Outliers(columns, {weights[name].outliers_name: weights[name] for name in columns})


def _outliers(inputs: InputStatistics, share: float | None) -> Columns:
    rms = np.sqrt(inputs.mean_square)
    n, most = len(rms), int(MAX_FOUND * len(rms))
    count = min(int((rms > FAR * np.median(rms)).sum()), most) if share is None else max(1, round(share * n))
    return np.sort(np.argsort(-rms, kind="stable")[:count]).astype(np.int32)


def _without(one: InputStatistics, columns: Columns) -> InputStatistics:
    def zeroed(values: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        if values is None:
            return None
        values = values.copy()
        values[columns] = 0
        if values.ndim == 2:
            values[:, columns] = 0
        return values

    square = zeroed(one.mean_square)
    assert square is not None
    return replace(one, mean_square=square, largest=zeroed(one.largest), covariance=zeroed(one.covariance))
