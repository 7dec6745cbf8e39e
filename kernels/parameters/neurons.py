"""Parameters of FFNs in layout neuron: gates, columns, masks, and reads on demand."""

from __future__ import annotations

from typing import NamedTuple


class _NeuronGated(NamedTuple):
    neurons: int
    part_bytes: int
    """Bytes of a gate row, an up row or a down column: all gates come first, then up and down of each neuron."""
    groups: int
    """Groups of columns in a part."""
    group: int
    """Columns that share a scale."""
    x_stride: int
    """Bytes from one token's x to the next."""
    out_stride: int
    rows: int
    """Index of the count of tokens."""
    block: int
    """Neurons of a block, whose columns are summed by themselves; at most NEURON_WINDOW."""
    chunk: int
    """Neurons per claimed chunk if there are several tokens."""
    activation: int
    """Number of the hidden activation, see ACTIVATIONS."""
    scratch: int
    """Scratch bytes of a thread."""
    token_tiles: int
    """Tokens of the blocks (abi.pack_token_tiles): compiled into the kernel, here for its reference."""
    fused: int
    """FUSED_*: the operation of each thread on row 0 of the source, alone, where COUNT_SEVERAL is 0; x is not read
    then."""
    width: int
    """Fused input: elements of the source's row."""
    eps: int
    """Fused input: epsilon of the norm, float32 bits."""
    x_scales: int
    """Offset of the scales in a row of x: after its values, padding included."""
    x_offsets: int
    """Offset of the offsets (-8 x sum of a group) in a row of x."""
    mask_stride: int
    """Bytes from one token's mask of neurons to the next, with FLAG_MASK."""
    cold: int
    """Neurons, the last ones, that are by themselves in slots and not among the weights."""
    shift: int
    """Cold neurons: a cluster, which is in a slot, holds 1 << shift of them."""
    cluster_bytes: int
    """Cold neurons: bytes of a slot."""
    before: int
    """Neurons at the beginning that the instruction leaves out: whole blocks."""
    behind: int
    """Neurons at the end that it leaves out."""
    limit: int
    """See LINEAR."""
    ungated: int
    """1 if a neuron has no up row: its gate's output is its value, and after all gates are columns alone."""


class _NeuronDown(NamedTuple):
    neurons: int
    part_bytes: int
    groups: int
    """Groups of outputs in a part."""
    group: int
    """Outputs that share a scale."""
    x_stride: int
    """Bytes from one token's activations of the neurons to the next."""
    out_stride: int
    width: int
    """Outputs: hidden_size."""
    rows: int
    """Index of the count of tokens."""
    chunk: int
    """64-byte lines of a part per claimed chunk: even, at most NEURON_LINES."""
    block: int
    """Neurons of a block, as in neuron_gated."""
    scratch: int
    """Scratch bytes of a thread."""
    cold: int
    """See neuron_gated."""
    shift: int
    cluster_bytes: int
    ungated: int
    """See neuron_gated."""
    eps: int
    """Epsilon of the norm of f as float32 bits, with FLAG_NORM_OF_F."""


class _NeuronMask(NamedTuple):
    neurons: int
    rows: int
    """Index of the count of tokens."""
    out_stride: int
    """Bytes from one token's mask to the next."""
    in_stride: int
    """Bytes from one token's scores, or x, to the next."""
    width: int
    """Signs: columns of x and of the gate."""
    scratch: int
    """Signs: scratch bytes of a thread."""
    token_tiles: int
    """Signs: tokens of the blocks (abi.pack_token_tiles): compiled into the kernel."""
    x_scales: int
    """Signs: offset of the scales in a row of x: after its values, padding included."""
    x_offsets: int
    """Signs: offset of the offsets in a row of x."""
    group: int
    """Signs: elements of x that share a scale."""


class _NeuronResolve(NamedTuple):
    neurons: int
    hot: int
    """Neurons, the first ones, that are among the weights."""
    shift: int
    """A cluster holds 1 << shift neurons."""
    cluster_bytes: int
    slots: int
    base: int
    """Number of the layer's first cluster among those of all layers."""
    unit: int
    """Offset of its clusters in the file, in units of STREAM_UNIT."""
    most: int
    """Clusters that are read together at most."""
    part: int
    """Number of the layer's first completion event, of abi.COLD_PARTS."""
    rows: int
    """Index of the count of tokens."""
    mask_stride: int
    """Bytes from one token's mask to the next."""
    span: int
    """Cold neurons of a part."""


NEURON_GATED = _NeuronGated(*range(25))
NEURON_DOWN = _NeuronDown(*range(16))
NEURON_MASK = _NeuronMask(*range(10))
NEURON_RESOLVE = _NeuronResolve(*range(12))
