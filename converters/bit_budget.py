"""Storage types of a model's matrices for a number of bytes, chosen by their effects on the outputs.

A matrix's cost in a type is the squared error of its output over the calibration text, or without one that of its
weights, as a share of the output's own square, times the effect of such noise there on the predictions. The divergence
of the whole is close to the sum of these costs (arXiv 2411.17525), so the choice is a knapsack (knapsack.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.process import usable_cores
from edgeinfer.base.progress import OnStageProgress
from edgeinfer.base.units import format_size
from edgeinfer.bundle import weights_file_bytes
from edgeinfer.errors import UsageError
from edgeinfer.graph import Graph, Weight, fitting, parameters
from edgeinfer.quant import InputStatistics, WeightType, one_thread, requestable, rounding

from .assembly import block_ranges
from .calibration import Calibration, Statistics
from .chosen_types import ChosenTypes
from .knapsack import Choice, choose
from .packing import WeightReader

CANDIDATES = (("tableq3", 64), ("tableq3", 32), ("q4", 128), ("q4", 64), ("tableq", 32), ("q5", 32), ("q6", 16),
              ("int8", 128), ("int8", 32))
"""Types that are tried, besides that of a file which keeps its codes."""
KINDS = ("matrix", "experts", "embedding", "head", "inputs", "rows")
"""Kinds of weights that have a choice."""
SAMPLE_ROWS = 512
"""Rows of a matrix that are rounded to each type to know its error."""
MAX_PIECES = 8
"""Experts of a layer that are looked at."""
UNMEASURED, OF_LAYERS = {"embedding": (1.2, 0.35), "head": (1.2, 0.0), "rows": (0.0, 0.015)}, 0.015
"""Effects of errors of rows, and of the share by which weights are off, where no text was run: about those of
fables-5m-silu and -relu."""
WITH_INPUTS = 4.0
"""Errors of outputs are smaller shares than those of weights by this, about, and have effects as much larger."""
Block = NDArray[np.float32]


class Option(NamedTuple):
    """A type that a weight could have."""

    stored: WeightType
    nbytes: int
    cost: float


@dataclass(frozen=True)
class BitBudget:
    """Bits of a weight, or bytes of all weights; one of them is given."""

    bits: float | None = None
    """Mean over all matrices, embedding and head included."""
    size: int | None = None
    """Size of the file of weights in bytes."""
    progress: OnStageProgress | None = None
    """Called with the matrices that are measured, their number and the name of the last."""

    @property
    def flag(self) -> str:
        """The request as on the command line."""
        return f"--bits {self.bits:g}" if self.bits is not None else f"--size {self.size}"

    def __call__(self, reading: WeightReader, graph: Graph, calibration: Calibration | None) -> ChosenTypes:
        """Choose a type for each matrix of a graph.

        Raises
        ------
        UsageError
            The smallest types take more, or the largest less.
        """
        reading = reading.uncounted()
        weights, possible = self.check(reading, graph)
        options = list[Sequence[Option]]()
        for number, (weight, types) in enumerate(zip(weights, possible, strict=True)):
            options.append(_options(reading, weight, types, calibration))
            if self.progress:
                self.progress(number + 1, len(weights), weight.name)
        choice, types_of = self._chosen(graph, weights, options)
        return ChosenTypes(types_of, self.flag, choice.gap, choice.cost)

    def _chosen(self, graph: Graph, weights: Sequence[Weight], options: Sequence[Sequence[Option]]
                ) -> tuple[Choice, dict[str, WeightType]]:
        """Choose by the knapsack; of a file's size the gaps between tensors, which depend on types, are part."""
        limit = self._limit(graph, weights)
        while True:
            choice = choose([[(one.nbytes, one.cost) for one in each] for each in options], limit)
            types = {weight.name: each[number].stored
                     for weight, each, number in zip(weights, options, choice.options, strict=True)}
            over = 0 if self.size is None else _file_bytes(graph, types) - self.size
            if over <= 0:
                return choice, types
            limit -= over

    def _limit(self, graph: Graph, weights: Sequence[Weight]) -> int:
        """Return the bytes that all matrices may take, gaps not counted."""
        if self.bits is not None:
            return int(self.bits * sum(map(parameters, weights)) / 8) - _bytes_apart(graph)
        assert self.size is not None
        others = [weight for weight in graph.weights if weight.kind not in KINDS]
        return self.size - sum(graph.types[weight.name].nbytes(weight.shape) for weight in others)

    def check(self, reading: WeightReader, graph: Graph) -> tuple[list[Weight], list[list[WeightType]]]:
        """Return the weights that have a choice, and the types of each; refuse a size that these cannot meet."""
        weights = [weight for weight in graph.weights if weight.kind in KINDS]
        possible, ends = [_types(reading, weight) for weight in weights], []
        for end in (min, max):
            types = {weight.name: end(each, key=lambda one, weight=weight: one.nbytes(weight.shape))  # type: ignore[misc]
                     for weight, each in zip(weights, possible, strict=True)}
            matrices = sum(types[weight.name].nbytes(weight.shape) for weight in weights) + _bytes_apart(graph)
            ends.append((8 * matrices / sum(map(parameters, weights)), _file_bytes(graph, types)))
        (least, smallest), (most, largest) = ends
        if self.bits is not None and not least <= self.bits <= most:
            raise UsageError(f"--bits {self.bits:g} cannot be met: it must be from {np.ceil(1000 * least) / 1000:g} to "
                             f"{np.floor(1000 * most) / 1000:g}, the bits per weight that this model's matrices take"
                             + ("; f16 is --weights f16." if self.bits > most else "."))
        if self.size is not None and not smallest <= self.size <= largest:
            raise UsageError(f"--size {format_size(self.size)} cannot be met: this model's weights take from "
                             f"{format_size(smallest)} ({smallest} bytes) to {format_size(largest)}"
                             + ("; the largest is --weights int8." if self.size > largest else "; choose more."))
        return weights, possible


def _file_bytes(graph: Graph, types: Mapping[str, WeightType]) -> int:
    return weights_file_bytes(replace(graph, types={**graph.types, **types}))


def _bytes_apart(graph: Graph) -> int:
    """Return the bytes of the columns that are stored apart, which belong to the matrices that have zeros there."""
    return sum(graph.types[weight.name].nbytes(weight.shape) for weight in graph.weights if weight.kind == "outliers")


def _types(reading: WeightReader, weight: Weight) -> list[WeightType]:
    """Return the types that a weight could have: none that padding makes larger than one of as many bits."""
    found = list(dict.fromkeys(fitting(WeightType.of(name, group), weight.shape) for name, group in CANDIDATES))
    if weight.name in reading.outliers.columns:  # whose codes would have the outliers, too
        found = [stored for stored in found if not _is_moved(reading, weight, stored)]
    else:
        found += [stored for name in requestable() if (stored := WeightType.of(name)).quantised and stored not in found
                  and fitting(stored, weight.shape) == stored and _is_moved(reading, weight, stored)]
    sizes = [(one.nbytes(weight.shape), one.bits_per_weight) for one in found]
    return [one for one, (nbytes, bits) in zip(found, sizes, strict=True)
            if not any(less < nbytes and as_many >= bits for less, as_many in sizes)]


def _is_moved(reading: WeightReader, weight: Weight, stored: WeightType) -> bool:
    """Return whether codes of the checkpoint's would stay as they are."""
    return reading.checkpoint.moved(weight, stored, lambda *_: None, []) is not None


def _options(reading: WeightReader, weight: Weight, types: Sequence[WeightType], calibration: Calibration | None
             ) -> list[Option]:
    """Return the types with their costs, which an interrupted conversion may have measured."""
    if calibration is None or reading.unfinished is None:
        return list(_measured(reading, weight, types, calibration))
    key = ("costs", weight.name, weight.shape, tuple(types), _effects(weight, calibration),
           reading.outliers.columns.get(weight.name))
    costs = reading.unfinished.numbers(
        key, lambda: [one.cost for one in _measured(reading, weight, types, calibration)])
    return [Option(stored, stored.nbytes(weight.shape), cost) for stored, cost in zip(types, costs, strict=True)]


def _measured(reading: WeightReader, weight: Weight, types: Sequence[WeightType], calibration: Calibration | None
              ) -> Iterator[Option]:
    """Yield the types with their costs."""
    statistics = calibration.of(weight) if calibration else None
    of_output, of_rows = _effects(weight, calibration)
    moved = [_is_moved(reading, weight, stored) for stored in types]
    output = norm = 0.0
    errors: NDArray[np.float64] = np.zeros((len(types), 2))
    for share, own, rows in _sample(reading, weight, statistics):
        squares = float(np.einsum("rc,rc->", rows, rows))
        output, norm = output + share * (own.error_of(rows) if own else squares), norm + share * squares
        rounded, inputs = reading.outliers.rounded(weight, rows, own)
        if inputs:
            _ = inputs.feedback  # computed once, for all types
        some = [i for i in range(len(types)) if not moved[i]]
        for i, found in zip(some, _errors([types[i] for i in some], rounded, weight.name, inputs), strict=True):
            errors[i] += share * np.array([found.output_error if own else found.squared_error, found.squared_error])
    for stored, (of_it, of_weights) in zip(types, errors, strict=True):
        cost = of_output * of_it / max(output, 1e-30) + of_rows * of_weights / max(norm, 1e-30)
        yield Option(stored, stored.nbytes(weight.shape), float(cost))


def _errors(types: Sequence[WeightType], rows: Block, name: str, inputs: InputStatistics | None
            ) -> list[rounding.RoundingErrors]:
    """Round rows to types, one in each thread."""
    def error(stored: WeightType) -> rounding.RoundingErrors:
        return rounding.quantise_matrix(rows, stored, name, inputs, threads=1, plain=False).errors

    with one_thread(), ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(error, types))


def _effects(weight: Weight, calibration: Calibration | None) -> tuple[float, float]:
    """Return the effects of errors of a matrix's outputs, and of its rows."""
    if calibration and calibration.effects and weight.name in calibration.effects:
        output, rows = calibration.effects[weight.name]
        return output, rows
    output, rows = UNMEASURED.get(weight.kind, (OF_LAYERS, 0.0))
    return (output if calibration is None else output * WITH_INPUTS), rows


def _sample(reading: WeightReader, weight: Weight, statistics: Statistics
            ) -> Iterator[tuple[float, InputStatistics | None, Block]]:
    """Yield rows that are spread over a weight, of some of its pieces; with each, how much its error counts."""
    pieces = len(statistics) if statistics else 1
    tiles = list(block_ranges(weight, prod(weight.shape[1:]), 1))
    of_piece = max(1, len(tiles) // pieces)
    step = -(-pieces // MAX_PIECES)
    for piece in range(0, pieces, step):
        own = statistics[piece] if statistics else None
        mine = tiles[piece * of_piece :][:of_piece]
        n = max(1, SAMPLE_ROWS * step // (pieces * (tiles[0][1] - tiles[0][0])))
        rows = [reading.whole_rows(weight, *at) for at in islice(mine, 0, None, max(1, len(mine) // n))]
        share = float(own.tokens) if own and pieces > 1 else 1.0
        yield share, own, np.ascontiguousarray(np.concatenate(rows))
