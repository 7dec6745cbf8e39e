"""Placement of every byte: no two living tensors share memory, regions have the sum of their parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import weights_file_bytes
from edgeinfer.converters import SHAPES
from edgeinfer.graph import (
    Attention,
    Graph,
    Op,
    RowOp,
    Tensor,
    TypeOf,
    build_graph,
    check,
    insert_after,
    read_config,
    requested_types,
)
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import MemoryPlan, Planner, Request, place_activations
from edgeinfer.quant import KV_TYPES
from tests.helpers import golden_cases
from tests.helpers.sessions import TINY, session, write_model

STORAGE = [("f32", 32), ("f16", 32), ("int8", 64), ("q4", 32), ("q4", 128)]
CONFIGS = {name: read_config(golden_cases.config_of(name)) for name in golden_cases.names()} | {
    "one layer": replace(TINY, num_hidden_layers=1), "wide": replace(TINY, hidden_size=144, intermediate_size=30)}
STORES: dict[str, TypeOf] = {
    **{f"{weights}g{group_size}": requested_types(weights, group_size) for weights, group_size in STORAGE},
    "f16 head q4": requested_types("f16", 32, embedding="q4", head="q4"),
    "q4 head f32": requested_types("q4", 64, embedding="f32", head="f32"),
}
"""Kinds of storage; mixed ones have quantisations of their own in between."""
MIXED = [(name, kind) for i, name in enumerate(CONFIGS) for kind in list(STORES)[i % 5 :: 5]]
"""Every model in one or two of them."""


@functools.lru_cache(maxsize=len(STORES))
def graph_of(name: str, kind: str) -> Graph:
    return build_graph(CONFIGS[name], STORES[kind])


def make_plan(graph: Graph, request: Request, weight_bytes: int) -> MemoryPlan:
    return Planner(graph, weight_bytes).plan(request)


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize("name", CONFIGS)
def test_no_tensor_is_overwritten_before_its_last_reader(name: str) -> None:
    """In all kinds of storage, for numbers of tokens around those of a chunk."""
    for kind in STORES:
        for n_tokens, n_outputs in ((1, 1), (7, 3), (64, 64)):
            no_tensor_is_overwritten(graph_of(name, kind), n_tokens, n_outputs)


def no_tensor_is_overwritten(graph: Graph, n_tokens: int, n_outputs: int) -> None:
    """Run the graph on memory that remembers who wrote each 64 bytes, rows and slack included."""
    placed, arena = place_activations(graph, n_tokens, n_outputs)
    owner = np.full(arena // 64, "", dtype="U32")
    buffers = graph.buffers()

    def units(tensor: Tensor) -> slice:
        at = placed[tensor.name]
        rows = n_outputs if tensor.rows == "outputs" else n_tokens
        assert at.offset % 64 == 0 and at.stride % 64 == 0
        assert at.stride >= (4 * tensor.width if tensor.dtype == "f32" else tensor.width)
        assert rows * at.stride + 64 <= at.nbytes and at.offset + at.nbytes <= arena
        return slice(at.offset // 64, (at.offset + at.nbytes) // 64)

    for op in graph.ops:
        inputs = [tensor for tensor in op.inputs  # logits have their own region
                  if buffers[tensor.name] != buffers[graph.logits.name]]
        for tensor in inputs:
            home = buffers[tensor.name]
            assert (owner[units(tensor)] == home).all(), f"{op.label} reads {tensor.name}, which is overwritten"
        if buffers[op.out.name] == buffers[graph.logits.name]:
            continue
        spare = owner.copy()
        spare[units(op.out)] = buffers[op.out.name]
        for one in inputs:  # written chunk by chunk while the inputs are still read
            assert (spare[units(one)] == buffers[one.name]).all(), f"{op.label} writes {op.out.name} over its input"
        owner = spare


def test_buffers_are_shared_by_layers() -> None:
    deep = build_graph(replace(TINY, num_hidden_layers=30), requested_types("q4"))
    flat = build_graph(replace(TINY, num_hidden_layers=2), requested_types("q4"))
    assert place_activations(deep, 64, 1)[1] == place_activations(flat, 64, 1)[1]
    placed, arena = place_activations(deep, 64, 1)
    assert arena < sum(p.nbytes for p in placed.values()) / 20


@pytest.mark.slow(keep=60)
@pytest.mark.parametrize(("name", "kind"), MIXED)
def test_regions_add_up(name: str, kind: str) -> None:
    for kv in KV_TYPES:
        regions_add_up(graph_of(name, kind), kv)


def regions_add_up(graph: Graph, kv: str) -> None:
    c = graph.config
    filed = sum(graph.types[w.name].nbytes(w.shape) for w in graph.weights if w.kind == "rows")
    plan = make_plan(graph, Request(300, kv, 3, 17, 2, 4), 12345 + filed)
    assert plan.total_bytes == sum(region.nbytes for region in plan.regions)
    assert all(region.bytes == region.nbytes > 0 and region.reason for region in plan.regions)
    assert len({region.name for region in plan.regions}) == len(plan.regions)
    assert plan.region("weights").nbytes == 12345
    assert plan.filed_bytes == filed and bool(filed) == any(region.name == "rows" for region in plan.regions)
    attend = {op.layer for op in graph.ops if isinstance(op, Attention)}  # others have a recurrent layer or an FFN
    assert plan.kv_layers.keys() == {c.kv_layer(i) for i in range(c.num_hidden_layers) if i in attend}
    assert all(layer.nbytes == plan.kv_pool(i) * layer.stride for i, layer in plan.kv_layers.items())
    layers = list(plan.kv_layers.values())
    assert max((layer.stride for layer in layers), default=0) == plan.kv_block_bytes
    ends = [layer.offset + layer.nbytes for layer in layers]
    assert all(end <= layer.offset for end, layer in zip(ends, layers[1:], strict=False))
    assert max(ends, default=0) <= plan.region("kv").nbytes
    assert plan.kv_blocks >= 4 * -(-300 // 16)


@pytest.mark.parametrize(("kv", "element_bytes", "scale_bytes"), [("int8", 1, 2), ("f16", 2, 0), ("f32", 4, 0)])
def test_llama_2_7b(kv: str, element_bytes: int, scale_bytes: int) -> None:
    """K and V of s tokens in l layers of width d: 2 s d l elements, for int8 with a scale per token and head each."""
    config = SHAPES["llama-2-7b"]
    s, d, n_layers, heads = 4096, 4096, 32, 32
    graph = build_graph(config, requested_types("q4"))
    plan = make_plan(graph, Request(s, kv, 8, 256, 1, 1), 4_000_000_000)
    expected = 2 * s * d * n_layers * element_bytes + 2 * s * heads * n_layers * scale_bytes
    assert expected <= plan.region("kv").nbytes <= expected + 64
    assert plan.region("logits").nbytes == pytest.approx(4 * 32000, abs=64)
    assert plan.region("constants").nbytes == pytest.approx(s * 2 * 4 * 64, abs=64)
    rows = 256 * (4 * (4096 + 3 * 4096 + 11008))  # x, qkv and f, the largest that live together, at the very least
    assert 0.3 * rows < plan.region("activations").nbytes < 1.7 * rows
    assert plan.total_bytes < 4e9 + expected + 0.3e9


def test_half_the_context_is_half_the_kv() -> None:
    graph = graph_of("qwen3", "q4g32")
    plans = [make_plan(graph, Request(ctx, "int8", 1, 16, 1, 1), 0) for ctx in (4096, 2048)]
    assert plans[0].kv_blocks == 2 * plans[1].kv_blocks


@pytest.mark.parametrize("options", [{}, {"kv": "f32", "max_sequences": 5, "ctx": 90, "outputs": 9, "threads": 3}])
def test_a_session_takes_what_was_planned(tmp_path: Path, options: dict[str, object]) -> None:
    with session(write_model(tmp_path), **options) as opened:
        for name, memory in opened.executor.regions.items():
            assert memory.size == opened.plan.region(name).nbytes, name
        tables = [value for value in vars(opened._tables).values() if isinstance(value, np.ndarray)]
        taken = sum(table.nbytes for table in tables) + opened.program.words.nbytes + abi.CTX_BYTES
        assert taken <= opened.plan.region("tables").nbytes
        for instruction in opened.program.instructions:
            for region, offset in instruction.operands:
                assert 0 <= offset < opened.executor.regions[region].size


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=50)
@pytest.mark.parametrize(("name", "kind"), MIXED)
def test_every_tensor_and_weight_has_an_allocation_in_its_region(name: str, kind: str) -> None:
    graph = graph_of(name, kind)
    nbytes = weights_file_bytes(graph)
    plan = make_plan(graph, Request(300, "int8", 2, 17, 2, 1), nbytes)
    assert set(plan.allocations) == {op.out.name for op in graph.ops} | {w.name for w in graph.weights}
    for place in plan.allocations.values():
        whole = nbytes if place.region == "weights" else plan.region(place.region).nbytes
        assert 0 <= place.offset <= place.offset + place.nbytes <= whole
    assert {plan.allocations[w.name].region for w in graph.weights} == {"weights"}


def test_weights_in_memory_of_the_process() -> None:
    graph, rest = graph_of("qwen3", "q4g32"), {"python", "tables"}
    nbytes = weights_file_bytes(graph)
    mapped, resident = (make_plan(graph, Request(64, "int8", 1, 8, 1, 1, residency=residency), nbytes)
                        for residency in ((), (("*", "resident"),)))
    names = [region.name for region in resident.regions]
    assert names[0] == "resident" and "weights" not in names and resident.region("resident").kind == "private"
    assert resident.mapped_bytes == 0 and resident.reclaimable_bytes == 0
    assert resident.total_bytes == pytest.approx(mapped.total_bytes, abs=70_000)  # without the gaps between tensors
    ends = sorted((p.offset, p.offset + p.nbytes) for p in resident.allocations.values() if p.region == "resident")
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] <= resident.region("resident").nbytes and rest <= set(names)


def test_streamed_layers_take_turns_in_two_buffers() -> None:
    graph = build_graph(replace(TINY, num_hidden_layers=5), requested_types("q4"))
    layers = {f"layers.{i}.{part}" for i in range(5) for part in ("gate_up", "down")}
    residency = tuple((name, "streamed") for name in sorted(layers))
    plan = make_plan(graph, Request(64, "int8", 1, 8, 1, 1, residency=residency), 1 << 20)
    assert {name for name, place in plan.allocations.items() if place.region == "streamed"} == layers
    buffer = (plan.region("streamed").nbytes - 64) // 2
    for i in range(5):
        up, down = plan.allocations[f"layers.{i}.gate_up"], plan.allocations[f"layers.{i}.down"]
        assert i % 2 * buffer <= up.offset < up.offset + up.nbytes <= down.offset < down.offset + down.nbytes
        assert down.offset + down.nbytes <= (i % 2 + 1) * buffer
    assert plan.allocations["layers.0.qkv"].region == "weights"  # the rest stays where it is


@dataclass(frozen=True, kw_only=True)
class Recurrent(RowOp):
    """Keeps 100 bytes of a sequence."""

    KERNELS = ()
    x: Tensor

    @property
    def state_bytes(self) -> int:
        return 100


def test_recurrent_state_is_a_region_of_its_own() -> None:
    graph = graph_of("qwen3", "q4g32")
    assert "state" not in [region.name for region in make_plan(graph, Request(64, "int8", 1, 8, 1, 1), 0).regions]

    def make(op: Op) -> Op:
        return Recurrent(out=replace(op.out, name=f"state.{op.layer}"), x=op.out, layer=op.layer)

    graph = check(insert_after(graph, lambda op: isinstance(op, Attention), make))
    plan = make_plan(graph, Request(64, "int8", 1, 8, 1, sequences=3), 0)
    state = plan.state
    assert state and [*state.offsets.values()] == [0, 128]  # of 100 bytes each, at a line's beginning
    assert (state.slots, state.slot_bytes) == (3 + 1 + 4, 4096) and plan.region("state").nbytes == 8 * 4096 + 64


def test_a_draft_model_brings_regions_of_its_own() -> None:
    request = Request(64, "int8", 2, 8, 2, 1)
    target, draft = (make_plan(graph_of(name, "q4g32"), request, nbytes) for name, nbytes in
                     (("qwen3", 9000), ("wide", 5000)))
    both = target.with_draft(draft)
    names = [region.name for region in both.regions]
    assert names[:8] == [region.name for region in target.regions] and len(set(names)) == len(names)
    assert both.region("draft_weights").nbytes == 5000 and "draft_python" not in names
    assert both.total_bytes == target.total_bytes + draft.total_bytes - draft.region("python").nbytes
