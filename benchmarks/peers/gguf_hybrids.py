"""Parts of GGUF files of hybrid models, for gguf_models.py: matrices, vectors and settings of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np

TYPES = gguf.GGMLQuantizationType
NAMES = {"qwen3_5_text": "qwen35", "lfm2": "lfm2"}
"""Hybrid models that can be written, and their names in llama.cpp."""


def mixers(shape: dict, layer: int, q: int, kv: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, rows and columns of the matrices before a layer's FFN."""
    hidden, r = shape["hidden_size"], shape["recurrent"]
    if layer not in r["layers"]:
        yield from (("attn_q", q * (1 + bool(shape["attention_gate"])), hidden), ("attn_k", kv, hidden),
                    ("attn_v", kv, hidden), ("attn_output", hidden, q))
    elif r["kind"] == "conv":
        yield from (("shortconv.in_proj", 3 * hidden, hidden), ("shortconv.out_proj", hidden, hidden))
    else:
        keys, values = r["key_heads"] * r["key_dim"], r["heads"] * r["value_dim"]
        yield from (("attn_qkv", 2 * keys + values, hidden), ("attn_gate", values, hidden),
                    ("ssm_beta", r["heads"], hidden), ("ssm_alpha", r["heads"], hidden), ("ssm_out", hidden, values))


def vectors(shape: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of float32 tensors."""
    hidden, r = shape["hidden_size"], shape["recurrent"]
    delta = r["kind"] == "delta"
    for i in range(shape["num_hidden_layers"]):
        yield f"blk.{i}.attn_norm.weight", (hidden,)
        yield f"blk.{i}.{'post_attention_norm' if delta else 'ffn_norm'}.weight", (hidden,)
        if i not in r["layers"]:
            yield from ((f"blk.{i}.attn_{x}_norm.weight", (shape["head_dim"],)) for x in "qk")
        elif delta:
            channels = 2 * r["key_heads"] * r["key_dim"] + r["heads"] * r["value_dim"]
            yield from ((f"blk.{i}.ssm_conv1d.weight", (channels, r["conv_width"])), (f"blk.{i}.ssm_a", (r["heads"],)),
                        (f"blk.{i}.ssm_dt.bias", (r["heads"],)), (f"blk.{i}.ssm_norm.weight", (r["value_dim"],)))
        else:
            yield f"blk.{i}.shortconv.conv.weight", (hidden, r["conv_width"])
    yield ("output_norm.weight" if delta else "token_embd_norm.weight"), (hidden,)


def values(name: str, shape_of: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return values of such a vector."""
    if name.endswith("ssm_a"):
        return -np.exp(rng.uniform(0.0, 2.7, shape_of)).astype(np.float32)
    if name.endswith("ssm_dt.bias"):
        return np.full(shape_of, -4.0, np.float32)
    return (0.5 * rng.standard_normal(shape_of)).astype(np.float32) if "conv" in name else np.ones(shape_of, np.float32)


def add_settings(writer: gguf.GGUFWriter, shape: dict) -> None:
    """Add the metadata of recurrent layers."""
    name, r, layers = NAMES[shape["model_type"]], shape["recurrent"], shape["num_hidden_layers"]
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    if r["kind"] == "conv":
        kv = [0 if i in r["layers"] else shape["num_key_value_heads"] for i in range(layers)]
        writer.add_head_count_kv(kv)
        writer.add_uint32(f"{name}.shortconv.l_cache", r["conv_width"])
        return
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_array(f"{name}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_uint32(f"{name}.full_attention_interval", 4)
    writer.add_ssm_conv_kernel(r["conv_width"])
    writer.add_ssm_state_size(r["key_dim"])
    writer.add_ssm_group_count(r["key_heads"])
    writer.add_ssm_time_step_rank(r["heads"])
    writer.add_ssm_inner_size(r["heads"] * r["value_dim"])
