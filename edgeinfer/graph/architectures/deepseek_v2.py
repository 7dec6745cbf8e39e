"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention, and a mixture with shared experts."""

from __future__ import annotations

from ..config import ModelConfig
from ..latent_block import forward, read_latent, read_routed
from ..reader import ConfigReader

__all__ = ["forward", "read"]

DEFAULTS = {
    "vocab_size": 102400, "num_attention_heads": 32, "max_position_embeddings": 2048, "bos_token_id": 1,
    "eos_token_id": 2, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0,
}


def read(c: ConfigReader) -> ModelConfig:
    """Experts are chosen of all, or of the groups whose best score is largest; their weights are softmax's own."""
    c.own_code()
    method = c.choice("topk_method", c.get("topk_method", "greedy"), ("greedy", "group_limited_greedy"))
    c.choice("scoring_func", c.get("scoring_func", "softmax"), ("softmax",))
    for name in ("norm_topk_prob", "mlp_bias"):
        if c.flag(name):
            raise c.unsupported(name, True, "published models of the family have it off")
    for name in ("aux_loss_alpha", "seq_aux", "ep_size"):
        c.get(name)  # of training
    if c.integer("moe_layer_freq", 1) != 1:
        raise c.unsupported("moe_layer_freq", c.get("moe_layer_freq"), "only 1 is supported")
    first = c.integer("first_k_dense_replace", 0, low=0)
    dense = tuple(range(min(first, c.integer("num_hidden_layers", high=2**12))))
    groups = {"groups": 1, "active_groups": 1} if method == "greedy" else {}
    return read_latent(c, DEFAULTS, read_routed(c, DEFAULTS, dense, normalise=False, **groups))
