"""What all decoder-only architectures read from a config in the same way."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .config import ModelConfig
from .reader import ConfigReader
from .rope import read_rope

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "squared_relu": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
"""Hugging Face's names of activations, and ours. The tanh forms of gelu differ only in how they are written."""

LAYER_TYPES = ("full_attention", "sliding_attention")


def read_decoder(c: ConfigReader, defaults: dict[str, Any], **own: Any) -> ModelConfig:
    """The fields that every architecture has; `own` are those that the architecture read itself.

    Parameters
    ----------
    c : ConfigReader
    defaults : dict
        The architecture's values for absent fields: max_position_embeddings, and where it has them
        num_key_value_heads, head_dim, bos_token_id, eos_token_id.
    """
    vocab_size = c.integer("vocab_size", high=2**22)
    hidden_size = c.integer("hidden_size", high=2**17)
    layers = c.integer("num_hidden_layers", high=2**12)
    heads = c.integer("num_attention_heads", high=2**12)
    kv_heads = _kv_heads(c, heads, defaults)
    max_positions = c.integer("max_position_embeddings", defaults["max_position_embeddings"], high=2**27)
    activation = c.choice("hidden_act", c.get("hidden_act") or "silu", ACTIVATIONS)
    return ModelConfig(
        model_type=c.get("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=c.integer("intermediate_size", high=2**20),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(c, hidden_size, heads, defaults),
        hidden_act=ACTIVATIONS[activation],
        rms_norm_eps=c.number("rms_norm_eps", 1e-6, high=1.0),
        max_position_embeddings=max_positions,
        rope=read_rope(c, max_positions),
        tie_word_embeddings=c.flag("tie_word_embeddings"),
        bos_token_id=next(iter(_special_ids(c, "bos_token_id", defaults, vocab_size)), None),
        eos_token_ids=_special_ids(c, "eos_token_id", defaults, vocab_size),
        **own,
    )


def read_layer_windows(c: ConfigReader) -> tuple[int, ...]:
    """Sliding windows as Qwen's configs give them: by `layer_types`, else from layer `max_window_layers` on."""
    layers = c.integer("num_hidden_layers", high=2**12)
    use = c.flag("use_sliding_window")
    window = c.integer("sliding_window", None if c.is_null("sliding_window") else 4096)
    first = c.integer("max_window_layers", 28, low=0)
    types = c.get("layer_types")
    if types is None:
        sliding = [bool(use and window and i >= first) for i in range(layers)]
    else:
        if not isinstance(types, list) or len(types) != layers:
            raise CheckpointError(f"{c.where}: layer_types is {types!r:.60}; it must list {layers} types.")
        sliding = [c.choice("layer_types", t, LAYER_TYPES) == "sliding_attention" for t in types]
        if any(sliding) and not (use and window):
            raise CheckpointError(
                f"{c.where}: layer_types has sliding_attention, but use_sliding_window is {use} and "
                f"sliding_window {window}; set both."
            )
    return tuple(window if s else 0 for s in sliding) if any(sliding) else ()


def _kv_heads(c: ConfigReader, heads: int, defaults: dict[str, Any]) -> int:
    default = defaults.get("num_key_value_heads", heads)
    if c.is_null("num_key_value_heads"):
        default = heads
    kv_heads: int = c.integer("num_key_value_heads", default, high=2**12)
    if heads % kv_heads:
        raise CheckpointError(
            f"{c.where}: num_attention_heads is {heads}; it must be a multiple of num_key_value_heads, {kv_heads}."
        )
    return kv_heads


def _head_dim(c: ConfigReader, hidden_size: int, heads: int, defaults: dict[str, Any]) -> int:
    default = defaults.get("head_dim")
    if default is None and not c.has("head_dim"):
        if hidden_size % heads:
            raise CheckpointError(
                f"{c.where}: hidden_size is {hidden_size}, no multiple of num_attention_heads, {heads}, "
                "and head_dim is not given."
            )
        default = hidden_size // heads
    head_dim: int = c.integer("head_dim", default, high=2**12)
    if head_dim % 2:
        raise UnsupportedModelError(f"{c.where}: the head dimension is {head_dim}; RoPE needs an even one.")
    return head_dim


def _special_ids(c: ConfigReader, name: str, defaults: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Token ids of a field; the architecture's id where the field is absent (null means none)."""
    default = defaults.get(name)
    if not c.has(name) and not c.is_null(name) and default is not None and default < vocab_size:
        return (default,)
    return c.ids(name, vocab_size)
