"""A toy of fused projections, embeddings that are multiplied by sqrt(hidden_size), and norms stored minus 1."""

from __future__ import annotations

import itertools
import math

from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 2048}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on the fused projection and on the output of the attention."""
    bias = c.flag("attention_bias")
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    scale, width, ffn = math.sqrt(c.hidden_size), c.query_width + 2 * c.kv_width, c.intermediate_size
    ends = (0, c.query_width, c.query_width + c.kv_width, width)

    def norm(name: str) -> Source:
        return Source(name, (c.hidden_size,)).plus(1)

    def parts(source: Source) -> tuple[Source, ...]:
        return tuple(source.rows(*pair) for pair in itertools.pairwise(ends))

    x = g.embed(Source("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)).scaled(scale))
    for i in range(c.num_hidden_layers):
        g.layer = i
        hf, name = f"model.layers.{i}.", f"layers.{i}."
        qkv = hf + "self_attn.qkv_proj"
        h = g.rms_norm(x, name + "attention_norm", norm(hf + "input_layernorm.weight"))
        h = g.linear(h, name + "qkv", parts(Source(qkv + ".weight", (width, c.hidden_size))),
                     (c.query_width, c.kv_width, c.kv_width),
                     bias=parts(Source(qkv + ".bias", (width,))) if c.attention_bias else ())
        h = g.attention(g.rope_store(h))
        x = g.linear(h, name + "o", (hf + "self_attn.o_proj.weight",), (c.hidden_size,), residual=x,
                     bias=(hf + "self_attn.o_proj.bias",) if c.attention_output_bias else ())
        h = g.rms_norm(x, name + "ffn_norm", norm(hf + "post_attention_layernorm.weight"))
        gate_up = Source(hf + "mlp.gate_up_proj.weight", (2 * ffn, c.hidden_size))
        x = g.ffn(h, name, (gate_up.rows(0, ffn), gate_up.rows(ffn, 2 * ffn), hf + "mlp.down_proj"), residual=x)
    last = norm("model.norm.weight")  # a tied head is multiplied by the scale too
    return g.build(g.logits(x, last.scaled(1 / scale) if c.tie_word_embeddings else last, "lm_head.weight"))
