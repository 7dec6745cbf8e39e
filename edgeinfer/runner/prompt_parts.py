"""Parts of a prompt's K and V on their way to another process: common to runners that read and that write them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from edgeinfer.kernels import abi

if TYPE_CHECKING:
    from edgeinfer.graph import ModelConfig

PART_BYTES = 1 << 20
"""Bytes of a part at most, unless a single block or a recurrent state has more."""
ALL, WINDOW, STATE = "all", "window", "state"
"""Contents of a part: blocks of layers that keep all tokens, of layers with a window, or the recurrent state."""
SIZE = struct.Struct("<Q")
"""Size of the header, which precedes it."""


class BlockForm(NamedTuple):
    """KV blocks of a runner of our own kernels, as another executor has to make them."""

    model: str
    """Identity of K and V that another executor computes (`computed_elsewhere`)."""
    kv: str
    block_bytes: int
    layers: int
    layout: int
    windows: bool
    """Whether layers with a window keep blocks of their own."""
    window: int = 0
    """Positions that a token sees in these layers."""
    windowed: tuple[int, ...] = ()
    """Numbers of the layers with a window."""

    @property
    def header(self) -> dict[str, Any]:
        """The fields of a part's header that say whose blocks it has."""
        return dict(zip(self._fields[:6], self[:6], strict=True))


def computed_elsewhere(bundle: str) -> str:
    """Return the identity of K and V that another executor computes, given that of the bundle."""
    return hashlib.sha256(f"computed elsewhere\0{bundle}".encode()).hexdigest()


def why_not_elsewhere(config: ModelConfig, ctx: int) -> str:
    """Return why an executor that runs a model cannot compute prompts for our own kernels; empty if it can."""
    if config.latent:
        return "it has latent attention, whose keys other executors store in another form"
    if config.recurrent:
        return "it keeps a recurrent state, which other executors do not hand over"
    if config.rope.kind in ("dynamic", "longrope") and ctx > config.rope.original_max_position_embeddings:
        return f"its rotations depend on the context; lower --ctx to {config.rope.original_max_position_embeddings}"
    return ""


def encoded(header: dict[str, Any], planes: Iterable[Any]) -> bytes:
    """Return a part: the size of its header, the header in JSON, and of each layer, plane and KV head the blocks."""
    text = json.dumps(header).encode()
    return b"".join([SIZE.pack(len(text)), text, *planes])


def ranges(kind: str, first: int, end: int, block_bytes: int) -> list[tuple[str, int, int]]:
    """Return the stretches of blocks from `first` to `end`, each of which makes a part."""
    n = max(1, PART_BYTES // max(block_bytes, 1))
    return [(kind, begin, min(begin + n, end)) for begin in range(first, end, n)]


def blocks_of_tokens(n_tokens: int, complete: bool) -> int:
    """Return how many blocks of a prompt can go: its full ones, or all of them if it is complete."""
    return -(-n_tokens // abi.BLOCK_TOKENS) if complete else n_tokens // abi.BLOCK_TOKENS
