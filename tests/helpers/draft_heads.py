"""Heads for further tokens: random tensors of a checkpoint, and their mathematics in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from edgeinfer.graph import ExpertsConfig, ModelConfig, fill_rope_tables
from tests.helpers import golden_cases
from tests.helpers.golden_cases import GoldenCase

Tensors = dict[str, np.ndarray]
LATENT_EPS = 1e-6


class Modules(NamedTuple):
    """Names of a head's modules in a checkpoint."""

    embedding_norm: str
    hidden_norm: str
    both: str
    layer: str
    norm: str
    copies: tuple[str, ...] = ()
    """Embedding and output head of the model once more, where a checkpoint has them."""


QWEN = Modules("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0.", "mtp.norm")


def modules(c: dict[str, Any]) -> Modules:
    """Return the names that a family's checkpoints have, by the fields of its config.json."""
    if "qwen" in c["model_type"]:
        return QWEN
    layer = f"model.layers.{c['num_hidden_layers']}."
    return Modules(layer + "enorm", layer + "hnorm", layer + "eh_proj", layer, layer + "shared_head.norm",
                   (layer + "embed_tokens", layer + "shared_head.head"))


def with_head(case: GoldenCase) -> GoldenCase:
    """Add the tensors of a head for further tokens, in the shapes of the last layer that has attention and, where the
    model has any, experts; experts have a tensor for each matrix, as in published checkpoints."""
    inner = case.config.get("text_config", case.config)
    names, own = modules(inner), text(case)
    has = (".experts." if any(".experts." in name for name in own) else "q_proj.weight", "self_attn.")
    layers = [f"model.layers.{i}." for i in range(inner["num_hidden_layers"])]
    last = [layer for layer in layers if all(any(name.startswith(layer) and part in name for name in own)
                                             for part in has)][-1]
    d, vocab = inner["hidden_size"], inner["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {names.both + ".weight": (d, 2 * d)}
    shapes |= {f"{norm}.weight": (d,) for norm in (names.embedding_norm, names.hidden_norm, names.norm)}
    shapes |= {f"{copy}.weight": (vocab, d) for copy in names.copies}
    for name, array in own.items():
        if name.startswith(last):
            shapes |= _apart(names.layer + name.removeprefix(last), array.shape)
    drawn = {name: golden_cases.weights(f"{case.name}/{name}", shape) for name, shape in shapes.items()}
    inner = {**inner, "mtp_num_hidden_layers" if names is QWEN else "num_nextn_predict_layers": 1}
    config = {**case.config, "text_config": inner} if "text_config" in case.config else inner
    return case._replace(tensors={**case.tensors, **drawn}, config=config)


def _apart(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a stack's matrices, or of a tensor that is none."""
    module, _, part = name.rpartition(".")
    if len(shape) != 3 or not module.endswith(".experts"):
        return {name: shape}
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    n, rows, columns = shape
    return {f"{module}.{i}.{one}.weight": (rows // len(parts), columns) for i in range(n) for one in parts}


def text(case: GoldenCase) -> Tensors:
    """Return the tensors of the text model, by its own names."""
    return {name.replace("model.language_model.", "model."): array for name, array in case.tensors.items()}


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def head_rows(c: ModelConfig, tensors: Tensors, given: np.ndarray, ids: list[int]) -> np.ndarray:
    """Return the head's rows after its last norm; `given` are the rows before each token: (T, hidden_size)."""
    plus_one = "mtp.fc.weight" in tensors
    t = {name: array.astype(np.float64) + (plus_one and array.ndim == 1 and name.endswith("norm.weight"))
         for name, array in tensors.items()}
    for name in (QWEN.embedding_norm, QWEN.hidden_norm) if plus_one else ():
        t[name + ".weight"] = t[name + ".weight"] + 1
    names, eps = modules({"model_type": c.model_type, "num_hidden_layers": c.num_hidden_layers}), c.rms_norm_eps
    both = np.concatenate([normed(t["model.embed_tokens.weight"][ids], t[names.embedding_norm + ".weight"], eps),
                           normed(given.astype(np.float64), t[names.hidden_norm + ".weight"], eps)], axis=1)
    x, layer = both @ t[names.both + ".weight"].T, names.layer
    attend = _latent_attention if c.latent else _attention
    x = x + attend(c, t, normed(x, t[layer + "input_layernorm.weight"], eps), layer + "self_attn.")
    h = normed(x, t[layer + "post_attention_layernorm.weight"], eps)
    x = x + (_experts(c.experts, t, h, layer + "mlp.") if c.experts else _ffn(t, h, layer + "mlp."))
    return normed(x, t[names.norm + ".weight"], eps)


def _ffn(t: Tensors, h: np.ndarray, module: str) -> np.ndarray:
    gate, up = (h @ t[f"{module}{part}_proj.weight"].T for part in ("gate", "up"))
    return gate / (1 + np.exp(-gate)) * up @ t[module + "down_proj.weight"].T


def _experts(e: ExpertsConfig, t: Tensors, h: np.ndarray, module: str) -> np.ndarray:
    """The chosen experts of each row, and the shared expert."""
    logits = h @ t[module + "gate.weight"].T
    scores = 1 / (1 + np.exp(-logits)) if e.scores == "sigmoid" else np.exp(logits - logits.max(-1, keepdims=True))
    if e.scores == "softmax":
        scores = scores / scores.sum(-1, keepdims=True)
    wanted = scores + t.get(module + "gate.e_score_correction_bias", 0)
    groups = wanted.reshape(len(h), e.groups, -1)
    best = np.sort(groups, axis=2)[:, :, -e.group_best :].sum(2)
    closed = np.argsort(-best, axis=1, kind="stable")[:, e.active_groups :]
    np.put_along_axis(groups, closed[:, :, None], -np.inf, axis=1)
    out = np.zeros_like(h)
    for row, chosen in enumerate(np.argsort(-wanted, axis=1, kind="stable")[:, : e.active]):
        weights = scores[row, chosen] / (scores[row, chosen].sum() if e.normalise else 1) * e.scale
        out[row] = sum(weight * _ffn(t, h[row], f"{module}experts.{i}.")
                       for weight, i in zip(weights, chosen, strict=True))
    if not e.shared_gate:
        return out + _ffn(t, h, module + "shared_experts.")
    gate = 1 / (1 + np.exp(-h @ t[module + "shared_expert_gate.weight"].T))
    return out + gate * _ffn(t, h, module + "shared_expert.")


def _attention(c: ModelConfig, t: Tensors, h: np.ndarray, name: str) -> np.ndarray:
    """Causal attention with a partial rotation; heads may be normed, and have a sigmoid gate beside each query."""
    n, heads, kv_heads, eps = c.head_dim, c.num_attention_heads, c.num_key_value_heads, c.rms_norm_eps
    q, k, v = ((h @ t[f"{name}{p}_proj.weight"].T + t.get(f"{name}{p}_proj.bias", 0)).reshape(len(h), count, -1)
               for p, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    gate, q = q[..., n:], q[..., :n]
    if name + "q_norm.weight" in t:
        q, k = (normed(x, t[f"{name}{p}_norm.weight"], eps) for p, x in (("q", q), ("k", k)))
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (_turned(c, k), v))
    o = _causal(_turned(c, q), k, v, n**-0.5)
    return _out(t, (o / (1 + np.exp(-gate)) if c.attention_gate else o).reshape(len(h), -1), name)


def _latent_attention(c: ModelConfig, t: Tensors, h: np.ndarray, name: str) -> np.ndarray:
    """Causal attention whose keys and values are made of one latent (arXiv 2405.04434, section 2.1)."""
    latent, heads, rotary = c.latent, c.num_attention_heads, c.rope_dim
    assert latent
    rank, nope, rows = c.head_dim - rotary, latent.nope_dim, h
    if latent.q_rank:
        rows = normed(h @ t[name + "q_a_proj.weight"].T, t[name + "q_a_layernorm.weight"], LATENT_EPS)
    q = rows @ t[name + ("q_b_proj.weight" if latent.q_rank else "q_proj.weight")].T
    q = q.reshape(len(h), heads, nope + rotary)
    both = h @ t[name + "kv_a_proj_with_mqa.weight"].T
    kv = normed(both[:, :rank], t[name + "kv_a_layernorm.weight"], LATENT_EPS) @ t[name + "kv_b_proj.weight"].T
    kv = kv.reshape(len(h), heads, nope + latent.value_dim)

    def turned(x: np.ndarray) -> np.ndarray:
        return _turned(c, np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1) if latent.interleaved else x)

    q = np.concatenate([q[..., :nope], turned(q[..., nope:])], axis=-1)
    key = np.broadcast_to(turned(both[:, None, rank:]), (len(h), heads, rotary))
    k = np.concatenate([kv[..., :nope], key], axis=-1)
    return _out(t, _causal(q, k, kv[..., nope:], c.attention_scale).reshape(len(h), -1), name)


def _causal(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


def _out(t: Tensors, o: np.ndarray, name: str) -> np.ndarray:
    return o @ t[name + "o_proj.weight"].T + t.get(name + "o_proj.bias", 0)


def _turned(c: ModelConfig, x: np.ndarray) -> np.ndarray:
    width: Any = c.rope_dim
    cosines, sines = (np.zeros((len(x), width // 2), np.float32) for _ in range(2))
    fill_rope_tables(c.rope, width, cosines, sines)
    a, b, rest = np.split(x, [width // 2, width], axis=-1)
    cos, sin = cosines[:, None], sines[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
