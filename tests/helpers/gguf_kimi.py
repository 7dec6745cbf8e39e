"""GGUF files of Kimi Linear, as llama.cpp's converter writes them from a golden case."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from edgeinfer.graph import ModelConfig
from tests.helpers.golden_cases import GoldenCase

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a", "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a", "self_attn.g_b_proj": "ssm_g_b", "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm", "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{which}_proj": f"ffn_{which}" for which in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{which}_proj": f"ffn_{which}_shexp" for which in ("gate", "up", "down")},
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def metadata(c: ModelConfig) -> dict[str, Any]:
    """The keys, without the architecture's name."""
    r, e, latent = c.recurrent, c.experts, c.latent
    assert r and e and latent
    rank, key = c.head_dim - c.rope_dim, latent.nope_dim + c.rope_dim
    found: dict[str, Any] = {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size, "vocab_size": c.vocab_size,
        "block_count": c.num_hidden_layers, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "rope.freq_base": 10000.0,
        "attention.head_count_kv": [int(i not in r.layers) for i in range(c.num_hidden_layers)],
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.dimension_count": c.rope_dim,
        "attention.kv_lora_rank": rank, "attention.key_length": rank + c.rope_dim,
        "attention.key_length_mla": key, "attention.value_length_mla": latent.value_dim,
        "kda.head_dim": r.key_dim, "ssm.conv_kernel": r.conv_width, "expert_count": e.total,
        "expert_used_count": e.active, "expert_feed_forward_length": e.intermediate_size,
        "expert_shared_count": e.shared_size // e.intermediate_size, "expert_weights_scale": e.scale,
        "expert_gating_func": 2, "leading_dense_block_count": len(e.dense_layers),
        "expert_weights_norm": e.normalise, "expert_group_count": e.groups, "expert_group_used_count": e.active_groups}
    return found | ({"attention.q_lora_rank": latent.q_rank} if latent.q_rank else {})


def tensors_of(case: GoldenCase, c: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors by the file's names."""
    found: dict[str, np.ndarray] = {}
    for name, stored in case.tensors.items():
        x = stored.astype(np.float32)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        parts = _parts(layer[2], x, c) if layer else {OUTER[name.removesuffix(".weight")] + ".weight": x}
        found |= {f"blk.{layer[1]}.{part}" if layer else part: np.ascontiguousarray(y) for part, y in parts.items()}
    return found


def _parts(name: str, x: np.ndarray, c: ModelConfig) -> dict[str, np.ndarray]:
    """Return the GGUF tensors of a layer's tensor."""
    assert c.latent
    if name == "self_attn.conv1d.weight":
        return {f"ssm_conv1d_{part}.weight": rows.reshape(1, len(rows), 1, -1)
                for part, rows in zip("qkv", np.split(x, 3), strict=True)}
    if name == "self_attn.kv_b_proj.weight":
        heads = x.reshape(c.num_attention_heads, -1, x.shape[1])
        k, v = np.split(heads, [c.latent.nope_dim], axis=1)
        return {"attn_k_b.weight": k.swapaxes(1, 2), "attn_v_b.weight": v}
    if name == "mlp.experts.gate_up_proj":
        return {f"ffn_{which}_exps.weight": half
                for which, half in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True)}
    one = {"self_attn.forget_gate.A_log": ("ssm_a", -np.exp(x)), "mlp.experts.down_proj": ("ffn_down_exps.weight", x),
           "self_attn.forget_gate.dt_bias": ("ssm_dt.bias", x),
           "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias", x)}
    own, y = one.get(name) or (f"{NAMES[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}", x)
    return {own: y}
