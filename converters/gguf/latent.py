"""Latent attention in GGUF files: the matrices of heads apart, as newer files have them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from edgeinfer.graph import ModelConfig, Source, Weight

_WEIGHT = re.compile(r"layers\.([0-9]+)\.([kv]_b)")


def with_heads_apart(weight: Weight, config: ModelConfig, names: Collection[str]) -> Weight:
    """Return the matrices of heads as newer files have them: two stacks, keys transposed already."""
    found = _WEIGHT.fullmatch(weight.name) if config.latent else None
    if not found or (name := f"blk.{found[1]}.attn_{found[2]}.weight") not in names:
        return weight
    heads = config.num_attention_heads
    stack = Source(name, (heads, weight.shape[0] // heads, weight.shape[1]), each=True)
    return replace(weight, sources=stack.items)
