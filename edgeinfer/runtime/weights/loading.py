"""Loads the data that a run computes with: weights, predictor and screen, rotary tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edgeinfer.bundle import APPROXIMATING, Bundle
from edgeinfer.graph import Graph, ModelConfig, Weight, alibi_slopes, fill_rope_tables
from edgeinfer.memory_planner import PAGE_BYTES, MemoryPlan, Placement, extents, mapped_spans

from ...base.progress import OnStageProgress
from ..memory import copy_in, lock, read_in, read_seldom
from ..planning import offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Regions: TypeAlias = "dict[str, NDArray[np.uint8]]"
"""Memory by the names of abi.REGIONS."""
COPIED = ("resident", "streamed", "cold", "experts")
"""Regions of the process that hold weights, or slots and buffers for those that are read from storage."""


def load(bundle: Bundle, graph: Graph, plan: MemoryPlan, regions: Regions, mlock: bool,
         loading: OnStageProgress | None) -> None:
    """Bring the weights to where the plan has them: mapped from their file, or copied from it."""
    parts, offsets = [], offsets_of(bundle)
    own = {weight.name: weight for weight in graph.weights
           if plan.allocations[weight.name].region == "resident" and weight.kind != "predictor"}
    copied = {name: graph.types[name].nbytes(weight.shape) for name, weight in own.items()}
    for name, nbytes in extents(plan.allocations, copied).items():
        parts += _sources(regions["resident"], plan.allocations[name], own[name], offsets[name], copied[name], nbytes)
    copy_in(parts, bundle.weights_path, loading)
    load_parts(bundle, graph.weights, plan, regions)
    spans = _read_at_once(graph, plan, bundle.weights_bytes)
    if spans or plan.filed:
        regions["weights"] = bundle.weights
        for name in plan.filed:
            read_seldom(bundle.weights[plan.allocations[name].offset :][: plan.allocations[name].nbytes])
        read_in(bundle.weights, bundle.weights_path, loading, spans)
    if mlock:
        for start, stop in spans:
            lock(bundle.weights[start:stop])
        for name in COPIED:
            if name in regions:
                lock(regions[name])


def _read_at_once(graph: Graph, plan: MemoryPlan, nbytes: int) -> list[tuple[int, int]]:
    """Parts of the mapped file that every token needs, from whole pages on: all but tables that stay there."""
    if not any(region.name == "weights" for region in plan.regions):
        return []
    if graph.layers:
        return mapped_spans(plan.allocations.values(), nbytes)
    spans, start = [], 0
    for allocation in sorted((plan.allocations[name] for name in plan.filed), key=lambda allocation: allocation.offset):
        spans.append((start, allocation.offset))
        start = (allocation.offset + allocation.nbytes) // PAGE_BYTES * PAGE_BYTES
    return [(first, end) for first, end in (*spans, (start, nbytes)) if first < end]


def load_parts(bundle: Bundle, wanted: Sequence[Weight], plan: MemoryPlan, regions: Regions) -> None:
    """Copy those weights of predictor and screen, which are files of their own, to their allocations."""
    for part in APPROXIMATING:
        weights = [one for one in wanted if one.kind == "predictor" and f"{part}." in one.name]
        if not weights:
            continue
        from edgeinfer.bundle import part_extents, read_screen

        if part == "screen":
            read_screen(bundle)  # which refuses one of another model
        path, found = part_extents(bundle, part)
        parts = []
        for weight in weights:
            offset, nbytes = found[weight.name.replace(f"{part}.", "")]
            parts.append((offset, regions["resident"][plan.allocations[weight.name].offset :][:nbytes]))
        copy_in(parts, path)  # pages of a mapping would count as the process's memory beside their copy


def _sources(region: NDArray[np.uint8], allocation: Placement, weight: Weight, offset: int, nbytes: int,
             together: int) -> list[tuple[int, NDArray[np.uint8]]]:
    """Return (offset in the file, destination) of each piece of a weight; of an FFN perhaps its first neurons only.

    The weight and those that share its allocation have `together` bytes.
    """
    if allocation.nbytes == nbytes:
        return [(offset, region[allocation.offset :][:together])]
    own, parts = region[allocation.offset :][: allocation.nbytes], weight.shape[1]
    gates = allocation.nbytes // parts
    return [(offset, own[:gates]), (offset + nbytes // parts, own[gates:])]


def fill_constants(model: ModelConfig, plan: MemoryPlan, region: NDArray[np.uint8]) -> None:
    """Cosines and sines per position of each rotation, each padded to vectors of 16; after them ALiBi's slopes."""
    nbytes = model.table_rows(plan.request.ctx) * plan.rope_row_bytes
    for i, rope in enumerate(model.rotations):
        half = model.turned(rope) // 2
        table = region[i * nbytes : (i + 1) * nbytes].view(np.float32).reshape(-1, 2, plan.rope_row_bytes // 8)
        fill_rope_tables(rope, 2 * half, table[:, 0, :half], table[:, 1, :half])
    if model.alibi:
        slopes = alibi_slopes(model.alibi, model.num_attention_heads)
        region[len(model.rotations) * nbytes :][: slopes.nbytes].view(np.float32)[:] = slopes
