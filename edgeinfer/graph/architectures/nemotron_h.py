"""Nemotron-H and Nemotron 3 (NVIDIA, arXiv 2504.03624): blocks of Mamba 2, of attention, and of FFNs without gates.

A block is one of these or a mixture of such FFNs; heads do not turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import CheckpointError
from ..builder.builder import GraphBuilder
from ..builder.hybrid import mamba, read_kinds, read_scan, scan_layer
from ..builder.moe import count_experts
from ..config import ExpertsConfig, ModelConfig
from ..families.family import ExpertModules, Family, Gguf, GgufExperts
from ..families.gguf_hybrid import FULL, LINEAR, TENSORS_OF_SCAN, kv_heads, scan_fields
from ..families.gguf_metadata import GgufMetadata
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..recurrent import SCAN
from ..tensors import Tensor
from .llama import weights

DEFAULTS = {"vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "relu2", "intermediate_size": 21504, "rotary": False, "mamba_n_heads": 128,
            "mamba_n_groups": 8, "mamba_d_state": 128, "mamba_d_conv": 4}
KINDS = {"linear_attention": SCAN, "mamba": SCAN, "full_attention": "attention", "attention": "attention",
         "mlp": "mlp", "moe": "moe"}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
NAMES = {"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_d_state": "ssm_state_size",
         "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
         "mamba_chunk_size": "chunk_size", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"}
"""Names of the fields that other models have under those of Bamba."""
_UNUSED = """expand norm_eps num_logits_to_keep use_mamba_kernels rescale_prenorm_residual residual_in_fp32
    time_step_min time_step_max time_step_floor time_step_rank rope_theta partial_rotary_factor rope_parameters
    mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap n_shared_experts num_nextn_predict_layers
    mtp_layers_block_type mtp_hybrid_override_pattern attention_head_dim mamba_expand mamba_dt_min mamba_dt_max
    mamba_dt_init_floor""".split()
"""Fields of training, of layers that draft, of a rotation that there is not, and such that repeat others."""
_OF_EXPERTS = """n_routed_experts num_local_experts num_experts_per_tok moe_intermediate_size moe_latent_size n_group
    topk_group moe_shared_expert_intermediate_size norm_topk_prob routed_scaling_factor""".split()
"""Fields that say nothing of a model without experts."""


def read(c: ConfigReader) -> ModelConfig:
    """`layers_block_type` lists the blocks, or `hybrid_override_pattern` has a letter for each.

    Time steps are bounded by `time_step_limit`, as in the published code and in files of llama.cpp; transformers (5.23)
    bounds those of a prompt, and not those of single tokens, by `time_step_min`.
    """
    c.own_code()
    for name in _UNUSED:
        c.get(name)
    c.called(**NAMES)
    kinds = _kinds(c)
    c = c.instead(num_hidden_layers=len(kinds))
    c.choice("mamba_hidden_act", c.get("mamba_hidden_act") or "silu", ("silu", "swish"))
    if c.flag("tie_word_embeddings"):
        raise c.unsupported("tie_word_embeddings", True, "models of the family have a head of their own")
    bias = c.flag("use_bias")
    scan = read_scan(c, tuple(i for i, kind in enumerate(kinds) if kind == SCAN), DEFAULTS, in_bias=bias, out_bias=bias)
    experts = _read_experts(c, kinds) if "moe" in kinds else None
    for name in _OF_EXPERTS:
        c.get(name)
    model = read_decoder(c, DEFAULTS, mlp_bias=c.flag("mlp_bias"), recurrent=scan, experts=experts)
    if not experts:
        return replace(model, mixers=kinds)
    size = model.intermediate_size if "mlp" in kinds else experts.shared_size
    sizes = tuple(size if kind == "mlp" else experts.shared_size for kind in kinds)
    return replace(model, intermediate_size=size, ffn_sizes=sizes, mixers=kinds)


def _kinds(c: ConfigReader) -> tuple[str, ...]:
    """The kind of each block, by whichever field there is."""
    pattern = c.get("hybrid_override_pattern")
    name = next((n for n in ("layers_block_type", "layer_types") if c.has(n)), "layers_block_type")
    if pattern is None or c.has(name):
        listed = c.get(name)
        return read_kinds(c.instead(num_hidden_layers=len(listed) or 1) if isinstance(listed, list) else c, KINDS, [],
                          name)
    if not isinstance(pattern, str):
        raise CheckpointError(f"{c.where}: hybrid_override_pattern is {pattern!r:.60}; it must be a text with a letter "
                              "for each block.")
    return tuple(KINDS[LETTERS[c.choice("hybrid_override_pattern", letter, LETTERS)]] for letter in pattern)


def _read_experts(c: ConfigReader, kinds: tuple[str, ...]) -> ExpertsConfig:
    """Experts without gates, in groups, chosen by sigmoids with a bias; they may work on a latent of the stream."""
    c.choice("hidden_act", c.get("hidden_act") or "relu2", ("relu2",))
    total, active = count_experts(c, "n_routed_experts", 8, 2)
    groups = c.integer("n_group", 1, high=total)
    return ExpertsConfig(
        total, active, c.integer("moe_intermediate_size", 7688, high=2**20), scores="sigmoid", choice_bias=True,
        normalise=c.flag("norm_topk_prob", True), scale=c.number("routed_scaling_factor", 1.0), groups=groups,
        active_groups=c.integer("topk_group", 1, high=groups), group_best=2, shared_gate=False,
        shared_size=c.integer("moe_shared_expert_intermediate_size", 7688, high=2**20),
        dense_layers=tuple(i for i, kind in enumerate(kinds) if kind != "moe"), gated=False,
        latent_size=c.integer("moe_latent_size", None, high=2**17) or 0)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embeddings.weight")
    for i in range(c.num_hidden_layers):
        g.layer, name, hf = i, f"layers.{i}.", f"model.layers.{i}."
        h = g.rms_norm(x, name + "norm", hf + "norm.weight")
        x = BLOCKS[c.mixers[i]](g, c, h, x, i)
    return g.build(g.logits(x, "model.norm_f.weight", "lm_head.weight"))


def scan(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, i: int) -> Tensor:
    """x + Mamba 2's scan of h."""
    return scan_layer(g, c, h, x, f"layers.{i}.", mamba(c, f"model.layers.{i}.mixer."))


def attend(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, i: int) -> Tensor:
    """x + the attention of h, whose heads do not turn."""
    name, hf, widths = f"layers.{i}.", f"model.layers.{i}.mixer.", (c.query_width, c.kv_width, c.kv_width)
    h = g.linear(h, name + "qkv", weights(tuple(f"{hf}{p}_proj" for p in "qkv")), widths)
    return g.linear(g.attention(g.rope_store(h)), name + "o", (hf + "o_proj.weight",), (c.hidden_size,), residual=x)


def ffn(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, i: int, module: str = "") -> Tensor:
    """x + the FFN of h."""
    hf = f"model.layers.{i}.mixer.{module}"
    return g.plain_ffn(h, f"layers.{i}.", hf + "up_proj.weight", hf + "down_proj.weight", x,
                       (hf + "up_proj.bias", hf + "down_proj.bias") if c.mlp_bias else ())


def routed(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, i: int) -> Tensor:
    """x + the shared FFN of h + its experts, of h or of a latent of it."""
    e, name, hf, mlp = c.experts, f"layers.{i}.", f"model.layers.{i}.mixer.", f"model.layers.{i}.mlp."
    assert e
    routes = g.route(h, name, mlp)
    x = ffn(g, c, h, x, i, "shared_experts.")
    if not e.latent_size:
        return g.experts(h, routes, name, mlp, residual=x)
    kinds = ("weight", "bias")[: 1 + c.mlp_bias]
    into, out = (tuple(f"{hf}fc{n}_latent_proj.{kind}" for kind in kinds) for n in (1, 2))
    h = g.linear(h, name + "latent_in", into[:1], (e.latent_size,), bias=into[1:])
    h = g.experts(h, routes, name, mlp, residual=None)
    return g.linear(h, name + "latent_out", out[:1], (c.hidden_size,), bias=out[1:], residual=x)


def _fields(m: GgufMetadata) -> dict[str, Any]:
    """Blocks with key-value heads attend, those with an FFN's size are FFNs or mixtures, and the others scan."""
    heads, n = kv_heads(m)
    sizes = m.by_layer(m.get("feed_forward_length"), "feed_forward_length")
    drafts = m.get("nextn_predict_layers") or 0
    mixtures = [f"blk.{i}.ffn_gate_inp.weight" in m.tensors for i in range(len(sizes))]
    kinds = [FULL if heads[i] else LINEAR if not sizes[i] else "moe" if mixtures[i] else "mlp"
             for i in range(len(sizes))]
    m.get("rope.scaling.finetuned")
    return {**scan_fields(m), "use_bias": any(name.endswith("ssm_in.bias") for name in m.tensors),
            "num_key_value_heads": n, "intermediate_size": max(*sizes, 1), "hidden_act": "relu2",
            "layers_block_type": kinds[: len(kinds) - drafts]}


def _routed_fields(m: GgufMetadata) -> dict[str, Any]:
    groups = m.get("expert_group_count") or 1
    return {**_fields(m), "routed_scaling_factor": m.get("expert_weights_scale") or 1.0, "n_group": groups,
            "topk_group": m.get("expert_group_used_count") or groups, "moe_latent_size": m.get("moe_latent_size")}


TENSORS = {**{f"mixer.{name}": own for name, own in TENSORS_OF_SCAN.items()}, "norm": "attn_norm",
           "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
           "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down", "mixer.shared_experts.up_proj": "ffn_up_shexp",
           "mixer.shared_experts.down_proj": "ffn_down_shexp", "mixer.fc1_latent_proj": "ffn_latent_down",
           "mixer.fc2_latent_proj": "ffn_latent_up", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
           "model.embeddings": "token_embd", "model.norm_f": "output_norm"}
EXPERTS = GgufExperts("n_routed_experts", size="moe_intermediate_size", normalise=True,
                      shared_size="moe_shared_expert_intermediate_size")
IGNORED = ("rope.dimension_count", "rope.freq_base", "attention.layer_norm_epsilon")
BLOCKS = {SCAN: scan, "attention": attend, "mlp": ffn, "moe": routed}
FAMILY = Family(
    (Gguf("nemotron_h", fields=_fields, ignored=IGNORED),
     Gguf("nemotron_h_moe", fields=_routed_fields, ignored=IGNORED, experts=EXPERTS)), TENSORS, neighbours=True,
    further_tokens=True, otherwise="backbone.", experts=ExpertModules(
        "mixer", ("gate_proj", "up_proj", "down_proj"), "mixer.gate", choice_bias="mixer.gate.e_score_correction_bias"))
