"""Names of the int32 parameters in each kernel family's records: lowering fills them, kernels and twins read them.

A family is a named tuple of indices, so that ``LINEAR.tiles`` is a constant in a kernel and a name everywhere else.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple


class _Linear(NamedTuple):
    tiles: int
    """Tiles of 16 rows (gated: pairs of them)."""
    tile_bytes: int
    records: int
    """Records of a tile (f16: pairs of columns; f32: columns)."""
    x_stride: int
    """Bytes from one token's x to the next."""
    x_scales: int
    """Place of the scales in a row of x: behind its values, padding included."""
    x_offsets: int
    """Place of the offsets (-8 x sum of a group) in a row of x."""
    out_stride: int
    rows: int
    """Which count gives the tokens."""
    chunk: int
    """Tiles per claimed chunk."""
    activation: int
    """Gated: number of the hidden activation, see ACTIVATIONS."""
    scratch: int
    """Gated: scratch bytes of a thread."""
    token_tiles: int
    """Tokens of the blocks (abi.pack_token_tiles): compiled into the kernel, here for its twin."""
    fused: int
    """FUSED_*: what each thread does to row 0 of the source, alone, where COUNT_SEVERAL is 0; x is not read then."""
    width: int
    """Fused input: elements of the source's row."""
    group: int
    """Fused input: elements that share a scale."""
    eps: int
    """Fused input: epsilon of the norm, float32 bits."""
    limit: int
    """Gated: limit of fatrelu and swiglu_oai, float32 bits."""
    active: int
    """Experts: how many a token goes through; `tiles` are those of one expert."""
    source_stride: int
    """Experts: bytes from one row of the source to the next, where a single token has a row for each expert; 0 = all
    its experts read the same row."""
    head_tiles: int
    """linear: tiles of each head's own matrix, all behind one another; chunks end with heads. 0 = one matrix."""
    head_x: int
    """Heads: bytes from one head's x to the next's."""
    head_gap: int
    """Heads: bytes of an output row between what one head writes and what the next does."""
    since: int
    """Experts with FLAG_SLOTS: the first one that the record computes."""
    until: int
    """The one behind the last."""


class _Rows(NamedTuple):
    width: int
    """Elements of a row."""
    in_stride: int
    out_stride: int
    rows: int
    """Which count gives the rows."""
    scales: int
    """q8 output: place of the scales in a row: behind its values, padding included."""
    offsets: int
    """q8 output: place of the offsets (-8 x sum of a group) in a row."""
    group: int
    """q8 output: elements that share a scale."""
    eps: int
    """float32 bits."""
    tile_bytes: int
    """embed: bytes of a tile of the table."""
    scratch: int
    """rms_norm_q8: scratch bytes of a thread."""
    token_tiles: int
    """q8 output: tokens of the blocks (abi.pack_token_tiles): as in LINEAR."""
    heads: int
    """quantize: pieces of `width` elements that a row has side by side, each quantised to rows of its own; 0 = 1."""
    head_out: int
    """quantize: bytes from the rows of one head to those of the next."""
    piece: int
    """embed: columns of a lane where a tile of the table is one token's row, lane by lane; 0 = it has 16 rows."""
    parts: int
    """norm_f32: parts of a row, of `width` elements each, that are normed one by one with the same weight; 0 = one."""


class _Rope(NamedTuple):
    stride: int
    """Bytes of a qkv row."""
    heads: int
    kv_heads: int
    head_dim: int
    table_stride: int
    """Bytes of one position in the table: cosines, then sines."""
    block_bytes: int
    """Bytes of K, and of V, of one KV head in a block (abi.kv_block_bytes)."""
    blocks: int
    """Blocks of the pool: as many are between a KV head and the next."""
    eps: int
    """Epsilon of the head norms, float32 bits."""
    rows: int
    """Which count gives the tokens."""
    rotary: int
    """Dimensions of a head that turn; 0 = none."""
    apart: int
    """Dimensions from one of a pair that turns to the other, which begins the second half of those that do."""
    recent: int
    """Which of a sequence's block tables the layer has: 1 with a window, where what it no longer sees is given back."""


class _Attention(NamedTuple):
    q_stride: int
    out_stride: int
    heads: int
    kv_heads: int
    head_dim: int
    block_bytes: int
    """Bytes of K, and of V, of one KV head in a block."""
    blocks: int
    """Blocks of the pool."""
    window: int
    """Positions a query sees, itself included; 0 = all."""
    scale: int
    """What scores are multiplied by, mostly 1 / sqrt(head_dim); float32 bits."""
    scratch: int
    """Scratch bytes of a thread."""
    splits: int
    """Most splits of a context."""
    tokens: int
    """Tokens of a unit of work."""
    rows: int
    """Which count gives the tokens."""
    most: int
    """attention_select: rows that a head wants; 0 = by the least share."""
    least: int
    """attention_select: how far below the largest score a wanted one may be, float32 bits; -inf = any."""
    instead: int
    """INSTEAD_*: what stands for the rows that are left out."""
    cap: int
    """Scores become cap x tanh(score / cap), float32 bits; 0 = they stay as they are."""
    values: int
    """Latent KV: V is so many of K's first elements, and not stored by itself; 0 = it is stored."""
    turned: int
    """Latent KV: where in a thread's scratch the V of a split is made of its K."""
    recent: int
    """Which of a sequence's block tables the layer has, as in ROPE."""


class _Latent(NamedTuple):
    stride: int
    """Bytes of a row of queries, behind which the token's key lies."""
    q_stride: int
    """Bytes of a row of which the queries' rotated parts are taken."""
    q_first: int
    """Element at which these begin."""
    c_stride: int
    """Bytes of a row that has the latent, then the key's rotated part."""
    c_first: int
    """Element at which it begins."""
    heads: int
    rank: int
    """Elements of the latent."""
    rotary: int
    """Elements behind it, which turn."""
    table_stride: int
    """As in ROPE, like what follows."""
    block_bytes: int
    blocks: int
    eps: int
    """Epsilon of the latent's norm, float32 bits."""
    rows: int
    recent: int


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
    """Which count gives the tokens."""
    block: int
    """Neurons of a block, whose columns are summed by themselves; at most NEURON_WINDOW."""
    chunk: int
    """Neurons per claimed chunk where there are several tokens."""
    activation: int
    """Number of the hidden activation, see ACTIVATIONS."""
    scratch: int
    """Scratch bytes of a thread."""
    token_tiles: int
    """Tokens of the blocks (abi.pack_token_tiles): compiled into the kernel, here for its twin."""
    fused: int
    """FUSED_*: what each thread does to row 0 of the source, alone, where COUNT_SEVERAL is 0; x is not read then."""
    width: int
    """Fused input: elements of the source's row."""
    eps: int
    """Fused input: epsilon of the norm, float32 bits."""
    x_scales: int
    """Place of the scales in a row of x: behind its values, padding included."""
    x_offsets: int
    """Place of the offsets (-8 x sum of a group) in a row of x."""
    mask_stride: int
    """With FLAG_MASK: bytes from one token's mask of neurons to the next."""
    cold: int
    """Neurons, the last ones, that lie by themselves in slots and not among the weights."""
    shift: int
    """Cold neurons: a cluster, which is in a slot, holds 1 << shift of them."""
    cluster_bytes: int
    """Cold neurons: bytes of a slot."""
    before: int
    """Neurons at the beginning that the record leaves out: whole blocks."""
    behind: int
    """Neurons at the end that it leaves out."""
    limit: int
    """As in LINEAR."""


class _NeuronResolve(NamedTuple):
    neurons: int
    hot: int
    """Neurons, the first ones, that lie among the weights."""
    shift: int
    """A cluster holds 1 << shift neurons."""
    cluster_bytes: int
    slots: int
    base: int
    """Number of the layer's first cluster among those of all layers."""
    unit: int
    """Where its clusters begin in the file, in units of STREAM_UNIT."""
    most: int
    """Clusters that are read together at most."""
    part: int
    """Number of the layer's first ticket, of abi.COLD_PARTS."""
    rows: int
    """Which count gives the tokens."""
    mask_stride: int
    """Bytes from one token's mask to the next."""
    span: int
    """Cold neurons of a part."""


class _NeuronMask(NamedTuple):
    neurons: int
    rows: int
    """Which count gives the tokens."""
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
    """Signs: place of the scales in a row of x: behind its values, padding included."""
    x_offsets: int
    """Signs: place of the offsets in a row of x."""
    group: int
    """Signs: elements of x that share a scale."""


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
    """Which count gives the tokens."""
    chunk: int
    """64-byte lines of a part per claimed chunk: even, at most NEURON_LINES."""
    block: int
    """Neurons of a block, as in neuron_gated."""
    scratch: int
    """Scratch bytes of a thread."""
    cold: int
    """As in neuron_gated."""
    shift: int
    cluster_bytes: int


class _Draw(NamedTuple):
    vocab_size: int
    logits_stride: int
    work_stride: int
    """Bytes from one row of work to the next."""
    sums: int
    """Place of the sums of chunks in a row of work (abi.draw_row)."""
    candidates: int
    """Place of the candidates."""


class _Screen(NamedTuple):
    """The first nine as in LINEAR, whose products read them."""

    tiles: int
    tile_bytes: int
    records: int
    x_stride: int
    x_scales: int
    x_offsets: int
    out_stride: int
    """Bytes from one row of logits to the next, and of estimates."""
    rows: int
    chunk: int
    group: int
    """Columns of the head that share a scale."""
    token_tiles: int
    """Tokens of the blocks (abi.pack_token_tiles): as in LINEAR."""
    scratch: int
    """Scratch bytes of a thread."""
    vocab_size: int
    work_stride: int
    """Bytes from one row of work to the next (abi.screen_row)."""
    low_stride: int
    """Bytes from one row of the transformed input to the next."""
    width: int
    """Elements of such a row."""
    rank: int
    """How many of them the estimates were made of, rounded to int8."""


class _Values(NamedTuple):
    width: int
    """Elements of a row."""
    stride: int
    rows: int
    """Which count gives the rows."""
    function: int
    """Number of the function, see VALUE_FUNCTIONS."""
    factor: int
    """scale: what values are multiplied by; soft_cap: the cap; fatrelu: the limit. float32 bits."""
    by_stride: int
    """FLAG_TIMES: bytes from one row of what is multiplied by to the next."""


class _Positions(NamedTuple):
    width: int
    """Elements of a row, and of one of the table."""
    stride: int
    """Bytes from one token's row to the next."""
    rows: int
    """Which count gives the rows."""
    offset: int
    """Row of the table that position 0 has."""
    tile_bytes: int
    """Bytes of a tile of the table."""


class _Route(NamedTuple):
    experts: int
    active: int
    """Experts that a token goes through."""
    in_stride: int
    """Bytes from one token's logits to the next (route), or from one token's entries to the next (sort_routes)."""
    out_stride: int
    """Route: bytes from one token's entries to the next."""
    rows: int
    """Which count gives the tokens."""
    scores: int
    """SCORE_*: what is made of the logits."""
    normalise: int
    """1: the chosen scores are divided by their sum."""
    scale: int
    """What they are multiplied by, float32 bits."""
    groups: int
    """Groups of neighbouring experts, of which only the best can be chosen from; 1 = all in one."""
    active_groups: int
    group_best: int
    """How many of a group's best choices are added to compare it with others: 1 or 2."""
    scratch: int
    """Scratch bytes of a thread."""


class _ExpertsInput(NamedTuple):
    width: int
    """Elements of a row."""
    in_stride: int
    out_stride: int
    rows: int
    """Which count gives the tokens."""
    active: int
    gather: int
    """1: the source has a row for each token; 0: one for each entry of the list, in its order."""
    scales: int
    """q8 output: as in ROWS, like what follows."""
    offsets: int
    group: int
    token_tiles: int


class _ExpertsResolve(NamedTuple):
    experts: int
    active: int
    """Experts that a token goes through."""
    in_stride: int
    """Bytes from one token's entries to the next."""
    rows: int
    """Which count gives the tokens."""
    slots: int
    slot_bytes: int
    down: int
    """Where the columns lie in a slot; in front of them are gates and ups."""
    base: int
    """Number of the layer's first expert among those of all layers."""
    gate_up_bytes: int
    """Of one expert."""
    down_bytes: int
    gate_up_unit: int
    """Where those of the layer begin in the file, in units of routes.LINE."""
    down_unit: int
    ticket: int
    """Number of the layer's first ticket, of 2 EXPERT_PARTS; 0 in the first layer with experts."""
    span: int
    """Experts of a part."""
    most: int
    """Bytes that are read at a time: whole pages."""
    total: int
    """Experts of all layers."""


class _Release(NamedTuple):
    part: int
    """Number of the part whose buffer is free."""


LINEAR = _Linear(*range(24))
ROWS = _Rows(*range(15))
ROPE = _Rope(*range(12))
ATTENTION = _Attention(*range(20))
LATENT = _Latent(*range(14))
NEURON_GATED = _NeuronGated(*range(24))
NEURON_DOWN = _NeuronDown(*range(14))
NEURON_RESOLVE = _NeuronResolve(*range(12))
NEURON_MASK = _NeuronMask(*range(10))
DRAW = _Draw(*range(5))
SCREEN = _Screen(*range(17))
VALUES = _Values(*range(6))
POSITIONS = _Positions(*range(5))
ROUTE = _Route(*range(12))
EXPERTS_INPUT = _ExpertsInput(*range(10))
EXPERTS_RESOLVE = _ExpertsResolve(*range(16))
RELEASE = _Release(*range(1))

ACTIVATIONS = {"relu": 0, "silu": 1, "relu2": 2, "gelu": 3, "gelu_tanh": 4, "drelu": 5, "fatrelu": 6,
               "swiglu_oai": 7}
"""Numbers of the hidden activations in records. drelu is ReLU of the gate and of what it multiplies (arXiv 2406.05955);
fatrelu leaves what is above a limit, and is 0 elsewhere (arXiv 2402.13516). swiglu_oai is gpt-oss's: the gate, at
most a limit, times its sigmoid by 1.702, and what it multiplies within that limit, plus 1."""
PAIRED = ("swiglu_oai",)
"""Those that are a function of a gate and what it multiplies, and none of a gate alone."""
VALUE_FUNCTIONS = {**{name: number for name, number in ACTIVATIONS.items() if name not in PAIRED},
                   "scale": 16, "soft_cap": 17}
"""Numbers of the functions of single values of rows."""


def fill(family: Any, **values: int | float) -> list[int]:
    """Parameters of a record in the family's order; floats become their float32 bits, what is not named is 0.

    Raises
    ------
    AttributeError
        If the family has no parameter of a given name.
    """
    out = [0] * len(family)
    for name, value in values.items():
        bits = struct.unpack("<i", struct.pack("<f", value))[0] if isinstance(value, float) else value
        out[getattr(family, name)] = bits
    return out
