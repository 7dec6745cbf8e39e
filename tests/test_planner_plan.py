"""Where every byte lies: no two living tensors share memory, regions are what their parts need, sizes are as said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.converters import SHAPES
from edgeinfer.graph import Graph, Op, Tensor, build_graph, read_config, requested_types
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import Request, make_plan, place_activations
from tests import golden_cases
from tests.sessions import TINY, session, write_model

STORAGE = [("f32", 32), ("f16", 32), ("int8", 64), ("q4", 32), ("q4", 128)]


def graphs() -> Iterator[tuple[str, Graph]]:
    """All architectures in all kinds of storage; mixed ones have quantisations of their own in between."""
    configs = {name: read_config(golden_cases.load(name).config) for name in golden_cases.names()}
    configs["one layer"] = replace(TINY, num_hidden_layers=1)
    configs["wide"] = replace(TINY, hidden_size=144, intermediate_size=30)
    for name, config in configs.items():
        for weights, group_size in STORAGE:
            yield f"{name} {weights}g{group_size}", build_graph(config, requested_types(weights, group_size))
        yield f"{name} f16 head q4", build_graph(config, requested_types("f16", 32, embedding="q4", head="q4"))
        yield f"{name} q4 head f32", build_graph(config, requested_types("q4", 64, embedding="f32", head="f32"))


GRAPHS = dict(graphs())


@pytest.mark.parametrize(("n_tokens", "n_outputs"), [(1, 1), (7, 3), (64, 64)])
@pytest.mark.parametrize("name", GRAPHS)
def test_no_tensor_is_overwritten_before_its_last_reader(name: str, n_tokens: int, n_outputs: int) -> None:
    """Run the graph on memory that remembers who wrote each 64 bytes, rows and slack included."""
    graph = GRAPHS[name]
    placed, arena = place_activations(graph, n_tokens, n_outputs)
    owner = np.full(arena // 64, "", dtype="U32")
    made_by: dict[str, Op] = {}

    def units(tensor: Tensor) -> slice:
        at = placed[tensor.name]
        rows = n_outputs if tensor.rows == "outputs" else n_tokens
        assert at.offset % 64 == 0 and at.stride % 64 == 0
        assert at.stride >= (4 * tensor.width if tensor.dtype == "f32" else tensor.width)
        assert rows * at.stride + 64 <= at.nbytes and at.offset + at.nbytes <= arena
        return slice(at.offset // 64, (at.offset + at.nbytes) // 64)

    for op in graph.ops:
        read = list(op.inputs)
        for tensor in op.inputs:  # products of one token quantise their input themselves
            if tensor.dtype == "q8" and tensor.name in made_by:
                read += made_by[tensor.name].inputs
        for tensor in read:
            assert (owner[units(tensor)] == tensor.name).all(), f"{op.kind} reads {tensor.name}, which is overwritten"
        for tensor in op.outputs:
            made_by[tensor.name] = op
            if tensor.name == graph.logits.name:
                continue
            spare = owner.copy()
            spare[units(tensor)] = tensor.name
            for one in read:  # written chunk by chunk while the inputs are still read
                assert (spare[units(one)] == one.name).all(), f"{op.kind} writes {tensor.name} over its input"
            owner = spare


def test_buffers_are_shared_by_layers() -> None:
    deep = build_graph(replace(TINY, num_hidden_layers=30), requested_types("q4"))
    flat = build_graph(replace(TINY, num_hidden_layers=2), requested_types("q4"))
    assert place_activations(deep, 64, 1)[1] == place_activations(flat, 64, 1)[1]
    placed, arena = place_activations(deep, 64, 1)
    assert arena < sum(p.nbytes for p in placed.values()) / 20


@pytest.mark.parametrize("name", list(GRAPHS)[::5])
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_regions_add_up(name: str, kv: str) -> None:
    plan = make_plan(GRAPHS[name], Request(300, kv, 3, 17, 2, 4), 12345)
    assert plan.total_bytes == sum(region.nbytes for region in plan.regions)
    assert all(region.bytes == region.nbytes > 0 and region.reason for region in plan.regions)
    assert len({region.name for region in plan.regions}) == len(plan.regions)
    assert plan.region("weights").nbytes == 12345
    layers = GRAPHS[name].config.num_hidden_layers
    ends = [plan.layer_offset(i) + plan.kv_blocks * plan.kv_block_bytes for i in range(layers)]
    assert all(end <= plan.layer_offset(i + 1) for i, end in enumerate(ends))
    assert ends[-1] <= plan.region("kv").nbytes
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
    graph = GRAPHS["qwen3 q4g32"]
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
        for record in opened.program.records:
            for region, offset in record.places:
                assert 0 <= offset < opened.executor.regions[region].size
