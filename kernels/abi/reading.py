"""Weights that are read while tokens flow: streamed layers, and neurons that are read when they are wanted."""

from __future__ import annotations

# -- streaming: readers and parts --------------------------------------------------------------------------------------
# Parts (a layer's streamed weights) are read in the order in which passes use them, in rounds; a piece is one read.
STREAM_PREAD, STREAM_FILE = 0, 8
"""Address of `pread`, and the file descriptor that it is called with."""
STREAM_DROP = 16
"""Address of `posix_fadvise` where pages have to be dropped from the system's cache after a read, else 0."""
STREAM_PIECES, STREAM_N_PIECES = 24, 32
"""Address of the table of pieces, by part: PIECE_BYTES each."""
STREAM_PARTS, STREAM_N_PARTS = 40, 48
"""Address of the table of parts: PART_BYTES each."""
STREAM_EVENTS = 56
"""Address of the completion events: one for each part."""
STREAM_NEXT = 64
"""Pieces claimed since the last `begin`, those of all rounds; reader threads claim by atomic addition."""
STREAM_GATE = 128
"""Gate: changes with a release, and with the state."""
STREAM_RELEASED = 256
"""Parts that forward passes are done with since the beginning of the first round."""
STREAM_STATE = 320
"""STREAM_RUNS, STREAM_PAUSES or STREAM_ENDS."""
STREAM_BUSY = 384
"""Readers that may touch buffers: those that are not parked."""
STREAM_FAILED = 448
"""1 + number of a piece that could not be read, after which nothing is; 0 = none."""
STREAM_READ = 512
"""Bytes read."""
STREAM_QUEUE = 576
"""Non-zero: instructions post pieces as they want them, RELEASED counts those posted, and the table of pieces is a
ring.
"""
STREAM_BYTES = 640
STREAM_UNIT = 4096
"""Direct I/O reads multiples of it from multiples of it."""
STREAM_RUNS, STREAM_PAUSES, STREAM_ENDS = 0, 1, -1

PIECE_BYTES = 40
PIECE_OFFSET, PIECE_LENGTH = 0, 8
"""Offset and length of a piece in the file; direct I/O needs multiples of a page."""
PIECE_LEAST = 16
"""Bytes that have to come: fewer than PIECE_LENGTH only where the file ends."""
PIECE_TO, PIECE_PART = 24, 32
"""Address in memory, number of the part."""
PART_BYTES = 24
PART_BEHIND = 0
"""Number of releases since its buffer was another part's (or its own, a round ago), counted from the part's own."""
PART_LEFT, PART_PIECES = 8, 16
"""Pieces that are still to be read in this round, and how many there are."""

# -- neurons that are read when they are wanted ------------------------------------------------------------------------
COLD_HAND, COLD_EPOCH = 0, 8
"""Position of the clock's hand; instructions of `neuron_resolve` so far."""
COLD_HITS, COLD_MISSES = 16, 24
"""Clusters that decoded tokens wanted and that were there, or not there."""
COLD_EARLY = 32
"""1 + first event of the layer whose early instruction holds its events, until its other instruction releases them; 0 =
none.
"""
COLD_BYTES = 64
COLD_PARTS = 4
"""Completion events of a layer: its cold neurons are computed in this many parts, or fewer, while those after are read.
"""
COLD_USES = 3
"""Most uses that are counted of a slot."""
