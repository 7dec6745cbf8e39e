"""Small bundles for tests, and ways to damage them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import HEADER_FILE, Bundle, BundleWriter, Quantisation
from edgeinfer.bundle.header import checksum
from edgeinfer.graph import ModelConfig
from edgeinfer.quant import WeightType, layouts

CONFIG = ModelConfig(
    model_type="llama", vocab_size=40, hidden_size=24, intermediate_size=36, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=64,
)
TENSORS = {
    "embed": (WeightType("int8", 32), (40, 24)),
    "norm": (WeightType("f32", 0, "plain"), (24,)),
    "big": (WeightType("f32"), (17, 8200)),  # more than 1 MiB: starts on a 64 KiB boundary
    "ffn": (WeightType("q4", 32, "neuron"), (36, 3, 24)),
}


def contents(seed: int = 0) -> dict[str, np.ndarray]:
    """Random stored bytes for each tensor."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 256, stored.nbytes(shape), dtype=np.uint8)
        for name, (stored, shape) in TENSORS.items()
    }


def write_bundle(destination: Path, **options: Any) -> dict[str, np.ndarray]:
    """Write a bundle of TENSORS with a tokenizer file."""
    data = contents()
    with BundleWriter(destination, CONFIG, Quantisation(), **options) as writer:
        for name, (weight_type, shape) in TENSORS.items():
            writer.add(name, weight_type, shape, data[name])
        writer.add_file("tokenizer.json", b'{"model": 1}')
    return data


def tensor_bytes(bundle: Bundle, name: str) -> NDArray[np.uint8]:
    """The stored bytes of one tensor: a read-only view of the mapping, or a copy of its pieces."""
    pieces = list(bundle.stored(name))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def as_format_1(bundle: Path) -> None:
    """Turn a bundle into one of format 1: types by name, files without parts, nothing after the last tensor."""
    types = {entry.name: entry.type for entry in Bundle.open(bundle).tensors.values()}

    def change(data: dict[str, Any]) -> None:
        data.update(version=1, weights_bytes=data["weights_bytes"] - 64)
        for row in data["tensors"]:
            for field in ("bits", "grid", "table", "scale", "minimum"):
                del row[field]
            row["dtype"] = types[row["name"]].dtype
        for row in data["files"]:
            del row["part"]

    alter_header(bundle, change)
    os.truncate(bundle / "weights.bin", (bundle / "weights.bin").stat().st_size - 64)


def alter_header(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change bundle.json and seal it again, as an attacker would."""
    data = json.loads((bundle / HEADER_FILE).read_text())
    change(data)
    data.pop("checksum", None)
    data["checksum"] = checksum(data)
    (bundle / HEADER_FILE).write_text(json.dumps(data))


def weights_of(path: Path) -> dict[str, np.ndarray]:
    """All weights of a bundle as float32, by name."""
    out: dict[str, np.ndarray] = {}
    with Bundle.open(path) as bundle:
        for entry in bundle.header.tensors:
            raw, stored = tensor_bytes(bundle, entry.name), entry.type
            values = (raw.view("<f4")[: entry.shape[0]] if stored.layout == "plain" else
                      layouts.unpack_tile16(raw, stored.dtype, stored.group_size, entry.shape, stored.levels))
            whole = re.sub(r"qkv\.[0-9]", "qkv", entry.name)  # parts of a matrix, in their order
            out[whole] = np.concatenate([out[whole], values]) if whole in out else values
    return out
