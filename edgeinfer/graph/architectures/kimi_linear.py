"""Kimi Linear (Moonshot AI, arXiv 2510.26692): Kimi delta attention, and latent attention whose heads do not turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...base.units import round_up
from ...errors import CheckpointError
from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..builder.hybrid import read_delta, read_kinds
from ..builder.latent import attend
from ..builder.moe import moe
from ..config import ModelConfig, RopeConfig
from ..families.family import ExpertModules, Family
from ..families.gguf_hybrid import FULL, LINEAR, kv_heads
from ..families.gguf_metadata import GgufMetadata
from ..families.pre_tokenizer import PreTokenizer
from ..graph import Graph
from ..hf_config.reader import ConfigReader
from ..recurrent import DELTA
from ..tensors import Tensor
from ..weights import Source
from . import deepseek_v2
from .glm4_moe_lite import read_sigmoid
from .qwen3_5_text import KINDS, SILU

DEFAULTS = {
    "vocab_size": 163840, "num_attention_heads": 32, "max_position_embeddings": 1048576, "bos_token_id": 163584,
    "eos_token_id": 163586, "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1, "intermediate_size": 9216,
}
NAMES = {"max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
         "n_group": "num_expert_group", "num_experts_per_tok": "num_experts_per_token",
         "n_shared_experts": "num_shared_experts", "n_routed_experts": "num_experts",
         "scoring_func": "moe_router_activation_func"}
"""Published names of fields that DeepSeek's configs have under others."""
SIZES = {"linear_num_heads": ("num_heads", 32), "linear_head_dim": ("head_dim", 128),
         "linear_conv_kernel_dim": ("short_conv_kernel_size", 4)}
"""Names in `linear_attn_config` of fields that transformers has outside of it, and defaults."""


def read(c: ConfigReader) -> ModelConfig:
    """`linear_attn_config` lists the layers from 1 on; without it `layer_types` has their kinds."""
    c.own_code()
    c.called(**NAMES)
    if not c.flag("mla_use_nope", True):
        raise c.unsupported("mla_use_nope", False, "published models have it on")
    if c.integer("moe_layer_freq", 1) != 1:
        raise c.unsupported("moe_layer_freq", c.get("moe_layer_freq"), "only 1 is supported")
    c.get("use_grouped_topk")  # which one group leaves as it is
    c.get("head_dim")  # not the size of these heads: hidden_size by their number, or their rotated part
    c = _with_layers(c)
    layers = c.integer("num_hidden_layers", high=2**12)
    kinds = read_kinds(c, KINDS, [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)])
    sizes = {"linear_num_key_heads": "linear_num_heads", "linear_num_value_heads": "linear_num_heads",
             "linear_key_head_dim": "linear_head_dim", "linear_value_head_dim": "linear_head_dim"}
    c.called(**sizes)
    defaults = {name: default for name, (_, default) in SIZES.items()}
    delta = read_delta(c, tuple(i for i, kind in enumerate(kinds) if kind == DELTA),
                       {**defaults, **{name: defaults[own] for name, own in sizes.items()}}, by_row=True)
    c.choice("hidden_act", c.get("hidden_act") or "silu", SILU)  # which is that of convolutions, too
    rotary = c.integer("qk_rope_head_dim", 64, high=2**16)
    model = read_sigmoid(c.instead(head_dim=rotary, rope_interleave=False), DEFAULTS)
    return replace(model, recurrent=delta, rope=RopeConfig(kind="none"))


def _with_layers(c: ConfigReader) -> ConfigReader:
    """The config with the contents of `linear_attn_config` under transformers' names."""
    layers, own = c.integer("num_hidden_layers", high=2**12), c.section("linear_attn_config")
    if own is None:
        return c
    full, recurrent = own.get("full_attn_layers"), own.get("kda_layers")
    fields: dict[str, Any] = {name: own.integer(theirs, default, high=2**12)
                              for name, (theirs, default) in SIZES.items()}
    own.refuse_unread()
    if full is not None or recurrent is not None:
        both = [*full, *recurrent] if isinstance(full, list) and isinstance(recurrent, list) else []
        if not all(type(i) is int for i in both) or sorted(both) != list(range(1, layers + 1)):
            raise CheckpointError(f"{own.where}: full_attn_layers and kda_layers must have each of the {layers} layers "
                                  "once, counted from 1.")
        fields["layer_types"] = [FULL if i in full else LINEAR for i in range(1, layers + 1)]
    return c.instead(**fields)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    recurrent = c.recurrent.layers if c.recurrent else ()
    return llama_like(g, c, lambda g, c, x, i: moe(g, c, (delta if i in recurrent else attend)(g, c, x, i), i))


def delta(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """The first half of a block: x + the delta rule of norm(x); decays and the output's gate are of low rank."""
    g.layer, name, hf, r = i, f"layers.{i}.", f"model.layers.{i}.self_attn.", c.recurrent
    assert r
    h = g.rms_norm(x, name + "attention_norm", f"model.layers.{i}.input_layernorm.weight")

    def matrices(*parts: str) -> tuple[str, ...]:
        return tuple(f"{hf}{part}_proj.weight" for part in parts)

    rows = g.linear(h, name + "mixer_in", matrices("q", "k", "v"), (r.key_width, r.key_width, r.value_width))
    u = g.causal_conv(rows, name + "conv", (Source(hf + "conv1d.weight", (r.conv_channels, 1, r.conv_width)),),
                      silu=True, normed=2 * r.key_heads, head_dim=r.key_dim)
    first, decays = round_up(r.heads, 16), r.heads * r.key_dim
    gates = g.linear(h, name + "beta", matrices("b"), (r.heads,), room=first - r.heads + decays)
    low = g.linear(h, name + "decay_in", matrices("f_a"), (r.key_dim,))
    gates = g.linear(low, name + "decay", matrices("f_b"), (decays,), onto=gates, first=first)
    o = g.delta_rule(u, gates, name, hf + "A_log", hf + "dt_bias", gate_start=0)
    low = g.linear(h, name + "gate_in", matrices("g_a"), (r.value_dim,))
    z = g.linear(low, name + "gate", matrices("g_b"), (r.value_width,))
    o = g.gated_norm(o, z, name + "mixer_norm", hf + "o_norm.weight", start=0, group=r.value_dim, shared=True,
                     gated_first=r.gated_first, function="sigmoid")
    return g.linear(o, name + "mixer_out", matrices("o"), (c.hidden_size,), residual=x)


# -- files -------------------------------------------------------------------------------------------------------------


def _fields(m: GgufMetadata) -> dict[str, Any]:
    """Layers without key-value heads have delta rules, with as many heads as attention."""
    heads, _ = kv_heads(m)
    assert deepseek_v2.GGUF.fields
    fields = deepseek_v2.GGUF.fields(m)
    fields |= {theirs: fields.pop(name) for name, theirs in NAMES.items() if name in fields}
    return {**fields, "layer_types": [FULL if each else LINEAR for each in heads],
            "linear_num_heads": m.size("num_attention_heads"), "linear_head_dim": m.get("kda.head_dim"),
            "linear_conv_kernel_dim": m.get("ssm.conv_kernel")}


_GATES = {f"self_attn.{part}": f"self_attn.forget_gate.{part}"
          for part in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")}
_FFN = {f"mlp.{part}": f"block_sparse_moe.{part}" for part in (
    "gate.weight", "gate.e_score_correction_bias", *(f"{module}{which}_proj.weight" for which in ("gate", "up", "down")
                                                     for module in ("", "shared_experts.")))}
"""Names of FFNs as published; transformers (5.24) saves those of layers without experts so, too."""
_CAPITALS, _SMALL = (rf"(?:(?!\p{{Han}})[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}])" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = (rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{_ENDS}"
         rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{_ENDS}"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""GPT-4o's pre-tokenizer, in which runs of Han characters are words of their own."""
FAMILY = Family(
    (replace(deepseek_v2.GGUF, name="kimi-linear", fields=_fields),),
    {**deepseek_v2.TENSORS, "self_attn.q_conv1d": "ssm_conv1d_q", "self_attn.k_conv1d": "ssm_conv1d_k",
     "self_attn.v_conv1d": "ssm_conv1d_v", "self_attn.f_a_proj": "ssm_f_a", "self_attn.f_b_proj": "ssm_f_b",
     "self_attn.g_a_proj": "ssm_g_a", "self_attn.g_b_proj": "ssm_g_b", "self_attn.b_proj": "ssm_beta",
     "self_attn.A_log": "ssm_a", "self_attn.dt_bias": "ssm_dt.bias", "self_attn.o_norm": "ssm_norm"},
    aliases={**_GATES, **_FFN}, experts=ExpertModules("block_sparse_moe", ("w1", "w3", "w2")),
    pre_tokenizers={"kimi-k2": PreTokenizer((WORDS,))})
