"""A toy whose checkpoint stacks the matrices of all layers as (layers, in, out), for RoPE of neighbouring pairs."""

from __future__ import annotations

from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 2048}


def read(c: ConfigReader) -> ModelConfig:
    """Nothing of its own; there is always a bias on queries, keys and values."""
    return read_decoder(c, DEFAULTS, attention_bias=True)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits; gate and up columns alternate."""
    layers, hidden, ffn = c.num_hidden_layers, c.hidden_size, c.intermediate_size

    def matrix(name: str, i: int, columns: int, rows: int) -> Source:
        return Source(name, (layers, columns, rows)).item(i).transposed()

    def vector(name: str, i: int, n: int) -> Source:
        return Source(name, (layers, n)).item(i)

    x = g.embed("wte")
    for i in range(layers):
        g.layer = i
        name, q, kv = f"layers.{i}.", c.query_width, c.kv_width
        turned = [matrix("h.q", i, hidden, q), matrix("h.k", i, hidden, kv)]
        biases = [vector("h.q_bias", i, q), vector("h.k_bias", i, kv)]
        h = g.rms_norm(x, name + "attention_norm", vector("h.norm_1", i, hidden))
        h = g.linear(h, name + "qkv", (*(s.rope_halves(c.head_dim) for s in turned), matrix("h.v", i, hidden, kv)),
                     (q, kv, kv), (*(s.rope_halves(c.head_dim) for s in biases), vector("h.v_bias", i, kv)))
        h = g.attention(g.rope_store(h))
        x = g.linear(h, name + "o", (matrix("h.o", i, q, hidden),), (hidden,), residual=x)
        h = g.rms_norm(x, name + "ffn_norm", vector("h.norm_2", i, hidden))
        gate_up = matrix("h.gate_up", i, hidden, 2 * ffn)
        modules = (gate_up.every(2), gate_up.every(2, first=1), matrix("h.down", i, ffn, hidden))
        x = g.ffn(h, name, modules, residual=x)
    return g.build(g.logits(x, "norm_f", Source("head", (hidden, c.vocab_size)).transposed()))
