"""Names of the tensors of a mixture of experts in checkpoints: by expert, stacked, or gate and up fused.

Architectures use one set of names, with a pair of braces for an expert's number; this module maps them to the names of
a checkpoint and makes the items of a stack sources of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import replace

from edgeinfer.graph import ExpertModules, Graph, Source, Weight, family_of

_PART = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.\{\}\.(gate|up|down)_proj\.(weight|bias)")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.(weight|bias)")
_CHOICE = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.e_score_correction_bias")
_SHARED = re.compile(r"(model\.layers\.\d+\.)mlp\.(?:shared_experts\.)?(gate|up|down)_proj\.weight")
_TOGETHER = "experts.gate_up_proj", "experts.down_proj"
"""Tensors of all experts of a block, as transformers 5 itself writes them: gate rows above up rows."""
_STACKED = "switch_mlp"
"""Module of all experts of a block whose three matrices are a tensor each: MLX's."""
_BLOCK, _ROUTER_HERE = "mlp", "mlp.gate"


def with_experts(graph: Graph, names: Container[str], packed: Container[str] = (),
                 shapes: Callable[[str], tuple[int, ...]] | None = None) -> Graph:
    """Return the graph with the sources of its experts as a checkpoint with these tensors has them.

    A weight in no known form keeps its name, and will be reported missing. Those of `packed` are quantised.
    `shapes` tells the shape of a stored tensor.
    """
    modules = family_of(graph.config.model_type).experts

    def rename(source: Source) -> Source:
        part = _PART.fullmatch(source.name) if modules.in_turns else None
        return _turned(source, part, packed) if part else _named(source, names, shapes, modules)

    return replace(graph, weights=tuple(with_stacks(weight, rename) for weight in graph.weights))


def with_stacks(weight: Weight, rename: Callable[[Source], Source]) -> Weight:
    """Return a weight with renamed sources, stacks among them as their items in stored order."""
    sources = [rename(source) for source in weight.sources]
    if any(source.each for source in sources):
        sources = [source for items in zip(*(source.items for source in sources), strict=True) for source in items]
    return replace(weight, sources=tuple(sources))


def _named(source: Source, names: Container[str], shapes: Callable[[str], tuple[int, ...]] | None,
           modules: ExpertModules) -> Source:
    if match := _ROUTER.fullmatch(source.name):
        routers = dict.fromkeys((_ROUTER_HERE, modules.router, modules.router.removesuffix(".layer")))
        found = (f"{match[1]}{name}.{match[2]}" for name in routers)
        return replace(source, name=next((name for name in found if name in names), source.name))
    if (match := _CHOICE.fullmatch(source.name)) and modules.choice_bias:
        return replace(source, name=match[1] + modules.choice_bias)
    if not (match := _PART.fullmatch(source.name)):
        return _shared(source, names, modules)
    layer, part = match[1], match[2]
    own = dict(zip(("gate", "up", "down"), modules.parts, strict=True))[part]
    if source.name.format(0) not in names and (name := f"{layer}{modules.block}.experts.{{}}.{own}.weight"
                                               ).format(0) in names:
        return replace(source, name=name)
    blocks = tuple(dict.fromkeys((_BLOCK, modules.block)))
    for block in blocks:
        if (name := f"{layer}{block}.{_STACKED}.{part}_proj.{match[3]}") in names:
            return replace(source, name=name)
    pairs = [(f"{block}.{_TOGETHER[0]}", f"{block}.{_TOGETHER[1]}") for block in blocks]
    for both, down in (*pairs, *([modules.together] if modules.together else [])):
        if layer + both in names and part != "down":
            n, rows, cols = source.stored
            start = rows if part == "up" else 0
            whole = Source(layer + both, (n, 2 * rows, cols), each=True)
            if _inputs_first(layer, both, down, shapes):
                whole = Source(layer + both, (n, cols, 2 * rows), each=True).transposed()
            return whole.rows(start, start + rows)
        if layer + down in names and part == "down":
            n, rows, cols = source.stored
            if layer + both in names and _inputs_first(layer, both, down, shapes):
                return Source(layer + down, (n, cols, rows), each=True).transposed()
            return replace(source, name=layer + down)
    alone = (f"{layer}{block}.experts.{own}" for block in blocks)  # of experts without a gate
    return next((replace(source, name=name) for name in alone if name in names), source)


def _shared(source: Source, names: Container[str], modules: ExpertModules) -> Source:
    """An FFN beside the experts that has gate rows above up rows."""
    match = _SHARED.fullmatch(source.name) if modules.shared else None
    if match and not modules.plain and ".shared_experts." not in source.name:
        return source
    if not match or not modules.shared or (both := match[1] + modules.shared[0]) not in names:
        return source
    if match[2] == "down":
        return replace(source, name=match[1] + modules.shared[1])
    rows, cols = source.stored
    start = rows if match[2] == "up" else 0
    return Source(both, (2 * rows, cols)).rows(start, start + rows)


def _inputs_first(layer: str, both: str, down: str, shapes: Callable[[str], tuple[int, ...]] | None) -> bool:
    """Return whether stacks are (experts, inputs, outputs), as files of Qwen3-VL-MoE are.

    Of a layer's two stacks one at least has other sizes then: the usual ones are (n, 2 size, width), (n, width, size).
    """
    if not shapes:
        return False
    gates, downs = shapes(layer + both), shapes(layer + down)
    return len(gates) == len(downs) == 3 and gates[1] == downs[2] and gates[2] == 2 * downs[1]


def _turned(source: Source, part: re.Match[str], packed: Container[str]) -> Source:
    """Every second row of a tensor that has gates and ups alternately, or all of one."""
    (n, rows, *columns), both = source.stored, part[2] != "down"
    rows *= 1 + both
    name = f"{part[1]}mlp.experts.{'gate_up_proj' if both else 'down_proj'}{'_bias' if part[3] == 'bias' else ''}"
    if name in packed or not columns:
        whole = Source(name, (n, rows, *columns), each=True)
    else:
        whole = Source(name, (n, *columns, rows), each=True).transposed()
    return whole.every(2, int(part[2] == "up")) if both else whole
