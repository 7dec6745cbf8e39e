"""Architectures beyond Llama's block: the same bits for any threads and chunks, references beside every instruction,
checkpoints whose names differ, and FFNs that are mostly zeros."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe
from edgeinfer.converters import convert, write_random_bundle
from edgeinfer.errors import CheckpointError, EdgeInferError, UnsupportedModelError
from edgeinfer.graph import (
    AlibiConfig,
    ModelConfig,
    RopeConfig,
    alibi_slopes,
    build_graph,
    read_config,
    requested_types,
)
from edgeinfer.registry import recipe_with
from tests.helpers import golden_cases
from tests.helpers.checkpoints import make_checkpoint, read_tensors
from tests.helpers.reference import forward
from tests.helpers.sessions import SPLIT, TINY, logits_of, scored, session, tokens
from tests.models.test_models_golden import TOLERANCE, difference

LAYERS = {"num_hidden_layers": 3, "windows": (0, 300, 40)}
CONFIGS: dict[str, ModelConfig] = {
    "gemma2": replace(TINY, model_type="gemma2", **LAYERS, attention_softcap=5.0, logits_softcap=8.0,
                      attention_scale=0.3, embedding_scale=6.0, tie_word_embeddings=True, hidden_act="gelu_tanh"),
    "gemma3_text": replace(TINY, model_type="gemma3_text", **LAYERS, local_rope=RopeConfig(100.0), ropes=(1, 2, 2)),
    "olmo2": replace(TINY, model_type="olmo2"),
    "gpt2": replace(TINY, model_type="gpt2", num_key_value_heads=6, rotary_dim=0, hidden_act="gelu_tanh",
                    tie_word_embeddings=True),
    "gpt_neox": replace(TINY, model_type="gpt_neox", num_key_value_heads=6, rotary_dim=2, parallel_residual=True,
                        parallel_norms=2, hidden_act="gelu"),
    "falcon": replace(TINY, model_type="falcon", num_key_value_heads=1, parallel_residual=True, hidden_act="gelu"),
    "falcon-rw": replace(TINY, model_type="falcon", num_key_value_heads=6, rotary_dim=0,
                         alibi=AlibiConfig(bfloat16=True)),
    "bloom": replace(TINY, model_type="bloom", num_key_value_heads=6, rotary_dim=0, alibi=AlibiConfig(),
                     hidden_act="gelu_tanh", attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "phi": replace(TINY, model_type="phi", rotary_dim=4, parallel_residual=True, head_bias=True),
    "smollm3": replace(TINY, model_type="smollm3", ropes=(1, 0)),
    "bamboo": replace(TINY, model_type="bamboo", hidden_act="drelu"),
    "opt": replace(TINY, model_type="opt", num_key_value_heads=6, rotary_dim=0, hidden_act="relu", embedding_dim=33,
                   norms_behind=True, final_norm=False, tie_word_embeddings=True),
    "cohere": replace(TINY, model_type="cohere", parallel_residual=True, head_layer_norm=True),
    "exaone4": replace(TINY, model_type="exaone4", **LAYERS, ropes=(0, 1, 1)),
    "ministral3": replace(TINY, model_type="ministral3", ropes=(1, 1), local_rope=RopeConfig(
        kind="query_scale", factor=0.3, original_max_position_embeddings=100)),
}


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", CONFIGS)
def test_threads_and_chunks(name: str, tmp_path: Path) -> None:
    write_random_bundle(CONFIGS[name], tmp_path / "bundle", "q4", 32)
    rows = []
    for threads, chunk in ((1, 512), (1, 7), (2, 64), (3, 512)):
        with session(tmp_path / "bundle", ctx=2 * SPLIT, threads=threads, prefill_chunk=chunk) as opened:
            rows.append(logits_of(opened, tokens(SPLIT + 91), n_decoded=5))
    assert np.ptp(rows[0]) > 0
    assert all(row.tobytes() == rows[0].tobytes() for row in rows)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ["gemma2", "falcon-rw", "gpt_neox", "olmo2", "bloom"])
def test_every_instruction_is_what_its_reference_says(name: str, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    write_random_bundle(CONFIGS[name], tmp_path / "bundle", "int8", 32)
    with session(tmp_path / "bundle", ctx=400, prefill_chunk=32) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(SPLIT + 20))
        opened.decode([sequence], [5])


@pytest.mark.parametrize(("name", "kv"), [("gemma2", "int8"), ("gemma2", "f16"), ("falcon-rw", "int8"),
                                          ("bloom", "f16")])
def test_chosen_rows_of_v_see_capped_scores_and_alibi(name: str, kv: str, tmp_path: Path) -> None:
    """If every row is selected, the bits are those of plain attention."""
    config = replace(CONFIGS[name], windows=(), num_hidden_layers=2)
    write_random_bundle(config, tmp_path / "bundle", "int8", 32)
    rows = []
    for attention in ("exact", "eps:0"):
        with session(tmp_path / "bundle", kv=kv, ctx=400, recipe=recipe_with(attention=attention)) as opened:
            sequence = opened.new_sequence()
            opened.prefill(sequence, tokens(300))
            rows.append(np.stack([opened.decode([sequence], [t])[0].copy() for t in (1, 2, 3)]))
    assert rows[0].tobytes() == rows[1].tobytes()


@pytest.mark.parametrize("model_type", ["bamboo", "sparsellama", "bitnet"])
@pytest.mark.parametrize("layout", ["tile16", "neuron"])
def test_relufied_models(model_type: str, layout: str, tmp_path: Path) -> None:
    """Against the oracle in floats; in layout neuron, dense and with dead neurons left out, the same bits."""
    acts = {"bamboo": "relu", "sparsellama": "fatrelu", "bitnet": "relu2"}
    own = {"hidden_act": acts[model_type], **({"hidden_act_param": 0.05} if model_type == "sparsellama" else {})}
    source = make_checkpoint(tmp_path / "hf", model_type, auto_map={"AutoModelForCausalLM": "m.M"}, **own)
    config = read_config(json.loads((source / "config.json").read_text()))
    assert config.hidden_act == (acts | {"bamboo": "drelu"})[model_type]
    ids = tokens(40)
    golden = forward(build_graph(config, requested_types("f32")), read_tensors(source), ids)
    plain = forward(build_graph(replace(config, hidden_act="relu"), requested_types("f32")), read_tensors(source), ids)
    assert difference(plain, golden) > 0.01
    weights = "f32" if layout == "tile16" else "int8"
    convert(source, tmp_path / "bundle", weights=weights, ffn_layout=layout)
    found = []
    for recipe in (recipe_with(sparse="off"), recipe_with(sparse="exact")) if layout == "neuron" else (Recipe(),):
        with session(tmp_path / "bundle", kv="f32", outputs=16, recipe=recipe) as opened:
            sequence = opened.new_sequence()
            rows = [opened.prefill(sequence, ids[:20]).copy(), *(opened.decode([sequence], [t])[0].copy()
                                                                 for t in ids[20:])]
            found.append(np.stack(rows))
    assert difference(found[0], golden[19:]) < (TOLERANCE if layout == "tile16" else 0.05)
    assert all(one.tobytes() == found[0].tobytes() for one in found)


# -- names -------------------------------------------------------------------------------------------------------------


def logits_by(case: golden_cases.GoldenCase, folder: Path) -> np.ndarray:
    with session(folder, kv="f32", ctx=64, outputs=16) as opened:
        return scored(opened, case.ids).copy()


@pytest.mark.parametrize(("name", "base"), [("gpt2", "transformer."), ("opt", "model."), ("gpt-neox", "gpt_neox.")])
def test_names_without_their_beginning_and_buffers(name: str, base: str, tmp_path: Path) -> None:
    """As early checkpoints were saved; masks and frequencies that the config says are left out."""
    case = golden_cases.load(name)
    short = {key.removeprefix(base): value for key, value in case.tensors.items()}
    extra = {"gpt2": "h.0.attn.bias", "opt": "decoder.layers.0.self_attn.rotary_emb.inv_freq",
             "gpt-neox": "layers.0.attention.masked_bias"}[name]
    case = case._replace(tensors={**short, extra: np.ones((1, 1), np.float16)})
    convert(golden_cases.write_checkpoint(case, tmp_path / "hf"), tmp_path / "bundle", weights="f16")
    assert difference(logits_by(case, tmp_path / "bundle"), case.logits) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma3-wrapped", "qwen2-vl-wrapped", "mistral3-wrapped", "ministral3-wrapped"])
def test_both_ways_to_name_the_text_model(name: str, tmp_path: Path) -> None:
    """transformers puts the language model into the model, or the model into the language model."""
    case, other = golden_cases.load(name), {}
    for key, value in case.tensors.items():
        key = key.replace("model.language_model.", "language_model.model.")
        key = key.replace("model.vision_tower.", "vision_tower.")
        other[key.replace("lm_head.", "language_model.lm_head.")] = value
    case = case._replace(tensors=other)
    report = convert(golden_cases.write_checkpoint(case, tmp_path / "hf"), tmp_path / "bundle", weights="f16")
    assert "tensors of what sees pictures" in report.remarks[0] and "are left out" in report.remarks[0]
    with Bundle.open(tmp_path / "bundle") as bundle:
        assert bundle.config.model_type in ("gemma3_text", "qwen2", "mistral", "ministral3")
    assert difference(logits_by(case, tmp_path / "bundle"), case.logits) < TOLERANCE


def test_a_text_model_has_no_pictures(tmp_path: Path) -> None:
    """The same tensors beside a model that does not see are refused by name."""
    case = golden_cases.load("mistral")
    case = case._replace(tensors={**case.tensors, "vision_tower.x.weight": np.ones((2, 2), np.float16)})
    with pytest.raises(CheckpointError, match=r"The tensor vision_tower\.x\.weight .* is not part of a mistral"):
        convert(golden_cases.write_checkpoint(case, tmp_path / "hf"), tmp_path / "bundle")


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3-sections", {"rope_parameters": {"full_attention": {}, "global": {"rope_theta": 1}}}, "global is"),
        ("gemma3-wrapped", {"altup": 1}, "altup is 1"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi is False"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max is 16"),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv is 6.0"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm is True"),
        ("mpt", {"no_bias": False}, "no_bias is False"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm is True"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("cohere2", {"head_dim": 12}, "head_dim is 12, which .* hidden_size / num_attention_heads, 10"),
        ("cohere2", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block is False"),
        ("cohere2-bias", {"sliding_window": None}, "layer_types has sliding_attention, but sliding_window is None"),
        ("exaone4", {"sliding_window_pattern": "LLX"}, "sliding_window_pattern is 'LLX'"),
        ("exaone4", {"attention_bias": True}, "attention_bias is True"),
        ("glm4", {"mlp_bias": True}, "mlp_bias is True"),
        ("glm4-no-bias", {"partial_rotary_factor": 0.1}, "1 of the 14 dimensions of a head turn"),
        ("gpt-bigcode", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt-bigcode", {"num_key_value_heads": 5}, "num_key_value_heads is 5, which .* multi_query it is 1"),
        ("granitemoeshared", {"shared_expert_gate": True}, "shared_expert_gate is True"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}},
         "rope_parameters lacks 'original_max_position_embeddings'"),
        ("ministral3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.2,
                                         "original_max_position_embeddings": 7}}, "disagree; keep the one"),
        ("ministral3", {"attention_bias": True}, "attention_bias is True"),
        ("ministral3", {"rope_parameters": {}}, "the section of RoPE is empty, and lacks 'llama_4_scaling_beta'"),
        ("olmo3", {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, "a section for full_attention and"),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
         "rope_type of layers with a window is 'linear'"),
        ("olmo3", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt-neo-window", {"attention_types": [[["global"], 2]]}, "it must say global or local for 3"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim is 0; it must be a whole number from 1 to"),
        ("starcoder2-window", {"norm_type": "rms"}, "norm_type is 'rms'"),
        ("phi3-longrope-partial", {"attention_bias": True}, "attention_bias is True"),
        ("smollm3", {"no_rope_layers": [1, 2]}, r"no_rope_layers is \[1, 2\]; it must list 0 or 1 for 3 layers"),
        ("gpt-neox", {"rotary_pct": 0.25}, "disagree"),
        ("stablelm", {"partial_rotary_factor": 0.25}, "3 of the 12 dimensions of a head turn"),
        ("olmo2", {"sliding_window": 7}, "sliding_window is 7"),
        ("granite", {"embedding_multiplier": -1}, "embedding_multiplier is -1; it must be a number above 0"),
        ("gpt-neo-window", {"attention_types": [[[["local"]], 12]]}, "it must say global or local for"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name: str, changes: dict, message: str) -> None:
    config = golden_cases.config_of(name)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_config({**config, **changes})


def test_layers_are_counted_before_something_is_made_for_each() -> None:
    config = golden_cases.config_of("starcoder2-window")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="num_hidden_layers is 4194304; it must be a whole number from 1 to"):
            read_config({**config, "num_hidden_layers": 1 << 22})
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_factors_of_longrope_are_counted() -> None:
    config = golden_cases.config_of("phi3-longrope-partial")
    section = {**config["rope_parameters"], "long_factor": [1.0, 2.0]}
    with pytest.raises(CheckpointError, match="long_factor has 2 values; 4 are needed"):
        read_config({**config, "rope_parameters": section})


def test_longrope_follows_the_context_of_the_run(tmp_path: Path) -> None:
    """Up to the context of the training the short factors hold, beyond it the long ones, whatever a prompt's length."""
    case = golden_cases.load("phi3-longrope-partial")
    convert(golden_cases.write_checkpoint(case, tmp_path / "hf"), tmp_path / "bundle", weights="f16")
    config = read_config(case.config)
    for ctx, factors in ((16, config.rope.short_factors), (17, config.rope.long_factors)):
        rope = replace(config.rope, short_factors=factors, long_factors=factors)
        graph = build_graph(replace(config, rope=rope), requested_types("f32"))
        golden = forward(graph, case.tensors, case.ids[:12])
        with session(tmp_path / "bundle", kv="f32", ctx=ctx, outputs=12) as opened:
            assert difference(scored(opened, case.ids[:12]), golden) < TOLERANCE


def test_dynamic_scaling_follows_the_context_of_the_run(tmp_path: Path) -> None:
    """Up to the context of the training nothing is stretched, and a run that does not say has that context.

    Keys of one context are not those of another, so their caches are not taken.
    """
    case = golden_cases.load("llama-dynamic")
    convert(golden_cases.write_checkpoint(case, tmp_path / "hf"), tmp_path / "bundle", weights="f16")
    config, ids = read_config(case.config), case.ids[:12]
    assert config.max_position_embeddings == 60 and config.rope.original_max_position_embeddings == 20
    plain = build_graph(replace(config, rope=RopeConfig(config.rope.theta)), requested_types("f32"))
    golden = forward(plain, case.tensors, ids)
    with session(tmp_path / "bundle", kv="f32", outputs=12) as opened:
        assert opened.plan.request.ctx == 20
        assert difference(scored(opened, ids), golden) < TOLERANCE
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        opened.save(sequence, tmp_path / "cache")
    with session(tmp_path / "bundle", kv="f32", ctx=19) as opened:
        assert opened.load(tmp_path / "cache").tokens == ids
    with session(tmp_path / "bundle", kv="f32", ctx=44, outputs=12) as opened:
        assert difference(scored(opened, ids), golden) > 1e-2
        with pytest.raises(EdgeInferError, match=r"The prompt cache .* was saved by another model"):
            opened.load(tmp_path / "cache")


def test_an_early_phi_calls_longrope_su() -> None:
    config = golden_cases.config_of("phi3-longrope-partial")
    section = {**config["rope_parameters"], "rope_type": "su"}
    assert read_config({**config, "rope_parameters": section}) == read_config(config)


def test_a_wrapper_s_config_is_that_of_its_text_model() -> None:
    """M-RoPE turns text as the plain rotation does; older files have the text model's fields outside."""
    config = golden_cases.config_of("qwen2-vl-wrapped")
    flat = {**config, **config["text_config"], "model_type": "qwen2_vl"}
    del flat["text_config"]
    plain = {key: value for key, value in config["text_config"].items() if key != "rope_parameters"}
    plain |= {"model_type": "qwen2", "rope_theta": 2000.0}
    assert read_config(config) == read_config(flat) == read_config(plain)
    mrope = {"type": "mrope", "mrope_section": [2, 2, 1]}
    assert read_config({**flat, "rope_parameters": None, "rope_theta": 2000.0, "rope_scaling": mrope}) == \
        read_config(config)


PUBLISHED = {  # what the hub's files hold beside sizes
    "phi4-mini": {
        "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
        "sliding_window": 262144, "tie_word_embeddings": True, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "mlp_bias": False, "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999,
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}},
    "qwen2.5-vl-3b": {
        "model_type": "qwen2_5_vl", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000,
        "max_window_layers": 70, "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": True,
        "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "bos_token_id": 151643,
        "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "vision_config": {"depth": 32}},
    "gemma-3-4b-it": {
        "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256, "vision_config": {},
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "sliding_window": 1024,
                        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}},
    "mistral-small-3.1": {
        "model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1, "vision_config": {},
        "text_config": {"model_type": "mistral", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
                        "intermediate_size": 32768, "max_position_embeddings": 131072, "num_attention_heads": 32,
                        "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
                        "sliding_window": None, "vocab_size": 131072}},
    "falcon-7b": {
        "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False,
        "hidden_size": 4544, "layer_norm_epsilon": 1e-5, "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71, "parallel_attn": True,
        "vocab_size": 65024, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"}},
    "pythia-70m": {
        "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 512, "intermediate_size": 2048,
        "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 6,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
        "vocab_size": 50304, "bos_token_id": 0, "eos_token_id": 0},
    "command-r-v01": {
        "model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625, "max_position_embeddings": 8192, "model_max_length": 131072, "num_attention_heads": 64,
        "num_hidden_layers": 40, "num_key_value_heads": 64, "rope_theta": 8e6, "use_qk_norm": False,
        "vocab_size": 256000, "bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0},
}
BILLIONS = {"phi4-mini": 3.84, "qwen2.5-vl-3b": 3.09, "gemma-3-4b-it": 3.88, "mistral-small-3.1": 23.6,
            "falcon-7b": 6.92, "pythia-70m": 0.0704, "command-r-v01": 35.0}
"""As published, of the text models."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str) -> None:
    graph = build_graph(read_config(PUBLISHED[name]), requested_types())
    vectors = sum(weight.shape[0] for weight in graph.weights if weight.kind == "vector")
    assert graph.weight_count == pytest.approx(BILLIONS[name] * 1e9, rel=0.01) and vectors < 0.01 * graph.weight_count


@pytest.mark.parametrize(("heads", "powers"), [
    (1, [8]), (2, [4, 8]), (5, [2, 4, 6, 8, 1]), (6, [2, 4, 6, 8, 1, 3]), (8, [1, 2, 3, 4, 5, 6, 7, 8]),
    (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
])
def test_slopes_of_alibi(heads: int, powers: list[float]) -> None:
    """As in the paper for powers of 2, and in its program for others; in bfloat16 of 8 bits."""
    np.testing.assert_allclose(alibi_slopes(AlibiConfig(), heads), 2.0 ** -np.array(powers), rtol=1e-6)
    rounded = alibi_slopes(AlibiConfig(bfloat16=True), heads)
    np.testing.assert_allclose(rounded, 2.0 ** -np.array(powers), rtol=2.0**-8)
    assert not (rounded.view(np.uint32) & 0xFFFF).any()
    np.testing.assert_allclose(alibi_slopes(AlibiConfig(16.0), heads), 4.0 ** -np.array(powers), rtol=1e-6)


def test_alibi_and_a_rotation_are_not_together(tmp_path: Path) -> None:
    for bad in (replace(TINY, model_type="falcon", alibi=AlibiConfig()),
                replace(TINY, model_type="falcon", rotary_dim=0, alibi=AlibiConfig(65.0))):
        with pytest.raises(UnsupportedModelError, match=r"alibi is AlibiConfig.*max_bias above 0 and at most 64"):
            build_graph(bad, requested_types("q4"))
