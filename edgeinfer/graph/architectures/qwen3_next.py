"""Qwen3-Next (Alibaba): as Qwen3.5-MoE, with the matrices of delta rules stored by key head."""

from __future__ import annotations

from ..builder.builder import GraphBuilder
from ..builder.hybrid import Mixer, delta_layer
from ..builder.moe import moe, read_experts
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_hybrid import delta_fields
from ..graph import Graph
from ..hf_config.reader import ConfigReader
from ..steps import Rows
from ..tensors import Tensor
from ..weights import Source
from .gemma import norm
from .qwen3_5_moe_text import EXPERTS
from .qwen3_5_text import DEFAULTS, TENSORS, attend, mixer, read_hybrid


def read(c: ConfigReader) -> ModelConfig:
    """Layers of `mlp_only_layers` have a plain FFN, and those between the steps of `decoder_sparse_step`."""
    size = c.integer("moe_intermediate_size", 512, high=2**20)
    experts = read_experts(c, "num_experts", 512, 10, size, normalise=c.flag("norm_topk_prob", True),
                           shared_size=c.integer("shared_expert_intermediate_size", 512, high=2**20))
    plain = c if c.has("intermediate_size") else c.instead(intermediate_size=5632)
    return read_hybrid(plain, {**DEFAULTS, "num_key_value_heads": 2}, experts=experts)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embed_tokens.weight")
    for i in range(c.num_hidden_layers):
        x = moe(g, c, mix(g, c, x, i), i, norm=norm(f"model.layers.{i}.post_attention_layernorm", c.hidden_size))
    return g.build(g.logits(x, norm("model.norm", c.hidden_size), "lm_head.weight"))


def mix(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """The first half of a block: x + the delta rule, or the attention, of norm(x)."""
    g.layer, name, hf = i, f"layers.{i}.", f"model.layers.{i}."
    h = g.rms_norm(x, name + "attention_norm", norm(hf + "input_layernorm", c.hidden_size))
    if not c.recurrent or i not in c.recurrent.layers:
        return attend(g, c, h, x, name, hf + "self_attn.")
    return delta_layer(g, c, h, x, name, by_key_head(c, hf + "linear_attn."))


def by_key_head(c: ModelConfig, hf: str) -> Mixer:
    """The tensors of a delta rule: of each key head its query, its key, then the values and gates of its value heads.
    """
    r = c.recurrent
    assert r
    group, keys = r.heads // r.key_heads, r.key_dim
    values = group * r.value_dim
    step = 2 * keys + 2 * values
    wide = Source(hf + "in_proj_qkvz.weight", (r.key_heads * step, c.hidden_size))
    thin = Source(hf + "in_proj_ba.weight", (2 * r.heads, c.hidden_size))
    rows = (wide.every(step, 0, keys), wide.every(step, keys, keys), wide.every(step, 2 * keys, values),
            wide.every(step, 2 * keys + values, values), thin.every(2 * group, 0, group),
            thin.every(2 * group, group, group))
    return mixer(c, hf)._replace(rows=rows)


def parts(c: ModelConfig, name: str, source: Source) -> tuple[str, Source] | None:
    """Newer files have q, k and v of all key heads in one tensor, and z in another."""
    r, first = c.recurrent, source.steps[0] if source.steps else None
    if name != "linear_attn.in_proj_qkvz.weight" or not r or not isinstance(first, Rows):
        return None
    keys, columns = r.key_width, source.stored[1:]
    ends = {0: (0, keys), r.key_dim: (keys, 2 * keys), 2 * r.key_dim: (2 * keys, r.conv_channels)}
    if first.start not in ends:
        return "attn_gate.weight", Source("", (r.value_width, *columns))
    return "attn_qkv.weight", Source("", (r.conv_channels, *columns)).rows(*ends[first.start])


FAMILY = Family(
    (Gguf("qwen3next", fields=delta_fields, turns="share", experts=EXPERTS),),
    {**TENSORS, "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba"}, parts=parts,
    further_tokens=True, norms_plus_one=True)
