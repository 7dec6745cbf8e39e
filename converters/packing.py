"""The stored bytes of weights: moved as they are, or read, quantised and packed block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError
from edgeinfer.graph import Graph, TypeOf, Weight, parameters
from edgeinfer.quant import WeightType, layouts, levels, quantise, rounding

from .assembly import assembled, block_of, block_ranges
from .calibration import Calibration, Statistics, is_free, rounded
from .checkpoint.sources import BLOCK_WEIGHTS, SourceReader
from .outliers import Outliers, find_outliers, share_of
from .report import TensorReport
from .scaling import Scaling
from .unfinished import Unfinished

F16_MAX = 65504.0


class WeightReader(SourceReader):
    """Reads the sources of stored weights in stored order."""

    scaling: Scaling | None = None
    """Factors of channels that weights are stored with."""
    outliers = Outliers({}, {})
    """Columns that are stored apart."""
    unfinished: Unfinished | None = None
    """Copies of weights that are rounded by statistics."""

    def blocks(self, weight: Weight) -> Iterator[NDArray[np.float32]]:
        """The stored rows as float32 (rows, cols), in blocks whose rows are a multiple of 16 up to the last one."""
        start, whole = 0, self.outliers.whole(weight)
        for block in assembled(whole, prod(whole.shape[1:]), np.float32, self.rows, BLOCK_WEIGHTS):
            yield self._stored_block(weight, block, start)
            start += len(block)

    def stored_rows(self, weight: Weight, start: int, stop: int) -> NDArray[np.float32]:
        """The stored rows start to stop, multiples of 16 up to the last one, as float32."""
        return self._stored_block(weight, self.whole_rows(weight, start, stop), start)

    def whole_rows(self, weight: Weight, start: int, stop: int) -> NDArray[np.float32]:
        """The rows of the checkpoint, without factors, and with the columns that are stored apart."""
        whole = self.outliers.whole(weight)
        return block_of(whole, start, stop, prod(whole.shape[1:]), np.float32, self.rows)

    def _stored_block(self, weight: Weight, block: NDArray[np.float32], start: int) -> NDArray[np.float32]:
        return self.outliers.apply(weight, block if self.scaling is None else self.scaling.apply(weight, block, start))

    def parts(self, weight: Weight) -> Iterator[NDArray[np.float32]]:
        """Blocks (parts, hidden_size) of an FFN by neuron: all gate rows, then up row, down column, up row, ...

        Without a gate: all rows, then all columns.
        """
        gate, *up, down = weight.sources
        total, _, hidden = weight.shape
        step = max(1, 2 * BLOCK_WEIGHTS // hidden)  # columns are read piece by piece, this many at a time
        for start in range(0, total, step):
            yield self.rows(gate, start, min(start + step, total))
        for start in range(0, total, step):
            stop = min(start + step, total)
            block = np.empty((stop - start, 1 + len(up), hidden), np.float32)
            for i, source in enumerate(up):
                block[:, i] = self.rows(source, start, stop)
            block[:, -1] = self.columns(down, start, stop).T
            yield block.reshape(-1, hidden)


def stored_bytes(reading: WeightReader, weight: Weight, stored: WeightType,
                 statistics_of: Callable[[Weight], Statistics] = lambda _: None
                 ) -> tuple[Iterator[NDArray[np.uint8]], Callable[[], TensorReport]]:
    """Return the stored bytes of a weight, block by block, and the report of it once they were read.

    `statistics_of` gives the statistics of a matrix's input by which it is rounded, if it is.
    """
    checkpoint, sums, nearest = reading.checkpoint, list[quantise.ErrorSums](), list[str]()
    moved = reading.outliers.stored(weight)
    if moved is None and weight.kind != "outliers":
        moved = checkpoint.moved(weight, stored, reading.count, sums)
    statistics = statistics_of(weight) if moved is None and stored.quantised else None

    def report() -> TensorReport:
        errors = sum(sums, quantise.ErrorSums())
        own = [part for part in sums if statistics and isinstance(part, rounding.RoundingErrors)]
        return TensorReport(weight.name, stored.dtype, stored.nbytes(weight.shape), errors,
                            checkpoint.file_types(weight), not errors.squared_error, moved is not None,
                            sum(part.output_error for part in own), sum(part.output_error_plain for part in own),
                            bool(own), nearest[0] if nearest else "",
                            0 if weight.kind in ("vector", "router", "outliers") else parameters(weight),
                            weight.kind not in ("vector", "router"))

    data = moved or _packed(reading, weight, stored, sums, statistics, nearest)
    if statistics and reading.unfinished:
        return _resumed(reading, reading.unfinished, weight, stored, data, sums, nearest), report
    return data, report


def _resumed(reading: WeightReader, unfinished: Unfinished, weight: Weight, stored: WeightType,
             data: Iterator[NDArray[np.uint8]], sums: list[quantise.ErrorSums], nearest: list[str]
             ) -> Iterator[NDArray[np.uint8]]:
    """Yield the stored bytes of a weight: a copy that an interrupted conversion has left, or `data`, copied."""
    own = reading.scaling or Scaling({}, {})
    key = (weight.name, weight.shape, stored, own.columns.get(weight.name), own.rows.get(weight.name),
           reading.outliers.columns.get(weight.name))
    before = unfinished.stored(key, sums, nearest)
    if before is None:
        yield from unfinished.copied(key, data, sums, nearest)
        return
    for part in (part for source in weight.sources for part in source.parts):
        reading.count(part.name, prod(part.stored))
    yield from before


def apart(calibration: Calibration, reading: WeightReader, graph: Graph, type_of: TypeOf) -> tuple[Calibration, Graph]:
    """Find outliers; return the calibration that records them, and the graph that multiplies them apart."""
    found = find_outliers(graph, partial(is_free, reading.checkpoint, graph), calibration.of,
                          share_of(calibration.outliers))
    if not found.columns:
        return replace(calibration, remarks=(*calibration.remarks, "No column of an input is an outlier, so none is "
                                             "stored apart.")), graph
    reading.outliers = found
    return replace(calibration, apart={name: columns.tolist() for name, columns in found.columns.items()}), \
        reading.checkpoint.graph(found.types(type_of))


def with_levels(reading: WeightReader, weight: Weight, stored: WeightType) -> WeightType:
    """Return the type of a weight, with levels that fit some of its rows if these are of the tensor."""
    if not stored.storage.fitted:
        return stored
    cols = prod(weight.shape[1:])
    ranges = list(block_ranges(weight, cols, 1))
    step = -(-weight.shape[0] * cols // levels.SAMPLE_WEIGHTS)
    some = [reading.stored_rows(weight, *rows) for rows in ranges[::step]]
    return replace(stored, levels=levels.fit_levels(np.concatenate(some), stored))


def _packed(
    reading: WeightReader, weight: Weight, stored: WeightType, sums: list[quantise.ErrorSums], statistics: Statistics,
    nearest: list[str]
) -> Iterator[NDArray[np.uint8]]:
    """The stored bytes of a weight, block by block; errors of its quantisation are appended to `sums`."""
    name = ", ".join(dict.fromkeys(reading.checkpoint.stored(source.name) for source in weight.sources))
    if stored.quantised and stored.layout == "tile16" and (statistics or not stored.storage.simple):
        yield from rounded(partial(reading.stored_rows, weight), weight, stored, name, statistics, sums, nearest)
        return
    if stored.layout == "neuron":
        for parts in reading.parts(weight):
            codes, scales, errors = quantise.quantise(parts, stored.dtype, stored.group_size, name)
            sums.append(errors)
            yield layouts.pack_parts(codes, stored.dtype, stored.group_size, scales)
        return
    for block in reading.blocks(weight):
        if stored.layout == "plain":
            yield np.ascontiguousarray(block, "<f4").reshape(-1).view(np.uint8)
        elif stored.quantised:
            codes, scales, errors = quantise.quantise(block, stored.dtype, stored.group_size, name)
            sums.append(errors)
            yield layouts.pack_tile16(codes, stored.dtype, stored.group_size, scales)
        else:
            values: NDArray[np.float16 | np.float32] = block
            if stored.dtype == "f16":
                values, errors = halves_of(block, name)
                sums.append(errors)
            yield layouts.pack_tile16(values, stored.dtype)


def halves_of(block: NDArray[np.float32], name: str) -> tuple[NDArray[np.float16], quantise.ErrorSums]:
    """Weights in fp16, which must be able to hold them, and the squared error of rounding."""
    largest = float(np.abs(block).max())
    if largest > F16_MAX:
        raise CheckpointError(
            f"The tensor {name} has the value {largest:.3g}, too large for f16; convert with weights f32."
        )
    halves, rounded = quantise.to_halves(np.ascontiguousarray(block))
    difference = block - rounded
    error = float(np.einsum("rc,rc->", difference, difference))
    return halves, quantise.ErrorSums(error, error, float(np.einsum("rc,rc->", block, block)))
