"""Feed-forward networks of a graph: positions of their activations, and their weights as numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import F_NORM, Activate, GatedLinear, Graph, Linear, MatMul, NeuronGated, Tensor, Weight
from edgeinfer.quant import TILE_ROWS, layouts

Floats = NDArray[np.float32]


class Ffn(NamedTuple):
    """A layer's feed-forward network act(x G^T) * (x U^T) D^T, or without a gate act(x G^T) D^T."""

    layer: int
    op: GatedLinear | NeuronGated | Activate
    """The operation that makes f = act(x G^T) * (x U^T)."""
    matmul: MatMul
    """The one with the matrix."""

    @property
    def x(self) -> Tensor:
        """Input of the network."""
        return self.matmul.x

    @property
    def weight(self) -> Weight:
        """The matrix of gates and ups, or all three by neuron."""
        return self.matmul.weight

    @property
    def activation(self) -> str:
        """Activation of the gates."""
        return self.op.function if isinstance(self.op, Activate) else self.op.activation

    @property
    def parts(self) -> int:
        """Rows and columns of a neuron: 3, or 2 without a gate."""
        return self.weight.shape[1] if self.by_neuron else 2 if isinstance(self.op, Activate) else 3

    @property
    def by_neuron(self) -> bool:
        """True if its neurons can be left out: else it is in tiles."""
        return isinstance(self.op, NeuronGated)

    @property
    def f(self) -> Tensor:
        """Output of its neurons, one value each."""
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
        The model has none, or of several sizes, for which a bundle's statistics have no room, or their columns are in
        an order of their own, which neurons have none for.
    """
    makers = {op.out: op for op in graph.ops if isinstance(op, Linear) and op.in_ffn}
    found = [Ffn(op.layer or 0, op, op) for op in graph.ops if isinstance(op, GatedLinear | NeuronGated)]
    found += [Ffn(op.layer or 0, op, makers[op.x]) for op in graph.ops if isinstance(op, Activate) and op.x in makers]
    if not found:
        raise UnsupportedModelError(f"A {graph.config.model_type} model has no FFN, so no neurons can be left out of "
                                    "it.")
    sizes = sorted({ffn.neurons for ffn in found})
    if len(sizes) > 1:
        raise UnsupportedModelError(f"The FFNs of this {graph.config.model_type} model have {sizes[0]} to {sizes[-1]} "
                                    "neurons; a bundle has predictors and statistics of layers of one size alone.")
    own = {weight.name for weight in graph.weights if weight.ordered}
    if ordered := sorted(own & {name for ffn in found for name in (ffn.weight.name, f"layers.{ffn.layer}.down")}):
        raise UnsupportedModelError(f"The columns of {ordered[0]} are in an order of their own (act-order), in which "
                                    "neurons are not stored. Convert the checkpoint with --weights q4 --ffn-layout "
                                    "neuron, which requantises it, and sparsify that.")
    if apart := [ffn for ffn in found if ffn.matmul.left_out or graph.types[ffn.weight.name].outliers]:
        raise UnsupportedModelError(f"The outlier columns of {apart[0].weight.name} are stored apart, which "
                                    "neurons have no place for. Convert the checkpoint without --outliers and sparsify "
                                    "that.")
    return sorted(found, key=lambda ffn: ffn.layer)


class Parts(NamedTuple):
    """A layer's FFN as numbers, one row a neuron."""

    gate: Floats
    """(neurons, hidden)."""
    up: Floats
    """(neurons, hidden); empty of an FFN without a gate, whose ups are where gates would."""
    down: Floats
    """(neurons, hidden): columns of the down matrix."""


def parts(bundle: Bundle, ffn: Ffn) -> Parts:
    """Return the weights as the kernels multiply them, dequantised."""
    weight, stored = ffn.weight, bundle.weight_type(ffn.weight.name)
    data, kind = stored_bytes(bundle, weight.name), (stored.dtype, stored.group_size)
    if ffn.by_neuron:
        values = layouts.unpack_neuron(data, *kind, (ffn.neurons, ffn.parts, weight.shape[2]))
        gate, *up, down = (np.ascontiguousarray(values[:, i]) for i in range(ffn.parts))
    else:
        gate, *up = apart(layouts.unpack_tile16(data, *kind, (weight.shape[0], weight.shape[1]), stored.levels), ffn)
        down = np.ascontiguousarray(down_matrix(bundle, ffn).T)
    return Parts(gate, up[0] if up else np.zeros((0, gate.shape[1]), np.float32), down)


def biases(bundle: Bundle, ffn: Ffn) -> Floats:
    """Return the biases of gates and ups, (parts - 1, neurons), in the bundle's order of neurons; zeros for none."""
    shape, bias = (ffn.parts - 1, ffn.neurons), ffn.matmul.bias
    if bias is None:
        return np.zeros(shape, np.float32)
    values = stored_bytes(bundle, bias.name).view("<f4")
    if ffn.by_neuron or ffn.parts == 2:
        return values.reshape(shape)
    return np.stack([half[:, 0] for half in apart(values[:, None], ffn)])


def normed(bundle: Bundle, ffn: Ffn, f: Floats) -> Floats:
    """Return rows of f as down multiplies them: after their norm, if the layer has one (BitNet)."""
    name = f"layers.{ffn.layer}.{F_NORM}"
    if name not in bundle.tensors:
        return f
    rms = np.sqrt(np.square(f).mean(axis=1, keepdims=True) + np.float32(bundle.config.rms_norm_eps))
    return np.asarray(f * (stored_bytes(bundle, name).view("<f4") / rms), np.float32)


def down_matrix(bundle: Bundle, ffn: Ffn) -> Floats:
    """Return the down matrix (hidden_size, neurons) of a layer in layout tile16, dequantised."""
    name = f"layers.{ffn.layer}.down"
    stored = bundle.weight_type(name)
    return layouts.unpack_tile16(stored_bytes(bundle, name), stored.dtype, stored.group_size,
                                 (ffn.weight.shape[1], ffn.neurons), stored.levels)


def apart(rows: NDArray, ffn: Ffn) -> tuple[NDArray, ...]:
    """Return gate rows and up rows of a matrix that alternates them by tile; all rows if there is no gate."""
    if ffn.parts == 2:
        return (rows,)
    tiles = rows.reshape(-1, 2, TILE_ROWS, rows.shape[1])
    return tuple(np.ascontiguousarray(tiles[:, i].reshape(-1, rows.shape[1])[: ffn.neurons]) for i in range(2))


def stored_bytes(bundle: Bundle, name: str) -> NDArray[np.uint8]:
    """Return a tensor as it is in the file, in one piece."""
    (data,) = bundle.stored(name)
    return data
