"""Reference of `store_latent`: the norm of a token's latent, rotated parts, and K in the layer's blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import KV_TYPES

from ...abi import BLOCK_TOKENS, TOKEN_POSITION
from ...parameters import LATENT
from ..elementwise import rms_norm
from ..expected import Expected
from ..rope import key_view, rotate, sizes_of_pairs, stored_rows
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView, float_of


def _key_views(view: InstructionView, kv: str, slot: int) -> tuple[NDArray, NDArray, NDArray]:
    """One token's K as `key_view` has it, its scale (1,), and the scale of V, live."""
    p, kind, (block, row) = view.parameters(LATENT), KV_TYPES[kv], divmod(slot, BLOCK_TOKENS)
    k = key_view(view, 4, kind, (1, p.rank + p.rotary, 0), block * p.block_bytes, row)
    at = p.blocks * p.block_bytes + 4 * BLOCK_TOKENS * block + 2 * row
    n = int(kind.scaled)
    return k, view.array(4, np.float16, (n,), at=at), view.array(4, np.float16, (n,), at=at + 2 * BLOCK_TOKENS)


def store_latent_reference(kv: str) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``store_latent_<kv>``."""

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(LATENT)
        n, width, tokens = view.count(p.rows), p.rank + p.rotary, slice(0, view.count(p.rows))
        positions, slots = view.tokens(TOKEN_POSITION)[tokens], view.slots(p.recent)[tokens]
        positions = positions * (1 - p.still)
        rows = view.array(0, np.float32, (n, p.heads + 1, width), (p.stride, 4 * width, 4))
        shape, strides = (n, p.heads, p.rotary), (p.q_stride, 4 * p.rotary, 4)
        q = view.array(1, np.float32, shape, strides, at=4 * p.q_first).astype(np.float64)
        latent = view.array(2, np.float32, (n, width), (p.c_stride, 4), at=4 * p.c_first).astype(np.float64)
        shape, half = (int(positions.max(initial=-1)) + 1, 2, p.rotary // 2), p.table_stride // 2
        table = view.array(3, np.float32, shape, (p.table_stride, half, 4))
        cos, sin = table[positions].astype(np.float64).transpose(1, 0, 2)
        parts = np.concatenate([q, latent[:, None, p.rank :]], axis=1)
        turned, slack = rotate(parts, cos, sin), TOLERANCES["rope"] * sizes_of_pairs(parts, cos, sin) + TINY
        normed = rms_norm(latent[:, : p.rank], view.array(5, np.float32, (p.rank,)), float_of(p.eps))
        loose = TOLERANCES["rms_norm"] * np.abs(normed) + TINY
        keys, near = (np.concatenate(both, axis=1) for both in ((normed, turned[:, -1]), (loose, slack[:, -1])))
        out = [Expected("rotated parts", rows[..., p.rank :], turned, exact=False, tolerance=slack),
               Expected("latents", rows[:, -1, : p.rank], normed, exact=False, tolerance=loose)]
        for t, slot in enumerate(slots):
            k, scale, same = _key_views(view, kv, int(slot))
            out += stored_rows(f"K of token {t}", KV_TYPES[kv], k, scale, keys[t : t + 1], near[t : t + 1])
            if KV_TYPES[kv].scaled:
                out.append(Expected(f"V scales of token {t}", same, partial(np.copy, scale)))
        return out

    return reference
