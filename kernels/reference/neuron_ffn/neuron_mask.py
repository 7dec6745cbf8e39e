"""References of the masks of neurons: which scores are above their thresholds, for tokens that are decoded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...abi import ROLE_DECODE, TOKEN_ROLE, neuron_mask_bytes, unpack_token_tiles
from ...parameters import NEURON_MASK
from ..expected import Expected
from ..q8 import q8_blocks, read_q8
from ..view import InstructionView


def _masks(view: InstructionView, scores: NDArray[np.float32]) -> list[Expected]:
    """The masks of all decoded tokens; bits after the last neuron count for nothing and may be anything."""
    p = view.parameters(NEURON_MASK)
    chosen = scores > view.array(1, np.float32, (p.neurons,))

    def mask(t: int) -> Expected:
        where = view.array(2, np.uint8, (neuron_mask_bytes(p.neurons),), at=t * p.out_stride)

        def expected() -> NDArray[np.uint8]:
            bits = np.unpackbits(where, bitorder="little")
            bits[: p.neurons] = chosen[t]
            return np.packbits(bits, bitorder="little")

        return Expected("mask", where, expected)

    return [mask(int(t)) for t in np.flatnonzero(view.tokens(TOKEN_ROLE)[: len(scores)] == ROLE_DECODE)]


def scores_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``neuron_mask_scores``."""
    p = view.parameters(NEURON_MASK)
    return _masks(view, view.array(0, np.float32, (view.count(p.rows), p.neurons), (p.in_stride, 4)).copy())


def signs_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``neuron_mask_signs``."""
    p = view.parameters(NEURON_MASK)
    tokens, words = view.count(p.rows), -(-p.width // 64)
    blocks = q8_blocks(view.address(0), tokens, p.in_stride, p.x_scales, p.x_offsets, p.group,
                       unpack_token_tiles(p.token_tiles))
    codes = read_q8(blocks)[0].reshape(tokens, -1)[:, : p.width]
    rows = view.array(4, np.uint8, (p.neurons, 8 * words))
    signs = np.unpackbits(rows, axis=1, bitorder="little")[:, : p.width]
    differ = ((codes < 0)[:, None] != signs[None].astype(bool)).sum(axis=2)
    return _masks(view, (p.width - 2 * differ).astype(np.float32))
