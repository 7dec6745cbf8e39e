"""Latent attention in GGUF files: newer files store the up-projections of K and V as separate tensors per head."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from edgeinfer.graph import ModelConfig, Source, Weight

_WEIGHT = re.compile(r"layers\.([0-9]+)\.([kv]_b)")


def with_heads_apart(weight: Weight, config: ModelConfig, names: Collection[str]) -> Weight:
    """Return the weight with the sources that newer files have: one stack per projection, that of K transposed."""
    found = _WEIGHT.fullmatch(weight.name) if config.latent else None
    if not found or (name := f"blk.{found[1]}.attn_{found[2]}.weight") not in names:
        return weight
    heads = config.num_attention_heads
    stack = Source(name, (heads, weight.shape[0] // heads, weight.shape[1]), each=True)
    return replace(weight, sources=stack.items)
