"""Tiny models with transformers' logits: the reference of a runtime where torch is absent.

A case is one file of tests/golden, written by tests/make_golden.py: config, names and shapes of the tensors, token ids
and logits. The weights are not in it: they follow from the case's name, byte for byte, by `weights`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from edgeinfer.graph import seeing_models, supported_architectures

FOLDER = Path(__file__).parents[1] / "golden"


class GoldenCase(NamedTuple):
    name: str
    config: dict[str, Any]
    """As in config.json."""
    tensors: dict[str, np.ndarray]
    """float16, by Hugging Face's names; a tied head is left out."""
    ids: list[int]
    """T tokens of one sequence."""
    logits: np.ndarray
    """float32, (T, vocab_size): after each token, computed in float32 by transformers."""


def names() -> list[str]:
    """Every case of a family that there is, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.npz") if runs(_described(path.stem)["config"]))


def runs(config: dict[str, Any]) -> bool:
    """Return whether there is a file for the family; without one, its cases and what is tested with them are left
    out."""
    return seeing_models().get(config["model_type"], config["model_type"]) in supported_architectures()


@cache
def _described(name: str) -> dict[str, Any]:
    """Config, shapes and checksum of a case."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        found: dict[str, Any] = json.loads(bytes(file["case"]))
    return found


def config_of(name: str) -> dict[str, Any]:
    """The config of a case, for which its weights are not made. Skips the test of a family without a file."""
    config: dict[str, Any] = copy.deepcopy(_described(name)["config"])
    if not runs(config):
        pytest.skip(f"there is no family {config['model_type']}")
    return config


def cases() -> list[GoldenCase]:
    """Every case, read."""
    return [load(name) for name in names()]


def load(name: str) -> GoldenCase:
    """One case; its weights are compared with the checksum in the file. Skips as `config_of`."""
    config = config_of(name)
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        case = json.loads(bytes(file["case"]))
        ids, logits = file["ids"].tolist(), file["logits"]
    tensors = {tensor: weights(f"{name}/{tensor}", shape) for tensor, shape in case["shapes"].items()}
    if checksum(tensors) != case["sha256"]:
        raise ValueError(f"the weights of the golden case {name} are not those that transformers saw")
    return GoldenCase(name, config, tensors, ids, logits)


def save(case: GoldenCase, folder: Path = FOLDER) -> None:
    """Write a case; the tensors must be those of `weights`."""
    shapes = {tensor: list(array.shape) for tensor, array in case.tensors.items()}
    text = json.dumps({"config": case.config, "shapes": shapes, "sha256": checksum(case.tensors)}, indent=1)
    np.savez_compressed(
        folder / f"{case.name}.npz",
        case=np.frombuffer(text.encode(), np.uint8),
        ids=np.array(case.ids, np.int32),
        logits=case.logits.astype(np.float32),
    )


def weights(name: str, shape: list[int] | tuple[int, ...]) -> np.ndarray:
    """Random float16 array that depends on the name alone: SHAKE-256 gives 16 bits an element.

    Uniform. Matrices keep the size of what they multiply (queries and keys make it larger, so that attention is sharp
    and positions matter), norms lie around 1, biases within a half.
    """
    n = int(np.prod(shape))
    bits = np.frombuffer(hashlib.shake_256(name.encode()).digest(2 * n), "<i2")
    uniform = bits.reshape(shape) / 2.0**15
    if len(shape) == 1 and name.endswith(".weight"):
        values = 1 + 0.4 * uniform
        if "wide-heads/" in name and name.endswith("q_norm.weight"):  # scores of 512 products, which nothing divides
            values /= 16
    elif name.endswith(("router.scale", "router.per_expert_scale")):  # the first is divided by sqrt(hidden_size)
        values = (8 if name.endswith("router.scale") else 1) * (1 + 0.4 * uniform)
    elif name.endswith("bias"):
        values = 0.5 * uniform
    elif name.endswith("embed_tokens.weight"):
        values = 0.5 * uniform  # the layers weigh more than the token itself
    else:
        sharp = name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "query_key_value.weight",
                               "c_attn.weight"))
        values = uniform * np.sqrt(3 / (shape[-1] if len(shape) else 1)) * (1.6 if sharp else 1.0)
    return np.asarray(values, np.float16)


def checksum(tensors: dict[str, np.ndarray]) -> str:
    """SHA-256 of all elements, little-endian, in order."""
    digest = hashlib.sha256()
    for array in tensors.values():
        digest.update(array.astype("<f2").tobytes())
    return digest.hexdigest()


def write_checkpoint(case: GoldenCase, directory: Path) -> Path:
    """Write a case as a Hugging Face checkpoint: config, safetensors, and a tokenizer whose words are ``t0 t1 ...``."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(case.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {f"t{i}": i for i in range(case.config.get("text_config", case.config)["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
    generation = {name: case.config.get(name) for name in ("bos_token_id", "eos_token_id")}
    for name, content in [
        ("config.json", case.config),
        ("generation_config.json", generation),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", tokenizer_config),
    ]:
        (directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return directory
