"""Where checkpoints have the tensors of a mixture of experts: by expert, stacked, or gate and up in one.

Architectures call them by one set of names, with a pair of braces for an expert's number; here these become those of a
checkpoint, and a stack's items become sources of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import replace

from edgeinfer.graph import Graph, Source, Weight

_PART = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.\{\}\.(gate|up|down)_proj\.(weight|bias)")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.(weight|bias)")
_SHARED = re.compile(r"(model\.layers\.\d+\.)mlp\.shared_experts\.(gate|up|down)_proj\.weight")
_ROUTERS = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "block_sparse_moe.router.layer",
            "block_sparse_moe.router", "block_sparse_moe.primary_router", "router.proj")
_BY_EXPERT = (("mlp.experts.{}.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
              ("block_sparse_moe.experts.{}.", {"gate": "w1", "up": "w3", "down": "w2"}),
              ("block_sparse_moe.experts.{}.", {"gate": "gate", "up": "up", "down": "down"}))
"""Modules of an expert in Hugging Face's checkpoints: Qwen's and OLMoE's names, Mixtral's, SmallThinker's."""
_STACKED = ("mlp.switch_mlp", "block_sparse_moe.switch_mlp")
"""Modules of all experts whose three matrices are a tensor each: MLX's."""
_TOGETHER = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
             ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
             ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
             ("experts.gate_up_proj", "experts.down_proj"))
"""Tensors of all experts, gate rows above up rows: transformers 5's own, Granite's and Gemma 4's."""
_IN_TURNS = ("gpt_oss",)
"""Architectures whose tensors of all experts have a gate row and an up row in turns, as columns where they are not
quantised."""


def with_experts(graph: Graph, names: Container[str], packed: Container[str] = (),
                 shapes: Callable[[str], tuple[int, ...]] | None = None) -> Graph:
    """Return the graph with the sources of its experts as a checkpoint with these tensors has them.

    What it has in no known form keeps its name, and will be said to be missing. Those of `packed` are quantised.
    `shapes` tells the shape of a stored tensor.
    """
    in_turns = graph.config.model_type in _IN_TURNS

    def rename(source: Source) -> Source:
        part = _PART.fullmatch(source.name) if in_turns else None
        return _turned(source, part, packed) if part else _named(source, names, shapes)

    return replace(graph, weights=tuple(with_stacks(weight, rename) for weight in graph.weights))


def with_stacks(weight: Weight, rename: Callable[[Source], Source]) -> Weight:
    """Return a weight with renamed sources, stacks among them as their items in stored order."""
    sources = [rename(source) for source in weight.sources]
    if any(source.each for source in sources):
        sources = [source for items in zip(*(source.items for source in sources), strict=True) for source in items]
    return replace(weight, sources=tuple(sources))


def _named(source: Source, names: Container[str], shapes: Callable[[str], tuple[int, ...]] | None) -> Source:
    if match := _ROUTER.fullmatch(source.name):
        found = (f"{match[1]}{name}.{match[2]}" for name in _ROUTERS)
        return replace(source, name=next((name for name in found if name in names), source.name))
    if not (match := _PART.fullmatch(source.name)):
        return _shared(source, names)
    layer, part = match[1], match[2]
    for module, parts in _BY_EXPERT:
        name = f"{layer}{module}{parts[part]}.weight"
        if name.format(0) in names:
            return replace(source, name=name)
    for module in _STACKED:
        if (name := f"{layer}{module}.{part}_proj.{match[3]}") in names:
            return replace(source, name=name)
    for both, down in _TOGETHER:
        if layer + both in names and part != "down":
            n, rows, cols = source.stored
            start = rows if part == "up" else 0
            whole = Source(layer + both, (n, 2 * rows, cols), each=True)
            if _inputs_first(layer, both, down, shapes):
                whole = Source(layer + both, (n, cols, 2 * rows), each=True).transposed()
            return whole.rows(start, start + rows)
        if layer + down in names and part == "down":
            n, rows, cols = source.stored
            if _inputs_first(layer, both, down, shapes):
                return Source(layer + down, (n, cols, rows), each=True).transposed()
            return replace(source, name=layer + down)
    return source


def _shared(source: Source, names: Container[str]) -> Source:
    """Granite's FFN beside its experts, which has gate rows above up rows."""
    match = _SHARED.fullmatch(source.name)
    if not match or f"{match[1]}shared_mlp.input_linear.weight" not in names:
        return source
    if match[2] == "down":
        return replace(source, name=f"{match[1]}shared_mlp.output_linear.weight")
    rows, cols = source.stored
    start = rows if match[2] == "up" else 0
    return Source(f"{match[1]}shared_mlp.input_linear.weight", (2 * rows, cols)).rows(start, start + rows)


def _inputs_first(layer: str, both: str, down: str, shapes: Callable[[str], tuple[int, ...]] | None) -> bool:
    """Whether stacks are (experts, inputs, outputs), as files of Qwen3-VL-MoE are.

    Of a layer's two stacks one at least has other sizes then: the usual ones are (n, 2 size, width), (n, width, size).
    """
    if not shapes:
        return False
    gates, downs = shapes(layer + both), shapes(layer + down)
    return len(gates) == len(downs) == 3 and gates[1] == downs[2] and gates[2] == 2 * downs[1]


def _turned(source: Source, part: re.Match[str], packed: Container[str]) -> Source:
    """Every second row of a tensor that has gates and ups in turns, or all of one."""
    (n, rows, *columns), both = source.stored, part[2] != "down"
    rows *= 1 + both
    name = f"{part[1]}mlp.experts.{'gate_up_proj' if both else 'down_proj'}{'_bias' if part[3] == 'bias' else ''}"
    if name in packed or not columns:
        whole = Source(name, (n, rows, *columns), each=True)
    else:
        whole = Source(name, (n, *columns, rows), each=True).transposed()
    return whole.every(2, int(part[2] == "up")) if both else whole
