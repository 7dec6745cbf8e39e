"""References of the embedding lookup."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgeinfer.quant import layouts

from ..abi import TOKEN_ID
from ..parameters import ROWS
from .expected import Expected
from .view import InstructionView


def embed_reference(dtype: str, group: int) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``embed_<dtype>``: code x scale, one float32 product, or the stored float."""

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(ROWS)
        ids, levels = view.tokens(TOKEN_ID)[: view.count(p.rows)], view.stored(dtype, group).levels
        if p.piece:  # a tile is a token's row, lane by lane
            out = view.array(1, np.float32, (len(ids), p.width), (p.out_stride, 4))
            tiles = (view.array(0, np.uint8, (p.tile_bytes,), at=int(i) * p.tile_bytes) for i in ids)
            shape = layouts.TILE_ROWS, p.piece
            whole = [layouts.unpack_tile16(tile, dtype, group, shape, levels).reshape(-1)[: p.width] for tile in tiles]
            return [Expected("out", out, np.array(whole).reshape(out.shape))]
        values = np.empty((len(ids), p.width), np.float32)
        for tile in np.unique(ids // layouts.TILE_ROWS):
            data = view.array(0, np.uint8, (p.tile_bytes,), at=int(tile) * p.tile_bytes)
            rows = layouts.unpack_tile16(data, dtype, group, (layouts.TILE_ROWS, p.width), levels)
            here = ids // layouts.TILE_ROWS == tile
            values[here] = rows[ids[here] % layouts.TILE_ROWS]
        out = view.array(1, np.float32, values.shape, (p.out_stride, 4))
        return [Expected("out", out, values)]

    return reference
