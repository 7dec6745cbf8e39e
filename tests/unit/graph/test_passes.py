"""Passes over graphs: the default passes, recipes, and refusals of unfit passes by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.config import Recipe, RuntimeConfig, Step
from edgeinfer.errors import UnsupportedModelError, UsageError
from edgeinfer.graph import (
    PASSES,
    Graph,
    LayerNorm,
    Linear,
    LinearPart,
    MatMul,
    Quantize,
    RmsNorm,
    Tensor,
    Weight,
    apply,
    build_graph,
    graph_pass,
    quantize_activations,
    read_config,
    requested_types,
)
from edgeinfer.quant import WeightType
from tests.helpers.graphs import NONE, build, first
from tests.unit.graph.test_graph import CONFIG

# -- the pass before all others ----------------------------------------------------------------------------------------


def stored(**types: str) -> Callable[[Weight], WeightType]:
    """Storage of q4 but for the matrices of layer 0 whose names these are; `parted` gives q, k and v types."""
    requested = requested_types("q4", 64)
    parts = {f"layers.0.qkv.{i}": name for i, name in enumerate(types.pop("parted", "").split()) if name}

    def of(weight: Weight) -> WeightType:
        name = types.get(weight.name.removeprefix("layers.0."), parts.get(weight.name))
        return WeightType.of(name, 64) if name else requested(weight)

    return of


def norms(graph: Graph, layer: int | None = 0) -> list[tuple[str, int]]:
    """Types of the rows that a layer's norms write."""
    return [(op.out.dtype, op.out.group_size) for op in graph.ops if isinstance(op, RmsNorm) and op.layer == layer]


def test_a_norm_writes_what_its_only_matrix_multiplies() -> None:
    graph = build_graph(read_config(CONFIG), stored(qkv="int8", gate_up="f16"), NONE)
    assert norms(graph) == [("q8", 64), ("f32", 0)] and norms(graph, 1) == [("q8", 64)] * 2
    quantised = [op for op in graph.ops if isinstance(op, Quantize)]
    assert [op.out.name for op in quantised] == [f"q.{i}" for i in range(len(quantised))]
    assert sum(op.layer == 0 for op in quantised) == 2  # o and down; gate and up multiply floats


def test_readers_of_several_types_quantise_themselves() -> None:
    config = read_config({**CONFIG, "model_type": "phi", "hidden_size": 96})  # attention and FFN share a norm
    same = build_graph(config, stored(), NONE)
    apart = build_graph(config, stored(up="f16"), NONE)
    shared = [op for op in same.ops if isinstance(op, LayerNorm) and op.layer == 0]
    floats = [op for op in apart.ops if isinstance(op, LayerNorm) and op.layer == 0]
    assert [op.out.dtype for op in shared] == ["q8"] and [op.out.dtype for op in floats] == ["f32"]
    readers = [op for op in apart.ops if floats[0].out in op.inputs]
    assert [type(op) for op in readers] == [Quantize, Linear], "qkv quantises, up reads floats"


def test_each_part_of_a_matrix_has_a_norm_of_its_own() -> None:
    graph = build_graph(read_config({**CONFIG, "hidden_size": 96}), stored(parted="q4 int8 f16"), Recipe())
    made = [op for op in graph.ops if isinstance(op, RmsNorm) and op.layer == 0][:3]
    parts = [op for op in graph.ops if isinstance(op, LinearPart)]
    assert [op.x for op in parts] == [op.out for op in made] and len({op.out.name for op in made}) == 3
    assert [op.out.dtype for op in made] == ["q8", "q8", "f32"]
    assert [op.source is not None for op in parts] == [True, True, False]


def test_quantising_a_quantised_graph_changes_nothing() -> None:
    for weights in ("q4", "f16"):
        graph = build(weights=weights)
        assert quantize_activations(graph) == graph


def test_what_need_not_be_in_memory_whole_is_said_by_operations() -> None:
    """Operations report their neurons, experts and rows of tables to the planner; those of a plain model report none.
    """
    assert all(build().on_demand(kind) == [] for kind in ("neurons", "experts", "rows")) and not build().chooses_values
    neurons = build_graph(read_config(CONFIG), requested_types(ffn_layout="neuron"), Recipe())
    found = neurons.on_demand("neurons")
    assert [(one.layer, one.pieces, one.chosen) for one in found] == [(0, 100, False), (1, 100, False)]
    assert all(one.pieces * one.nbytes == neurons.types[one.weight.name].nbytes(one.weight.shape) for one in found)
    moe = build_graph(read_config({**CONFIG, "model_type": "mixtral", "num_local_experts": 6}),
                          requested_types(), Recipe())
    experts = moe.on_demand("experts")
    assert [one.weight.name.rsplit(".", 1)[1] for one in experts] == ["experts_gate_up", "experts_down"] * 2
    assert {(one.pieces, one.active) for one in experts} == {(6, 2)}
    assert sum(one.nbytes * one.pieces for one in experts[:2]) == sum(
        moe.types[one.weight.name].nbytes(one.weight.shape) for one in experts[:2])


@pytest.mark.parametrize("place", ["memory_planner", "offload", "edgeinfer/bench", "edgeinfer/backends/onnx/export.py"])
def test_other_packages_do_not_ask_for_the_class_of_an_operation(place: str) -> None:
    root = Path(__file__).resolve().parents[3] / place
    files = [root] if root.is_file() else list(root.rglob("*.py"))
    assert files and not [str(file) for file in files if "isinstance(op" in file.read_text("utf-8")]


def test_a_live_share_is_read() -> None:
    """Of an FFN with gates and ups: exact runs read all gates, predicted ones a part of both, and of columns a part."""
    ops = build_graph(read_config(CONFIG), requested_types(ffn_layout="neuron"), Recipe()).ops
    shares = {op.name: [op.read_share(mode, 0.25) for mode in ("off", "exact", "predict")] for op in ops}
    assert shares["neuron_gated"] == [1, 0.625, 0.25] and shares["neuron_down"] == [1, 0.25, 0.25]
    assert shares["linear"] == [1, 1, 1]


def test_replaced_is_what_dataclasses_give() -> None:
    op = build().ops[1]
    assert op.inputs and op.replaced(layer=7) == dataclasses.replace(op, layer=7) != op
    assert "inputs" not in vars(op.replaced(layer=7)), "what was derived is derived again"
    with pytest.raises(TypeError, match="The operation rms_norm has no field 'nothing'"):
        op.replaced(nothing=1)


# -- the pass that every run uses --------------------------------------------------------------------------------------


def test_matmuls_of_one_token_make_their_input_visibly() -> None:
    plain, fused = build(), build(Recipe())
    assert not any(op.several for op in plain.ops) and not any(getattr(op, "source", None) for op in plain.ops)
    makers = [op for op in fused.ops if op.several]
    readers = [op for op in fused.ops if isinstance(op, MatMul) and op.source]
    assert len(makers) == len(readers) == 2 * 4  # qkv, o, gate and up, down
    for maker, reader in zip(makers, readers, strict=True):
        assert isinstance(maker, RmsNorm | Quantize) and isinstance(reader, MatMul)
        assert reader.x == maker.out and reader.source == maker.x and reader.source in reader.inputs
        assert (reader.norm, reader.eps) == ((maker.weight, maker.eps) if isinstance(maker, RmsNorm) else (None, None))
    assert fused.types == plain.types and fused.weights == plain.weights
    assert sum(op.operations() for op in fused.ops) == sum(op.operations() for op in plain.ops)


def test_float_weights_and_the_head_are_left_alone() -> None:
    assert build(Recipe(), weights="f16") == build(weights="f16")
    assert build(Recipe()).ops[-1] == build().ops[-1]


def test_rows_with_two_readers_stay_an_instruction_of_their_own() -> None:
    graph = build()
    at = first(graph, Linear)
    twice = dataclasses.replace(graph.ops[at], out=Tensor("again", graph.ops[at].out.width))
    graph = dataclasses.replace(graph, ops=(*graph.ops[: at + 1], twice, *graph.ops[at + 1 :]))
    fused = apply(graph, Recipe())
    assert not fused.ops[at - 1].several and fused.ops[at] == graph.ops[at]


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_recipes_are_text_and_back() -> None:
    recipe = Recipe((Step("fuse_input"), Step("topn", (("n", 32), ("eps", 1e-3), ("mode", "mean")))))
    assert str(recipe) == "fuse_input+topn:n=32,eps=0.001,mode=mean"
    assert Recipe.parse(str(recipe)) == recipe and Recipe.parse("none") == NONE and str(NONE) == "none"
    assert RuntimeConfig().recipe == Recipe() == Recipe.parse("fuse_input")
    assert hash(recipe) == hash(Recipe.parse(str(recipe)))


@pytest.mark.parametrize("text", ["", "a b", "topn:n", "topn:n=", "topn:=3", "+", "fuse_input+"])
def test_a_text_that_is_no_recipe(text: str) -> None:
    with pytest.raises(UsageError, match=r"The recipe is .*; write passes as name:key=value"):
        Recipe.parse(text)


def test_a_setting_that_is_given_twice() -> None:
    with pytest.raises(UsageError, match=r"^The recipe is 'topn:n=3,n=4', whose pass topn has n twice; give it once"):
        Recipe.parse("topn:n=3,n=4")


def test_a_pass_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"the pass 'fuse_imput', which does not exist; did you mean 'fuse_input'"):
        build(Recipe.parse("fuse_imput"))
    with pytest.raises(UsageError, match=r"The pass fuse_input:n=3 cannot be applied: .*'n'"):
        build(Recipe.parse("fuse_input:n=3"))


def test_a_pass_of_a_module_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere_passes.py").write_text(
        "from dataclasses import replace\nfrom edgeinfer.graph import graph_pass\n\n\n@graph_pass\n"
        "def elsewhere(graph, last=9):\n    return replace(graph, ops=graph.ops[:last])\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("edgeinfer.graph.passes.PASSES", dict(PASSES))
    assert build(Recipe.parse("elsewhere_passes.elsewhere:last=1000")) == build(Recipe.parse("none"))
    with pytest.raises(UnsupportedModelError, match=r"After the pass elsewhere_passes\.elsewhere, nothing writes"):
        build(Recipe.parse("elsewhere_passes.elsewhere:last=3"))
    with pytest.raises(UsageError, match=r"'nowhere\.cut', whose module cannot be imported: No module named 'nowhere'"):
        build(Recipe.parse("nowhere.cut"))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.graph.passes.PASSES", dict(PASSES))


def test_two_passes_of_one_name(passes: None) -> None:
    def fuse_input(graph: Graph) -> Graph:
        return graph

    with pytest.raises(ValueError, match="Two passes are named 'fuse_input'"):
        graph_pass(fuse_input)


def test_the_checker_runs_after_each_pass(passes: None) -> None:
    @graph_pass
    def lose_one(graph: Graph) -> Graph:
        return dataclasses.replace(graph, ops=graph.ops[1:])

    with pytest.raises(UnsupportedModelError, match=r"After the pass lose_one, .* reads x\.0 before it is written"):
        build(Recipe.parse("lose_one"))


@pytest.mark.parametrize("made", [None, "graph", ()])
def test_a_pass_that_gives_no_graph(passes: None, made: object) -> None:
    @graph_pass
    def forgotten(graph: Graph) -> object:
        return made

    with pytest.raises(UnsupportedModelError, match="The pass forgotten returns no graph, but "):
        build(Recipe.parse("forgotten"))


def test_a_defect_of_a_pass_is_no_fault_of_the_recipe(passes: None) -> None:
    @graph_pass
    def broken(graph: Graph, n: int = 1) -> Graph:
        return graph + n

    with pytest.raises(TypeError, match="unsupported operand"):
        build(Recipe.parse("broken:n=2"))


@pytest.mark.parametrize("recipe", ["none", 5, Recipe(("fuse_input",))])
def test_what_is_no_recipe(recipe: Any) -> None:
    with pytest.raises(UsageError, match=r"^recipe is .*; give a Recipe of Steps"):
        RuntimeConfig(recipe=recipe)


# -- the checker -------------------------------------------------------------------------------------------------------
