"""GGUF files of each architecture, made as llama.cpp's converter makes them, give transformers' logits.

Names come from the gguf package's own table, values from the golden cases; what the converter does to some of them is
written again here.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import convert
from edgeinfer.errors import EdgeInferError, UnsupportedModelError
from edgeinfer.graph import ModelConfig, build_graph, family_of, inverse_frequencies, read_config, requested_types
from edgeinfer.models.describe import describe
from tests.helpers import golden_cases
from tests.helpers.bundles import weights_of
from tests.helpers.gguf_files import add_tensor, permuted
from tests.helpers.gguf_hybrids import ARCHITECTURES as ARCHITECTURES_OF_HYBRIDS
from tests.helpers.sessions import logits_of, scored, session
from tests.make_golden import CASES
from tests.models.test_models_golden import TOLERANCE, difference

ARCHITECTURES = {
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3", "phi3-longrope-partial": "phi3",
    "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "gpt2": "gpt2", "gpt-neox": "gptneox",
    "gpt-neox-serial": "gptneox", "falcon-7b": "falcon", "falcon-40b": "falcon", "falcon-11b-bias": "falcon",
    "stablelm": "stablelm", "stablelm-parallel": "stablelm", "phi": "phi2", "starcoder2-window": "starcoder2",
    "starcoder2-no-bias": "starcoder2", "cohere": "command-r", "qwen2-vl-wrapped": "qwen2vl",
    "qwen3-vl-wrapped": "qwen3vl", "gemma4": "gemma4", "gemma4-keys-as-values": "gemma4",
    "gemma4-mixture": "gemma4", "gemma4-mixture-rows": "gemma4", "gemma4-unified-wrapped": "gemma4",
    "ministral3": "mistral3", "ministral3-wrapped": "mistral3", "mistral3-wrapped": "mistral3", "olmo3": "olmo2",
    "exaone4": "exaone4", "exaone4-whole": "exaone4", "glm4": "glm4", "glm4-no-bias": "glm4", "cohere2": "cohere2",
    "gpt-bigcode": "starcoder", "stablelm-head-norms": "stablelm", "cohere-head-norms": "command-r",
    "bloom": "bloom", "mpt": "mpt",
}  # fmt: skip
ELSEWHERE = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "olmoe",
             "gpt_oss", "granitemoe", "granitemoeshared", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe",
             *ARCHITECTURES_OF_HYBRIDS}
"""Families whose files other modules compare: test_gguf_import, test_experts, test_latent, test_glm4_moe,
test_gpt_oss, test_gguf_hybrids."""
_LISTED = ELSEWHERE | {CASES[name]["model_type"] for name in ARCHITECTURES}
ARCHITECTURES |= {name: family_of(config["model_type"]).gguf[0].name for name, config in CASES.items()
                  if config["model_type"] not in _LISTED and family_of(config["model_type"]).gguf}
ARCHITECTURES = {name: arch for name, arch in ARCHITECTURES.items() if name in golden_cases.names()}
"""GGUF's name of each case; a family that is not named here needs no row where its file says all."""
SAID = {  # what llama.cpp knows of an architecture, and these tiny models have otherwise
    "gemma2": {"query_pre_attn_scalar": 14},  # a head's size, but of the 27B model
    "gemma3": {"query_pre_attn_scalar": 14, "sliding_window_pattern": 6},
    "gpt-neox-serial": {"hidden_act": "gelu"},
    "smollm3": {"no_rope_layer_interval": 4, "use_sliding_window": False},
}


def metadata(case: golden_cases.GoldenCase, c: ModelConfig, arch: str) -> dict[str, Any]:
    """As the converter writes them."""
    sizes = {"context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
             "block_count": c.num_hidden_layers, "feed_forward_length": c.intermediate_size,
             "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
             "vocab_size": c.vocab_size}
    layer_norm = arch in ("gpt2", "gptneox", "falcon", "stablelm", "phi2", "starcoder2", "starcoder",
                           "command-r", "cohere2", "bloom", "mpt")
    own = case.config.get("text_config", case.config)
    residual = own.get("residual_multiplier", 1)
    sizes["attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"] = \
        float(c.rms_norm_eps * residual**2)
    if c.rope_dim:
        sizes |= {"rope.dimension_count": c.rope_dim, "rope.freq_base": float(c.rope.theta)}
    if c.head_dim * c.num_attention_heads != c.hidden_size:
        sizes |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if any(c.windows):
        sizes["attention.sliding_window"] = max(c.windows)
    more: dict[str, dict[str, Any]] = {
        "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "gemma3": {"final_logit_softcapping": 5.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0,
                   "rope.freq_base_swa": 50.0},
        "granite": {"embedding_scale": 7.0, "residual_scale": 0.3, "attention.scale": 0.5, "logit_scale": 4.0},
        "gptneox": {"use_parallel_residual": c.parallel_residual},
        "stablelm": {"use_parallel_residual": c.parallel_residual},
        "cohere2": {"logit_scale": 0.25, "rope.scaling.type": "none"},
        "command-r": {"logit_scale": c.logits_scale, "rope.scaling.type": "none"},
        "mpt": {"attention.max_alibi_bias": 8.0},
        "qwen2vl": {"rope.dimension_sections": [2, 2, 1, 0]},
        "qwen3vl": {"rope.dimension_sections": [3, 3, 3, 0], "n_deepstack_layers": 1},
    }
    if arch == "gemma4":
        sizes |= gemma4(c)
    if any(c.windows) and arch in ("olmo2", "exaone4"):
        sizes |= {"attention.sliding_window_pattern": [bool(w) for w in c.windows]}
    if arch == "olmo2" and c.local_rope:
        sizes |= {"rope.freq_base_swa": c.local_rope.theta}
    if c.rope.kind == "yarn":
        sizes |= {"rope.scaling.type": "yarn", "rope.scaling.factor": c.rope.factor,
                  "rope.scaling.original_context_length": c.rope.original_max_position_embeddings}
    if c.rope.kind == "llama3":
        sizes["rope.scaling.original_context_length"] = c.rope.original_max_position_embeddings
    if c.query_scale and c.local_rope:
        sizes |= {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": c.local_rope.factor}
    if c.rope.kind == "longrope":
        sizes |= {"rope.scaling.original_context_length": 16,
                  "rope.scaling.attn_factor": math.sqrt(1 + math.log(64 / 16) / math.log(16))}
    return {f"{arch}.{key}": value for key, value in (sizes | more.get(arch, {})).items()}


def gemma4(c: ModelConfig) -> dict[str, Any]:
    """Sizes of heads by kind of layer, others layer by layer, as conversion/gemma.py of llama.cpp writes them."""
    layers = range(c.num_hidden_layers)
    found: dict[str, Any] = {
        "attention.key_length": max(c.head_dims), "attention.value_length": max(c.head_dims),
        "attention.key_length_swa": c.head_dim, "attention.value_length_swa": c.head_dim,
        "rope.dimension_count": max(c.head_dims), "rope.dimension_count_swa": c.head_dim,
        "attention.sliding_window_pattern": [bool(w) for w in c.windows],
        "attention.shared_kv_layers": sum(c.kv_layer(i) != i for i in layers),
        "embedding_length_per_layer_input": c.layer_input, "final_logit_softcapping": c.logits_softcap,
        "rope.freq_base_swa": c.local_rope.theta if c.local_rope else 0.0}
    if c.ffn_sizes:
        found["feed_forward_length"] = list(c.ffn_sizes)
    if e := c.experts:
        found |= {"expert_count": e.total, "expert_used_count": e.active,
                  "expert_feed_forward_length": e.intermediate_size}
    return found | ({"attention.head_count_kv": list(c.kv_heads)} if c.keys_as_values else {})


def tensors_of(case: golden_cases.GoldenCase, c: ModelConfig, arch: str) -> dict[str, np.ndarray]:
    """By the gguf package's names."""
    gguf = pytest.importorskip("gguf")
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, out = gguf.get_tensor_name_map(kind, c.num_hidden_layers), {}
    for name, stored in case.tensors.items():
        if re.search(r"visual|embed_(vision|audio)|vision_tower|projector", name):
            continue
        values = stored.astype(np.float32)
        if arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        if arch == "gpt2" and values.ndim == 2 and ".h." in name:
            values = values.T
        if head := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.\d+\.weight", name):
            one = f"blk.{head[1]}.attn_{head[2]}_norm.weight"
            out[one] = np.concatenate([*([out[one]] if one in out else []), values[None]])
            continue
        if "query_key_value" in name:
            values = in_rows(values, c)
        if arch in ("granite", "smollm3", "mistral3"):
            heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
            for part, n in heads.items():
                values = permuted(values, n) if part in name else values
        text = name.replace("model.language_model.", "model.")
        text = text.removeprefix("transformer.") if arch == "bloom" else text
        if "router" in name and name.endswith("scale"):
            name = "ffn_down_exps" if "expert" in name else "ffn_gate_inp"
            out[f"blk.{text.split('.')[2]}.{name}.scale"] = values
            continue
        text += "" if name.endswith(("weight", "bias")) else ".weight"
        out[names.get_name(text, try_suffixes=(".weight", ".bias"))] = values
    if arch == "gemma4":
        turning, pairs = c.rope.dims // 2, c.rope.span // 2
        out["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)
    if c.rope.kind == "llama3":
        plain = replace(c.rope, kind="default")
        factors = inverse_frequencies(plain, c.head_dim) / inverse_frequencies(c.rope, c.head_dim)
        out["rope_freqs.weight"] = factors.astype(np.float32)
    if c.rope.kind == "longrope":
        out |= {"rope_factors_long.weight": np.array(c.rope.long_factors, np.float32),
                "rope_factors_short.weight": np.array(c.rope.short_factors, np.float32)}
    return out


def in_rows(fused: np.ndarray, c: ModelConfig) -> np.ndarray:
    """Queries of all heads, then keys, then values, from a tensor that has them by KV head."""
    heads = fused.reshape(c.num_key_value_heads, -1, c.head_dim, *fused.shape[1:])
    parts = (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])
    return np.concatenate([part.reshape(-1, *fused.shape[1:]) for part in parts])


def write(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], arch: str,
          kinds: dict[str, str] | None = None) -> None:
    """`kinds` are types of matrices by a word of their names; all others are F32."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, arch)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
              list: writer.add_array}
    for key, value in fields.items():
        adders[type(value)](key, value)
    for name, values in tensors.items():
        matrix = values.ndim > 1 and "norm" not in name
        kind = next((kind for word, kind in (kinds or {}).items() if word in name and matrix), "F32")
        add_tensor(writer, name, np.ascontiguousarray(values, np.float32), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_of_a_file(name: str, tmp_path: Path) -> None:
    """Those of the checkpoint, and where the file cannot say what the case has, those of a checkpoint that agrees."""
    case, arch = golden_cases.load(name), ARCHITECTURES[name]
    case = case._replace(config={**case.config, **SAID.get(name, {})})
    c = read_config(case.config)
    write(tmp_path / "m.gguf", metadata(case, c, arch), tensors_of(case, c, arch), arch)
    convert(tmp_path / "m.gguf", tmp_path / "bundle")
    golden = case.logits
    if name in SAID:
        convert(golden_cases.write_checkpoint(case, tmp_path / "hf"), tmp_path / "other", weights="f32")
        with session(tmp_path / "other", kv="f32", ctx=64, outputs=16) as opened:
            golden = scored(opened, case.ids).copy()
    with session(tmp_path / "bundle", kv="f32", ctx=64, outputs=16) as opened:
        assert difference(scored(opened, case.ids), golden) < TOLERANCE
    assert describe(tmp_path / "m.gguf").weight_bytes == describe(tmp_path / "bundle").weight_bytes


def of_256(name: str) -> golden_cases.GoldenCase:
    """A case with rows of whole blocks of 256, without transformers' logits."""
    case = golden_cases.load(name)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
             "head_dim": 64}
    config = case.config | {key: value for key, value in sizes.items() if key in case.config}
    shapes = {source.name: source.stored for weight in build_graph(read_config(config), requested_types("f32")).weights
              for source in weight.sources}
    tensors = {tensor: golden_cases.weights(tensor, shape) for tensor, shape in shapes.items()}
    return case._replace(config=config, tensors=tensors)


PARTS = {"Q4_K_M": {"attn_v": "Q6_K", "attn_": "Q4_K", "ffn_": "Q4_K"},
         "floats between": {"attn_k": "F16", "attn_": "Q8_0", "ffn_": "Q4_0"}}
NORMS = ("stablelm", "stablelm-parallel", "phi", "starcoder2-window", "cohere", "olmo2", "olmo3", "exaone4", "cohere2",
         "ministral3", "stablelm-head-norms", "cohere-head-norms")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("name", "kinds"), [(name, list(PARTS)[i % 2]) for i, name in enumerate(NORMS)])
def test_parts_of_a_matrix_behind_every_norm(name: str, kinds: str, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v of several types have an input each: logits beside those of the same values in f32."""
    case, arch = of_256(name), ARCHITECTURES[name]
    c = read_config(case.config)
    write(tmp_path / "m.gguf", metadata(case, c, arch), tensors_of(case, c, arch), arch, PARTS[kinds])
    convert(tmp_path / "m.gguf", tmp_path / "bundle")
    convert(tmp_path / "m.gguf", tmp_path / "floats", weights="f32")
    options: dict[str, Any] = {"kv": "f32", "ctx": 64}
    with session(tmp_path / "floats", **options) as other:
        wanted = logits_of(other, case.ids, 3)
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with session(tmp_path / "bundle", **options) as ours:
        assert "layers.0.qkv.2" in ours.graph.types
        found = logits_of(ours, case.ids, 3)
    assert np.abs(found - wanted).max() < 0.15 * np.abs(wanted).max()  # activations of 8 bits, random weights
    assert describe(tmp_path / "m.gguf").weight_bytes == describe(tmp_path / "bundle").weight_bytes


def test_rows_of_heads_that_turn_in_part_keep_their_codes(tmp_path: Path) -> None:
    """Every value is the file's, though rows of q and k are put into another order."""
    case = of_256("glm4")
    c = read_config(case.config)
    assert 0 < c.rope_dim < c.head_dim
    write(tmp_path / "m.gguf", metadata(case, c, "glm4"), tensors_of(case, c, "glm4"), "glm4",
          {"attn_v": "Q6_K", "attn_": "Q4_K", "ffn_": "Q4_K"})
    report = convert(tmp_path / "m.gguf", tmp_path / "bundle")
    assert all(tensor.moved for tensor in report.tensors if re.search(r"(qkv|gate_up|down)$", tensor.name))
    convert(tmp_path / "m.gguf", tmp_path / "floats", weights="f32")
    ours, floats = weights_of(tmp_path / "bundle"), weights_of(tmp_path / "floats")
    for i in range(c.num_hidden_layers):
        for name in (f"layers.{i}.qkv", f"layers.{i}.gate_up", f"layers.{i}.down"):
            np.testing.assert_array_equal(ours[name], floats[name])


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K", "Q4_K"])
def test_a_table_of_rows_keeps_its_codes(kind: str, tmp_path: Path) -> None:
    """Each row becomes a tile; of blocks of 256 its pieces are whole ones."""
    case, extra = golden_cases.load("gemma4"), {"hidden_size_per_layer_input": 256}
    c = read_config(case.config | extra)
    shapes = {source.name: source.stored for weight in build_graph(c, requested_types("f32")).weights
              for source in weight.sources}
    tensors = {tensor: golden_cases.weights(tensor, shape) for tensor, shape in shapes.items()}
    case = case._replace(config=case.config | extra, tensors=tensors)
    write(tmp_path / "m.gguf", metadata(case, c, "gemma4"), tensors_of(case, c, "gemma4"), "gemma4",
          {"per_layer_token_embd": kind})
    report = convert(tmp_path / "m.gguf", tmp_path / "bundle")
    assert next(tensor for tensor in report.tensors if tensor.name == "layer_rows").moved
    convert(tmp_path / "m.gguf", tmp_path / "floats", weights="f32")
    options: dict[str, Any] = {"kv": "f32", "ctx": 64, "outputs": 16}
    with session(tmp_path / "bundle", **options) as ours, session(tmp_path / "floats", **options) as other:
        assert difference(scored(ours, case.ids), scored(other, case.ids)) < TOLERANCE
    assert describe(tmp_path / "m.gguf").weight_bytes == describe(tmp_path / "bundle").weight_bytes


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma4", "gemma4.rope.dimension_count", 10, "rope.dimension_count 10, .* width of a head, 22"),
        ("gemma4", "gemma4.feed_forward_length", [100, 200, 100, 100, 200, 200, 200], "is not that of a known Gemma 4"),
        ("gemma4", "gemma4.attention.sliding_window_pattern", [True, False], "for each of 7 layers"),
        ("gemma4", "gemma4.expert_count", 8, "lacks 'top_k_experts'"),
        ("gemma4-mixture", "gemma4.expert_used_count", 10, "top_k_experts is 10; it must be .* from 1 to 9"),
        ("gemma4-mixture", "gemma4.expert_gating_func", 2, "expert_gating_func is 2"),
        ("gemma4", "gemma4.block_count", 2**32 - 1, "4294967295 layers, but edgeinfer takes at most 4096"),
        ("gemma4", "gemma4.attention.shared_kv_layers", 2**32 - 1, "must be a number from 0 to 6"),
        ("gemma4", "gemma4.attention.shared_kv_layers", "x", "must be a number from 0 to 6"),
        ("gemma4", "gemma4.attention.shared_kv_layers", math.nan, "must be a number from 0 to 6"),
        ("gemma2", "gemma2.attention.key_length", 16, "it must be the width of a head, 16"),
        ("olmo3", "olmo2.attention.sliding_window_pattern", [True], "for each of 4 layers"),
        ("ministral3", "mistral3.rope.scaling.type", "none", "temperature_scale is 0.8"),
        ("ministral3", "mistral3.attention.temperature_length", 64, "temperature_length is 64"),
        ("ministral3", "mistral3.expert_count", 4, "expert_count is 4"),
        ("glm4", "glm4.nextn_predict_layers", 1, "nextn_predict_layers is 1"),
        ("cohere2", "cohere2.rope.dimension_count", 6, "rope.dimension_count is 6"),
        ("gpt2", "gpt2.residual_scale", 2.0, "residual_scale is 2.0"),
        ("falcon-7b", "falcon.rope.dimension_count", 6, "rope.dimension_count is 6"),
        ("cohere", "command-r.attention.scale", 3.0, "attention.scale is 3.0"),
        ("mpt", "mpt.attention.max_alibi_bias", 0.0, "alibi_bias_max is 0.0; it must be a number above 0"),
        ("mpt", "mpt.attention.clamp_kqv", 6.0, "clamp_kqv is 6.0"),
        ("starcoder2-window", "starcoder2.expert_gating_func", 2, "expert_gating_func is 2"),
    ],
)
def test_what_changes_the_mathematics_is_refused(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    case, arch = golden_cases.load(name), ARCHITECTURES[name]
    c = read_config(case.config)
    write(tmp_path / "m.gguf", {**metadata(case, c, arch), key: value}, tensors_of(case, c, arch), arch)
    with pytest.raises(EdgeInferError, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_an_unknown_architecture_is_refused_with_the_nearest(tmp_path: Path) -> None:
    case = golden_cases.load("gemma")
    c = read_config(case.config)
    write(tmp_path / "m.gguf", metadata(case, c, "gemma"), {"token_embd.weight": np.ones((99, 60))}, "gemma3n")
    with pytest.raises(UnsupportedModelError, match=r"architecture 'gemma3n'; known: .*the nearest is gemma"):
        convert(tmp_path / "m.gguf", tmp_path / "bundle")
