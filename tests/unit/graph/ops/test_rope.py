"""Tables of cosines and sines against the papers' formulas and transformers."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.graph import RopeConfig, rope_tables
from tests.helpers.reference_parts import frequencies

ROPES = {
    "default": RopeConfig(500000.0),
    "linear": RopeConfig(10000.0, "linear", 3.0),
    "llama3": RopeConfig(500000.0, "llama3", 8.0, 8192, 1.0, 4.0),
    "yarn": RopeConfig(10000.0, "yarn", 4.0, 4096, attention_factor=1.1386294361119891),
    "yarn unrounded": RopeConfig(150000.0, "yarn", 32.0, 4096, beta_fast=20.0, beta_slow=2.0, truncate=False),
    "yarn short": RopeConfig(100.0, "yarn", 2.0, 8, beta_fast=1.0, beta_slow=1.0),  # the ramp has no width
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [2, 6, 10, 64, 128])
def test_tables_are_the_formula(name: str, head_dim: int) -> None:
    rope = ROPES[name]
    n = 5000  # more than the rows computed at once
    cos, sin = rope_tables(rope, head_dim, n)
    assert cos.shape == sin.shape == (n, head_dim // 2)
    assert cos.dtype == sin.dtype == np.float32
    angles = np.arange(n)[:, None] * frequencies(rope, head_dim)
    assert np.abs(cos - rope.attention_factor * np.cos(angles)).max() < 2e-7 * rope.attention_factor
    assert np.abs(sin - rope.attention_factor * np.sin(angles)).max() < 2e-7 * rope.attention_factor


def test_more_positions_change_no_row() -> None:
    few, many = (rope_tables(ROPES["yarn"], 64, n) for n in (7, 2000))
    assert all((a == b[:7]).all() for a, b in zip(few, many, strict=True))


@pytest.mark.reference
@pytest.mark.parametrize("name", [name for name in ROPES if name != "yarn short"])
@pytest.mark.parametrize("head_dim", [6, 64, 128])
def test_tables_are_transformers(name: str, head_dim: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'reference')")
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'reference')")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope, n = ROPES[name], 3000
    fields = {k: v for k, v in vars(rope).items() if k not in ("theta", "kind")}
    wanted = {"default": (), "linear": ("factor",), "llama3": ("factor", "original_max_position_embeddings",
              "low_freq_factor", "high_freq_factor"), "yarn": ("factor", "original_max_position_embeddings",
              "beta_fast", "beta_slow", "attention_factor", "truncate")}[rope.kind]  # fmt: skip
    parameters = {"rope_theta": rope.theta, "rope_type": rope.kind, **{k: fields[k] for k in wanted}}
    config = LlamaConfig(hidden_size=head_dim * 4, num_attention_heads=4, head_dim=head_dim, rope_parameters=parameters)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(n)[None])
    for table, other in zip(rope_tables(rope, head_dim, n), theirs, strict=True):
        # They round frequencies and angles to float32: an error that grows with the position.
        assert np.abs(table - other[0, :, : head_dim // 2].numpy()).max() < 2.0**-23 * n
