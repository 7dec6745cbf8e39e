"""Parameters of mixtures of experts: the choice, rows by expert, and experts that are read when a token needs them."""

from __future__ import annotations

from typing import NamedTuple


class _Route(NamedTuple):
    experts: int
    active: int
    """Experts that a token goes through."""
    in_stride: int
    """Bytes from one token's logits to the next (route), or from one token's entries to the next (sort_routes)."""
    out_stride: int
    """Route: bytes from one token's entries to the next."""
    rows: int
    """Index of the count of tokens."""
    scores: int
    """SCORE_*: function of the logits."""
    normalise: int
    """1: the chosen scores are divided by their sum."""
    scale: int
    """Factor of the weights, float32 bits."""
    groups: int
    """Groups of neighbouring experts, of which only the best can be chosen from; 1 = all in one."""
    active_groups: int
    group_best: int
    """Number of a group's best scores whose sum ranks the group: 1 or 2."""
    scratch: int
    """Scratch bytes of a thread."""


class _ExpertsInput(NamedTuple):
    width: int
    """Elements of a row."""
    in_stride: int
    out_stride: int
    rows: int
    """Index of the count of tokens."""
    active: int
    gather: int
    """1: the source has a row for each token; 0: one for each entry of the list, in its order."""
    scales: int
    """q8 output: see ROWS; so are the next fields."""
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
    """Index of the count of tokens."""
    slots: int
    slot_bytes: int
    base: int
    """Number of the layer's first expert among those of all layers."""
    gate_up_bytes: int
    """Bytes of gate and up of one expert."""
    expert_bytes: int
    """Bytes of its gates, ups and columns, which follow each other."""
    unit: int
    """Offset of the layer's first expert in the file, in units of routes.LINE."""
    event: int
    """Number of the layer's first completion event, of 2 EXPERT_PARTS; 0 in the first layer with experts."""
    span: int
    """Experts of a part."""
    readers: int
    """Threads that share the reads of a forward pass, of `least` to `most` bytes each."""
    least: int
    most: int
    """Whole pages, both."""
    total: int
    """Experts of all layers."""


ROUTE = _Route(*range(12))
EXPERTS_INPUT = _ExpertsInput(*range(10))
EXPERTS_RESOLVE = _ExpertsResolve(*range(16))
