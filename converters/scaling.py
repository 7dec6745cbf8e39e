"""Factors of channels that move from the inputs of matrices into their columns (arXiv 2306.00978, 2211.10438).

An input channel divided by s and the columns after it multiplied by s give the same outputs. The producer of the input
is divided: the weight of a norm, or the rows of up in front of down. Where one channel is far larger than its group,
the int8 values of activations lose the others of the group; where its weights matter most, they take the levels of
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.graph import (
    GatedLinear,
    Graph,
    LayerNorm,
    Linear,
    MatMul,
    RmsNorm,
    Weight,
    build_graph,
    requested_types,
)
from edgeinfer.quant import InputStatistics, WeightType

Floats = NDArray[np.float32]
EXPONENTS = (0.25, 0.5, 0.75, 1.0)
"""Exponents of the grid; 0, no scaling, is a point of it too."""
WORTH = 0.7
"""Factors are taken where they lower the expected error to this share at least."""
CREST = 5.0
"""Expected square of the largest of a group of values of equal mean square, over that."""
FORMULAS: dict[str, Callable[[Floats, Floats, Floats, float], NDArray]] = {
    "AWQ": lambda rms, largest, top, a: rms**a,
    "SmoothQuant": lambda rms, largest, top, a: largest**a / np.maximum(top, 1e-12) ** (1 - a),
}
"""Factors by root mean squares and largest values of inputs, largest weights of their columns, and an exponent."""
PROPORTIONAL = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid")
"""Activations of gates that multiply up: their output is proportional to up."""
Read = Callable[[Weight], Iterator[Floats]]
Of = Callable[[Weight], Sequence[InputStatistics] | None]


@dataclass(frozen=True)
class Scaling:
    """Factors by the names of weights."""

    columns: dict[str, Floats]
    """Factors of the columns of a matrix."""
    rows: dict[str, Floats]
    """Divisors of the rows of a matrix, or of the elements of a vector."""

    def apply(self, weight: Weight, block: Floats, start: int) -> Floats:
        """Return stored rows of a weight, from `start` on, with their factors."""
        if (own := self.rows.get(weight.name)) is not None:
            block = block / own[start : start + len(block), None]
        if (own := self.columns.get(weight.name)) is not None:
            block = block * own
        return block

    def of(self, statistics: Of) -> Of:
        """Return the statistics of inputs that are divided."""
        def scaled(weight: Weight) -> Sequence[InputStatistics] | None:
            found, own = statistics(weight), self.columns.get(weight.name)
            if found is None or own is None:
                return found
            return [_divided(one, own) for one in found]

        return scaled


def _divided(one: InputStatistics, s: Floats) -> InputStatistics:
    covariance = None if one.covariance is None else one.covariance / s[:, None] / s
    return replace(one, mean_square=one.mean_square / s**2, covariance=covariance,
                   largest=None if one.largest is None else one.largest / s)


@dataclass(frozen=True)
class Channels:
    """Matrices that read one input, and the weights that make it."""

    readers: tuple[Weight, ...]
    makers: tuple[tuple[Weight, NDArray[np.intp]], ...]
    """Each with the number of the stored row, or element, that makes a channel."""


def foldable(graph: Graph, free: Callable[[Weight], bool]) -> Iterator[Channels]:
    """Yield the inputs whose factors can be folded into weights.

    `free` says of a weight whether it is read as values; others keep their codes.
    """
    makers = {op.out.name: op for op in graph.ops}
    users: dict[str, int] = {}
    for op in graph.ops:
        for weight in op.weights:
            users[weight.name] = users.get(weight.name, 0) + 1
    for name, op in makers.items():
        readers = [one for one in graph.ops if any(x.name == name for x in one.inputs)]
        matrices = [one.weight for one in readers if isinstance(one, MatMul) and one.x.name == name]
        makes = _makers(op)
        if not makes or not matrices or len(matrices) < len(readers):
            continue
        if all(type(one) in (Linear, GatedLinear) for one in readers) and \
                all(users[weight.name] == 1 and free(weight) for weight in (*matrices, *(maker for maker, _ in makes))):
            yield Channels(tuple(matrices), makes)


def _makers(op: object) -> tuple[tuple[Weight, NDArray[np.intp]], ...]:
    """Return the weights to which an operation's output is proportional, channel by channel."""
    if isinstance(op, RmsNorm | LayerNorm):
        vectors = (op.weight, *([op.bias] if isinstance(op, LayerNorm) and op.bias else []))
        return tuple((vector, np.arange(vector.shape[0])) for vector in vectors)
    if isinstance(op, GatedLinear) and not op.bias and op.activation in PROPORTIONAL and not op.limit \
            and op.weight.combine == "interleave16" and len(op.weight.sources) == 2:
        channel = np.arange(op.out.width)
        return ((op.weight, (2 * (channel // 16) + 1) * 16 + channel % 16),)
    return ()


def find_scaling(graph: Graph, free: Callable[[Weight], bool], statistics: Of, read: Read) -> Scaling | None:
    """Find factors that lower the expected error of matrices and of the int8 values that they multiply.

    Parameters
    ----------
    graph : with the types that weights will have
    free : says of a weight whether it is read as values
    statistics : of the inputs of a weight
    read : gives the rows of a weight as float32, in blocks

    Returns
    -------
    Scaling or None
        None if no factors are worth it.
    """
    columns, rows = dict[str, Floats](), dict[str, Floats]()
    stored = {weight.name: weight for weight in graph.weights}
    in_floats = build_graph(graph.config, requested_types("f32"))  # in which no matrix makes its input itself
    for channels in foldable(in_floats, lambda weight: weight.name in stored and free(stored[weight.name])):
        known = statistics(channels.readers[0])
        if known is None or len(known) != 1 or known[0].largest is None:
            continue
        s = _best(known[0], [np.concatenate(list(read(stored[weight.name]))) for weight in channels.readers],
                  [graph.types[weight.name] for weight in channels.readers])
        if s is None:
            continue
        columns |= {weight.name: s for weight in channels.readers}
        for weight, places in channels.makers:
            rows[weight.name] = np.ones(weight.shape[0], np.float32)
            rows[weight.name][places] = s
    return Scaling(columns, rows) if columns else None


def _best(inputs: InputStatistics, weights: Sequence[Floats], types: Sequence[WeightType]) -> Floats | None:
    """Return the factors of the grid with the least expected error; None if the gain is not worth it."""
    assert inputs.largest is not None
    rms = np.sqrt(inputs.mean_square)
    top = np.max([np.abs(w).max(axis=0) for w in weights], axis=0)
    ones = np.ones_like(rms)
    tried = [ones]
    for a in EXPONENTS:
        for formula in FORMULAS.values():
            by = formula(rms, inputs.largest, top, a)
            usable = (by > 0) & np.isfinite(by)
            s = np.where(usable, by, 1) / np.exp(np.log(by[usable]).mean() if usable.any() else 0)
            tried.append(np.clip(s, 1e-4, 1e4).astype(np.float32))
    errors = [sum(expected_error(w * s, inputs.mean_square / s**2, stored)
                  for w, stored in zip(weights, types, strict=True)) for s in tried]
    best = int(np.argmin(errors))
    return tried[best] if errors[best] < WORTH * errors[0] else None


def expected_error(w: Floats, squares: Floats, stored: WeightType) -> float:
    """Return the squared output error to expect of a token: of levels between weights, and of int8 activations."""
    if not stored.quantised:
        return 0.0
    groups, wide = stored.group_size, stored.input_group
    levels = (1 << stored.storage.bits) - 1
    steps = 2 * _by_group(np.abs(w), groups).max(axis=2) / levels  # (rows, groups)
    rounding = (steps**2).sum(axis=0, dtype=np.float64) / 12 @ _by_group(squares[None], groups).sum(axis=2)[0]
    energy = np.square(w).sum(axis=0, dtype=np.float64)[None]
    largest = CREST * _by_group(squares[None], wide).max(axis=2)[0]
    return float(rounding + (largest / 127**2 / 12) @ _by_group(energy, wide).sum(axis=2)[0])


def _by_group(values: NDArray, size: int) -> NDArray:
    rows, cols = values.shape
    padded = np.zeros((rows, -(-cols // size) * size), values.dtype)
    padded[:, :cols] = values
    return padded.reshape(rows, -1, size)
