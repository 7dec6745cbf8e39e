"""Quantised weights of a checkpoint whose codes one of our types takes as they are: moved, with their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError
from edgeinfer.graph import RopeHalves, Rows, Source, Weight, WeightType
from edgeinfer.quant import layouts, quantise

from .assembly import block_of, block_ranges, in_order
from .packed_tensor import PackedTensor

Bytes = NDArray[np.uint8]
Done = tuple[list[tuple[str, int]], quantise.ErrorSums]
BLOCK_WEIGHTS = 1 << 20
"""Of rows that one thread packs at a time."""
MOST_ERROR = 1e-4
"""Squared error / squared norm of a tensor beyond which scales do not fit fp16: rounding them costs 2.4e-7 at most."""


def holds_codes(packed: Mapping[str, PackedTensor], weight: Weight, stored: WeightType) -> bool:
    """Whether a stored type takes the codes of a weight as they are."""
    return stored.layout == "tile16" and weight.kind != "vector" and all(
        source.name in packed and stored in packed[source.name].kind.held and not source.index
        and all(isinstance(step, RopeHalves | Rows) for step in source.steps) for source in weight.sources)


def moved(packed: Mapping[str, PackedTensor], weight: Weight, stored: WeightType, count: Callable[[str, int], None],
          sums: list[quantise.ErrorSums]) -> Iterator[Bytes] | None:
    """The stored bytes of a weight, block by block, its codes and scales moved; None where values must be calculated.

    Parameters
    ----------
    packed : mapping
        The quantised tensors by name.
    weight : Weight
    stored : WeightType
    count : callable
        Told the name of a tensor and how many elements of it were read.
    sums : list
        Gets the errors of blocks in which scales, or codes of -128, are not what they were.

    Raises
    ------
    CheckpointError
        Scales are too large, or too small, for fp16.
    """
    if not holds_codes(packed, weight, stored):
        return None
    ranges = block_ranges(weight, weight.shape[1], BLOCK_WEIGHTS)

    def made(start: int, stop: int) -> tuple[Bytes, Done]:
        codes, scales, done = _codes(packed, weight, stored, start, stop)
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16)
        if not np.isfinite(halves).all():
            raise _unfit(weight, f"a scale of {np.abs(scales).max():.3g}, too large for fp16")
        kept = np.maximum(codes, -127) if stored.dtype == "int8" else codes  # products of int8 cannot take -128
        errors = _errors(codes, kept, scales, halves, stored.group_size)
        return layouts.pack_tile16(kept, stored.dtype, stored.group_size, halves), (done, errors)

    def told(done: Done) -> None:
        for name, elements in done[0]:
            count(name, elements)
        if done[1].squared_error:
            sums.append(done[1])

    return _checked(in_order(made, ranges, told), sums, weight)


def _codes(packed: Mapping[str, PackedTensor], weight: Weight, stored: WeightType, start: int, stop: int
           ) -> tuple[NDArray[np.int8], NDArray[np.float32], list[tuple[str, int]]]:
    """Codes and scales of stored rows, a scale for each group of the stored type, and what was read for them."""
    columns, groups = weight.shape[1], -(-weight.shape[1] // stored.group_size)
    read: dict[tuple[str, int, int], NDArray[np.float32]] = {}
    done: list[tuple[str, int]] = []

    def codes_of(source: Source, first: int, last: int) -> NDArray[np.int8]:
        rows = np.arange(first, last)
        for step in reversed(source.steps):
            rows, _ = step.origin(rows, None)
        low = int(rows.min())
        block = packed[source.name].block(low, int(rows.max()) + 1)
        times = -(-(block.group_size or columns) // stored.group_size)
        read[source.name, first, last] = np.repeat(block.scales, times, axis=1)[rows - low, :groups]
        done.append((source.name, (last - first) * columns))
        return block.codes[rows - low] if source.steps else block.codes

    codes = block_of(weight, start, stop, columns, np.int8, codes_of)
    scales = block_of(weight, start, stop, groups, np.float32, lambda source, a, b: read[source.name, a, b])
    return codes, scales, done


def _errors(codes: NDArray[np.int8], kept: NDArray[np.int8], scales: NDArray[np.float32], halves: NDArray[np.float16],
            group_size: int) -> quantise.ErrorSums:
    """Squared error of scales rounded to fp16 and of codes that were clipped; nothing where both are what they were."""
    if np.array_equal(scales, halves) and (kept is codes or np.array_equal(kept, codes)):
        return quantise.ErrorSums()
    values = np.repeat(scales, group_size, axis=1)[:, : codes.shape[1]] * codes
    difference = values - layouts.dequantise(kept, halves, group_size)
    error = float(np.einsum("rc,rc->", difference, difference))
    return quantise.ErrorSums(error, error, float(np.einsum("rc,rc->", values, values)))


def _checked(blocks: Iterator[Bytes], sums: list[quantise.ErrorSums], weight: Weight) -> Iterator[Bytes]:
    """The blocks; refused at their end where rounding scales has cost more than rounding can."""
    yield from blocks
    if sum(sums, quantise.ErrorSums()).relative > MOST_ERROR:
        raise _unfit(weight, "scales that are too small for fp16")


def _unfit(weight: Weight, what: str) -> CheckpointError:
    name = ", ".join(dict.fromkeys(source.name for source in weight.sources))
    return CheckpointError(f"The tensor {name} has {what}; convert with --weights f32.")
