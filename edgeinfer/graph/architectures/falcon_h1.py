"""Falcon-H1 (TII, arXiv 2507.22448): attention and Mamba 2 (arXiv 2405.21060) side by side in each layer.

Its multipliers are folded into the weights: that of the embedding into the embedding's scale, that of the head into the
last norm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...errors import CheckpointError
from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..builder.hybrid import mamba, read_scan, scan_layer
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_hybrid import TENSORS_OF_SCAN, scan_fields
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor
from ..weights import Source

DEFAULTS = {"vocab_size": 128000, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "mamba_n_heads": 128,
            "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
_OF_TRAINING = ("time_step_floor", "time_step_min", "time_step_max", "time_step_rank", "num_logits_to_keep",
                "mamba_use_mlp", "attn_layer_indices", "layers_block_type", "layer_types", "mamba_chunk_size",
                "mlp_expansion_factor", "rescale_prenorm_residual", "residual_in_fp32")


def read(c: ConfigReader) -> ModelConfig:
    """`mamba_rms_norm` is whether the scan is normed, `mamba_norm_before_gate` in which order."""
    c.own_code()
    for name in _OF_TRAINING:
        c.get(name)
    c.choice("hidden_act", c.get("hidden_act") or "silu", ("silu", "swish"))  # which is that of convolutions, too
    hidden, layers = c.integer("hidden_size", high=2**17), c.integer("num_hidden_layers", high=2**12)
    expand = c.integer("mamba_expand", 2, high=64)
    width = c.integer("mamba_d_ssm", expand * hidden if c.is_null("mamba_d_ssm") else 1024, high=2**20)
    norm, after = c.flag("mamba_rms_norm"), not c.flag("mamba_norm_before_gate", True)
    scan = read_scan(c, tuple(range(layers)), DEFAULTS, width, norm=norm, gated_first=after,
                     in_bias=c.flag("mamba_proj_bias"), out_bias=c.flag("projectors_bias"))
    bias = c.flag("attention_bias")
    return read_decoder(
        c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, mlp_bias=c.flag("mlp_bias"), recurrent=scan,
        embedding_scale=c.number("embedding_multiplier", 1.0), logits_scale=c.number("lm_head_multiplier", 1.0),
        multipliers=read_multipliers(c))


def read_multipliers(c: ConfigReader) -> tuple[float, ...]:
    """Return the multipliers of a scan's input, z, x, B, C, time step and output; of attention's input, keys and
    output; of gate and down; none if all are 1.
    """
    many = {"ssm_multipliers": 5, "mlp_multipliers": 2}
    found = {name: c.numbers(name) if c.has(name) else (1.0,) * n for name, n in many.items()}
    for name, n in many.items():
        if len(found[name]) != n:
            raise CheckpointError(f"{c.where}: {name} has {len(found[name])} values; {n} are needed.")
    single = ("ssm_out_multiplier", "attention_in_multiplier", "key_multiplier", "attention_out_multiplier")
    factors = (c.number("ssm_in_multiplier", 1.0), *found["ssm_multipliers"], *(c.number(name, 1.0) for name in single),
               *found["mlp_multipliers"])
    return factors if any(factor != 1 for factor in factors) else ()


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """One block: x + attention(norm(x)) + scan(norm(x)), then + FFN of its norm."""
    g.layer, name, hf, d, n = i, f"layers.{i}.", f"model.layers.{i}.", c.hidden_size, c.intermediate_size
    before, *rows, scanned, into, keys, attended, gate, down = c.multipliers or (1.0,) * 12
    h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
    x = attend(g, c, h, x, i, (into, into * keys, into), attended)
    r, parts = c.recurrent, mamba(c, hf + "mamba.")
    assert r
    widths = (r.value_width, r.value_width, r.key_width, r.key_width, r.heads)
    whole, biases = parts.rows[0], tuple(Source(hf + "mamba.in_proj.bias", (sum(widths),)) for _ in parts.in_bias)
    x = scan_layer(g, c, h, x, name, parts._replace(
        rows=_pieces(c, whole, widths, [before * factor for factor in rows]),
        in_bias=_pieces(c, biases[0], widths, rows) if biases else (),
        out=_times(Source(hf + "mamba.out_proj.weight", (d, r.value_width)), scanned),
        out_bias=tuple(_times(Source(str(bias), (d,)), scanned) for bias in parts.out_bias)))
    h = g.rms_norm(x, name + "ffn_norm", hf + "pre_ff_layernorm.weight")
    mlp = hf + "feed_forward."
    ffn = tuple(_times(Source(f"{mlp}{p}_proj.weight", shape), by)
                for p, shape, by in (("gate", (n, d), gate), ("up", (n, d), 1.0), ("down", (d, n), down)))
    bias = tuple(_times(Source(f"{mlp}{p}_proj.bias", (size,)), by)
                 for p, size, by in (("gate", n, gate), ("up", n, 1.0), ("down", d, down)) if c.mlp_bias)
    return g.ffn(h, name, (ffn[0], ffn[1], ffn[2]), residual=x, bias=bias)


def attend(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, i: int, by: tuple[float, float, float], out: float
           ) -> Tensor:
    """x + the attention of h; of q, k and v, matrices are multiplied by factors, and so is the bias of k."""
    name, attn, d = f"layers.{i}.", f"model.layers.{i}.self_attn.", c.hidden_size
    widths = (c.query_width, c.kv_width, c.kv_width)
    qkv = tuple(_times(Source(f"{attn}{p}_proj.weight", (w, d)), f) for p, w, f in zip("qkv", widths, by, strict=True))
    biases = tuple(_times(Source(f"{attn}{p}_proj.bias", (w,)), by[1] / by[0] if p == "k" else 1.0)
                   for p, w in zip("qkv", widths, strict=True) if c.attention_bias)
    h = g.attention(g.rope_store(g.linear(h, name + "qkv", qkv, widths, bias=biases)))
    o = _times(Source(attn + "o_proj.weight", (d, c.query_width)), out)
    bias = (_times(Source(attn + "o_proj.bias", (d,)), out),) if c.attention_output_bias else ()
    return g.linear(h, name + "o", (o,), (d,), bias=bias, residual=x)


def _pieces(c: ModelConfig, whole: Source, widths: tuple[int, ...], by: list[float]) -> tuple[Source, ...]:
    """Runs of rows, each times its factor; the whole of a model without factors."""
    if not c.multipliers:
        return (whole,)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple(_times(whole.rows(a, a + n), factor) for a, n, factor in zip(starts, widths, by, strict=True))


def _times(source: Source, by: float) -> Source:
    return source if by == 1 else source.scaled(by)


def _fields(m: GgufMetadata) -> dict[str, Any]:
    """The converter has folded the multipliers, and llama.cpp norms after gating."""
    has = {name.split(".", 2)[-1] for name in m.tensors}
    return {**scan_fields(m), "mamba_d_ssm": m.get("ssm.inner_size"), "mamba_norm_before_gate": False,
            "mamba_rms_norm": "ssm_norm.weight" in has, "projectors_bias": "ssm_out.bias" in has}


forward = partial(llama_like, block=layer, norm="model.final_layernorm.weight")
TENSORS = {**{f"mamba.{name}": own for name, own in TENSORS_OF_SCAN.items()}, "feed_forward.gate_proj": "ffn_gate",
           "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down",
           "pre_ff_layernorm.weight": "ffn_norm", "model.final_layernorm": "output_norm"}
FAMILY = Family((Gguf("falcon-h1", fields=_fields),), TENSORS)
