"""Brings into memory what a run computes with: weights, predictor and screen, rotary tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import APPROXIMATING, Bundle, part_places, read_screen
from edgeinfer.graph import Graph, ModelConfig, Weight, fill_rope_tables
from edgeinfer.memory_planner import MemoryPlan, Placement
from edgeinfer.sizes import round_up

from .memory import Progress, copy_in, lock, read_in
from .planning import offsets_of

Regions = dict[str, NDArray[np.uint8]]
"""Memory by the names of abi.REGIONS."""


def load(bundle: Bundle, graph: Graph, plan: MemoryPlan, regions: Regions, mlock: bool,
         loading: Progress | None) -> None:
    """Bring the weights to where the plan has them: mapped from their file, or copied from it."""
    parts, offsets = [], offsets_of(bundle)
    for weight in graph.weights:
        place = plan.places[weight.name]
        if place.region == "resident" and weight.kind != "predictor":
            parts += _sources(regions["resident"], place, offsets[weight.name],
                              graph.types[weight.name].nbytes(weight.shape))
    copy_in(parts, bundle.weights_path, loading)
    load_parts(bundle, graph.weights, plan, regions)
    if any(region.name == "weights" for region in plan.regions):
        regions["weights"] = bundle.weights
        read_in(bundle.weights, bundle.weights_path, loading)
    for home in ("weights", "resident") if mlock else ():
        if home in regions:
            lock(regions[home])


def load_parts(bundle: Bundle, wanted: Sequence[Weight], plan: MemoryPlan, regions: Regions) -> None:
    """Copy those weights of predictor and screen, which are files of their own, to their places."""
    for part in APPROXIMATING:
        weights = [one for one in wanted if one.kind == "predictor" and f"{part}." in one.name]
        if not weights:
            continue
        if part == "screen":
            read_screen(bundle)  # which refuses what is not this model's
        path, places = part_places(bundle, part)
        parts = []
        for weight in weights:
            offset, nbytes = places[weight.name.replace(f"{part}.", "")]
            parts.append((offset, regions["resident"][plan.places[weight.name].offset :][:nbytes]))
        copy_in(parts, path)  # pages of a mapping would count as the process's memory beside their copy


def _sources(region: NDArray[np.uint8], place: Placement, offset: int,
             nbytes: int) -> list[tuple[int, NDArray[np.uint8]]]:
    """Where the parts of a weight lie in the file, and where they go: of an FFN perhaps its first neurons only."""
    if place.nbytes == nbytes:
        return [(offset, region[place.offset :][:nbytes])]
    own, third = region[place.offset :][: place.nbytes], place.nbytes // 3
    return [(offset, own[:third]), (offset + nbytes // 3, own[third:])]


def fill_constants(model: ModelConfig, plan: MemoryPlan, region: NDArray[np.uint8]) -> None:
    """Cosines and sines per position of each rotation, each padded to vectors of 16."""
    half = model.rope_dim // 2
    nbytes = plan.request.ctx * plan.rope_row_bytes
    for i, rope in enumerate(model.rotations):
        table = region[i * nbytes : (i + 1) * nbytes].view(np.float32).reshape(-1, 2, round_up(half, 16))
        fill_rope_tables(rope, model.rope_dim, table[:, 0, :half], table[:, 1, :half])
