"""GGUF files of tiny checkpoints, written with the gguf package as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import Checkpoint
from edgeinfer.converters.gguf.names import gguf_name
from edgeinfer.converters.gguf.types import BY_NAME
from edgeinfer.graph import ModelConfig

SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 2}
"""Rows of blocks of 32 whose number is odd."""


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """As LlamaModel.permute of convert_hf_to_gguf.py."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(
        values.shape)


def architecture(config: ModelConfig) -> str:
    """GGUF's name of an architecture."""
    own = {"mistral": "llama", "mixtral": "llama", "gpt_oss": "gpt-oss", "granitemoeshared": "granitemoe"}
    return own.get(config.model_type, config.model_type.replace("_", ""))


def tensors_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The tensors by GGUF's names, in float32."""
    config, out = checkpoint.config, {}
    for name in checkpoint.files:
        shape = checkpoint.tensor(name).shape
        values = checkpoint.read_rows(name, 0, shape[0]).reshape(shape)
        if architecture(config) in ("llama", "granitemoe"):
            if ".q_proj." in name:
                values = permuted(values, config.num_attention_heads)
            if ".k_proj." in name:
                values = permuted(values, config.num_key_value_heads)
        for router in (".block_sparse_moe.router.", ".block_sparse_moe.primary_router.", ".mlp.router."):
            name = name.replace(router, ".mlp.gate.")
        name = name.replace(".block_sparse_moe.", ".mlp.").replace("model.language_model.", "model.")
        if "visual" in name:
            continue
        if ".shared_mlp." in name:
            layer = name.partition("shared_mlp.")[0] + "mlp.shared_experts."
            parts = np.split(values, 2) if "input_linear" in name else [values]
            which = ("gate", "up") if "input_linear" in name else ("down",)
            out |= {gguf_name(f"{layer}{w}_proj.weight"): part for w, part in zip(which, parts, strict=True)}
            continue
        module, _, part = name.partition(".experts.")
        if part and config.model_type == "gpt_oss":
            out |= in_turns(module, part, values)
        elif part and config.model_type == "smallthinker":
            number, which, _ = part.split(".")
            stack = gguf_name(f"{module}.experts.{{}}.{which}_proj.weight")
            out[stack] = np.concatenate([*([out[stack]] if int(number) else []), values[None]])
        elif part == "gate_up_proj":
            for which, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                out[gguf_name(f"{module}.experts.{{}}.{which}_proj.weight")] = half
        elif part:
            out[gguf_name(module + ".experts.{}.down_proj.weight")] = values
        else:
            one = name.endswith("shared_expert_gate.weight")
            out[gguf_name(name, config.model_type)] = values[0] if one else values
    return out


def in_turns(module: str, part: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """gpt-oss's experts, as its converter writes them: a row for each output, gates and ups apart."""
    end = "bias" if part.endswith("_bias") else "weight"
    values = values if end == "bias" else np.ascontiguousarray(values.swapaxes(1, 2))
    parts = {"gate": values[:, 0::2], "up": values[:, 1::2]} if part.startswith("gate_up") else {"down": values}
    return {gguf_name(f"{module}.experts.{{}}.{which}_proj.{end}"): np.ascontiguousarray(rows)
            for which, rows in parts.items()}


def expert_fields(config: ModelConfig, name: str) -> dict[str, Any]:
    """Keys of a mixture of experts."""
    if (e := config.experts) is None:
        return {}
    own = {} if name == "llama" else {f"{name}.expert_feed_forward_length": e.intermediate_size}
    shared = {f"{name}.expert_shared_feed_forward_length": e.shared_size} if e.shared_size else {}
    return {f"{name}.expert_count": e.total, f"{name}.expert_used_count": e.active, **own, **shared}


def write_gguf(path: Path, source: Path, kinds: dict[str, str] | str = "F32", fields: dict[str, Any] | None = None,
               extra: dict[str, np.ndarray] | None = None, arch: str = "") -> dict[str, np.ndarray]:
    """Write the model of a checkpoint; gives its tensors as the gguf package dequantises them.

    Parameters
    ----------
    path : Path
    source : Path
        A checkpoint directory.
    kinds : dict or str
        Type of the matrices whose names contain a word, or of all; vectors are F32.
    fields : dict
        Further integer, float or text fields; None leaves a field out.
    extra : dict
        Further tensors, in float32.
    arch : str
        GGUF's name of the architecture where the config does not tell it.
    """
    gguf = pytest.importorskip("gguf")
    out = {}
    with Checkpoint.open(source) as checkpoint:
        config = checkpoint.config
        name = arch or architecture(config)
        writer = gguf.GGUFWriter(path, name)
        values: dict[str, Any] = {
            f"{name}.context_length": config.max_position_embeddings, f"{name}.embedding_length": config.hidden_size,
            f"{name}.block_count": config.num_hidden_layers, f"{name}.feed_forward_length": config.intermediate_size,
            f"{name}.attention.head_count": config.num_attention_heads,
            f"{name}.attention.head_count_kv": config.num_key_value_heads,
            f"{name}.attention.key_length": config.head_dim, f"{name}.attention.value_length": config.head_dim,
            f"{name}.rope.dimension_count": config.head_dim, f"{name}.rope.freq_base": config.rope.theta,
            f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            **({f"{name}.attention.sliding_window": max(config.windows)}
               if name in ("llama", "gpt-oss", "smallthinker") and config.windows else {}),
            **expert_fields(config, name), "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            **(fields or {}),
        }
        for key, value in values.items():
            if value is not None:
                {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                 list: writer.add_array}[type(value)](key, value)
        for tensor, data in {**tensors_of(checkpoint), **(extra or {})}.items():
            kind = kinds if isinstance(kinds, str) else next((kinds[word] for word in kinds if word in tensor), "F32")
            plain = data.ndim == 1 or tensor.endswith("bias")
            out[tensor] = add_tensor(writer, tensor, data, "F32" if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def add_tensor(writer: Any, name: str, data: np.ndarray, kind: str) -> np.ndarray:
    """Add a tensor in some type, of random bytes where the package cannot quantise; gives its values."""
    import gguf

    if kind == "F64":
        writer.add_tensor(name, data.astype(np.float64))
        return data
    number = gguf.GGMLQuantizationType[kind]
    try:
        raw = gguf.quants.quantize(data, number)
    except NotImplementedError:
        raw = random_blocks(kind, data.shape)
    writer.add_tensor(name, raw, raw_dtype=number)
    return np.asarray(gguf.quants.dequantize(raw, number), np.float32).reshape(data.shape)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0, size: float = 0.01) -> np.ndarray:
    """Blocks of random codes; their fp16 numbers, wherever they are, are made small and finite, of this size."""
    elements, nbytes = BY_NAME[kind].elements, BY_NAME[kind].nbytes
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, nbytes), np.uint8)
    for at in HALVES.get(kind, ()):
        blocks[:, at : at + 2] = rng.normal(0, size, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(115, 123, len(blocks))
    if kind == "IQ1_M":  # the top nibble of its scale
        blocks[:, 55] = blocks[:, 55] & 15 | 0x20
    return blocks.reshape(shape[0], -1)


HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "Q1_0": (0,), "Q2_0": (0,),
          "TQ1_0": (52,), "TQ2_0": (64,),
          **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,))}
"""Bytes of each block at which there is a number in half precision."""


OF_256 = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16, "head_dim": 16,
          "num_key_value_heads": 2, "num_hidden_layers": 2}
"""Sizes of a model whose rows are whole blocks of 256."""


def sizes_for(*kinds: str) -> dict[str, int]:
    return OF_256 if any(BY_NAME[kind].elements == 256 for kind in kinds) else SIZES


def split(path: Path, directory: Path, source: Path, count: int = 3) -> list[Path]:
    """Write a model in parts, of which the first has the fields, as llama-gguf-split does."""
    gguf = pytest.importorskip("gguf")
    write_gguf(path, source)
    reader = gguf.GGUFReader(path)
    parts = [directory / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        for key, value in reader.fields.items():
            if i == 0 and key.startswith("llama."):
                add = writer.add_float32 if "freq_base" in key or "epsilon" in key else writer.add_uint32
                add(key, value.contents())
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts
