"""Paths of tokens in attention, and the K and V that blocks hold, in order; shared by its references."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import KV_TYPES
from edgeinfer.quant import kv as layouts

from ...abi import (
    BLOCK_TOKENS,
    FLAG_PRUNED,
    KV_SCALES_BYTES,
    SPLIT_BLOCKS,
    TOKEN_BASE,
    TOKEN_MASK,
    TOKEN_ROW,
    TOKEN_SEQUENCE,
    padded_head_dim,
)
from ...parameters import ATTENTION
from ..view import InstructionView

Doubles = NDArray[np.float64]
SPLIT_TOKENS = BLOCK_TOKENS * SPLIT_BLOCKS


class Stored(NamedTuple):
    """Contents of blocks, in order."""

    k: Doubles
    """(kv_heads, positions, n)."""
    v: Doubles
    """(kv_heads, positions, n)."""
    v_scales: Doubles | None
    """Scales of KV in codes: (kv_heads, positions)."""

    def of(self, head: int, rows: NDArray[np.int64]) -> tuple[Doubles, Doubles, Doubles | None]:
        """K, V and scales of V of a head at some positions."""
        return self.k[head, rows], self.v[head, rows], None if self.v_scales is None else self.v_scales[head, rows]


def value_dim(p: Any) -> int:
    """Elements of a value: where it is not stored, those of a key that stand for it."""
    return int(p.values or p.head_dim)


def stored_keys_and_values(view: InstructionView, kv: str, blocks: NDArray[np.int32]) -> Stored:
    """K and V of the blocks in order."""
    p = view.parameters(ATTENTION)
    padded, kv_heads = padded_head_dim(p.head_dim), p.kv_heads
    plane, kind, latent = kv_heads * p.blocks * p.block_bytes, KV_TYPES[kv], bool(p.values)

    def of_plane(at: int, n: int) -> NDArray[np.uint8]:
        """Return a plane's bytes of each head in the blocks, n bytes each: (kv_heads, blocks, n)."""
        return view.array(2, np.uint8, (kv_heads, p.blocks, n), at=at)[:, blocks]

    keys = layouts.unpack_keys(of_plane(0, p.block_bytes), kind, BLOCK_TOKENS)
    k = v = keys.reshape(kv_heads, -1, padded).astype(np.float64)
    if not latent:
        values = layouts.unpack_values(of_plane(plane, p.block_bytes), kind, BLOCK_TOKENS)
        v = values.reshape(kv_heads, -1, padded).astype(np.float64)
    v_scales = None
    if kind.scaled:
        scales = of_plane((1 if latent else 2) * plane, KV_SCALES_BYTES).view(np.float16).astype(np.float64)
        scales = scales.reshape(kv_heads, len(blocks), 2, BLOCK_TOKENS).transpose(2, 0, 1, 3)
        v_scales = scales[1].reshape(kv_heads, -1)
        k, v = k * scales[0].reshape(kv_heads, -1, 1), v * v_scales[..., None]
    return Stored(k[..., : p.head_dim], v[..., : value_dim(p)], v_scales)


class Path(NamedTuple):
    """Positions that a token sees."""

    low: int
    """Position of the first row in the whole path, which starts with row 0."""
    rows: NDArray[np.int64]
    """Rows of the sequence, the token's own last."""
    there: NDArray[np.bool_]
    """Mask of those that the layer has."""

    @property
    def position(self) -> int:
        """The token's own position."""
        return self.low + len(self.rows) - 1

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions of these rows."""
        return np.arange(self.low, self.low + len(self.rows))

    @property
    def splits(self) -> range:
        """The splits that these positions are in."""
        return range(self.low // SPLIT_TOKENS, (self.low + len(self.rows) - 1) // SPLIT_TOKENS + 1)


def paths(view: InstructionView, n_tokens: int, window: int) -> list[Path]:
    """Return the path of each of the first n tokens; window 0 sees the whole path."""
    out: list[Path] = []
    fields = (view.tokens(field)[:n_tokens] for field in (TOKEN_ROW, TOKEN_BASE, TOKEN_MASK))
    for row, base, mask in zip(*(map(int, field) for field in fields), strict=True):
        rows = np.arange(row + 1)
        if mask != -1:
            rows = rows[(rows < base) | (rows == row) | (mask >> np.clip(rows - base, 0, 63) & 1 == 1)]
        low = max(0, len(rows) - window) if window else 0
        out.append(Path(low, rows[low:], _there(view, len(out), rows[low:])))
    return out


class Seen(NamedTuple):
    """A token of the forward pass with the rows that it sees."""

    t: int
    path: Path
    stored: Stored


def seen_tokens(view: InstructionView, kv: str, first: int, end: int) -> list[Seen]:
    """Tokens first to end - 1 with their paths and their sequences' rows, sequence by sequence."""
    p, out = view.parameters(ATTENTION), []
    sequences, found = view.tokens(TOKEN_SEQUENCE)[first:end], paths(view, end, p.window)[first:]
    for sequence in np.unique(sequences):
        mine = np.flatnonzero(sequences == sequence)
        n_blocks = max(int(found[t].rows[-1]) for t in mine) // BLOCK_TOKENS + 1
        stored = stored_keys_and_values(view, kv, view.block_table(int(sequence), n_blocks, p.recent))
        out += [Seen(first + int(t), found[t], stored) for t in mine]
    return out


def _there(view: InstructionView, t: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of these rows of token t's sequence have K and V in the layer."""
    if not view.flags & FLAG_PRUNED:
        return np.ones(len(rows), bool)
    sequence, recent = int(view.tokens(TOKEN_SEQUENCE)[t]), view.parameters(ATTENTION).recent
    blocks = view.block_table(sequence, int(rows.max()) // BLOCK_TOKENS + 1, recent)
    pruned = view.array(6, np.uint8, (int(blocks.max()) + 1, BLOCK_TOKENS))
    return pruned[blocks[rows // BLOCK_TOKENS], rows % BLOCK_TOKENS] == 0
