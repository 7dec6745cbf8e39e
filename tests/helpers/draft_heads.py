"""Heads for further tokens: random tensors of a checkpoint, and their mathematics in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeinfer.graph import ModelConfig, fill_rope_tables
from tests.helpers import golden_cases
from tests.helpers.golden_cases import GoldenCase

Tensors = dict[str, np.ndarray]


def with_head(case: GoldenCase) -> GoldenCase:
    """Add the tensors of Qwen's head for further tokens, in the shapes of its attention layers."""
    layer = next(name for name in case.tensors if name.endswith("q_proj.weight")).rpartition("self_attn")[0]
    shapes = {name.replace(layer, "mtp.layers.0."): array.shape for name, array in case.tensors.items()
              if name.startswith(layer)}
    (d,) = next(array.shape for name, array in text(case).items() if name == "model.norm.weight")
    shapes |= {"mtp.fc.weight": (d, 2 * d), "mtp.norm.weight": (d,), "mtp.pre_fc_norm_embedding.weight": (d,),
               "mtp.pre_fc_norm_hidden.weight": (d,)}
    own = {name: golden_cases.weights(f"{case.name}/{name}", shape) for name, shape in shapes.items()}
    inner = {**case.config.get("text_config", case.config), "mtp_num_hidden_layers": 1}
    config = {**case.config, "text_config": inner} if "text_config" in case.config else inner
    return case._replace(tensors={**case.tensors, **own}, config=config)


def text(case: GoldenCase) -> Tensors:
    """Return the tensors of the text model, by its own names."""
    return {name.replace("model.language_model.", "model."): array for name, array in case.tensors.items()}


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm with the weight's difference from 1."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + weight.astype(np.float64))


def head_rows(c: ModelConfig, tensors: Tensors, given: np.ndarray, ids: list[int]) -> np.ndarray:
    """Return the head's rows after its last norm; `given` are the rows before each token: (T, hidden_size)."""
    t = {name: array.astype(np.float64) for name, array in tensors.items()}
    layer, eps = "mtp.layers.0.", c.rms_norm_eps
    both = np.concatenate([normed(t["model.embed_tokens.weight"][ids], t["mtp.pre_fc_norm_embedding.weight"], eps),
                           normed(given.astype(np.float64), t["mtp.pre_fc_norm_hidden.weight"], eps)], axis=1)
    x = both @ t["mtp.fc.weight"].T
    x = x + _attention(c, t, normed(x, t[layer + "input_layernorm.weight"], eps), layer + "self_attn.")
    h = normed(x, t[layer + "post_attention_layernorm.weight"], eps)
    gate, up = (h @ t[f"{layer}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ t[layer + "mlp.down_proj.weight"].T
    return normed(x, t["mtp.norm.weight"], eps)


def _attention(c: ModelConfig, t: Tensors, h: np.ndarray, name: str) -> np.ndarray:
    """Causal attention with normed heads, a partial rotation, and a sigmoid gate beside each query."""
    n, heads, kv_heads, eps = c.head_dim, c.num_attention_heads, c.num_key_value_heads, c.rms_norm_eps
    q, k, v = ((h @ t[f"{name}{p}_proj.weight"].T + t.get(f"{name}{p}_proj.bias", 0)).reshape(len(h), count, -1)
               for p, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    gate, q = q[..., n:], _turned(c, normed(q[..., :n], t[name + "q_norm.weight"], eps))
    k = _turned(c, normed(k, t[name + "k_norm.weight"], eps))
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(n)
    scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    o = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    o = (o / (1 + np.exp(-gate))).reshape(len(h), -1)
    return o @ t[name + "o_proj.weight"].T + t.get(name + "o_proj.bias", 0)


def _turned(c: ModelConfig, x: np.ndarray) -> np.ndarray:
    width: Any = c.rope_dim
    cosines, sines = (np.zeros((len(x), width // 2), np.float32) for _ in range(2))
    fill_rope_tables(c.rope, width, cosines, sines)
    a, b, rest = np.split(x, [width // 2, width], axis=-1)
    cos, sin = cosines[:, None], sines[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
