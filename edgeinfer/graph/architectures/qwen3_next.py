"""Qwen3-Next (Alibaba): as Qwen3.5-MoE, with the matrices of delta rules stored by key head."""

from __future__ import annotations

from ..builder.builder import GraphBuilder
from ..builder.hybrid import Mixer
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_hybrid import delta_fields
from ..graph import Graph
from ..hf_config.reader import ConfigReader
from ..steps import Rows
from ..weights import Source
from . import qwen3_5_text
from .qwen3_5_moe_text import EXPERTS, read_routed
from .qwen3_5_text import TENSORS, block, mixer

__all__ = ["FAMILY", "block", "forward", "read"]


def read(c: ConfigReader) -> ModelConfig:
    """Layers of `mlp_only_layers` have a plain FFN, and those between the steps of `decoder_sparse_step`."""
    return read_routed(c, 512, 10, ffn=5632)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    return qwen3_5_text.forward(g, c, by_key_head)


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
    (Gguf("qwen3next", fields=delta_fields, rotated="share", experts=EXPERTS),),
    {**TENSORS, "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba"}, parts=parts,
    further_tokens=True, norms_plus_one=True)
