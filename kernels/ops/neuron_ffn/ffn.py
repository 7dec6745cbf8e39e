"""An FFN in layout neuron as an instruction describes it: its weights, its shape, and which neurons a token
computes.
"""

from __future__ import annotations

from typing import NamedTuple

from ...abi import FLAG_BIAS, FLAG_MASK, FLAG_NORM_OF_F, FLAG_THRESHOLD, NEURON_TOKENS, ROLE_DECODE, TOKEN_ROLE
from ...parameters import NEURON_GATED
from ...vector.instruction import flags, inline, operand, outlined, parameter, token
from ...vector.memory import load_f32, load_i32, load_i64, prefetch, store_f32, store_i32, store_i64
from ...vector.scalars import f32_from_bits, shift_right, trailing_zeros

THRESHOLDS = 8 * NEURON_TOKENS
"""Offset of the tokens' thresholds, after the addresses of their masks."""


class Ffn(NamedTuple):
    """Values shared by all steps of an instruction."""

    inst: int
    gates: int
    """Address of neuron 0's gate row; those of all neurons follow each other."""
    pairs: int
    """Address of neuron 0's up row; its down column follows, then the next neuron's pair."""
    up: int
    """1, or 0 if neurons have no up row: then columns follow each other."""
    bias: int
    """Address of the biases, 0: none."""
    neurons: int
    part: int
    """Bytes of a gate row, an up row or a down column."""
    codes: int
    """Bytes of a part's codes; its scales follow."""
    groups: int
    group: int
    """Codes that share a scale."""
    each: int
    """Quarters of a line (16 bytes) that share a scale."""
    lines: int
    """64-byte lines that hold the codes of a part."""
    resident: int
    """Neurons, the first ones, that are at `gates` and `pairs`; the others are in slots, by clusters."""
    table: int
    """Address of the slot of each cluster."""
    slots: int
    """Address of slot 0."""
    cluster: int
    """Bytes of a slot."""
    shift: int
    """A cluster holds 1 << shift neurons: of each its gate row, up row and down column."""
    by: int
    """Address of the factors of neurons' values in front of their columns; 0: none."""


class Tokens(NamedTuple):
    """Tokens that are computed together: as many as the kernel has registers for, or fewer."""

    present: int
    f: int
    """Address of the first one's activations of the neurons."""
    stride: int
    """Bytes from one token's to the next."""
    masks: int
    """Address of the addresses of their masks of neurons, 0: all neurons are computed."""


@inline
def open_ffn(inst, ctx, family, bits, bias, table):
    """Read an instruction whose parameters are named by NEURON_GATED or NEURON_DOWN; the biases are operand `bias`.

    The slots of cold neurons are the operand after `table`, then comes the weight of the norm of f.
    """
    neurons, part, weights = parameter(inst, family.neurons), parameter(inst, family.part_bytes), operand(inst, ctx, 0)
    groups, group = parameter(inst, family.groups), parameter(inst, family.group)
    biases, codes = operand(inst, ctx, bias) if flags(inst) & FLAG_BIAS else 0, groups * group * bits >> 3
    resident = neurons - parameter(inst, family.cold)
    up = 1 - parameter(inst, family.ungated)
    return Ffn(inst, weights, weights + resident * part, up, biases, neurons, part, codes, groups, group,
               group * bits >> 7, (codes + 63) >> 6, resident, operand(inst, ctx, table), operand(inst, ctx, table + 1),
               parameter(inst, family.cluster_bytes), parameter(inst, family.shift),
               operand(inst, ctx, table + 2) if flags(inst) & FLAG_NORM_OF_F else 0)


@inline
def for_column(ffn, neuron, value):
    """Return the factor of a neuron's column, from its value in f."""
    return value * load_f32(ffn.by + 4 * neuron) if ffn.by else value


@inline
def in_slot(ffn, neuron):
    """Return the address of a cold neuron, whose parts are together."""
    at = load_i32(ffn.table + 4 * (neuron >> ffn.shift)) * ffn.cluster
    return ffn.slots + at + (neuron & ((1 << ffn.shift) - 1)) * (2 + ffn.up) * ffn.part


@inline
def row_at(ffn, neuron):
    """Return the address of a neuron's gate row."""
    return ffn.gates + neuron * ffn.part if neuron < ffn.resident else in_slot(ffn, neuron)


@inline
def column_at(ffn, neuron):
    """Return the address of a neuron's down column; its up row is a part before it."""
    if neuron < ffn.resident:
        return ffn.pairs + ((neuron << ffn.up) + ffn.up) * ffn.part
    return in_slot(ffn, neuron) + (1 + ffn.up) * ffn.part


@inline
def fetch(address, nbytes):
    """Ask for the lines of this many bytes."""
    for at in range(address, address + nbytes, 64):
        prefetch(at)


@inline
def pair_at(ffn, column):
    """Return the address from which on a neuron is read that lives: of its up row, or of the column itself."""
    return column - ffn.up * ffn.part


@inline
def fetch_pair(ffn, column):
    """Ask for a neuron's up row and column."""
    fetch(pair_at(ffn, column), ffn.part << ffn.up)


@inline
def find_masks(inst, ctx, t, tokens):
    """Write for tokens t and on the addresses of their masks and their thresholds: 0 if there is none.

    A prompt's token has neither.
    """
    stride, bits = parameter(inst, NEURON_GATED.mask_stride), flags(inst)
    for j in range(tokens.present):
        mask, least = 0, f32_from_bits(0)
        if bits & (FLAG_MASK | FLAG_THRESHOLD) and token(ctx, t + j, TOKEN_ROLE) == ROLE_DECODE:
            if bits & FLAG_MASK:
                mask = operand(inst, ctx, 3) + (t + j) * stride
            else:
                least = load_f32(operand(inst, ctx, 3))
        store_i64(tokens.masks + 8 * j, mask)
        store_f32(tokens.masks + THRESHOLDS + 4 * j, least)


@inline
def chosen(tokens, j, neuron):
    """Tell whether token j computes a neuron."""
    mask = load_i64(tokens.masks + 8 * j)
    return mask == 0 or shift_right(load_i64(mask + 8 * (neuron >> 6)), neuron & 63) & 1 != 0


@outlined
def choose(tokens, first, stop, numbers):
    """Write the numbers of the neurons first .. stop that one of the tokens computes; return how many they are."""
    n = 0
    for at in range(first & -64, stop, 64):
        bits = 0
        for j in range(tokens.present):
            mask = load_i64(tokens.masks + 8 * j)
            bits |= load_i64(mask + 8 * (at >> 6)) if mask else -1
        if first > at:
            bits &= -1 << (first - at)
        if stop < at + 64:
            bits &= ~(-1 << (stop - at))
        while bits:
            store_i32(numbers + 4 * n, at + trailing_zeros(bits))
            bits &= bits - 1
            n += 1
    return n
