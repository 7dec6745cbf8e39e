"""Splits of layers: notation, validation, and stages that take equal time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeinfer.config import Recipe, Step
from edgeinfer.errors import UnsupportedModelError, UsageError
from edgeinfer.graph import Graph, build_graph, read_config, requested_types
from edgeinfer.pipeline import auto_split, layer_costs, layer_sizes, parse_split
from tests.helpers import golden_cases
from tests.helpers.sessions import TINY


def whole(layers: int = 8, vocab_size: int = 99) -> Graph:
    config = replace(TINY, num_hidden_layers=layers, vocab_size=vocab_size)
    return build_graph(config, requested_types("q4", 32), Recipe(()))


def test_a_split_lists_the_layers_of_each_stage() -> None:
    assert parse_split("0-3,4-7", whole()) == ((0, 3), (4, 7))
    assert parse_split(" 0 , 1-6,7", whole()) == ((0, 0), (1, 6), (7, 7))
    assert parse_split("0-7", whole()) == ((0, 7),)


@pytest.mark.parametrize("text, message", [
    ("", "The split is ''; list the layers of each stage, such as 0-15,16-31, or auto"),
    ("0-3;4-7", "list the layers of each stage"),
    ("0-3,4-x", "list the layers of each stage"),
    ("-1-3,4-7", "list the layers of each stage"),
    ("0-3,5-7", "leaves out layers 4 to 4"),
    ("1-3,4-7", "leaves out layers 0 to 0"),
    ("0-3,3-7", "has layer 3 twice"),
    ("4-7,0-3", "leaves out layers 0 to 3"),
    ("3-0,4-7", "stage 3-0 of the split ends before it begins"),
    ("0-3,4-8", "names layer 8; the model has layers 0 to 7"),
    ("0-3,4-6", "ends with layer 6; the last layer of the model is 7"),
])  # fmt: skip
def test_what_is_no_split_is_refused_by_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        parse_split(text, whole())
    assert "\n" not in str(refused.value)


def test_a_model_whose_layers_share_k_and_v_is_refused_where_they_do() -> None:
    config = read_config(golden_cases.config_of("gemma4"))
    graph = build_graph(config, requested_types("q4", 32), Recipe(()))
    last = config.num_hidden_layers - 1
    with pytest.raises(UnsupportedModelError, match=r"gemma4_text cannot be split before layer 1: later layers read"):
        parse_split(f"0,1-{last}", graph)
    with pytest.raises(UnsupportedModelError, match="the K and V of layer"):
        parse_split(f"0-{last - 1},{last}", graph)


def test_stages_of_equal_machines_take_equal_time() -> None:
    assert auto_split(whole(), [1.0]) == ((0, 7),)
    assert auto_split(whole(), [1.0, 1.0]) == ((0, 3), (4, 7))
    assert auto_split(whole(), [5.0] * 4) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_machine_of_twice_the_speed_has_twice_the_layers() -> None:
    (first, last) = auto_split(whole(30), [2.0, 1.0])  # the head is a part of a layer
    assert first[1] in (19, 20) and last == (first[1] + 1, 29)
    (first, last) = auto_split(whole(30), [1.0, 2.0])
    assert first[1] in (9, 10) and last == (first[1] + 1, 29)


def test_the_output_head_counts_as_layers() -> None:
    graph = whole(8, vocab_size=4000)
    costs = layer_costs(graph)
    assert costs[7] > 2 * costs[0] == 2 * costs[6]
    (first, last) = auto_split(graph, [1.0, 1.0])
    assert last[0] > 4 and first == (0, last[0] - 1)


def test_a_machine_has_no_more_layers_than_it_has_room_for() -> None:
    graph = whole(8)
    sizes = layer_sizes(graph, "int8", 64)
    weights = sum(graph.types[weight.name].nbytes(weight.shape) for weight in graph.weights)
    assert len(sizes) == 8 and sum(sizes) - weights == sum(op.kv.position_bytes("int8") * 64 for op in graph.ops
                                                           if op.kv and op.kv.stores)
    assert sizes[0] > sizes[1] == sizes[6] < sizes[7], "the embedding is of the first, the head of the last"
    plenty = float(sum(sizes))
    assert auto_split(graph, [1.0, 1.0], sizes, [plenty, plenty]) == auto_split(graph, [1.0, 1.0])
    assert auto_split(graph, [9.0, 1.0], sizes, [sum(sizes[:3]), plenty]) == ((0, 2), (3, 7))
    assert auto_split(graph, [1.0, 9.0], sizes, [plenty, sum(sizes[6:])]) == ((0, 5), (6, 7))
    lacking = auto_split(graph, [1.0, 1.0], sizes, [0.0, sum(sizes[1:]) - 1.0])
    assert lacking == ((0, 0), (1, 7)), "nothing fits, and this lacks least"


def test_splits_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="9 stages are more than the model's 8 layers"):
        auto_split(whole(), [1.0] * 9)
    for speeds in ([], [1.0, 0.0], [1.0, float("nan")], [-1.0, 1.0]):
        with pytest.raises(UsageError, match="finite numbers above 0"):
            auto_split(whole(), speeds)
    shared = build_graph(read_config(golden_cases.config_of("gemma4")), requested_types("q4", 32), Recipe(()))
    with pytest.raises(UnsupportedModelError, match="cannot be split before layer"):
        auto_split(shared, [1.0, 1.0])


CUTS_NOWHERE = {"gemma4", "gemma4-mixture-rows", "gemma4-wide-heads", "gemma4-wrapped"}
"""Layers of these read rows of the embedding, or K and V of earlier layers, to the end."""


@pytest.mark.slow(keep=40)
@pytest.mark.parametrize("case", golden_cases.names())
def test_all_other_families_can_be_split_before_any_layer(case: str) -> None:
    config = read_config(golden_cases._described(case)["config"])
    types, n = requested_types("q4", 32), config.num_hidden_layers
    weights = {weight.name for weight in build_graph(config, types).weights}
    for layer in range(1, n):
        found: set[str] = set()
        for first, last in ((0, layer - 1), (layer, n - 1)):
            step = Step("layer_range", (("first", first), ("last", last)))
            if case in CUTS_NOWHERE:
                with pytest.raises(UnsupportedModelError, match=f"before layer {layer}"):
                    build_graph(config, types, Recipe().replacing("layer_range", step))
                continue
            graph = build_graph(config, types, Recipe().replacing("layer_range", step))
            layers = {op.layer for op in graph.ops if op.layer is not None}
            assert layers == set(range(first, last + 1)) and graph.layers == (first, last)
            found |= {weight.name for weight in graph.weights}
        assert case in CUTS_NOWHERE or found == weights


def test_a_range_is_one_of_the_model() -> None:
    for first, last in ((-1, 2), (3, 2), (0, 8), (0.0, 3)):
        step = Step("layer_range", (("first", first), ("last", last)))
        with pytest.raises(UsageError, match=r"layer_range has layers .* the model has 0 to 7"):
            build_graph(replace(TINY, num_hidden_layers=8), requested_types("q4", 32), Recipe((step,)))
