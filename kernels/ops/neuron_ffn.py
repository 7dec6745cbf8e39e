"""An FFN in layout neuron as a record describes it: its weights, its shape, and which of its neurons are computed."""

from __future__ import annotations

from typing import NamedTuple

from ..abi import COUNT_ACTIVE, FLAG_BIAS, FLAG_LIST
from ..vector.record import count, flags, inline, operand, parameter
from ..vector.simd import load_i32, prefetch


class Ffn(NamedTuple):
    """What all steps of a record know."""

    rec: int
    weights: int
    """Address of neuron 0."""
    bias: int
    """Address of the biases, 0: none."""
    listed: int
    """Address of the numbers of the neurons that are computed, 0: all are."""
    entries: int
    """Neurons that are computed. An entry is a place in the list or, where there is none, a neuron."""
    neurons: int
    part: int
    """Bytes of a gate row, an up row or a down column; a neuron has one of each, in this order."""
    codes: int
    """Bytes of a part's codes; its scales follow."""
    groups: int
    group: int
    """Codes that share a scale."""
    each: int
    """Quarters of a line (16 bytes) that share a scale."""
    lines: int
    """64-byte lines that hold the codes of a part."""


class Tokens(NamedTuple):
    """Tokens that are computed together: as many as the kernel has registers for, or fewer."""

    present: int
    f: int
    """Address of the first one's activations of the neurons."""
    stride: int
    """Bytes from one token's to the next."""


@inline
def open_ffn(rec, ctx, family, bits):
    """Read a record whose parameters are named by NEURON_GATED or NEURON_DOWN."""
    neurons, part = parameter(rec, family.neurons), parameter(rec, family.part_bytes)
    groups, group = parameter(rec, family.groups), parameter(rec, family.group)
    bias = operand(rec, ctx, 5) if flags(rec) & FLAG_BIAS else 0
    listed = operand(rec, ctx, 3) if flags(rec) & FLAG_LIST else 0
    entries, codes = count(ctx, COUNT_ACTIVE) if listed else neurons, groups * group * bits >> 3
    return Ffn(rec, operand(rec, ctx, 0), bias, listed, entries, neurons, part, codes, groups, group,
               group * bits >> 7, (codes + 63) >> 6)


@inline
def number(ffn, entry):
    """Return the number of the neuron that stands at `entry`."""
    return load_i32(ffn.listed + 4 * entry) if ffn.listed else entry


@inline
def first_entry(ffn, neuron):
    """Return the entry of the first neuron that is not below `neuron`."""
    if not ffn.listed:
        return min(neuron, ffn.entries)
    low, high = 0, ffn.entries
    while low < high:
        middle = (low + high) >> 1
        if number(ffn, middle) < neuron:
            low = middle + 1
        else:
            high = middle
    return low


@inline
def part_at(ffn, entry, part):
    """Return the address of the gate row (0), up row (1) or down column (2) of the neuron at `entry`."""
    return ffn.weights + (3 * number(ffn, entry) + part) * ffn.part


@inline
def fetch(address, nbytes):
    """Ask for the lines of so many bytes."""
    for at in range(address, address + nbytes, 64):
        prefetch(at)
