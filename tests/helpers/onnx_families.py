"""Tiny models of every architecture in every type of weights, and the same models in floats, for the ONNX backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgeinfer.bundle import Bundle, BundleWriter, Quantisation
from edgeinfer.config import GROUP_SIZES
from edgeinfer.converters import convert, write_random_bundle
from edgeinfer.graph import Weight, build_graph, read_config, requested_types, seeing_models
from edgeinfer.quant import SUPER_COLUMNS, TYPES, layouts
from tests.golden_parts import LLAMA
from tests.helpers import golden_cases
from tests.helpers.bundles import tensor_bytes
from tests.helpers.onnx_models import graph_of
from tests.models.test_smallthinker import CONFIG as SMALLTHINKER
from tests.models.test_smallthinker import make as make_smallthinker

RELUFIED = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "m.M"}}
OTHERS: dict[str, dict[str, Any]] = {
    "bamboo": {**RELUFIED, "model_type": "bamboo", "hidden_act": "relu"},
    "sparsellama": {**RELUFIED, "model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": 0.05},
    "smallthinker": SMALLTHINKER}
"""Configs of architectures that transformers lacks."""
VOCABULARY = 301
"""Of models with random codes, whose tokenizer has all bytes."""
WHOLE = {**dict.fromkeys(("hidden_size", "n_embd", "d_model"), SUPER_COLUMNS),
         **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size",
                          "shared_intermediate_size", "shared_expert_intermediate_size", "moe_ffn_hidden_size"),
                         2 * SUPER_COLUMNS)}
"""Sizes of rows whose scales are nested."""
RECURRENT: dict[str, dict[str, int]] = {"granitemoehybrid": {"mamba_n_heads": 64}, "mamba2": {"head_dim": 64}}
"""Sizes that follow from those."""


class Storage(NamedTuple):
    """A type of matrices, and how FFNs have it."""

    weights: str
    group: int
    layout: str = "tile16"

    def __str__(self) -> str:
        return self.weights + (f":{self.group}" if self.group else "") + (" by neuron" * (self.layout == "neuron"))

    @property
    def asked(self) -> int | None:
        """The group as an option; None for floats, and of a type that has one of its own."""
        return self.group if self.group in GROUP_SIZES else None

    @property
    def nested(self) -> bool:
        """True if rows must be whole blocks of 256."""
        return TYPES[self.weights].nested


def storages() -> list[Storage]:
    """Every type that a checkpoint can be converted to, in every group; of types that FFNs by neuron have, one each."""
    found = []
    for name, row in TYPES.items():
        if row.requested:
            found += [Storage(name, group) for group in row.groups or (0,)]
            found += [Storage(name, group, "neuron") for group in row.neuron_groups[:1]]
    return found


def models(architecture: str) -> dict[str, dict[str, Any]]:
    """Configs of an architecture's tiny models, by name; those that are parts of larger ones come last."""
    seen = seeing_models()
    names = sorted(golden_cases.names(), key=lambda name: ("wrapped" in name, name))
    configs = {name: golden_cases.config_of(name) for name in names}
    found = {name: config for name, config in configs.items()
             if seen.get(config["model_type"], config["model_type"]) == architecture}
    return found | ({architecture: OTHERS[architecture]} if architecture in OTHERS else {})


def write_tiny(name: str, storage: Storage, destination: Path) -> Bundle:
    """Write a tiny model of sizes that are no multiples of 16, converted from the checkpoint of a golden case.

    Codes of nested types, and dense models that transformers lacks, are random; rows of nested types are whole blocks.
    """
    if storage.nested or (name in OTHERS and name != "smallthinker"):
        config = OTHERS.get(name) or golden_cases.config_of(name)
        config = {**(widened(config) if storage.nested else config), "vocab_size": VOCABULARY}
        config |= {"vocab_size_per_layer_input": VOCABULARY} if "vocab_size_per_layer_input" in config else {}
        read = replace(read_config(config), bos_token_id=1, eos_token_ids=(2,))
        write_random_bundle(read, destination, storage.weights, storage.asked or 32, ffn_layout=storage.layout)
    else:
        folder = destination.with_name(f"{name}-checkpoint")  # random codes of experts fill the padding of their rows
        source = make_smallthinker(folder)[0] if name in OTHERS else golden_cases.write_checkpoint(
            golden_cases.load(name), folder)
        convert(source, destination, weights=storage.weights, group_size=storage.asked,
                ffn_layout=storage.layout)
    return Bundle.open(destination)


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose matrices have rows of whole blocks, but those behind heads of a size of their own."""
    found = config | {key: size for key, size in WHOLE.items() if config.get(key)}
    heads = next(key for key in ("num_attention_heads", "n_head", "num_heads", "n_heads") if key in config)
    if "head_dim" not in config and "kv_lora_rank" not in config:  # then heads share the hidden size
        found |= {key: 8 if config[key] == config[heads] else 2
                  for key in (heads, "num_key_value_heads", "num_kv_heads") if key in config}
    return found | RECURRENT.get(config["model_type"], {})


def write_floats(bundle: Bundle, destination: Path) -> Path:
    """Write a bundle in f32 of the weights that another's codes stand for: our kernels do not quantise what it
    multiplies.
    """
    graph, stored = build_graph(bundle.config, requested_types("f32")), graph_of(bundle)
    by_name = {weight.name: weight for weight in stored.weights}
    with BundleWriter(destination, bundle.config, Quantisation("f32", 32, "f32", "f32")) as writer:
        for weight in graph.weights:
            kind, values = graph.types[weight.name], _values(bundle, weight, by_name)
            data = layouts.pack_tile16(values, "f32") if kind.layout == "tile16" else values.view(np.uint8)
            writer.add(weight.name, kind, weight.shape, data, weight.pieces, graph.strides.get(weight.name, 0))
        for entry in bundle.header.files:
            if not entry.part:
                writer.copy_file(bundle.path / entry.name)
    return destination


def _values(bundle: Bundle, weight: Weight, stored: dict[str, Weight]) -> np.ndarray:
    """Values of a weight of a graph in floats, in its order and with its padding."""
    name = weight.name if weight.name in stored else f"{weight.name.rpartition('.')[0]}.ffn"
    kind, data, shape = bundle.types[name], tensor_bytes(bundle, name), stored[name].shape
    if kind.layout == "plain":
        values = data.view(np.float32)
        return values if shape == weight.shape else _alternating(values.reshape(len(weight.sources), -1)).reshape(-1)
    if kind.layout == "neuron":
        parts = layouts.unpack_neuron(data, kind.dtype, kind.group_size, shape)
        inputs = parts[:, :-1].swapaxes(0, 1)
        return np.ascontiguousarray(parts[:, -1].T) if weight.name.endswith(".down") else \
            _alternating(inputs).reshape(-1, inputs.shape[2])[: weight.shape[0]]
    values = layouts.unpack_tile16(data, kind.dtype, kind.group_size, shape, kind.levels)
    if shape != weight.shape:  # each row is a tile, whose columns are whole blocks
        columns, rows = weight.sources[0].shape[1], values.reshape(-1, 16 * shape[1])
        values = np.zeros((len(rows), 16 * weight.shape[1]), np.float32)
        values[:, :columns] = rows[:, :columns]
    return values.reshape(weight.shape)


def _alternating(parts: np.ndarray) -> np.ndarray:
    """Gates and ups that take turns in tiles of 16 rows; of one part alone its rows."""
    n, rows = parts.shape[:2]
    whole = np.zeros((n, -(-rows // 16) * 16, *parts.shape[2:]), np.float32)
    whole[:, :rows] = parts
    return np.ascontiguousarray(whole.reshape(n, -1, 16, *parts.shape[2:]).swapaxes(0, 1))


