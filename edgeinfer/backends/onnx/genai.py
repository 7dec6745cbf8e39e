"""Files that onnxruntime-genai reads beside a model: genai_config.json, and those of the tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edgeinfer.bundle import Bundle
from edgeinfer.errors import TokenizerError

from .destination import CONFIG_FILE, MODEL_FILE
from .flavour import Flavour, Heads

NEEDED = ("tokenizer.json", "tokenizer_config.json")
"""Files that its tokenizer reads; it reads no tokenizer.model (0.18)."""
TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Names of decoders that it knows and that mean ours; differences between them are in the model's graph."""


def check_tokenizer(bundle: Bundle) -> None:
    """Refuse a bundle whose tokenizer onnxruntime-genai cannot read. Raises `TokenizerError`."""
    if missing := [name for name in NEEDED if name not in bundle.files]:
        raise TokenizerError(f"The bundle {bundle.path} has no {missing[0]}, which onnxruntime-genai reads; convert a "
                             "checkpoint that has it, or export with --for session.")


def write_beside(bundle: Bundle, flavour: Flavour, folder: Path) -> dict[str, str]:
    """Write genai_config.json and copy the bundle's files to a model's folder; returns their names and checksums."""
    config = (json.dumps(genai_config(bundle, flavour), indent=1) + "\n").encode()
    (folder / CONFIG_FILE).write_bytes(config)
    sums = {CONFIG_FILE: hashlib.sha256(config).hexdigest()}
    for entry in bundle.header.files:
        if not entry.part:
            (folder / entry.name).write_bytes((bundle.path / entry.name).read_bytes())
            sums[entry.name] = entry.sha256
    return sums


def genai_config(bundle: Bundle, flavour: Flavour) -> dict[str, Any]:
    """Return the contents of genai_config.json: sizes, names of inputs and outputs, special tokens, greedy search."""
    c, heads = bundle.config, Heads.of(bundle.config)
    ends = list(c.eos_token_ids)
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": MODEL_FILE,
        "head_size": heads.stored_dim,
        "hidden_size": c.hidden_size,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask",
                   "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
        "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names":
                    "present.%d.value"},
        "num_attention_heads": heads.query,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": heads.kv,
    }
    model: dict[str, Any] = {
        "type": c.model_type if c.model_type in TYPES else "decoder",
        "context_length": flavour.positions,
        "vocab_size": c.vocab_size,
        "pad_token_id": ends[0] if ends else 0,
        "eos_token_id": ends if len(ends) != 1 else ends[0],
        "decoder": decoder,
    }
    if c.bos_token_id is not None:
        model["bos_token_id"] = c.bos_token_id
    search = {"do_sample": False, "early_stopping": True, "max_length": flavour.positions, "min_length": 0,
              "num_beams": 1, "num_return_sequences": 1, "past_present_share_buffer": True, "temperature": 1.0,
              "top_k": 1, "top_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0,
              "no_repeat_ngram_size": 0, "diversity_penalty": 0.0}
    return {"model": model, "search": search}
