"""Where a GGUF file has the tensors that an architecture calls by Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from edgeinfer.graph import Affine, Graph, ModelConfig, Source, Transposed, Weight

from .expert_names import with_stacks
from .gguf_latent import with_heads_apart

_OUTER = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output",
    "transformer.word_embeddings": "token_embd", "model.final_layernorm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output", "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down", "ln_attn": "attn_norm_2", "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps", "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.e_score_correction": "exp_probs_b",
}
SHARED_GATE = ".ffn_gate_inp_shexp.weight"
"""A matrix of one row, which files have as a vector."""
_ON_THE_WAY_OUT = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
                   "post_feedforward_layernorm": "post_ffw_norm"}
_INPUTS = {"per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm"}
_OWN = {name: _LAYER | _ON_THE_WAY_OUT for name in ("gemma2", "gemma3_text", "olmo2", "olmo3",
                                                                  "exaone4")} | {
    "glm4": _LAYER | {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    "gpt_oss": _LAYER | {"post_attention_layernorm": "post_attention_norm"},
    "gemma4_text": _LAYER | _ON_THE_WAY_OUT | _INPUTS | {
        "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2"}}
_ALONE = re.compile(r"model\.layers\.([0-9]+)\.(self_attn\.sinks|layer_scalar|router\.scale|router\.per_expert_scale)")
_NUMBERS = {"self_attn.sinks": "attn_sinks.weight", "layer_scalar": "layer_output_scale.weight",
            "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
"""Tensors whose names here end in neither weight nor bias."""
_HEAD_NORM = re.compile(r"model\.layers\.([0-9]+)\.self_attn\.([qk])_layernorm\.norms\.([0-9]+)\.weight")
"""The norm of one head, which files have in one tensor for all."""
_FUSED = re.compile(r"(blk\.[0-9]+\.ffn_)(gate|up)(_exps\.(?:weight|bias))")
_NAME = re.compile(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.([0-9]+)\.(.+)\.(weight|bias)"
                   r"|(.+)\.(weight|bias)")
INTERLEAVED = ("llama", "mistral", "ministral3", "granite", "smollm3", "mixtral", "granitemoe", "granitemoeshared")
"""Architectures whose q and k rows llama.cpp's converter reorders, for a rotation that turns neighbours."""
_IN_ROWS = ("gpt2", "gpt_bigcode", "gpt_neox", "falcon", "phi", "gpt_oss")
"""Architectures whose q, k and v a converter leaves in one tensor, as rows one behind the other."""
_OR_APART = ("phi", "gpt_oss")
"""Of these, those that also have three."""
_PLUS_ONE = ("gemma", "gemma2", "gemma3_text")
"""Architectures to whose norms the converter adds 1."""


def with_gguf_names(graph: Graph, config: ModelConfig, names: Collection[str] = ()) -> Graph:
    """Return the graph with the sources of its weights as a GGUF file has them; `names` are those of its tensors."""
    return replace(graph, weights=tuple(_renamed(weight, config, names) for weight in graph.weights))


def _renamed(weight: Weight, config: ModelConfig, names: Collection[str]) -> Weight:
    apart = with_heads_apart(weight, config, names)
    if apart is not weight:
        return apart
    fused = re.fullmatch(r"layers\.([0-9]+)\.qkv(_bias)?", weight.name) if config.model_type in _IN_ROWS else None
    name = f"blk.{fused[1]}.attn_qkv.{'bias' if fused[2] else 'weight'}" if fused else ""
    if fused and (config.model_type not in _OR_APART or name in names):
        return replace(weight, sources=_rows(name, weight))
    return with_stacks(weight, lambda source: _source(source, config, names))


def _rows(name: str, weight: Weight) -> tuple[Source, ...]:
    """Each part of the weight as rows of one tensor."""
    counts = [source.shape[0] for source in weight.sources]
    whole = Source(name, (sum(counts), *weight.sources[0].shape[1:]))
    return tuple(whole.rows(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts)))


def _source(source: Source, config: ModelConfig, names: Collection[str]) -> Source:
    """The same elements by the file's name; steps of the architecture come behind those that undo the converter's.

    Steps that the converter has taken already are left out.
    """
    name, steps, stored = gguf_name(source.name, config.model_type), source.steps, source.stored
    if any(isinstance(step, Transposed) for step in steps) and not config.latent:
        steps, stored = tuple(step for step in steps if not isinstance(step, Transposed)), stored[::-1]
    if config.model_type in _PLUS_ONE:
        steps = tuple(step for step in steps if step != Affine(plus=1.0))
    if source.each and name not in names and (single := name.replace("_exps.", ".{}.")).format(0) in names:
        name = single  # files of early 2024 have a tensor for each expert
    plain = replace(source, name=name, stored=stored, steps=())
    if head := _HEAD_NORM.fullmatch(source.name):
        heads = config.num_attention_heads if head[2] == "q" else config.num_key_value_heads
        plain = replace(plain, stored=(heads, *stored), index=(int(head[3]),))
    if (part := _FUSED.fullmatch(name)) and name not in names and (both := f"{part[1]}gate_up{part[3]}") in names:
        rows, second = stored[1], part[2] == "up"
        plain = replace(plain, name=both, stored=(stored[0], 2 * rows, *stored[2:]))
        if config.model_type == "gpt_oss":  # in turns
            plain = plain.every(2, int(second))
        else:
            plain = plain.rows(rows * second, rows * (1 + second))
    if config.model_type in INTERLEAVED and re.search(r"\.attn_[qk]\.", name):
        plain = plain.rope_halves(config.head_dim, config.rope_dim)
    return replace(plain, steps=(*plain.steps, *steps))


def gguf_name(name: str, model_type: str = "") -> str:
    """The file's name of a tensor; one that has none there keeps its own, and will be said to be missing."""
    if head := _HEAD_NORM.fullmatch(name):
        return f"blk.{head[1]}.attn_{head[2]}_norm.weight"
    if alone := _ALONE.fullmatch(name):
        return f"blk.{alone[1]}.{_NUMBERS[alone[2]]}"
    match, layer = _NAME.fullmatch(name.replace(".gate.e_score_correction_bias", ".e_score_correction.bias")), \
        _OWN.get(model_type, _LAYER)
    if match and match[1] and match[2] in layer:
        return f"blk.{match[1]}.{layer[match[2]]}.{match[3]}"
    return f"{_OUTER[match[4]]}.{match[5]}" if match and match[4] in _OUTER else name
