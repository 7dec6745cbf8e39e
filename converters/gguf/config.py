"""The metadata of a GGUF file as the fields of a config.json: both are understood, and refused, in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgeinfer.base.validation import similar
from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.graph import (
    ConfigReader,
    Gguf,
    GgufMetadata,
    ModelConfig,
    RopeConfig,
    gguf_architectures,
    inverse_frequencies,
    plain_value,
    read_config,
    with_head,
)

from .header import GgufHeader, GgufTensor
from .moe import moe_fields, read_choice
from .vocabulary import NO_TOKEN

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of the factors of each pair's wavelength: the rule of Llama 3 as numbers."""
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""LongRoPE's factors, of runs beyond the context of the training and of others."""
PURPOSES = {"imatrix": "an importance matrix, which a quantiser reads", "mmproj": "the image encoder of a vision model",
            "adapter": "an adapter, which modifies another model", "vocab": "a vocabulary without weights"}
"""Files that are not models, by their general.type, with a description."""
_PLAIN = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps", "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "embedding_scale": (1,), "logit_scale": (1,), "residual_scale": (1,),
    "rope.scaling.finetuned": (True, False), "rope.scaling.attn_factor": (1,),
    "tensor_data_layout": ("Meta AI original pth",), "expert_weights_scale": (0, 1),
}
"""Values with which a key changes nothing; others pass when they are false, 0 or empty."""
_TRAINED_ON = (8192, *(1 << i for i in range(9, 21)))
"""Training contexts that are tried if only the factors of a rotation are given; Llama 3's first."""
ROPE_TOLERANCE = 1e-5
NOT_ROTATED = 1e20
"""Factor of wavelengths from which a pair of dimensions is not rotated."""


def architecture(header: GgufHeader) -> str:
    """GGUF's name of the model's architecture.

    Raises
    ------
    CheckpointError
        The file is not a model: an importance matrix, an image encoder, an adapter.
    UnsupportedModelError
        The name is not known; the message has those that are.
    """
    name = header.fields.get("general.architecture")
    if other := purpose(header):
        raise CheckpointError(f"{header.path} is {PURPOSES[other]}, not a language model; give the model's own file.")
    known = list(gguf_architectures())
    if not isinstance(name, str) or name not in known:
        near = similar(str(name), known)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UnsupportedModelError(f"{header.path} holds a model of architecture {name!r:.60}; known: "
                                    f"{', '.join(known)}{hint}.")
    return name


def purpose(header: GgufHeader) -> str:
    """Return the purpose of a file that is not a model, one of `PURPOSES`; empty for a model."""
    kind, name = header.fields.get("general.type"), header.fields.get("general.architecture")
    kind = "mmproj" if name == "clip" else "imatrix" if "imatrix.chunk_count" in header.fields else kind
    known = isinstance(kind, str) and kind in PURPOSES
    return str(kind) if known and not (kind == "vocab" and not header.tensors) else ""


def read_gguf_model(header: GgufHeader, tensors: Mapping[str, GgufTensor],
                    factors: Mapping[str, Sequence[float]] | None = None) -> ModelConfig:
    """Understand the metadata of a model that can run.

    Parameters
    ----------
    header : GgufHeader
        Of the first file.
    tensors : mapping
        Those of all files, which say whether the head is tied and where biases are.
    factors : mapping of str to sequences of float, optional
        Elements of the tensors `ROPE_FACTORS`, `LONG` and `SHORT`, as far as there are any.

    Raises
    ------
    CheckpointError
        A needed key is missing, or has a value that no model can have.
    UnsupportedModelError
        A key that changes the mathematics is not implemented; the message names it.
    """
    config, m, gguf = _understood(header, tensors)
    factors, reader, prefix = factors or {}, m.reader, m.prefix
    for key in (*_PLAIN, "vocab_size"):
        reader.get(prefix + key)
    if gguf.experts and header.fields.get(prefix + "expert_count"):
        read_choice(reader, prefix, gguf.experts)
    config |= gguf.rotation(m) if gguf.rotation else _rotation(m, config, gguf, factors)
    if not m.has_read("attention.sliding_window"):
        _refuse_window(reader, prefix, config)
    reader.refuse_unread({prefix + key: values for key, values in _NEUTRAL.items()})
    try:
        model = read_config(config)
    except (CheckpointError, UnsupportedModelError) as error:
        if not str(error).startswith("config.json"):
            raise
        raise type(error)(f"{header.path}, as a {error}") from None
    model = replace(model, attention_bias=bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & tensors.keys()),
                    attention_output_bias="blk.0.attn_output.bias" in tensors, mlp_bias="blk.0.ffn_up.bias" in tensors,
                    head_bias="output.bias" in tensors)
    rotary_dim = header.fields.get(f"{prefix}rope.dimension_count")
    if gguf.rotated == "count" and rotary_dim and rotary_dim != model.head_dim:
        model = replace(model, rotary_dim=rotary_dim)
    if ROPE_FACTORS not in factors:
        return model
    of_factors = _proportional if gguf.proportional else _of_factors
    return replace(model, rope=of_factors(model, factors[ROPE_FACTORS], header, prefix))


def config_fields(header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the fields of a config.json for the sizes of a model."""
    return _understood(header, tensors)[0]


def _understood(header: GgufHeader, tensors: Mapping[str, GgufTensor]
                ) -> tuple[dict[str, Any], GgufMetadata, Gguf]:
    """Return the fields of a config.json, the metadata that they come from, and the architecture's entry."""
    fields, name = header.fields, architecture(header)
    config = {ours: plain_value(fields[f"{name}.{key}"]) for key, ours in _PLAIN.items() if f"{name}.{key}" in fields}
    config["vocab_size"] = _vocabulary(header, tensors, name)
    where = f"the metadata of {header.path}"
    known = GgufMetadata(fields, name, config, tensors, where)
    model_type, gguf = next((model_type, gguf) for model_type, gguf in gguf_architectures()[name]
                            if gguf.when is None or gguf.when(known))
    m = GgufMetadata(fields, name, config, tensors, where)
    for key in gguf.ignored:
        m.get(key)
    config |= {"model_type": model_type, "hidden_act": "silu",
               "tie_word_embeddings": "output.weight" not in tensors if tensors else gguf.tied}
    ids = {f"{key}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos")
           if f"tokenizer.ggml.{key}_token_id" in fields}
    config |= {key: None if token_id in NO_TOKEN else token_id for key, token_id in ids.items()}
    config |= {**gguf.fixed_fields, **(gguf.fields(m) if gguf.fields else {})}
    if gguf.experts and fields.get(f"{name}.expert_count"):
        config |= moe_fields(gguf.experts, m)
    return config, m, gguf


def _vocabulary(header: GgufHeader, tensors: Mapping[str, GgufTensor], name: str) -> int | None:
    """Entries of the vocabulary; the tokens, the key and the embedding must agree on it."""
    tokens, own = header.fields.get("tokenizer.ggml.tokens"), header.fields.get(f"{name}.vocab_size")
    found = {"its tokens": len(tokens) if isinstance(tokens, list | range) else None, f"{name}.vocab_size": own,
             "the rows of token_embd.weight": tensors["token_embd.weight"].shape[0]
             if "token_embd.weight" in tensors else None}
    counts = {what: count for what, count in found.items() if count is not None}
    one, *others = counts.values() or (None,)
    if any(count != one for count in others):
        said = ", ".join(f"{what} {count}" for what, count in counts.items())
        raise CheckpointError(f"{header.path} has contradictory vocabulary sizes: {said}; download it again.")
    return next(iter(counts.values()), None)


def _rotation(m: GgufMetadata, config: Mapping[str, Any], gguf: Gguf, factors: Mapping[str, Sequence[float]]
              ) -> dict[str, Any]:
    """Return RoPE's keys as config.json's rope_scaling; if whole heads must be rotated, another width is refused."""
    r, prefix, config = m.reader, m.prefix, with_head(config)
    head_dim, rotary_dim = config.get("head_dim"), r.get(prefix + "rope.dimension_count")
    some = isinstance(rotary_dim, int) and isinstance(head_dim, int) and 0 < rotary_dim < head_dim
    if gguf.rotated == "share":  # so that no rounding makes it one less
        config["partial_rotary_factor"] = (rotary_dim + 0.25) / head_dim if some else 1.0
    if SHORT in factors or LONG in factors:
        return {**config, "rope_scaling": _longrope(r, prefix, config, factors)}
    in_part = gguf.rotated == "count" and some and rotary_dim % 2 == 0
    whole = () if in_part or gguf.rotated in ("share", "none") else ("rope.dimension_count",)
    for key in (*whole, "attention.value_length"):
        value = r.get(prefix + key)
        if value is not None and value != head_dim:
            raise r.unsupported(prefix + key, value, f"it must be the width of a head, {head_dim}")
    scale = None if m.has_read("attention.scale") else r.number(prefix + "attention.scale", 0.0, above=-1.0)
    if scale and isinstance(head_dim, int) and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise r.unsupported(prefix + "attention.scale", scale, f"only 1/sqrt({head_dim}) is supported")
    section = _scaled(m, config, gguf)
    return {**config, "rope_scaling": section} if section else config


def _scaled(m: GgufMetadata, config: Mapping[str, Any], gguf: Gguf) -> dict[str, Any]:
    """The section of a rotation that is stretched, empty for one that is not."""
    r, prefix = m.reader, m.prefix
    scaling = prefix + "rope.scaling."
    kind, factor = m.scaling()
    if kind == "none":
        r.get(scaling + "original_context_length")
        return {}
    if kind == "linear":
        r.get(scaling + "original_context_length")
        return {"rope_type": "linear", "factor": plain_value(factor)}
    keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    given = {ours: plain_value(r.number(scaling + key)) for ours, key in keys.items() if r.has(scaling + key)}
    stretch = r.number(scaling + "yarn_attn_factor", r.number(scaling + "attn_factor", 1.0))
    if r.number(scaling + "yarn_ext_factor", 1.0) != 1.0:
        raise r.unsupported(scaling + "yarn_ext_factor", r.get(scaling + "yarn_ext_factor"), "only 1 is supported")
    log_factor = r.number(scaling + "yarn_log_multiplier", 0.1, above=-1.0) or 0.1
    section = {
        "rope_type": "yarn", "truncate": True, "factor": plain_value(factor), **given,
        "original_max_position_embeddings": r.integer(scaling + "original_context_length",
                                                      config.get("max_position_embeddings")),
        "attention_factor": stretch * (1 + log_factor * math.log(factor)) if factor > 1 else stretch,
    }
    return gguf.stretch(m, section) if gguf.stretch else section


def _longrope(r: ConfigReader, prefix: str, config: Mapping[str, Any], factors: Mapping[str, Sequence[float]]
              ) -> dict[str, Any]:
    """Return the section of LongRoPE, whose factors are tensors; the file has the scale of cosines and sines."""
    r.get(prefix + "rope.scaling.type")
    section: dict[str, Any] = {
        "rope_type": "longrope", "long_factor": list(factors.get(LONG, ())),
        "short_factor": list(factors.get(SHORT, ())),
        "original_max_position_embeddings": r.integer(prefix + "rope.scaling.original_context_length",
                                                      config.get("max_position_embeddings"))}
    if stretch := r.number(prefix + "rope.scaling.attn_factor", None):
        section["attention_factor"] = plain_value(stretch)
    return section


def _refuse_window(r: ConfigReader, prefix: str, config: Mapping[str, Any]) -> None:
    """Refuse a window shorter than the context if no family says which layers have it."""
    window = r.integer(prefix + "attention.sliding_window", None, low=0)
    longest = config.get("max_position_embeddings", math.inf)
    if window and isinstance(longest, int | float) and window < longest:  # no number: refused with the others
        raise r.unsupported(prefix + "attention.sliding_window", window, "the file does not say which layers have it")


def _proportional(model: ModelConfig, factors: Sequence[float], header: GgufHeader, prefix: str) -> RopeConfig:
    """Return a rotation of the pairs with factor 1; those after them, with a huge factor, are not rotated."""
    turning = sum(factor == 1 for factor in factors)
    if 2 * len(factors) != model.rope.span or not turning or any(f != 1 for f in factors[:turning]) or \
            any(not NOT_ROTATED <= f < math.inf for f in factors[turning:]):
        raise UnsupportedModelError(f"{ROPE_FACTORS} in {header.path} holds {len(factors)} factors that are not 1 and "
                                    "then huge, one for each pair of a head; edgeinfer knows no others of Gemma 4.")
    return replace(model.rope, dims=2 * turning)


def _of_factors(model: ModelConfig, factors: Sequence[float], header: GgufHeader, prefix: str) -> RopeConfig:
    """Return the rotation by Llama 3's rule that gives these factors."""
    own, stretch = model.rope, max(factors)
    if own.kind != "default":
        raise UnsupportedModelError(f"{header.path} has both {ROPE_FACTORS} and {prefix}rope.scaling.type {own.kind}; "
                                    "edgeinfer does not know their combined meaning.")
    if len(factors) != model.rope_dim // 2 or not all(math.isfinite(f) and f > 0 for f in factors):
        raise CheckpointError(f"{ROPE_FACTORS} in {header.path} has {len(factors)} values; {model.rope_dim // 2} "
                              "positive ones are needed: download it again.")
    if all(f == 1 for f in factors):
        return own
    given = header.fields.get(f"{prefix}rope.scaling.original_context_length")
    plain = inverse_frequencies(own, model.rope_dim)
    for original in ([given] if isinstance(given, int) and given > 0 else []) + [*_TRAINED_ON]:
        rope = RopeConfig(own.theta, "llama3", plain_value(float(stretch)), original, 1.0, 4.0)
        made = plain / inverse_frequencies(rope, model.rope_dim)
        if all(math.isclose(a, b, rel_tol=ROPE_TOLERANCE) for a, b in zip(made.tolist(), factors, strict=True)):
            return rope
    raise UnsupportedModelError(f"{ROPE_FACTORS} in {header.path} holds factors from {min(factors):g} to {stretch:g} "
                                "that Llama 3's rule does not give; edgeinfer knows no other.")
