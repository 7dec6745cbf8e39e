"""GGUF files of models with recurrent layers, as llama.cpp's converter writes them from a golden case."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from edgeinfer.graph import ModelConfig
from tests.helpers import gguf_kimi
from tests.helpers.gguf_files import permuted
from tests.helpers.golden_cases import GoldenCase

ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5": "qwen35", "qwen3_5_moe_text": "qwen35moe",
                 "qwen3_5_moe": "qwen35moe", "qwen3_next": "qwen3next", "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
                 "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h",
                 "mamba2": "mamba2", "kimi_linear": "kimi-linear"}
NAMES = (
    (r"linear_attn\.in_proj_qkv\.", "attn_qkv."), (r"linear_attn\.in_proj_z\.", "attn_gate."),
    (r"linear_attn\.in_proj_b\.", "ssm_beta."), (r"linear_attn\.in_proj_a\.", "ssm_alpha."),
    (r"linear_attn\.in_proj_ba\.", "ssm_ba."), (r"linear_attn\.in_proj_qkvz\.", "ssm_in."),
    (r"(?:linear_attn|mamba|mixer)\.in_proj\.", "ssm_in."), (r"(?:linear_attn|mamba|mixer)\.conv1d\.", "ssm_conv1d."),
    (r"(?:linear_attn|mamba|mixer)\.out_proj\.", "ssm_out."), (r"(?:linear_attn|mamba|mixer)\.norm\.", "ssm_norm."),
    (r"(?:linear_attn|mamba|mixer)\.A_log", "ssm_a"), (r"(?:mamba|mixer)\.D", "ssm_d"),
    (r"(?:linear_attn|mamba|mixer)\.dt_bias", "ssm_dt.bias"), (r"conv\.conv\.", "shortconv.conv."),
    (r"conv\.(in|out)_proj\.", r"shortconv.\1_proj."), (r"(?:self_attn|mixer)\.([qkv])_proj\.", r"attn_\1."),
    (r"(?:self_attn|mixer)\.o(?:ut)?_proj\.", "attn_output."),
    (r"self_attn\.([qk])_(?:layer)?norm\.", r"attn_\1_norm."),
    (r"mlp\.shared_expert_gate\.", "ffn_gate_inp_shexp."),
    (r"(?:mlp|mixer)\.shared_experts?\.(\w+)_proj\.", r"ffn_\1_shexp."),
    (r"(?:mlp|feed_forward|mixer)\.gate\.e_score_correction_bias|feed_forward\.expert_bias", "exp_probs_b.bias"),
    (r"(?:mlp|feed_forward|mixer)\.gate\.|block_sparse_moe\.router\.", "ffn_gate_inp."),
    (r"(?:mlp|feed_forward|mixer)\.(gate|up|down)_proj\.", r"ffn_\1."), (r"feed_forward\.w1\.", "ffn_gate."),
    (r"feed_forward\.w2\.", "ffn_down."), (r"feed_forward\.w3\.", "ffn_up."),
    (r"mixer\.fc1_latent_proj\.", "ffn_latent_down."), (r"mixer\.fc2_latent_proj\.", "ffn_latent_up."),
    (r"(?:input_layernorm|operator_norm|norm)\.", "attn_norm."), (r"ffn_norm\.", "ffn_norm."),
    (r"pre_ff_layernorm\.weight", "ffn_norm"), (r"post_attention_layernorm\.", "post_attention_norm."),
)
OUTER = {"model.embed_tokens": "token_embd", "model.embeddings": "token_embd", "lm_head": "output",
         "model.norm": "output_norm", "model.final_layernorm": "output_norm", "model.norm_f": "output_norm",
         "model.embedding_norm": "token_embd_norm"}


DRAFTS = {"fc.weight": "eh_proj", "pre_fc_norm_embedding.weight": "enorm", "pre_fc_norm_hidden.weight": "hnorm",
          "norm.weight": "shared_head_norm"}


def architecture(case: GoldenCase, c: ModelConfig) -> str:
    """GGUF's name of a case's architecture."""
    return ARCHITECTURES[case.config["model_type"]] + ("_moe" if c.model_type == "nemotron_h" and c.experts else "")


def metadata(case: GoldenCase, c: ModelConfig, arch: str, drafts: int = 0) -> dict[str, Any]:
    """The keys, with this many blocks that draft."""
    own = case.config.get("text_config", case.config)
    r, layers = c.recurrent, range(c.num_hidden_layers + drafts)
    assert r
    attends = [i >= c.num_hidden_layers or (i not in r.layers and c.mixers[i : i + 1] in ((), ("attention",)))
               for i in layers]
    if arch == "kimi-linear":
        return {f"{arch}.{key}": value for key, value in gguf_kimi.metadata(c).items()}
    residual = own.get("residual_multiplier", 1)
    fields: dict[str, Any] = {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "block_count": len(layers), "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim, "attention.value_length": c.head_dim, "vocab_size": c.vocab_size,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps * residual**2)}
    if c.rope_dim:
        fields |= {"rope.dimension_count": c.rope_dim}
    if not arch.startswith("nemotron"):
        fields |= {"rope.freq_base": float(c.rope.theta)}
    if r.kind == "conv":
        fields |= {"shortconv.l_cache": r.conv_width}
    else:
        fields |= {"ssm.conv_kernel": r.conv_width, "ssm.state_size": r.key_dim, "ssm.group_count": r.key_heads,
                   "ssm.time_step_rank": r.heads, "ssm.inner_size": r.value_width}
    if r.kind == "delta":
        fields |= {"attention.recurrent_layers": [i in r.layers for i in layers], "full_attention_interval": 4}
        fields |= {"rope.dimension_sections": [11, 11, 10, 0]} if "qwen35" in arch else {}
    elif arch != "falcon-h1":
        fields["attention.head_count_kv"] = [c.num_key_value_heads * has for has in attends]
    if arch == "granitehybrid":
        fields |= {"embedding_scale": own["embedding_multiplier"], "residual_scale": own["residual_multiplier"],
                   "attention.scale": own["attention_multiplier"], "logit_scale": own["logits_scaling"],
                   "rope.scaling.finetuned": False}
    if arch.startswith("nemotron"):
        fields["feed_forward_length"] = [c.ffn_size(i) * (c.mixers[i] in ("mlp", "moe")) for i in layers]
        fields["rope.scaling.finetuned"] = False
    if arch == "mamba2":
        fields |= dict.fromkeys(("attention.head_count", "feed_forward_length"), 0)
        for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base"):
            fields.pop(key)
    if drafts:
        fields["nextn_predict_layers"] = drafts
    return {f"{arch}.{key}": value for key, value in (fields | experts(own, c, arch)).items()}


def experts(own: dict[str, Any], c: ModelConfig, arch: str) -> dict[str, Any]:
    """Keys of a mixture of experts."""
    if (e := c.experts) is None:
        return {}
    found: dict[str, Any] = {"expert_count": e.total, "expert_used_count": e.active,
                             "expert_feed_forward_length": e.intermediate_size}
    if e.shared_size:
        found["expert_shared_feed_forward_length"] = e.shared_size
    if arch == "granitehybrid":
        found["feed_forward_length"] = e.intermediate_size
    if arch == "lfm2moe":
        found |= {"leading_dense_block_count": own["num_dense_layers"], "expert_gating_func": 2}
    if not e.normalise:
        found["expert_weights_norm"] = False
    if arch.startswith("nemotron"):
        found |= {"expert_weights_scale": e.scale, "expert_group_count": e.groups, "expert_shared_count": 1,
                  "expert_group_used_count": e.active_groups}
        found |= {"moe_latent_size": e.latent_size} if e.latent_size else {}
    return found


def tensors_of(case: GoldenCase, c: ModelConfig, arch: str) -> dict[str, np.ndarray]:
    """The tensors by the file's names."""
    if arch == "kimi-linear":
        return gguf_kimi.tensors_of(case, c)
    out: dict[str, np.ndarray] = {}
    each: dict[str, list[np.ndarray]] = {}
    for stored, values in case.tensors.items():
        if ".visual." in stored:
            continue
        name = stored.replace("model.language_model.", "model.").replace("backbone.", "model.").replace(
            "mtp.layers.0.", f"model.layers.{c.num_hidden_layers}.")
        if own := DRAFTS.get(name.removeprefix("mtp.")):
            out[f"blk.{c.num_hidden_layers}.nextn.{own}.weight"] = values.astype(np.float32) + ("norm" in name)
            continue
        if one := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(\w+)_proj\.weight", name):
            each.setdefault(f"blk.{one[1]}.ffn_{one[2]}_exps.weight", []).append(values.astype(np.float32))
            continue
        for part, array in _converted(name, values.astype(np.float32), case, c, arch):
            out[part] = np.ascontiguousarray(array)
    return out | {name: np.stack(matrices) for name, matrices in each.items()}


def _converted(name: str, x: np.ndarray, case: GoldenCase, c: ModelConfig, arch: str
               ) -> list[tuple[str, np.ndarray]]:
    """A tensor's parts, reordered and reshaped."""
    r, module = c.recurrent, name.rpartition(".")[0]
    assert r
    if module in OUTER:
        return [(OUTER[module] + ".weight", x + (r.kind == "delta" and module == "model.norm"))]
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    assert layer, name
    block, part = f"blk.{layer[1]}.", layer[2]
    if part.endswith("A_log"):
        x = -np.exp(x)
    if "conv1d.weight" in part or part == "conv.conv.weight":
        x = x[:, 0]
    if r.kind == "delta":
        x = x + (part.endswith("norm.weight") and "linear_attn" not in part)
        x = tiled(part, x, c) if "qwen35" in arch else x
        if part == "linear_attn.in_proj_qkvz.weight":
            return [(block + own, rows) for own, rows in zip(("attn_qkv.weight", "attn_gate.weight"),
                                                             by_kind(x, c), strict=True)]
    elif re.search(r"(mamba|mixer)\.(A_log|D)$", part):
        x = x[:, None]
    elif re.search(r"(mamba|mixer)\.norm\.weight$", part):
        x = x.reshape(r.norm_groups, -1)
    if arch == "granitehybrid" or arch.startswith("nemotron"):
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
        x = next((permuted(x, n) for which, n in heads.items() if which in part), x)
    if found := _of_experts(part, x, c):
        return [(block + own, rows) for own, rows in found]
    if arch == "granitehybrid":
        part = part.replace("post_attention_layernorm", "ffn_norm")
    if part == "mlp.shared_expert_gate.weight":
        x = x[0]
    own = next((re.sub("^" + was, new, part) for was, new in NAMES if re.match(was, part)), "")
    assert own, part
    return [(block + own, x)]


def _of_experts(part: str, x: np.ndarray, c: ModelConfig) -> list[tuple[str, np.ndarray]]:
    """Experts, and FFNs whose gate and up are one tensor."""
    if part.endswith("experts.gate_up_proj"):
        return [(f"ffn_{which}_exps.weight", half)
                for which, half in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True)]
    if match := re.search(r"(?<!shared_)experts\.(up|down)_proj$", part):
        return [(f"ffn_{match[1]}_exps.weight", x)]
    end = "_shexp.weight" if c.experts else ".weight"
    if part == "shared_mlp.input_linear.weight":
        return [(f"ffn_{which}{end}", half) for which, half in zip(("gate", "up"), np.split(x, 2), strict=True)]
    return [(f"ffn_down{end}", x)] if part == "shared_mlp.output_linear.weight" else []


def tiled(part: str, x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """Value heads in the order of llama.cpp: the first of each key head, then the second of each."""
    r = c.recurrent
    assert r

    def turned(rows: np.ndarray, size: int) -> np.ndarray:
        heads = rows.reshape(r.key_heads, r.heads // r.key_heads, size, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    keys = 2 * r.key_width
    if part.startswith(("linear_attn.in_proj_qkv.", "linear_attn.conv1d.")):
        return np.concatenate([x[:keys], turned(x[keys:], r.value_dim)])
    if part.startswith("linear_attn.in_proj_z."):
        return turned(x, r.value_dim)
    if part.startswith("linear_attn.out_proj."):
        return turned(x.T, r.value_dim).T
    return turned(x, 1) if re.match(r"linear_attn\.(in_proj_[ab]\.|A_log|dt_bias)", part) else x


def by_kind(x: np.ndarray, c: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """q, k and v of all key heads, and z, from rows by key head."""
    r = c.recurrent
    assert r
    values = r.value_width // r.key_heads
    q, k, v, z = np.split(x.reshape(r.key_heads, -1, x.shape[1]), [r.key_dim, 2 * r.key_dim, 2 * r.key_dim + values],
                          axis=1)
    return np.concatenate([part.reshape(-1, x.shape[1]) for part in (q, k, v)]), z.reshape(-1, x.shape[1])
