"""Quantised weights of a checkpoint whose codes one of our types takes as they are: moved, with their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError
from edgeinfer.graph import ORDER, RopeHalves, Rows, Source, Weight
from edgeinfer.quant import WeightType, layouts, quantise
from edgeinfer.quant import packed as tiles

from ..assembly import Read, block_of, block_ranges, in_order
from .tensor import Block, PackedTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Done = tuple[list[tuple[str, int]], quantise.ErrorSums]
BLOCK_WEIGHTS = 1 << 20
"""Weights that one thread packs at a time."""
MAX_ERROR = 1e-4
"""Squared error / squared norm of a tensor beyond which scales do not fit fp16: rounding them costs 2.4e-7 at most."""


def holds_codes(packed: Mapping[str, PackedTensor], weight: Weight, stored: WeightType) -> bool:
    """Return whether a stored type takes the codes of a weight as they are."""
    return stored.layout == "tile16" and weight.kind != "vector" and all(
        source.name in packed and stored in packed[source.name].kind.held
        and bool(packed[source.name].kind.order) == weight.ordered
        and all(isinstance(step, RopeHalves | Rows) for step in source.steps) for source in weight.sources)


def moved(packed: Mapping[str, PackedTensor], weight: Weight, stored: WeightType, count: Callable[[str, int], None],
          sums: list[quantise.ErrorSums]) -> Iterator[Bytes] | None:
    """The stored bytes of a weight, block by block, its codes and scales moved; None if values must be calculated.

    Parameters
    ----------
    packed : mapping
        The quantised tensors by name.
    weight : Weight
    stored : WeightType
    count : callable
        Called with the name of a tensor and the number of its elements that were read.
    sums : list
        Gets the errors of blocks in which scales, or codes of -128, are changed.

    Raises
    ------
    CheckpointError
        Scales are too large, or too small, for fp16.
    """
    if stored == ORDER:
        return iter((_order(packed, weight).astype("<i4").view(np.uint8),))
    if not holds_codes(packed, weight, stored):
        return None
    ranges = block_ranges(weight, weight.shape[1], BLOCK_WEIGHTS)

    def made(start: int, stop: int) -> tuple[Bytes, Done]:
        codes, factors, done = _codes(packed, weight, stored, start, stop)
        with np.errstate(over="ignore"):
            halves = [part.astype(np.float16) for part in factors]
        if not all(np.isfinite(part).all() for part in halves):
            raise _unfit(weight, f"a scale of {np.abs(factors[0]).max():.3g}, too large for fp16")
        kept = np.maximum(codes, -127) if stored.dtype == "int8" else codes  # products of int8 cannot take -128
        errors = _errors(codes, kept, factors, halves, stored)
        if stored.dtype in ("q4", "int8"):
            return layouts.pack_tile16(kept, stored.dtype, stored.group_size, halves[0]), (done, errors)
        return tiles.pack(kept, stored, tiles.Factors(*halves)), (done, errors)

    def on_block(done: Done) -> None:
        for name, elements in done[0]:
            count(name, elements)
        if done[1].squared_error:
            sums.append(done[1])

    return _checked(in_order(made, ranges, on_block), sums, weight)


def _codes(packed: Mapping[str, PackedTensor], weight: Weight, stored: WeightType, start: int, stop: int
           ) -> tuple[NDArray[np.int8], list[Floats], list[tuple[str, int]]]:
    """Return codes of stored rows; scales and, if the type has them, minima of its groups; and the tensors read for
    them.
    """
    columns, groups = weight.shape[1], -(-weight.shape[1] // stored.group_size)
    read: dict[tuple[Source, int, int], list[Floats]] = {}
    done: list[tuple[str, int]] = []
    blocks: dict[tuple[str, int, int], Block] = {}
    order = _order(packed, weight) if weight.ordered else None

    def codes_of(source: Source, first: int, last: int) -> NDArray[np.int8]:
        rows = np.arange(first, last)
        for step in reversed(source.steps):
            rows, _ = step.origin(rows, None)
        rows += _item(source) * source.stored[-2]
        low, high = int(rows.min()), int(rows.max()) + 1
        if high - low > len(rows) and source.stored[-2] % 2 == 0:  # rows that another source has between them
            low, high = low - low % 2, high + high % 2
        if (source.name, low, high) not in blocks:
            blocks[source.name, low, high] = packed[source.name].block(low, high)
        block = blocks[source.name, low, high]
        times = -(-(block.group_size or columns) // stored.group_size)
        read[source, first, last] = [np.repeat(part, times, axis=1)[rows - low, :groups]
                                     for part in _factors(block, stored)]
        done.append((source.name, (last - first) * columns))
        codes = block.codes.view(np.int8)
        codes = codes if order is None else np.take(codes, order, axis=1)
        return codes[rows - low] if source.steps else codes

    codes = block_of(weight, start, stop, columns, np.int8, codes_of)
    return codes, [block_of(weight, start, stop, groups, np.float32, _part(read, i))
                   for i in range(stored.storage.factors)], done


def _order(packed: Mapping[str, PackedTensor], weight: Weight) -> NDArray[np.int32]:
    """The order of a weight's columns, which all its tensors have (`packed_checkpoint.storage_of`)."""
    order = packed[weight.sources[0].name].order
    assert order is not None
    return order


def _item(source: Source) -> int:
    """Return the index of a source's matrix in its stack."""
    return int(np.ravel_multi_index(source.index, source.stored[: len(source.index)])) if source.index else 0


def _part(read: Mapping[tuple[Source, int, int], list[Floats]], i: int) -> Read:
    """Factors number i of rows of a source that were read."""
    return lambda source, first, last: read[source, first, last][i]


def _factors(block: Block, stored: WeightType) -> list[Floats]:
    """Scales and minima of a block as the stored type has them."""
    if stored.storage.table:
        return [block.scales * np.float32(0.5)]  # its levels are twice the values
    if not stored.storage.minimum:
        return [block.scales]
    if block.minima is not None:
        return [block.scales, block.minima]
    zeros = np.zeros_like(block.scales) if block.zeros is None else block.zeros * block.scales
    return [block.scales, -zeros]


def _errors(codes: NDArray[np.int8], kept: NDArray[np.int8], factors: list[Floats], halves: list[NDArray[np.float16]],
            stored: WeightType) -> quantise.ErrorSums:
    """Return the squared error of factors rounded to fp16 and of clipped codes; nothing if both are unchanged."""
    same = all(np.array_equal(exact, half) for exact, half in zip(factors, halves, strict=True))
    if same and (kept is codes or np.array_equal(kept, codes)):
        return quantise.ErrorSums()
    values = tiles.values(codes, tiles.Factors(factors[0], factors[1] if factors[1:] else None), stored)
    difference = values - tiles.values(kept, tiles.Factors(*halves), stored)
    error = float(np.einsum("rc,rc->", difference, difference))
    return quantise.ErrorSums(error, error, float(np.einsum("rc,rc->", values, values)))


def _checked(blocks: Iterator[Bytes], sums: list[quantise.ErrorSums], weight: Weight) -> Iterator[Bytes]:
    """Yield the blocks; raise at the end if rounding scales has cost more than rounding can."""
    yield from blocks
    if sum(sums, quantise.ErrorSums()).relative > MAX_ERROR:
        raise _unfit(weight, "scales that are too small for fp16")


def _unfit(weight: Weight, what: str) -> CheckpointError:
    name = ", ".join(dict.fromkeys(source.name for source in weight.sources))
    return CheckpointError(f"The tensor {name} has {what}; convert with --weights f32.")
