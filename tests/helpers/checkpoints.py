"""Tiny random checkpoints, as transformers would save them, and raw safetensors files that may lie."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import CheckpointError
from edgeinfer.graph import ModelConfig, build_graph, read_config, requested_types

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM"}
VOCAB_SIZE = 300
SENTENCES = (
    "Once upon a time there was a fox who lived in a forest by the sea.",
    "The old king had three daughters, and the youngest was the wisest of all.",
    "A crow sat on the tree and held a piece of cheese in its beak.",
)


def make_checkpoint(
    directory: Path, model_type: str = "llama", *, dtype: str = "F32", shards: int = 1, seed: int = 0,
    tokenizer: bool = True, tensors: dict[str, np.ndarray | None] | None = None, **overrides: Any,
) -> Path:
    """Write a checkpoint with random weights and a tiny byte-level tokenizer; gives the directory.

    Parameters
    ----------
    directory : Path
        Made if it does not exist.
    model_type : str
        llama, mistral, qwen2 or qwen3.
    dtype : {'F64', 'F32', 'F16', 'BF16'}
        Of all tensors.
    shards : int
        Files to spread the tensors over.
    tokenizer : bool
        Write tokenizer.json and tokenizer_config.json.
    tensors : dict, optional
        Tensors to replace or add; None leaves one out.
    **overrides
        Fields of config.json; None removes one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(model_type, **overrides)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 3]}))
    weights = random_tensors(read_config(config), seed)
    weights.update(tensors or {})  # type: ignore[arg-type]
    save_tensors(directory, {name: value for name, value in weights.items() if value is not None}, dtype, shards)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def tiny_config(model_type: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A small config with dimensions that are not multiples of 16 or 32."""
    config = {
        "architectures": [ARCHITECTURES.get(model_type, "UnknownForCausalLM")], "model_type": model_type,
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 84, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2, "torch_dtype": "float32",
    }
    if model_type == "qwen3":
        config["head_dim"] = 16
    config.update(overrides)
    return {name: value for name, value in config.items() if value is not None or name == "sliding_window"}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under the names and with the shapes that the architecture expects."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for weight in build_graph(config, requested_types("f32")).weights:
        for source in chain.from_iterable(part.items if part.each else (part,) for part in weight.sources):
            if source.name in tensors:
                continue
            values = rng.standard_normal(source.stored).astype(np.float32)
            norm = len(source.shape) == 1 and "norm" in source.name
            tensors[source.name] = 1 + 0.1 * values if norm else values * np.float32(0.1)
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def save_tensors(directory: Path, tensors: dict[str, np.ndarray], dtype: str = "F32", shards: int = 1) -> None:
    """model.safetensors, or shards with their index."""
    if shards == 1:
        serialise(directory / "model.safetensors", tensors, dtype)
        return
    index: dict[str, str] = {}
    names = sorted(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        serialise(directory / file, part, dtype)
        index.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def serialise(path: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> None:
    """One safetensors file by the safetensors library (bfloat16, which NumPy lacks, by hand)."""
    from safetensors.numpy import save_file

    if dtype != "BF16":
        kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]
        save_file({name: values.astype(kind) for name, values in tensors.items()}, path, {"format": "pt"})
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, values in tensors.items():
        begin = len(data)
        data += bfloat16_bytes(values)
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [begin, len(data)]}
    raw_safetensors(path, header, bytes(data))


def bfloat16_bytes(values: np.ndarray) -> bytes:
    """The upper halves of float32, rounded to nearest, ties to even."""
    bits = values.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2").tobytes()


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors as float32, read by the safetensors library; not for bfloat16."""
    from safetensors.numpy import load_file

    tensors: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path))
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def raw_safetensors(path: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> None:
    """A safetensors file from any header, truthful or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer trained on a few sentences: ids 0 to 3 special, VOCAB_SIZE tokens at most."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    specials = ["<unk>", "<s>", "</s>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>",
                "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def refused(source: Path, kind: type[Exception] = CheckpointError, **options: Any) -> str:
    """The sentence with which a conversion is refused; the directory's path is left out of it."""
    import pytest

    from edgeinfer.converters import convert

    destination = source.parent / "bundle"
    before = sorted(source.parent.iterdir())
    with pytest.raises(kind) as caught:
        convert(source, destination, **options)
    assert sorted(source.parent.iterdir()) == before
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    return text.replace(str(source) + "/", "").replace(str(source), "SOURCE")
