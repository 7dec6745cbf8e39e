"""The checker of graphs, and incomplete operations: misfits are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import (
    Attention,
    Embed,
    Graph,
    Linear,
    Op,
    RmsNorm,
    RowOp,
    Tensor,
    Weight,
    build_graph,
    check,
    check_runnable,
    insert_after,
    requested_types,
)
from edgeinfer.quant import WeightType
from tests.helpers.graphs import build, changed, first


def other_width(graph: Graph) -> Graph:
    at = first(graph, Linear)
    return changed(graph, at, out=dataclasses.replace(graph.ops[at].out, width=7))


def other_type(graph: Graph) -> Graph:
    at = first(graph, RmsNorm)
    return changed(graph, at, out=dataclasses.replace(graph.ops[at].out, group_size=64))


def unknown_weight(graph: Graph) -> Graph:
    return changed(graph, 0, table=Weight("table", (99, 60), "embedding"))


def swapped(graph: Graph) -> Graph:
    at = first(graph, Attention)
    before, here = graph.ops[at - 1 : at + 1]
    return dataclasses.replace(graph, ops=(*graph.ops[: at - 1], here, before, *graph.ops[at + 1 :]))


def written_twice(graph: Graph) -> Graph:
    return dataclasses.replace(graph, ops=(graph.ops[0], *graph.ops))


def read_after(graph: Graph) -> Graph:
    """The residual stream is read once more after it was written over."""
    over = next(i for i, op in enumerate(graph.ops) if op.over is not None and op.over.name == "x.0")
    late = RmsNorm(out=Tensor("late", 60), x=graph.ops[0].out, weight=graph.ops[1].weights[0], eps=1e-6)
    return dataclasses.replace(graph, ops=(*graph.ops[: over + 1], late, *graph.ops[over + 1 :]))


def no_logits(graph: Graph) -> Graph:
    return dataclasses.replace(graph, ops=graph.ops[:-2])  # without the sample, which reads them


def no_source(graph: Graph) -> Graph:
    return changed(graph, first(graph, RmsNorm), several=True)


def over_another_width(graph: Graph) -> Graph:
    at = next(i for i, op in enumerate(graph.ops) if isinstance(op, Linear) and op.residual)
    wrong = dataclasses.replace(graph.ops[at].out, width=61)
    return changed(graph, at, out=wrong)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (other_width, r"linear layers\.0\.qkv does not fit: the matrix has rows: 100, but .* is 7 wide"),
        (other_type, r"linear layers\.0\.qkv does not fit: it reads h\.0\[.*q8g32\], but h\.0\[.*q8g64\] was written"),
        (unknown_weight, r"embed table does not fit: the weight table is not in the graph's table"),
        (swapped, r"attention layer 0 does not fit: it reads qkv\.1 before it is written"),
        (written_twice, r"embed embed does not fit: x\.0 is written twice"),
        (read_after, r"rms_norm layers\.0\.attention_norm does not fit: it reads x\.0, which linear .* has overw"),
        (no_logits, r"nothing writes the logits, logits\[outputs x 99 f32\]"),
        (no_source, r"h\.0\[.*\] is left out for one token, and it has no source to make it from"),
        (over_another_width, r"it writes x\.1\[tokens x 61 f32\] over x\.0\[tokens x 60 f32\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(plant: Callable[[Graph], Graph], message: str) -> None:
    graph = build()
    assert check(graph) is graph
    with pytest.raises(UnsupportedModelError, match=message):
        check(plant(graph), "the test")


def test_a_matmul_of_the_wrong_type() -> None:
    graph = build()
    types = dict(graph.types) | {"layers.0.qkv": WeightType("q4", 64)}
    with pytest.raises(UnsupportedModelError, match="weights q4g64 multiply q8 in groups of 64, but the input is"):
        check(dataclasses.replace(graph, types=types))


# -- an operation must say everything ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Double(RowOp):
    """2 x, by a kernel that does not exist."""

    KERNELS = ("double",)
    x: Tensor


@dataclass(frozen=True, kw_only=True)
class Untold(Op):
    """Does not state its costs."""

    x: Tensor


@dataclass(frozen=True, kw_only=True)
class Measured(RowOp):
    """Uses a kernel that has no reference."""

    KERNELS = ("stream_read",)
    x: Tensor


@dataclass(frozen=True, kw_only=True)
class Planned(RowOp):
    """Can be planned, and has no kernel yet."""

    KERNELS = ()
    x: Tensor


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Untold, r"The operation untold has no reads\(\), so it cannot be planned"),
        (Double, "The operation double layer 0 needs the kernel double, which does not exist"),
        (Measured, "The kernel stream_read of the operation measured layer 0 has no NumPy reference"),
        (Planned, "The operation planned layer 0 has no kernel yet, so edgeinfer cannot run it"),
    ],
)
def test_an_operation_without_cost_kernel_or_reference_is_refused(kind: Any, message: str) -> None:
    def make(op: Op) -> Op:
        return kind(out=dataclasses.replace(op.out, name="new"), x=op.out, layer=0)

    graph = insert_after(build(), lambda op: isinstance(op, Attention) and op.layer == 0, make)
    assert [op.name for op in graph.ops if any(x.name == "new" for x in op.inputs)] == ["quantize"]
    with pytest.raises(UnsupportedModelError, match=message):
        check_runnable(check(graph))


def test_a_renamed_operation_is_still_counted() -> None:
    """Costs come from the operation and not from its name."""

    @dataclass(frozen=True, kw_only=True)
    class SparseLinear(Linear):
        """As Linear, under another name."""

    graph = build()
    ops = tuple(SparseLinear(**{f.name: getattr(op, f.name) for f in dataclasses.fields(op)})
                if type(op) is Linear else op for op in graph.ops)
    other = check_runnable(check(dataclasses.replace(graph, ops=ops)))
    assert {op.name for op in other.ops} >= {"sparse_linear"} and not any(op.name == "linear" for op in other.ops)
    assert sum(op.operations() for op in other.ops) == sum(op.operations() for op in graph.ops)
    assert other.activation_values == graph.activation_values
    assert [op.reads(other.types) for op in other.ops] == [op.reads(graph.types) for op in graph.ops]


def test_what_operations_read_and_multiply_adds_up() -> None:
    graph = build(hidden_act="relu")
    stored = sum(graph.types[w.name].nbytes(w.shape) for w in graph.weights if w.name != "embed")
    assert sum(read.batch for op in graph.ops for read in op.reads(graph.types)) == stored
    assert isinstance(graph.ops[0], Embed) and graph.ops[0].reads(graph.types) == ()
    assert sum(op.operations() for op in graph.ops) == 2 * (graph.weight_count - 99 * 60 - 5 * 60)
    neuron = build_graph(graph.config, requested_types(ffn_layout="neuron"))
    assert sum(op.operations() for op in neuron.ops) == sum(op.operations() for op in graph.ops)
