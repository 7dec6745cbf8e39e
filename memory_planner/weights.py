"""Placement of weights: in the mapped file, in memory of the process, in buffers of a stream, or in slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.units import format_size, round_up
from edgeinfer.graph import Graph
from edgeinfer.kernels import abi

from .cold import ColdPlan, masked
from .expert_slots import PAGE_BYTES, READ_BYTES, ExpertsPlan
from .lifetimes import Placement
from .plan import LOCKED, MAPPED, STREAM_BUFFERS, Region, Request
from .reasons import types_of
from .shared_allocations import settle

MAPPED_BYTES = 1 << 16
"""Linux maps the pages around one that is touched, up to the next multiples of it (fault_around_bytes)."""


@dataclass(frozen=True)
class PlacedWeights:
    """Placed weights."""

    allocations: dict[str, Placement]
    parts: tuple[tuple[str, ...], ...]
    """Streamed ones."""
    resident_bytes: int
    buffer_bytes: int
    """Bytes of one part of the streamed weights."""
    cold: ColdPlan | None
    experts: ExpertsPlan | None
    filed: tuple[str, ...]
    """Tables that stay in their file; a token reads one row."""

    @property
    def filed_bytes(self) -> int:
        """Bytes of these tables."""
        return sum(self.allocations[name].nbytes for name in self.filed)

    @property
    def table_bytes(self) -> int:
        """Bytes of the instructions and tables that streaming needs."""
        pieces = (2 + self.allocations[name].nbytes // READ_BYTES for part in self.parts for name in part)
        streamed = len(self.parts) * (abi.INSTRUCTION_BYTES + abi.PART_BYTES) + abi.PIECE_BYTES * sum(pieces)
        instructions = (2 + abi.COLD_PARTS) * abi.INSTRUCTION_BYTES
        cold = self.cold.queue_bytes + instructions * len(self.cold.hot) if self.cold else 0
        return streamed + cold + (self.experts.queue_bytes if self.experts else 0)


def place_weights(graph: Graph, offsets: Mapping[str, int], whole: Mapping[str, int], request: Request
                  ) -> PlacedWeights:
    """Place each weight, of which the file has them at `offsets`; `whole` are their `allocation_bytes`."""
    residency = dict(request.residency)
    allocations: dict[str, Placement] = {}
    resident, cold = 0, ColdPlan.of(graph, request.hot, request.slots) if request.hot else None
    hot = {ffn.weight.name: cold.hot[ffn.layer] for ffn in masked(graph)} if cold else {}
    experts = ExpertsPlan.of(graph, offsets, request.expert_slots) if request.expert_slots else None
    for weight in graph.weights:
        name, nbytes = weight.name, graph.stored_bytes[weight.name]
        if cold and name in hot:
            nbytes = hot[name] * cold.neuron_bytes
        kind = "rows" if weight.kind == "rows" else "*"
        home = residency.get(name, residency.get(kind, "weights")) if weight.kind != "predictor" else "resident"
        if experts and weight.kind == "experts":
            home = "experts"
        allocations[name] = Placement(home, offsets[name] if home == "weights" else resident, nbytes)
        if home == "resident":
            resident = round_up(resident + (nbytes if name in hot else whole[name]), 64)
    parts, buffer = _place_streamed(graph, offsets, allocations, whole) if "streamed" in residency.values() else ((), 0)
    settle(graph, allocations)
    filed = tuple(w.name for w in graph.weights if w.kind == "rows" and allocations[w.name].region == "weights")
    return PlacedWeights(allocations, parts, resident, buffer, cold, experts, filed)


def _place_streamed(graph: Graph, offsets: Mapping[str, int],
                    allocations: dict[str, Placement], whole: Mapping[str, int]) -> tuple[tuple[tuple[str, ...], ...],
                                                                                          int]:
    """Place streamed weights in the buffers in which layers take turns; gives the parts and the bytes of a buffer."""
    layers = {weight.name: op.layer for op in graph.ops for weight in op.weights}
    parts: dict[int | None, list[str]] = {}
    for name, layer in layers.items():
        if allocations[name].region == "streamed":
            parts.setdefault(layer, []).append(name)
    begins, buffer = {name: allocations[name].offset for names in parts.values() for name in names}, 0
    for names in parts.values():  # as far after the beginning of a page as in the file
        end = 0
        for name in filter(whole.get, names):
            begins[name] = end + offsets[name] % PAGE_BYTES
            end = round_up(begins[name] + whole[name], PAGE_BYTES)
        buffer = max(buffer, end)
    for number, names in enumerate(parts.values()):
        for name in names:
            at = begins[name] + number % STREAM_BUFFERS * buffer
            allocations[name] = replace(allocations[name], offset=at)
    return tuple(map(tuple, parts.values())), buffer


def weight_regions(graph: Graph, file_bytes: int, request: Request, weights: PlacedWeights) -> Iterator[Region]:
    """Regions in which weights are; `file_bytes` are the length of weights.bin."""
    def stored(home: str) -> str:
        return types_of(graph, {name for name, allocation in weights.allocations.items() if allocation.region == home})

    if any(allocation.region == "weights" and name not in weights.filed for name,
           allocation in weights.allocations.items()):
        spans = [(0, file_bytes - weights.filed_bytes)]
        if graph.layers:
            spans = mapped_spans(weights.allocations.values(), file_bytes)
        yield Region("weights", sum(stop - start for start, stop in spans), stored("weights"),
                     LOCKED if request.mlock else MAPPED)
    if weights.filed:
        yield _rows(graph, request, weights)
    if weights.resident_bytes:
        yield Region("resident", weights.resident_bytes + 64,
                     f"weights in memory of the process: {stored('resident')}")
    if weights.parts:
        yield Region("streamed", STREAM_BUFFERS * weights.buffer_bytes + 64,
                     f"{STREAM_BUFFERS} buffers of {weights.buffer_bytes} bytes; "
                     f"{len(weights.parts)} layers take turns")
    if cold := weights.cold:
        yield Region("cold", cold.nbytes, f"{cold.slots} slots of {cold.cluster_bytes} bytes for neurons that are "
                                          "read when they are wanted")
    if experts := weights.experts:
        yield Region("experts", experts.nbytes, f"{experts.slots} slots of {experts.slot_bytes} bytes for "
                                                f"{experts.total} experts that are read when they are wanted")


def mapped_spans(placements: Iterable[Placement], file_bytes: int) -> list[tuple[int, int]]:
    """Return the parts of the mapped file that come into memory with these weights, as (first byte, byte after the
    last)."""
    mapped = sorted((one.offset, one.offset + one.nbytes) for one in placements if one.region == "weights")
    spans: list[tuple[int, int]] = []
    for start, stop in mapped:
        start, stop = start // MAPPED_BYTES * MAPPED_BYTES, min(round_up(stop, MAPPED_BYTES), file_bytes)
        if spans and start <= spans[-1][1]:
            start, stop = spans[-1][0], max(stop, spans.pop()[1])
        spans.append((start, stop))
    return spans


def _rows(graph: Graph, request: Request, weights: PlacedWeights) -> Region:
    """Pages of tables that stay in their file: as many as the contexts' tokens have rows on."""
    rows = [table.nbytes for table in graph.on_demand("rows") if table.weight.name in weights.filed]
    tokens = request.ctx * request.sequences
    most = tokens * sum(round_up(row, PAGE_BYTES) + PAGE_BYTES for row in rows)
    return Region("rows", min(weights.filed_bytes, most), f"{tokens} rows x {sum(rows)} B, "
                  f"{format_size(weights.filed_bytes)} stay in the file", MAPPED)
