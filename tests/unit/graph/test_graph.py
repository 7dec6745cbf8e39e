"""The graph's classes: operations, weights, storage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgeinfer.base.units import round_up
from edgeinfer.errors import BundleError, UnsupportedModelError, UsageError
from edgeinfer.graph import Attention, Graph, Op, Source, build_graph, expected_types, read_config, requested_types
from edgeinfer.quant import WeightType

CONFIG = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
LAYER = ["rms_norm", "linear", "rope_store", "attention", "linear", "rms_norm", "gated", "linear"]


def build(weights: str = "q4", group_size: int = 32, **fields: Any) -> Graph:
    return build_graph(read_config({**CONFIG, **fields}), requested_types(weights, group_size))


def kinds(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_unquantised_graph_is_the_textbook(model_type: str) -> None:
    graph = build("f32", model_type=model_type)
    assert kinds(graph) == ["embed", *LAYER, *LAYER, "gather_outputs", "rms_norm", "linear", "sample"]
    assert {tensor.dtype for op in graph.ops for tensor in (*op.inputs, op.out)} == {"f32"}
    assert [(op.layer, op.window) for op in graph.ops if isinstance(op, Attention)] == [
        (i, 4096 if model_type == "mistral" else 0) for i in range(2)
    ]


@pytest.mark.parametrize("weights", ["q4", "int8"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_activations_are_quantised_where_weights_are(weights: str, group_size: int) -> None:
    graph = build(weights, group_size)
    layer = [*LAYER[:4], "quantize", *LAYER[4:7], "quantize", *LAYER[7:]]
    assert kinds(graph) == ["embed", *layer, *layer, "gather_outputs", "rms_norm", "linear", "sample"]
    for op in graph.ops:
        if op.name in ("linear", "gated"):
            weight = graph.types[op.weights[0].name]
            assert (op.inputs[0].dtype, op.inputs[0].group_size) == ("q8", weight.group_size)


def test_mixed_types_quantise_for_each_weight() -> None:
    table = {weight.name: WeightType("f32", 0, "plain") for weight in build().weights}
    table["layers.1.qkv"] = WeightType("q4", 64)
    table["layers.1.down"] = WeightType("int8", 128)
    graph = build_graph(read_config(CONFIG), expected_types(table))
    quantised = {t.name: t.group_size for op in graph.ops for t in op.inputs if t.dtype == "q8"}
    assert sorted(quantised.values()) == [64, 128]
    norms = [op.out.dtype for op in graph.ops if op.name == "rms_norm"]
    assert norms == ["f32", "f32", "q8", "f32", "f32"]


def test_every_tensor_is_written_before_it_is_read() -> None:
    graph = build(model_type="qwen3", attention_bias=True)
    written: dict[str, Any] = {}
    for op in graph.ops:
        for tensor in op.inputs:
            assert written[tensor.name] == tensor
        assert op.out.name not in written and (op.over is None or op.over in op.inputs)
        written[op.out.name] = op.out
    assert (graph.logits.width, graph.logits.rows) == (99, "outputs")
    assert [op.name for op in graph.ops if op.out.rows == "outputs"] == ["gather_outputs", "rms_norm", "linear",
                                                                         "sample"]


def test_weights_name_their_sources() -> None:
    weights = {weight.name: weight for weight in build(attention_bias=True, mlp_bias=True).weights}
    assert weights["layers.1.qkv"].shape == (100, 60)
    attention = "model.layers.1.self_attn."
    names = [source.name for source in weights["layers.1.qkv"].sources]
    assert names == [attention + f"{p}_proj.weight" for p in "qkv"]
    assert [source.shape for source in weights["layers.1.qkv"].sources] == [(60, 60), (20, 60), (20, 60)]
    assert weights["layers.1.qkv_bias"].shape == (100,)
    assert weights["layers.1.gate_up"].shape == (224, 60)  # 100 rows padded to 112, twice
    assert weights["layers.1.gate_up"].combine == weights["layers.1.gate_up_bias"].combine == "interleave16"
    assert weights["layers.1.gate_up_bias"].shape == (224,)
    assert weights["layers.1.o_bias"].sources == (Source(attention + "o_proj.bias", (60,)),)
    assert weights["head"].kind == "head"
    assert weights["embed"].kind == "embedding"
    names = [source.name for weight in weights.values() for source in weight.sources]
    assert len(names) == len(set(names)) == 3 + 2 * (9 + 7)


def test_a_tied_head_is_the_embedding() -> None:
    graph = build(tie_word_embeddings=True)
    assert graph.ops[-2].weights == graph.ops[0].weights
    assert "head" not in graph.types
    assert build().weight_count - graph.weight_count == 99 * 60


def test_weight_count_leaves_padding_out() -> None:
    layer = 60 * (60 + 20 + 20) + 60 * 60 + 3 * 60 * 100 + 2 * 60
    assert build().weight_count == 2 * layer + 2 * 99 * 60 + 60


def test_q_and_k_norms_are_of_one_head() -> None:
    graph = build(model_type="qwen3", head_dim=10)
    rope = next(op for op in graph.ops if op.name == "rope_store")
    assert [(w.name, w.shape) for w in rope.weights] == [("layers.0.q_norm", (10,)), ("layers.0.k_norm", (10,))]
    assert (rope.layer, rope.eps, rope.heads, rope.kv_heads, rope.head_dim) == (0, 1e-6, 6, 2, 10)


def test_requested_types() -> None:
    def types(*request: Any, **more: Any) -> set[tuple[str, str]]:
        graph = build_graph(read_config(CONFIG), requested_types(*request, **more))
        return {(weight.kind, str(graph.types[weight.name])) for weight in graph.weights}

    vectors = ("vector", "f32")
    assert types("q4", 64) == {vectors, ("matrix", "q4g64"), ("embedding", "int8g64"), ("head", "int8g64")}
    assert types("f16") == {vectors, ("matrix", "f16"), ("embedding", "f16"), ("head", "f16")}
    assert types("q4", 32, embedding="f16", head="q4") == {
        vectors, ("matrix", "q4g32"), ("embedding", "f16"), ("head", "q4g32"),
    }  # fmt: skip


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="weights is 'q1'; choose one of q4, int8, f16, f32"):
        requested_types("q1")
    with pytest.raises(UsageError, match="embedding is 'q1'; choose one of"):
        requested_types(embedding="q1")
    with pytest.raises(UsageError, match="head is 'q1'; choose one of"):
        requested_types(head="q1")
    with pytest.raises(UsageError, match="group_size is 48; choose one of 32, 64, 128"):
        requested_types("q4", 48)


def test_a_table_without_a_weight() -> None:
    table = {w.name: WeightType("f16") for w in build().weights if w.name != "layers.1.o"}
    with pytest.raises(BundleError, match=r"The bundle lacks 'layers.1.o', which its architecture needs"):
        build_graph(read_config(CONFIG), expected_types(table))


def test_describe() -> None:
    lines = build(hidden_act="relu").describe().splitlines()
    assert lines[0] == "x.0[tokens x 60 f32] = embed(embed 99x60 int8g32)"
    assert lines[6] == (
        "x.1[tokens x 60 f32] = linear layer=0(q.0[tokens x 60 q8g32], a.0[tokens x 60 f32], x.0[tokens x 60 f32], "
        "layers.0.o 60x60 q4g32) over x.0"
    )
    assert lines[8] == (
        "f.0[tokens x 100 f32] = gated layer=0 eps=1e-06 activation=relu(h.1[tokens x 60 q8g32], x.1[tokens x 60 f32], "
        "layers.0.gate_up 224x60 q4g32, layers.0.ffn_norm 60 f32)"
    )
    assert len(lines) == len(build().ops)


def test_instructions_are_frozen_and_comparable() -> None:
    graph = build()
    assert graph == build()
    assert graph != build("int8")
    op = graph.ops[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        op.layer = 3  # type: ignore[misc]
    assert isinstance(op, Op)


@pytest.mark.parametrize(
    ("fields", "rope", "message"),
    [
        ({"model_type": "mamba"}, {}, "The model: model_type is 'mamba', which edgeinfer does not support"),
        ({"hidden_act": "tanh"}, {}, "The model's hidden_act is 'tanh'; it must be one of relu, silu"),
        ({"head_dim": 7}, {}, "The model's head_dim is 7; it must be even"),
        ({"rms_norm_eps": 1.5}, {}, "The model's rms_norm_eps is 1.5; it must be from 0 to 1"),
        ({}, {"kind": "ntk"}, "The model's rope.kind is 'ntk'; it must be one of default, linear, dynamic, llama3"),
        ({}, {"kind": "dynamic", "factor": 0.5, "original_max_position_embeddings": 16},
         "rope.factor is 0.5; it must be 1 or more"),
        ({"rotary_dim": 2}, {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
         "rope.dims is 0; it must be of a head that turns by dynamic scaling more than 2"),
        ({}, {"kind": "longrope", "original_max_position_embeddings": 16, "short_factors": (1.0,)},
         r"The model's rope.short_factors is \(1.0,\); it must be [0-9]+ numbers above 0"),
        ({"rotary_dim": 3}, {}, "The model's rotary_dim is 3; it must be even, and from 0 to head_dim"),
        ({"ropes": (2, 1)}, {}, r"The model's ropes is \(2, 1\); it must be 0 to 1 for each layer"),
        ({"embedding_scale": 0.0}, {}, "The model's embedding_scale is 0.0; it must be above 0"),
        ({"attention_scale": 1e150}, {}, r"attention_scale is 1e\+150; it must be above 0 and below 1e\+30"),
        ({"attention_softcap": -1.0}, {}, "The model's attention_softcap is -1.0; it must be above 0"),
        ({}, {"theta": -1.0}, "The model's rope.theta is -1.0; it must be above 1"),
        ({}, {"factor": 0.0}, "The model's rope.factor is 0.0; it must be above 0"),
        ({}, {"kind": "yarn"}, "rope.original_max_position_embeddings is 0; it must be above 0"),
        ({}, {"low_freq_factor": 4.0}, "rope.low_freq_factor is 4.0; it must be above 0 and below high_freq_factor"),
        ({}, {"beta_fast": 0.0}, "rope.beta_fast is 0.0; it must be above 0"),
        ({}, {"beta_slow": float("nan")}, "rope.beta_slow is nan; it must be above 0"),
    ],
)
def test_a_config_without_a_forward_pass(fields: dict[str, Any], rope: dict[str, Any], message: str) -> None:
    """read_config yields none of these; a bundle may."""
    config = read_config(CONFIG)
    config = dataclasses.replace(config, **fields, rope=dataclasses.replace(config.rope, **rope))
    with pytest.raises(UnsupportedModelError, match=message):
        build_graph(config, requested_types())


def test_round_up() -> None:
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
