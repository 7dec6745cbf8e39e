"""A random model that takes long enough for somebody to interrupt it."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import ModelConfig

CTX = 32768
CONFIG = ModelConfig(
    "llama", vocab_size=300, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=CTX,
    bos_token_id=1, eos_token_ids=(2,),
)


def write_slow_bundle(directory: Path) -> Path:
    """Write the model (19 MB); a token takes about a millisecond, a prompt of 30,000 tokens many seconds."""
    write_random_bundle(CONFIG, directory)
    return directory
