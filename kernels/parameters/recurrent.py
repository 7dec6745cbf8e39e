"""Parameters of recurrent layers: causal convolution, delta rule and selective scan, their journal, gated norm."""

from __future__ import annotations

from typing import NamedTuple


class _Conv(NamedTuple):
    channels: int
    width: int
    """Taps."""
    x_stride: int
    out_stride: int
    start: int
    """First column of x."""
    gate_in: int
    """First column of the factors of the input; -1 = none."""
    gate_out: int
    """First column of the factors of the output; -1 = none."""
    silu: int
    """True if the sum goes through SiLU."""
    block: int
    """Channels of a head, where heads are normed; else any number."""
    span: int
    """Blocks of a unit of work."""
    normed: int
    """First blocks that are divided by their length, the first half of them also by sqrt(block)."""


class _Rule(NamedTuple):
    heads: int
    group: int
    """Heads that share a key."""
    key_dim: int
    value_dim: int
    x_stride: int
    out_stride: int
    gates_stride: int
    gate_start: int
    """First column of the gates."""
    first: int
    """First column of x that is journaled, and its columns;"""
    columns: int
    gate_columns: int
    """gates that are."""
    keys: int
    """First column of k or B, counted from `first`;"""
    values: int
    """of v or x, likewise;"""
    queries: int
    """of q or C, of x."""
    stamps: int
    """Offsets in the layer's part of a slot (abi.rule_stamps),"""
    journal: int
    """(abi.rule_journal)."""
    beta_scale: int
    """delta_rule: factor of beta, float32 bits."""
    low: int
    """selective_scan: bounds of the time step, float32 bits."""
    high: int
    scratch: int
    """Scratch bytes of a thread."""


class _GatedNorm(NamedTuple):
    width: int
    group: int
    """Elements that are normed together."""
    x_stride: int
    gate_stride: int
    out_stride: int
    start: int
    """First column of the gate."""
    rows: int
    """Index of the count of rows."""
    eps: int
    """float32 bits."""
    normed: int
    """0 = only gated, 1 = a weight for the row, 2 = one for all groups."""
    gated_first: int
    sigmoid: int
    """True if the gate goes through a sigmoid instead of SiLU."""


CONV = _Conv(*range(11))
RULE = _Rule(*range(20))
GATED_NORM = _GatedNorm(*range(11))
