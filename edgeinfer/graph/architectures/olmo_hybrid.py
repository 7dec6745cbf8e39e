"""OLMo Hybrid (Ai2): layers with gated delta rules (arXiv 2412.06464), and OLMo 3's attention in each fourth one."""

from __future__ import annotations

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..builder.hybrid import Mixer, delta_layer, every_fourth, read_delta, read_kinds
from ..config import ModelConfig
from ..families.family import Family
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..recurrent import DELTA
from ..tensors import Tensor
from ..weights import Source
from . import olmo2
from .qwen3_5_text import KINDS, SILU

DEFAULTS = {"vocab_size": 100352, "num_attention_heads": 30, "intermediate_size": 11008, "eos_token_id": 100257,
            "max_position_embeddings": 65536}
HEAD_EPS = 1e-5
"""Epsilon of the heads' norm after a delta rule, whatever that of the model is."""
_OF_TRAINING = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")


def read(c: ConfigReader) -> ModelConfig:
    """Heads turn unless the config has null as `rope_theta`; `linear_allow_neg_eigval` lets beta reach 2."""
    for name in _OF_TRAINING:
        c.get(name)
    heads, hidden = c.integer("num_attention_heads", 30, high=2**12), c.integer("hidden_size", high=2**17)
    keys = c.integer("linear_num_key_heads", heads, high=2**12)
    key_dim = c.integer("linear_key_head_dim", max(1, 3 * hidden // (4 * keys)), high=2**12)
    sizes = {"linear_num_key_heads": keys, "linear_num_value_heads": heads, "linear_key_head_dim": key_dim,
             "linear_value_head_dim": 2 * key_dim, "linear_conv_kernel_dim": 4}
    default = every_fourth(c)
    if "full_attention" not in default:
        default[-1] = "full_attention"
    kinds = read_kinds(c, KINDS, default)
    delta = read_delta(c, tuple(i for i, kind in enumerate(kinds) if kind == DELTA), sizes, norm_eps=HEAD_EPS,
                       beta_scale=2.0 if c.flag("linear_allow_neg_eigval", True) else 1.0)
    c.choice("hidden_act", c.get("hidden_act") or "silu", SILU)  # which is that of convolutions, too
    section, bias = c.section("rope_parameters"), c.flag("attention_bias")
    turns = {"rope_theta": c.get("rope_theta", 0), **(section.items() if section else {})}["rope_theta"] is not None
    return read_decoder(c, {**DEFAULTS, "rotary": turns}, attention_bias=bias, attention_output_bias=bias,
                        recurrent=delta)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    recurrent = c.recurrent.layers if c.recurrent else ()
    return llama_like(g, c, lambda g, c, x, i: (layer if i in recurrent else olmo2.layer)(g, c, x, i))


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """Add one block with a delta rule: unlike those with attention, it norms the inputs of delta rule and FFN."""
    g.layer, name, hf = i, f"layers.{i}.", f"model.layers.{i}."
    h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
    x = delta_layer(g, c, h, x, name, mixer(c, hf + "linear_attn."))
    h = g.rms_norm(x, name + "ffn_norm", hf + "post_attention_layernorm.weight")
    return g.ffn(h, name, (hf + "mlp.gate_proj", hf + "mlp.up_proj", hf + "mlp.down_proj"), residual=x)


def mixer(c: ModelConfig, hf: str) -> Mixer:
    """The tensors of a delta rule."""
    r = c.recurrent
    assert r
    rows = {"q": r.key_width, "k": r.key_width, "v": r.value_width, "g": r.value_width, "b": r.heads, "a": r.heads}
    return Mixer(tuple(Source(f"{hf}{part}_proj.weight", (width, c.hidden_size)) for part, width in rows.items()),
                 (Source(hf + "conv1d.weight", (r.conv_channels, 1, r.conv_width)),), hf + "A_log", hf + "dt_bias",
                 hf + "o_norm.weight", hf + "o_proj.weight")


FAMILY = Family(aliases={"input_layernorm.weight": "attention_layer_norm.weight",
                         "post_attention_layernorm.weight": "feedforward_layer_norm.weight"})
