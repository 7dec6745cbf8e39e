"""Sizes of FFNs in layout neuron: lines, blocks, sums and scratch."""

from __future__ import annotations

from edgeinfer.quant import TYPES

from .rows import q8_row_bytes

NEURON_TYPES = tuple(row.name for row in TYPES.values() if "neuron" in row.layouts)
"""Types in which FFNs can be stored neuron by neuron."""

NEURON_TOKENS = 4
"""Most tokens that go through the neuron kernels together."""
NEURON_BATCH = 8
"""Neurons that are computed together: gates, then ups, then columns."""
NEURON_WINDOW = 1024
"""Most neurons of a block."""
NEURON_CLAIM = 2048
"""Most neurons that are claimed together."""
NEURON_LINES = 16
"""Most 64-byte lines of a down column in a chunk."""
NEURON_COLUMNS = 2048
"""Most outputs in a chunk."""


def neuron_line_columns(dtype: str) -> int:
    """Columns in a 64-byte line of a part in layout neuron."""
    return 512 // TYPES[dtype].bits


def neuron_lines(width: int, group_size: int, dtype: str) -> int:
    """64-byte lines that hold the codes of a part."""
    return -(-(-(-width // group_size) * group_size) // neuron_line_columns(dtype))


def neuron_block(neurons: int) -> int:
    """Neurons of a block: about 32 blocks, a fixed number for a shape, because sums of blocks are rounded."""
    return max(64, min(NEURON_WINDOW, -(-neurons // 256) * 8))


def neuron_sums_bytes(neurons: int, width: int, group_size: int, dtype: str) -> int:
    """Bytes of the sums that the blocks of one token leave: a row of floats each."""
    row = 4 * neuron_line_columns(dtype) * neuron_lines(width, group_size, dtype)
    return -(-neurons // neuron_block(neurons)) * row


def neuron_chunks(neurons: int, part_bytes: int, lines: int, threads: int, dtype: str) -> tuple[int, int]:
    """Neurons of a chunk of several tokens (64 KiB of rows, four chunks a thread), and lines of a chunk of columns."""
    most = min(NEURON_LINES, NEURON_COLUMNS // neuron_line_columns(dtype))
    return (max(1, min((64 << 10) // (2 * part_bytes), neurons // (4 * threads))),
            max(2, min(most, -(-lines // (4 * threads)) * 2)))


def neuron_mask_bytes(neurons: int) -> int:
    """Bytes of a token's mask of neurons (FLAG_MASK): whole words of 64 bits."""
    return 8 * -(-neurons // 64)


def neuron_gated_scratch_bytes(width: int, group_size: int, dtype: str) -> int:
    """Scratch of a thread in neuron_gated: sums, gates, lists of a claim, x as lines, factors, a fused input row."""
    columns, lines = neuron_line_columns(dtype), neuron_lines(width, group_size, dtype)
    fixed = 2 * 64 * NEURON_TOKENS + 64 + NEURON_CLAIM * (12 + 4 * NEURON_TOKENS)
    row = q8_row_bytes(width, group_size)[0] + 4 * (-(-width // 16) * 16)
    return fixed + lines * NEURON_TOKENS * (columns + 128) + NEURON_BATCH * 16 * (lines + 3) + row + 128


def neuron_down_scratch_bytes() -> int:
    """Scratch of a thread in neuron_down: sums and totals of a chunk, factors of a batch, values of a block."""
    factors = NEURON_BATCH * NEURON_TOKENS * NEURON_LINES * 16
    entries = (NEURON_WINDOW + 1) * (8 + 4 * NEURON_TOKENS)
    return 2 * 4 * NEURON_TOKENS * NEURON_COLUMNS + factors + entries + 64
