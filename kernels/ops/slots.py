"""Slots in memory for data that a pass needs and reads from storage: shared by instructions of neurons and of experts.

Reads are posted to the readers of stream.py, and their users wait for events; neuron_ffn/neuron_resolve.py explains
why that is safe.
"""

from __future__ import annotations

from ..abi import (
    PART_BYTES,
    PART_LEFT,
    PIECE_BYTES,
    PIECE_LEAST,
    PIECE_LENGTH,
    PIECE_OFFSET,
    PIECE_PART,
    PIECE_TO,
    STREAM_EVENTS,
    STREAM_FAILED,
    STREAM_N_PIECES,
    STREAM_PARTS,
    STREAM_PIECES,
    STREAM_RELEASED,
)
from ..vector.instruction import inline
from ..vector.memory import load_i64, store_i64
from ..vector.targets import atomic_add, atomic_load, atomic_store
from .stream import redeem


@inline
def post_piece(stream, part, offset, length, least, to):
    """Let a reader bring this many bytes of the file, of which `least` must be there."""
    posted = load_i64(stream + STREAM_RELEASED)
    piece = load_i64(stream + STREAM_PIECES) + PIECE_BYTES * (posted % load_i64(stream + STREAM_N_PIECES))
    store_i64(piece + PIECE_OFFSET, offset)
    store_i64(piece + PIECE_LENGTH, length)
    store_i64(piece + PIECE_LEAST, least)
    store_i64(piece + PIECE_TO, to)
    store_i64(piece + PIECE_PART, part)
    atomic_add(load_i64(stream + STREAM_PARTS) + PART_BYTES * part + PART_LEFT, 1)
    atomic_store(stream + STREAM_RELEASED, posted + 1)


@inline
def hold(stream, first, n):
    """Let no reader redeem these n completion events from now on."""
    for part in range(first, first + n):
        atomic_add(load_i64(stream + STREAM_PARTS) + PART_BYTES * part + PART_LEFT, 1)
        atomic_store(load_i64(stream + STREAM_EVENTS) + 8 * part, 0)


@inline
def let_go(ctx, stream, first, n):
    """Redeem those of n completion events of which nothing is under way; after a read that failed nothing will come."""
    for part in range(first, first + n):
        event = load_i64(stream + STREAM_EVENTS) + 8 * part
        if atomic_add(load_i64(stream + STREAM_PARTS) + PART_BYTES * part + PART_LEFT, -1) == 1:
            redeem(ctx, event, 1)
        if atomic_load(stream + STREAM_FAILED):
            redeem(ctx, event, -1)
