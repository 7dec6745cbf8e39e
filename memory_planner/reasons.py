"""Explanations of the sizes of a plan's regions, in words."""

from __future__ import annotations

from collections.abc import Container, Sequence

from edgeinfer.graph import Graph, ModelConfig, Sizes

from .plan import Request
from .windows import Windowed


def held_words(request: Request) -> str:
    """Describe the blocks of a KV pool, if they are not a context for each sequence."""
    if request.kv_tokens is not None:
        return f" ({request.kv_tokens} tokens in all)"
    return f" (a prompt once, {request.sequences} x {request.own_tokens} tokens)" if request.shares_prompt else ""


def pools(blocks: int, held: str, strides: Sequence[int], windowed: Windowed | None) -> str:
    """Say how many blocks layers have, of this many bytes each, and those with a window of their smaller pool."""
    layers, alike = len(strides), len(set(strides)) == 1
    if not windowed:
        return f", {blocks} blocks{held} x {layers} layers x {strides[0]} bytes" if alike else \
            f", {blocks} blocks{held} of {layers} layers, {sum(strides)} bytes"
    recent, whole = f"{windowed.blocks} x {len(windowed.layers)} windowed", layers - len(windowed.layers)
    return f" blocks: {blocks}{held} x {whole} layers, {recent}" if whole else f" blocks: {recent}"


def rotary(config: ModelConfig, ctx: int) -> str:
    """Describe the tables of rotations."""
    if config.alibi:
        return f"no rotary tables: ALiBi, a slope for each of {config.num_attention_heads} heads"
    if not config.rotations or config.table_rows(2) == 1:
        return "no rotary tables: no head is rotated"
    return f"{'two sets of ' if config.local_rope else ''}rotary tables of {ctx} positions"


def scored(graph: Graph, sizes: Sizes) -> str:
    """Mention the scores in scratch memory, if there are any."""
    return f", scores of {sizes.decoded_tokens} tokens" if graph.chooses_values else ""


def types_of(graph: Graph, names: Container[str]) -> str:
    """Return the storage types of these matrices, such as ``embedding, head int8g32; matrix q4g32``."""
    small = ("vector", "router", "rows")
    kinds = {w.kind: str(graph.types[w.name]) for w in graph.weights if w.kind not in small and w.name in names}
    if kinds.get("experts") == kinds.get("matrix"):  # then they are matrices like the others
        kinds.pop("experts", None)
    alike = {stored: [kind for kind in kinds if kinds[kind] == stored] for stored in kinds.values()}
    return "; ".join(f"{', '.join(names)} {stored}" for stored, names in alike.items())
