"""GLM-4.7-Flash (Z.ai): latent attention as DeepSeek's, experts chosen by sigmoids with a bias."""

from __future__ import annotations

from typing import Any

from ..builder.latent import block, forward, read_latent, read_routed
from ..config import ExpertsConfig, ModelConfig
from ..families.family import Family
from ..hf_config.reader import ConfigReader

__all__ = ["FAMILY", "block", "forward", "read"]

DEFAULTS = {
    "vocab_size": 154880, "num_attention_heads": 20, "max_position_embeddings": 202752, "bos_token_id": 0,
    "eos_token_id": 1, "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1,
}
MLPS = ("dense", "sparse")


def read(c: ConfigReader) -> ModelConfig:
    """The first layer has a plain FFN, or those that `mlp_layer_types` says."""
    return read_sigmoid(c, DEFAULTS)


def read_sigmoid(c: ConfigReader, defaults: dict[str, Any]) -> ModelConfig:
    """Latent attention and experts that sigmoids choose."""
    return read_latent(c, defaults, sigmoid_experts(c, defaults))


def sigmoid_experts(c: ConfigReader, defaults: dict[str, Any]) -> ExpertsConfig | None:
    """Experts are chosen by their scores plus a bias, of the groups whose two best are largest together."""
    c.choice("topk_method", c.get("topk_method", "noaux_tc"), ("noaux_tc",))
    c.choice("scoring_func", c.get("scoring_func", "sigmoid"), ("sigmoid",))
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        c.get(name)  # the first one drafts, if the checkpoint has it
    layers, types = c.integer("num_hidden_layers", high=2**12), c.get("mlp_layer_types")
    first = c.integer("first_k_dense_replace", defaults["first_k_dense_replace"], low=0)
    if types is None:
        types = ["dense" if i < first else "sparse" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise c.unsupported("mlp_layer_types", types, f"it must list {layers} of {', '.join(MLPS)}")
    dense = tuple(i for i, kind in enumerate(types) if c.choice("mlp_layer_types", kind, MLPS) == "dense")
    return read_routed(c, defaults, dense, normalise=c.flag("norm_topk_prob", True), scores="sigmoid",
                       choice_bias=True, group_best=2)


FAMILY = Family(further_tokens=True)
