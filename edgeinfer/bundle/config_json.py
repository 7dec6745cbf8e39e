"""ModelConfig from JSON: every field known and of its type; a wrong one changes the mathematics.

All fields are written, tuples as lists. One that has a default may be absent, because it is younger than the bundle."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_type_hints

from edgeinfer.errors import BundleError
from edgeinfer.graph import (
    MAX_EXPERTS_PER_LAYER,
    AlibiConfig,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
)
from edgeinfer.kernels import abi

from .rows import exact_fields

MAX_LAYERS = 4096
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")
MIXERS = {"scan", "attention", "mlp", "moe"}
BY_LAYER = ("head_dims", "kv_heads", "ffn_sizes")


def config_from_json(data: object) -> ModelConfig:
    """The config from plain JSON values.

    Raises
    ------
    UnknownError
        For a field that is not known; the reader of the header makes a BundleError of it.
    BundleError
        For a missing or wrongly typed field, or a size out of its range; the sentence names the field.
    """
    config = _record(ModelConfig, data, "config")
    for name in SIZES:
        if not 1 <= getattr(config, name) <= 2**31 - 1:
            raise BundleError(f"config.{name} is {getattr(config, name)}; it must be from 1 to 2147483647.")
    if config.num_hidden_layers > MAX_LAYERS:
        raise BundleError(f"config.num_hidden_layers is {config.num_hidden_layers}; the limit is {MAX_LAYERS}.")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", config.model_type):
        raise BundleError(f"config.model_type {config.model_type!r} is not the name of an architecture.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise BundleError(
            f"config.num_attention_heads is {config.num_attention_heads}, "
            f"no multiple of config.num_key_value_heads {config.num_key_value_heads}."
        )
    for name in ("windows", "ropes", *BY_LAYER, "kv_layers", "mixers"):
        if len(given := getattr(config, name)) not in (0, config.num_hidden_layers):
            raise BundleError(f"config.{name} has {len(given)} entries for {config.num_hidden_layers} layers.")
    check_layers(config)
    if config.experts:
        check_experts(config.experts)
    if config.latent:
        check_latent(config)
    if config.recurrent:
        check_recurrent(config, config.recurrent)
    return config


def check_layers(config: ModelConfig) -> None:
    """Refuse sizes by layer that no model has, and K and V that cannot be read."""
    for name in BY_LAYER:
        if bad := [n for n in getattr(config, name) if not 1 <= n <= 2**31 - 1]:
            raise BundleError(f"config.{name} has {bad[0]}; each must be from 1 to 2147483647.")
    layers = range(config.num_hidden_layers)
    for i in layers:
        if config.num_attention_heads % config.kv_count(i):
            raise BundleError(f"config.kv_heads has {config.kv_count(i)}, of which config.num_attention_heads "
                              f"{config.num_attention_heads} is not a multiple.")
        of = config.kv_layer(i)
        if of not in layers or of > i or config.kv_layer(of) != of or \
                (config.head_size(of), config.kv_count(of)) != (config.head_size(i), config.kv_count(i)):
            raise BundleError(f"config.kv_layers lets layer {i} read layer {of}; it must be itself or a layer before "
                              "it with K and V of its own in heads of the same size.")
    if unknown := {*config.mixers} - MIXERS:
        raise BundleError(f"config.mixers has {min(unknown)!r:.60}; each must be one of {', '.join(sorted(MIXERS))}.")
    if bad := [i for i in config.keys_as_values if i not in layers]:
        raise BundleError(f"config.keys_as_values has layer {bad[0]} of {config.num_hidden_layers}.")
    if config.layer_input < 0 or config.layer_input_vocab < (config.vocab_size if config.layer_input else 0):
        raise BundleError(f"config.layer_input is {config.layer_input} with layer_input_vocab "
                          f"{config.layer_input_vocab}; a table needs a row for each of {config.vocab_size} tokens.")


def check_experts(experts: ExpertsConfig) -> None:
    """Refuse numbers that no mixture of experts can have; the graph checks whether they fit together."""
    limits = {"total": (1, MAX_EXPERTS_PER_LAYER), "active": (1, experts.total), "intermediate_size": (1, 2**31 - 1),
              "groups": (1, experts.total), "active_groups": (1, experts.groups), "group_best": (1, 2),
              "shared_size": (0, 2**31 - 1)}
    for name, (low, high) in limits.items():
        if not low <= getattr(experts, name) <= high:
            raise BundleError(f"config.experts.{name} is {getattr(experts, name)}; it must be from {low} to {high}.")


def check_latent(config: ModelConfig) -> None:
    """Refuse numbers that no latent attention has."""
    assert config.latent
    rank = config.head_dim - config.rope_dim
    for name, value, low in (("q_rank", config.latent.q_rank, 0), ("nope_dim", config.latent.nope_dim, 1),
                             ("value_dim", config.latent.value_dim, 1)):
        if not low <= value <= 2**16:
            raise BundleError(f"config.latent.{name} is {value}; it must be from {low} to {2**16}.")
    if config.num_key_value_heads != 1 or rank < 16 or rank % 16 or config.latent.value_dim % 16:
        raise BundleError(f"config.latent: {config.num_key_value_heads} key-value heads of {config.head_dim} elements, "
                          f"{config.rope_dim} of them rotated, and values of {config.latent.value_dim} fit no latent "
                          "attention.")


def check_recurrent(config: ModelConfig, r: RecurrentConfig) -> None:
    """Refuse numbers that no recurrent layer has."""
    least = 0 if r.kind == "conv" else 1
    limits = {"conv_width": (abi.MIN_CONV, abi.MAX_CONV), **dict.fromkeys(("heads", "key_heads", "key_dim",
              "value_dim"), (least, 2**16)), "norm_groups": (0, 2**16)}
    for name, (low, high) in limits.items():
        if not low <= getattr(r, name) <= high:
            raise BundleError(f"config.recurrent.{name} is {getattr(r, name)}; it must be from {low} to {high}.")
    if r.kind not in ("conv", "delta", "scan"):
        raise BundleError(f"config.recurrent.kind is {r.kind!r:.60}; it must be conv, delta or scan.")
    if not r.layers or list(r.layers) != sorted({*r.layers} & {*range(config.num_hidden_layers)}):
        raise BundleError(f"config.recurrent.layers is {list(r.layers)!r:.60}; it must list some of the "
                          f"{config.num_hidden_layers} layers, ascending.")
    if r.heads % max(r.key_heads, 1) or r.value_width % max(r.norm_groups, 1):
        raise BundleError(f"config.recurrent has {r.heads} heads of {r.value_dim} elements, which are not a multiple "
                          f"of its {r.key_heads} key_heads and {r.norm_groups} norm_groups.")
    if r.time_limits and not (len(r.time_limits) == 2 and 0 <= r.time_limits[0] < r.time_limits[1]):
        raise BundleError(f"config.recurrent.time_limits is {list(r.time_limits)!r:.60}; it must be two ascending "
                          "numbers, or none.")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _record(kind: type, data: object, where: str) -> Any:
    """Build a dataclass from a JSON object with its fields; those with a default may be absent."""
    if not isinstance(data, dict):
        raise BundleError(f"{where} is not a JSON object.")
    optional = [f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING]
    exact_fields(data, _hints(kind), where, optional)
    return kind(**{name: _value(_hints(kind)[name], data[name], f"{where}.{name}") for name in data})


def _value(hint: Any, value: object, where: str) -> Any:
    """One field's value, checked against its type hint."""
    if hint is RopeConfig or (hint == RopeConfig | None and value is not None):
        return _record(RopeConfig, value, where)
    if hint == tuple[float, ...]:
        if isinstance(value, list) and all(type(item) in (int, float) and math.isfinite(item) for item in value):
            return tuple(map(float, value))
        raise BundleError(f"{where} is {_short(value)}; it must be a list of numbers.")
    if hint == tuple[str, ...]:
        if isinstance(value, list) and all(type(item) is str for item in value):
            return tuple(value)
        raise BundleError(f"{where} is {_short(value)}; it must be a list of texts.")
    for record in (AlibiConfig, ExpertsConfig, LatentConfig, RecurrentConfig):
        if hint == record | None:
            return None if value is None else _record(record, value, where)
    if hint == tuple[int, ...]:
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        raise BundleError(f"{where} is {_short(value)}; it must be a list of integers.")
    if hint is float:
        if type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
        raise BundleError(f"{where} is {_short(value)}; it must be a number.")
    allowed = {int: (int,), bool: (bool,), str: (str,), int | None: (int, type(None)),
               RopeConfig | None: (type(None),)}[hint]
    if type(value) not in allowed:
        raise BundleError(f"{where} is {_short(value)}; it must be of type {getattr(hint, '__name__', str(hint))}.")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
