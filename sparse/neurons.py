"""A new bundle with its FFNs stored neuron by neuron, in an order of their own: codes are moved, not rounded again.

Only the down matrix of a bundle in layout tile16 must be quantised again: there its groups run along the neurons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.bundle import Bundle, BundleWriter
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import F_NORM, Graph, Weight, build_graph, expected_types
from edgeinfer.quant import WeightType, holds, layouts, quantise

from .ffn import Ffn, apart, biases, down_matrix, stored_bytes


class Codes(NamedTuple):
    """An FFN as layout neuron stores it, before packing."""

    codes: NDArray[np.int8]
    """(neurons, parts, hidden_size)."""
    scales: NDArray[np.float16]
    """(neurons, parts, groups)."""
    error: quantise.ErrorSums
    """Additional error of quantising the down matrix a second time."""


def neuron_graph(bundle: Bundle, networks: Sequence[Ffn], tiles: Bundle | None = None) -> Graph:
    """Return the model's graph with these FFNs in layout neuron, everything else stored as in the bundle.

    Other FFNs are those of the same model in `tiles`.

    Raises
    ------
    UnsupportedModelError
        The FFNs are of a type that layout neuron does not hold.
    """
    types = {f"layers.{ffn.layer}.ffn": bundle.weight_type(ffn.weight.name) for ffn in networks}
    for stored in types.values():
        if stored.group_size not in stored.storage.neuron_groups:
            raise UnsupportedModelError(f"The FFNs of {bundle.path} are {stored}, and the layout by neuron exists only "
                                        f"in {', '.join(holds('neuron'))} (q2 in groups of 64 or 128); convert with "
                                        "--weights q4.")

    def type_of(weight: Weight) -> WeightType:
        if weight.name in types:
            stored = types[weight.name]
            return WeightType(stored.dtype, stored.group_size, "neuron")
        return other(weight)

    other = expected_types((tiles.types if tiles else {}) | {
        name: kind for name, kind in bundle.types.items() if kind.layout != "neuron"})
    return build_graph(bundle.config, type_of)


def codes_of(bundle: Bundle, ffn: Ffn) -> Codes:
    """Return the codes and scales of a layer's FFN, neuron by neuron."""
    weight, stored = ffn.weight, bundle.weight_type(ffn.weight.name)
    data, dtype, group = stored_bytes(bundle, weight.name), stored.dtype, stored.group_size
    if ffn.by_neuron:
        shape = (ffn.neurons, ffn.parts, weight.shape[2])
        return Codes(*layouts.neuron_codes(data, dtype, group, shape), quantise.ErrorSums())
    rows, hidden = weight.shape
    both, factors = layouts.tile16_codes(data, dtype, group, (rows, hidden))
    columns = np.ascontiguousarray(down_matrix(bundle, ffn).T)
    codes, scales, error = quantise.quantise(columns, dtype, group, f"layers.{ffn.layer}.down")
    return Codes(np.stack([*apart(both, ffn), codes], axis=1), np.stack([*apart(factors, ffn), scales], axis=1), error)


def write_by_neuron(bundle: Bundle, networks: Sequence[Ffn], graph: Graph, orders: Mapping[int, NDArray[np.int32]],
                    destination: Path, on_progress: OnStageProgress,
                    tiles: Bundle | None = None) -> quantise.ErrorSums:
    """Write a bundle with these FFNs of another one by neuron, each layer in its order; other weights are copied.

    Returns the error that was added to the down matrices.
    """
    by_name = {f"layers.{ffn.layer}.ffn": (ffn, orders[ffn.layer]) for ffn in networks}
    by_bias = {ffn.matmul.bias.name: (ffn, orders[ffn.layer]) for ffn in networks if ffn.matmul.bias}
    by_norm = {f"layers.{ffn.layer}.{F_NORM}": orders[ffn.layer] for ffn in networks}
    added, strides = quantise.ErrorSums(), graph.strides
    with BundleWriter(destination, bundle.config, bundle.header.quantisation, source=bundle.header.source) as writer:
        writer.reserve(sum(graph.types[weight.name].nbytes(weight.shape) for weight in graph.weights))
        copy_files(bundle, writer)
        for i, weight in enumerate(graph.weights):
            stored = graph.types[weight.name]
            if weight.name in by_name:
                ffn, order = by_name[weight.name]
                codes, scales, error = codes_of(bundle, ffn)
                added += error
                packed = layouts.pack_neuron(codes[order], stored.dtype, stored.group_size, scales[order])
                writer.add(weight.name, stored, weight.shape, packed)
            elif weight.name in by_bias:
                ffn, order = by_bias[weight.name]
                values = np.ascontiguousarray(biases(bundle, ffn)[:, order], "<f4")
                writer.add(weight.name, stored, weight.shape, values.reshape(-1).view(np.uint8))
            elif weight.name in by_norm:
                norm = stored_bytes(bundle, weight.name).view("<f4")[by_norm[weight.name]]
                writer.add(weight.name, stored, weight.shape, norm.view(np.uint8))
            else:
                home = tiles if tiles and weight.name not in bundle.tensors else bundle
                writer.add(weight.name, stored, weight.shape, home.stored(weight.name), weight.pieces,
                           strides.get(weight.name, 0))
            on_progress(i + 1, len(graph.weights), weight.name)
    return added


def copy_files(bundle: Bundle, writer: BundleWriter) -> None:
    """Copy a bundle's other files: tokenizer, chat template, licence; not those made for its weights."""
    for entry in bundle.header.files:
        if not entry.part:
            writer.copy_file(bundle.path / entry.name)


def copy_weights(bundle: Bundle, writer: BundleWriter) -> None:
    """Copy all tensors of a bundle, and its other files."""
    copy_files(bundle, writer)
    for entry in bundle.header.tensors:
        writer.add(entry.name, entry.type, entry.shape, bundle.stored(entry.name), entry.pieces, entry.stride)
