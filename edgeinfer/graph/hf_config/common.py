"""Config fields that all decoder-only architectures read in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ..config import ModelConfig, RopeConfig
from ..ops.rope import read_partial, read_rope, without_share
from .reader import ConfigReader

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
        The architecture's values for absent fields: max_position_embeddings, and where it has them vocab_size,
        num_attention_heads, intermediate_size, num_key_value_heads, head_dim, bos_token_id, eos_token_id, hidden_act,
        rms_norm_eps, tie_word_embeddings, rope_theta; ffn_times, how many times as wide as the stream an FFN is;
        partial, the names of the share of a head that turns and its default; share_ignored, True if heads turn as a
        whole whatever the config says of a share; rotary, False if positions are learned.
    """
    given = {name: {"default": defaults[name]} if name in defaults else {}
             for name in ("vocab_size", "num_attention_heads", "intermediate_size")}
    vocab_size = c.integer("vocab_size", high=2**22, **given["vocab_size"])
    hidden_size = c.integer("hidden_size", high=2**17)
    layers = c.integer("num_hidden_layers", high=2**12)
    heads = c.integer("num_attention_heads", high=2**12, **given["num_attention_heads"])
    kv_heads = _kv_heads(c, heads, defaults)
    max_positions = c.integer("max_position_embeddings", defaults["max_position_embeddings"], high=2**27)
    activation = c.choice("hidden_act", c.get("hidden_act") or defaults.get("hidden_act", "silu"), ACTIVATIONS)
    head_dim = _head_dim(c, hidden_size, heads, defaults)
    if times := defaults.get("ffn_times"):
        given["intermediate_size"] = {"default": times * hidden_size}
    fields = {**_rotation(c, head_dim, max_positions, defaults), **own}
    rope: RopeConfig | None = fields.get("rope")
    longest = int(max_positions * rope.factor) if rope and rope.kind == "dynamic" else max_positions
    return ModelConfig(
        model_type=c.get("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=c.integer("intermediate_size", high=2**20, **given["intermediate_size"]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=ACTIVATIONS[activation],
        rms_norm_eps=c.number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6), high=1.0),
        max_position_embeddings=longest,
        tie_word_embeddings=c.flag("tie_word_embeddings", defaults.get("tie_word_embeddings", False)),
        bos_token_id=next(iter(_special_ids(c, "bos_token_id", defaults, vocab_size)), None),
        eos_token_ids=_special_ids(c, "eos_token_id", defaults, vocab_size),
        **fields,
    )


def _rotation(c: ConfigReader, head_dim: int, max_positions: int, defaults: dict[str, Any]) -> dict[str, Any]:
    """RoPE, and how much of a head it turns."""
    if not defaults.get("rotary", True):
        return {"rotary_dim": 0}
    partial = defaults.get("partial")
    if defaults.get("share_ignored"):
        c = without_share(c)
    rope = read_rope(c, max_positions, defaults.get("rope_theta"), partial is not None)
    share = read_partial(c, *partial) if partial else 1.0
    turned = int(head_dim * share)
    if turned % 2 or not turned:
        raise UnsupportedModelError(f"{c.where}: {turned} of the {head_dim} dimensions of a head turn; RoPE needs an "
                                    "even number of them.")
    for name in ("short_factors", "long_factors"):
        if (factors := getattr(rope, name)) and len(factors) != turned // 2:
            raise CheckpointError(f"{c.where}: {name[:-1]} has {len(factors)} values; {turned // 2} are needed, one "
                                  "for each pair of dimensions that turns.")
    return {"rope": rope, "rotary_dim": None if turned == head_dim else turned}


def read_sliding(c: ConfigReader, window: int | None, sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer: by `layer_types` where the config has them, else of those that `sliding` says."""
    layers, types = c.integer("num_hidden_layers", high=2**12), c.get("layer_types")
    if types is None:
        found = [sliding(i) for i in range(layers)]
    elif not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"{c.where}: layer_types is {types!r:.60}; it must list {layers} types.")
    else:
        found = [c.choice("layer_types", t, LAYER_TYPES) == "sliding_attention" for t in types]
    if any(found) and not window:
        raise CheckpointError(f"{c.where}: layer_types has sliding_attention, but sliding_window is {window}; set "
                              "both.")
    return tuple(window if s and window else 0 for s in found) if any(found) else ()


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
