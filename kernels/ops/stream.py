"""Reading of weights ahead of use: threads that run `reader`, and the instruction that returns a buffer to them.

Readers claim pieces of the file in the order in which passes use them, round after round, and read each as soon as its
part's buffer is free: when the part that lay there before was released. The reader of a part's last piece redeems its
event. So the storage is idle only while all buffers wait to be used, and there is no call into Python and no lock
between two reads. `edgeinfer/runtime/weights/stream.py` writes the tables, and moves the readers to another part if a
forward pass does not begin with the one that comes next.

Neurons that a token needs (STREAM_QUEUE) are read by the same threads: instructions post pieces, which are claimed in
that order; `neuron_ffn/neuron_resolve.py` explains why that is safe.

No part is overwritten while it is used, and nothing is used before it is there, because:

* `stream_release` is an instruction after the last one that uses a part: all threads have passed the barrier. It sets
  the event to 0 before it counts the release, and a reader looks at the count before it writes into the buffer.
* It waits for the event itself. So a part whose instructions were all skipped is released only when all of it was
  read, and no read of a round is left over in the next.
* A piece is claimed by one reader, and PART_LEFT counts them down: the completion event is set after the last read.
* Readers are moved to another part only while all of them are parked. A parked reader holds no claim; it counts itself
  as busy again before it looks at the state.
* After a failed read, all pending events say that nothing will come, so a forward pass ends at the first missing part,
  whichever reader gave up its claim.
"""

from __future__ import annotations

from ..abi import (
    CTX_FUTEX_NUMBER,
    CTX_HOST_FUTEX,
    CTX_STREAM,
    INST_PARAMETERS,
    PART_BEHIND,
    PART_BYTES,
    PART_LEFT,
    PART_PIECES,
    PIECE_BYTES,
    PIECE_LEAST,
    PIECE_LENGTH,
    PIECE_OFFSET,
    PIECE_PART,
    PIECE_TO,
    STREAM_BUSY,
    STREAM_DROP,
    STREAM_ENDS,
    STREAM_EVENTS,
    STREAM_FAILED,
    STREAM_FILE,
    STREAM_GATE,
    STREAM_N_PARTS,
    STREAM_N_PIECES,
    STREAM_NEXT,
    STREAM_PARTS,
    STREAM_PIECES,
    STREAM_PREAD,
    STREAM_QUEUE,
    STREAM_READ,
    STREAM_RELEASED,
    STREAM_RUNS,
    STREAM_STATE,
)
from ..registry import kernel
from ..vector.instruction import inline
from ..vector.memory import load_i32, load_i64, store_i64
from ..vector.targets import atomic_add, atomic_load, atomic_store, call4, call6
from .waiting import FUTEX_WAKE_PRIVATE, await_change, change

TRIES = 3
"""Calls of `pread` for one piece: a signal may cut one short."""
POSIX_FADV_DONTNEED = 4
_EVERYONE = 2**31 - 1


@inline
def reads(stream):
    """Return whether readers may continue: they were not paused or ended, and no read has failed."""
    return atomic_load(stream + STREAM_STATE) == STREAM_RUNS and atomic_load(stream + STREAM_FAILED) == 0


@inline
def redeem(ctx, event, value):
    """Set a completion event and wake the thread that may sleep there."""
    atomic_store(event, value)
    futex = load_i64(ctx + CTX_HOST_FUTEX)
    if futex:
        call6(futex, load_i64(ctx + CTX_FUTEX_NUMBER), event, FUTEX_WAKE_PRIVATE, _EVERYONE, 0, 0)


@inline
def fail(ctx, stream, number):
    """Say that a piece could not be read: nothing pending will come."""
    atomic_store(stream + STREAM_FAILED, 1 + number)
    events, part = load_i64(stream + STREAM_EVENTS), 0
    while part < load_i64(stream + STREAM_N_PARTS):
        if atomic_load(events + 8 * part) == 0:
            redeem(ctx, events + 8 * part, -1)
        part += 1


@inline
def fetch(ctx, stream, number):
    """Read one piece; the last one of a part redeems its completion event."""
    piece = load_i64(stream + STREAM_PIECES) + PIECE_BYTES * number
    to, length, offset = load_i64(piece + PIECE_TO), load_i64(piece + PIECE_LENGTH), load_i64(piece + PIECE_OFFSET)
    least, got, tries, file = load_i64(piece + PIECE_LEAST), 0, 0, load_i64(stream + STREAM_FILE)
    while got < least and tries < TRIES:  # from its beginning: direct I/O takes no odd offsets
        got = call4(load_i64(stream + STREAM_PREAD), file, to, length, offset)
        tries += 1
    if load_i64(stream + STREAM_DROP):
        call4(load_i64(stream + STREAM_DROP), file, offset, length, POSIX_FADV_DONTNEED)
    if got < least:
        fail(ctx, stream, number)
        return
    atomic_add(stream + STREAM_READ, got)
    part = load_i64(piece + PIECE_PART)
    row = load_i64(stream + STREAM_PARTS) + PART_BYTES * part
    if atomic_add(row + PART_LEFT, -1) == 1:
        store_i64(row + PART_LEFT, load_i64(row + PART_PIECES))
        redeem(ctx, load_i64(stream + STREAM_EVENTS) + 8 * part, 1)


@inline
def await_buffer(ctx, stream, claim):
    """Wait until the buffer of a claimed piece is free, or it was posted, or the readers are to stop."""
    n_pieces = load_i64(stream + STREAM_N_PIECES)
    if load_i64(stream + STREAM_QUEUE):
        await_release(ctx, stream, claim + 1)
        return
    piece = load_i64(stream + STREAM_PIECES) + PIECE_BYTES * (claim % n_pieces)
    part = load_i64(piece + PIECE_PART)
    behind = load_i64(load_i64(stream + STREAM_PARTS) + PART_BYTES * part + PART_BEHIND)
    await_release(ctx, stream, claim // n_pieces * load_i64(stream + STREAM_N_PARTS) + part - behind + 1)


@inline
def await_release(ctx, stream, free):
    """Wait until this many parts were released, or pieces posted, or the readers are to stop."""
    gate = stream + STREAM_GATE
    seen = atomic_load(gate)
    while atomic_load(stream + STREAM_RELEASED) < free and reads(stream):
        seen, _ = await_change(ctx, gate, seen, 0)


@kernel("reader")
def reader(inst, ctx, tid, n_threads):
    """The life of a thread that reads; `inst` is the STREAM_* block.

    With `tid` < 0: set the state to `n_threads`, wake all readers and return. Who looks at the state sees all that was
    written before, and who set it sees how many are busy with the last one.
    """
    gate = inst + STREAM_GATE
    if tid < 0:
        atomic_store(inst + STREAM_STATE, n_threads)
        change(ctx, gate, atomic_load(gate) + 1)
        return 0
    while True:
        seen = atomic_load(gate)
        if atomic_load(inst + STREAM_STATE) == STREAM_ENDS:
            atomic_add(inst + STREAM_BUSY, -1)
            return 0
        if reads(inst):
            claim = atomic_add(inst + STREAM_NEXT, 1)
            await_buffer(ctx, inst, claim)
            if reads(inst):
                fetch(ctx, inst, claim % load_i64(inst + STREAM_N_PIECES))
        else:
            atomic_add(inst + STREAM_BUSY, -1)
            await_change(ctx, gate, seen, 0)
            atomic_add(inst + STREAM_BUSY, 1)


@kernel("stream_release")
def stream_release(inst, ctx, tid, n_threads):
    """Give the buffer of a part back to the readers: all threads are done with it."""
    if tid == 0:
        stream = load_i64(ctx + CTX_STREAM)
        atomic_store(load_i64(stream + STREAM_EVENTS) + 8 * load_i32(inst + INST_PARAMETERS), 0)
        atomic_add(stream + STREAM_RELEASED, 1)
        change(ctx, stream + STREAM_GATE, atomic_load(stream + STREAM_GATE) + 1)
    return 0
