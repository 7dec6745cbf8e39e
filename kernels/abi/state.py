"""Recurrent state: the contents of a slot of region ``state`` for one sequence, layer by layer.

A **convolution** keeps its inputs at the last positions: a ring of rows, position p in row p % conv_rows.

A **rule** (delta rule, selective scan) keeps for each head a matrix of key_dim rows, cut into tiles of
STATE_TILE_COLUMNS columns, tile after tile; then an int64 for each tile, the position that it stands at (the number of
tokens that it has processed); then a journal, a ring of JOURNAL_TOKENS rows from which tokens can be replayed.

A pass begins with the tokens that a sequence has (TOKEN_BASE). Each tile first replays the journal's rows from its
position up to there and is stored. New tokens, if they are JOURNAL_TOKENS at most, are computed from the tile but not
stored: they go into the journal. So drafts that are rejected, and passes that are cancelled, leave nothing behind. Of
more tokens all but those after the last multiple of JOURNAL_TOKENS are stored, and a cancelled pass leaves a mixture:
the runner keeps a copy of the slot. Replaying takes the same steps, so the bits are those of one pass over all.
"""

from __future__ import annotations

STATE_TILE_COLUMNS = 32
"""Columns of a tile: 16 KB with 128 rows, which stay in the first cache while tokens go through."""
JOURNAL_TOKENS = 16
"""Rows of a journal, a power of two; a KV block has as many, so a slot that is copied after a prompt can be cut to
the last block boundary."""
GATE_TOKENS = 64 + JOURNAL_TOKENS
"""Tokens whose gates a thread holds: those of a block and of a journal."""
MIN_CONV, MAX_CONV = 2, 8
"""Widths of convolutions."""


def conv_rows(width: int) -> int:
    """Return the rows of a convolution's ring: those that the first new token sees, wherever a journal is cut."""
    return width - 1 + JOURNAL_TOKENS


def conv_state_bytes(channels: int, width: int) -> int:
    """Return the bytes of a convolution's ring."""
    return conv_rows(width) * 4 * _round_16(channels)


def rule_tiles(heads: int, value_dim: int) -> int:
    """Return the number of tiles of all heads."""
    return heads * -(-value_dim // STATE_TILE_COLUMNS)


def rule_stamps(heads: int, key_dim: int, value_dim: int) -> int:
    """Return the offset of the tiles' positions."""
    return rule_tiles(heads, value_dim) * key_dim * 4 * STATE_TILE_COLUMNS


def rule_journal(heads: int, key_dim: int, value_dim: int) -> int:
    """Return the offset of the journal."""
    return rule_stamps(heads, key_dim, value_dim) + -(-8 * rule_tiles(heads, value_dim) // 64) * 64


def journal_row(values: int, gates: int) -> int:
    """Return the bytes of a journal's row: columns of the convolved row, then gates."""
    return 4 * (_round_16(values) + _round_16(gates))


def rule_state_bytes(heads: int, key_dim: int, value_dim: int, values: int, gates: int) -> int:
    """Return the bytes that a delta rule or a scan keeps of a sequence."""
    return rule_journal(heads, key_dim, value_dim) + JOURNAL_TOKENS * journal_row(values, gates)


def rule_scratch(key_dim: int, by_row: bool = False) -> int:
    """Return the bytes that a thread needs: gates and k . q of some tokens, and a tile.

    With a decay for each row of the state, also three vectors for each of these tokens.
    """
    vectors = 3 * 4 * _round_16(key_dim) * GATE_TOKENS if by_row else 0
    return 3 * 4 * GATE_TOKENS + key_dim * 4 * STATE_TILE_COLUMNS + vectors


def _round_16(n: int) -> int:
    return -(-n // 16) * 16
