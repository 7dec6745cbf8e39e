"""The feed-forward networks of a graph: where their activations are, and their weights as numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Gated, Graph, NeuronGated, Tensor
from edgeinfer.quant import TILE_ROWS, layouts

Floats = NDArray[np.float32]


class Ffn(NamedTuple):
    """A layer's feed-forward network act(x G^T) * (x U^T) D^T."""

    layer: int
    op: Gated | NeuronGated
    """The operation that makes f = act(x G^T) * (x U^T)."""

    @property
    def x(self) -> Tensor:
        """Its input."""
        return self.op.x

    @property
    def by_neuron(self) -> bool:
        """Whether its neurons can be left out: else it is in tiles."""
        return isinstance(self.op, NeuronGated)

    @property
    def f(self) -> Tensor:
        """What its neurons give, one value each."""
        return self.op.out

    @property
    def neurons(self) -> int:
        """Neurons of the layer."""
        return self.op.out.width


def ffns(graph: Graph) -> list[Ffn]:
    """Return the feed-forward networks in the order of their layers.

    Raises
    ------
    UnsupportedModelError
        The model has none with gates, or biases of its neurons, which predictors do not know.
    """
    found = [Ffn(op.layer or 0, op) for op in graph.ops if isinstance(op, Gated | NeuronGated)]
    if not found:
        raise UnsupportedModelError(f"A {graph.config.model_type} model has no gated FFN, so no neurons can be left "
                                    "out of it.")
    if any(ffn.op.bias for ffn in found):
        raise UnsupportedModelError("The FFN's gates have biases, which no predictor of neurons takes into account.")
    return found


class Parts(NamedTuple):
    """A layer's FFN as numbers, one row a neuron."""

    gate: Floats
    """(neurons, hidden)."""
    up: Floats
    """(neurons, hidden)."""
    down: Floats
    """(neurons, hidden): columns of the down matrix."""


def parts(bundle: Bundle, ffn: Ffn) -> Parts:
    """Return the weights as the kernels multiply them, dequantised."""
    weight, stored = ffn.op.weight, bundle.weight_type(ffn.op.weight.name)
    data, kind = stored_bytes(bundle, weight.name), (stored.dtype, stored.group_size)
    if isinstance(ffn.op, NeuronGated):
        values = layouts.unpack_neuron(data, *kind, (ffn.neurons, 3, weight.shape[2]))
        return Parts(*(np.ascontiguousarray(values[:, i]) for i in range(3)))
    rows, hidden = weight.shape
    gate, up = apart(layouts.unpack_tile16(data, *kind, (rows, hidden)), ffn.neurons)
    return Parts(gate, up, np.ascontiguousarray(down_matrix(bundle, ffn).T))


def down_matrix(bundle: Bundle, ffn: Ffn) -> Floats:
    """Return the down matrix (hidden_size, neurons) of a layer in layout tile16, dequantised."""
    name = ffn.op.weight.name.replace("gate_up", "down")
    stored = bundle.weight_type(name)
    return layouts.unpack_tile16(stored_bytes(bundle, name), stored.dtype, stored.group_size,
                                 (ffn.op.weight.shape[1], ffn.neurons))


def apart(rows: NDArray, neurons: int) -> tuple[NDArray, NDArray]:
    """Return gate rows and up rows of a matrix that alternates them by tile."""
    tiles = rows.reshape(-1, 2, TILE_ROWS, rows.shape[1])
    gate, up = (np.ascontiguousarray(tiles[:, i].reshape(-1, rows.shape[1])[:neurons]) for i in range(2))
    return gate, up


def stored_bytes(bundle: Bundle, name: str) -> NDArray[np.uint8]:
    """Return a tensor as it lies in the file, in one piece."""
    (data,) = bundle.stored(name)
    return data
