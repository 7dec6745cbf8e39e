"""SmallThinker beside a forward pass in NumPy that knows nothing of graphs, for transformers does not have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import convert
from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.graph import ExpertsConfig, read_config
from tests.helpers import golden_cases
from tests.helpers.gguf_files import write_gguf
from tests.helpers.sessions import TINY, scored, session, tokens, write_model
from tests.models.test_gpt_oss import trace

CONFIG: dict[str, Any] = {
    "model_type": "smallthinker", "vocab_size": 99, "hidden_size": 60, "num_hidden_layers": 5, "head_dim": 14,
    "num_attention_heads": 6, "num_key_value_heads": 2, "moe_num_primary_experts": 7, "moe_ffn_hidden_size": 44,
    "moe_num_active_primary_experts": 3, "rms_norm_eps": 1e-6, "rope_theta": 150.0, "max_position_embeddings": 64,
    "rope_layout": [0, 1, 1, 1, 0], "sliding_window_layout": [0, 1, 1, 1, 0], "sliding_window_size": 7,
    "norm_topk_prob": True, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 3],
    "auto_map": {"AutoModelForCausalLM": "modeling_smallthinker.SmallThinkerForCausalLM"},
}  # fmt: skip
PLAIN = {"rope_layout": [1] * 5, "sliding_window_layout": [0] * 5}
IDS = tokens(24, vocab_size=99)


def make(directory: Path, **changes: Any) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """A checkpoint with the published names, its config and its tensors."""
    c, shapes = {**CONFIG, **changes}, {}
    hidden, size, n = c["hidden_size"], c["moe_ffn_hidden_size"], c["head_dim"]
    for i in range(c["num_hidden_layers"]):
        layer, moe = f"model.layers.{i}.", f"model.layers.{i}.block_sparse_moe."
        attn = {"q": (6 * n, hidden), "k": (2 * n, hidden), "v": (2 * n, hidden), "o": (hidden, 6 * n)}
        shapes |= {f"{layer}self_attn.{part}_proj.weight": shape for part, shape in attn.items()}
        shapes |= {layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,),
                   moe + "primary_router.weight": (c["moe_num_primary_experts"], hidden)}
        for e in range(c["moe_num_primary_experts"]):
            shapes |= {f"{moe}experts.{e}.{part}.weight": (size, hidden) for part in ("gate", "up")}
            shapes[f"{moe}experts.{e}.down.weight"] = (hidden, size)
    shapes |= {"model.embed_tokens.weight": (99, hidden), "model.norm.weight": (hidden,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (99, hidden)
    made = {name: golden_cases.weights(f"smallthinker/{name}", shape) for name, shape in shapes.items()}
    case = golden_cases.GoldenCase("smallthinker", c, made, [], np.zeros(0))
    return golden_cases.write_checkpoint(case, directory), c, made


def forward(c: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int], late: bool = False) -> np.ndarray:
    """Logits after each token, in float64, layer by layer as the authors' model has it; `late`: routed as others do."""
    w = {name: values.astype(np.float64) for name, values in tensors.items()}
    x, n, at = w["model.embed_tokens.weight"][ids], c["head_dim"], np.arange(len(ids))
    angles = at[:, None, None] * c["rope_theta"] ** (-np.arange(0, n, 2) / n)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + c["rms_norm_eps"]) * w[name + ".weight"]

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    for i in range(c["num_hidden_layers"]):
        layer, moe = f"model.layers.{i}.", f"model.layers.{i}.block_sparse_moe."
        entered, h = x, norm(x, layer + "input_layernorm")
        q, k, v = ((h @ w[f"{layer}self_attn.{p}_proj.weight"].T).reshape(len(ids), -1, n) for p in "qkv")
        if c["rope_layout"][i]:
            q, k = turned(q), turned(k)
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 3, axis=1)) / np.sqrt(n)
        distance = at[:, None] - at
        window = c["sliding_window_size"] if c["sliding_window_layout"][i] else len(ids)
        scores = np.exp(np.where((distance >= 0) & (distance < window), scores, -np.inf))
        a = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), np.repeat(v, 3, axis=1))
        x = x + a.reshape(len(ids), -1) @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm")
        logits = (h if late else entered) @ w[moe + "primary_router.weight"].T
        chosen = np.argsort(-logits, axis=1)[:, : c["moe_num_active_primary_experts"]]
        top = np.take_along_axis(logits, chosen, axis=1)
        weights = np.exp(top) if c.get("moe_primary_router_apply_softmax") else 1 / (1 + np.exp(-top))
        weights /= weights.sum(axis=1, keepdims=True)
        x = x + np.stack([sum(share * (w[f"{moe}experts.{e}.down.weight"] @ (
            np.maximum(w[f"{moe}experts.{e}.gate.weight"] @ row, 0) * (w[f"{moe}experts.{e}.up.weight"] @ row)))
            for e, share in zip(experts, shares, strict=True)) for row, experts, shares in zip(h, chosen, weights,
                                                                                           strict=True)])
    return norm(x, "model.norm") @ w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"].T


def logits_of(bundle: Path) -> np.ndarray:
    with session(bundle, kv="f32", threads=2, prefill_chunk=13, outputs=16) as opened:
        return scored(opened, IDS)


def difference(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


@pytest.mark.parametrize("changes", [
    {}, {"moe_primary_router_apply_softmax": True, "tie_word_embeddings": True}, PLAIN,
], ids=["sigmoid", "softmax", "4b"])
def test_logits_are_those_of_the_published_mathematics(changes: dict[str, Any], tmp_path: Path) -> None:
    source, c, made = make(tmp_path / "hf", **changes)
    want = forward(c, made, IDS)
    assert difference(forward(c, made, IDS, late=True), want) > 0.01
    convert(source, tmp_path / "bundle", weights="f16")
    assert difference(logits_of(tmp_path / "bundle"), want) < 1e-5


@pytest.mark.parametrize(("changes", "way"), [({}, 2), ({"moe_primary_router_apply_softmax": True, **PLAIN}, 1)])
def test_a_gguf_file_has_the_same_logits(changes: dict[str, Any], way: int, tmp_path: Path) -> None:
    source, c, made = make(tmp_path / "hf", **changes)
    write_gguf(tmp_path / "model.gguf", source, fields={"smallthinker.expert_gating_func": way})
    convert(tmp_path / "model.gguf", tmp_path / "bundle")
    assert difference(logits_of(tmp_path / "bundle"), forward(c, made, IDS)) < 1e-5


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("weights", ["q4", "f16"])
def test_threads_chunks_and_references(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, model_type="smallthinker", hidden_act="relu", windows=(0, 40), ropes=(0, 1),
                     experts=ExpertsConfig(9, 3, 40, scores="sigmoid"))
    path = write_model(tmp_path, config, weights)
    with session(path) as opened:
        names = [op.name for op in opened.graph.ops if op.layer == 1]
        assert names.index("route") < names.index("attention") < names.index("experts_gated")
    whole = trace(path, prefill_chunk=512)
    for threads, chunk in ((1, 1), (3, 7)):
        assert trace(path, threads=threads, prefill_chunk=chunk) == whole, f"{threads} threads, chunks of {chunk}"
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    assert trace(path, prefill_chunk=40) == whole


@pytest.mark.parametrize(("fields", "error", "message"), [
    ({"rope_layout": [1, 2, 1, 1, 1]}, CheckpointError, r"rope_layout is \[1, 2, 1, 1, 1\]; it must list"),
    ({"sliding_window_layout": [1]}, CheckpointError, r"sliding_window_layout is \[1\]; .* each of 5 layers"),
    ({"moe_num_active_primary_experts": 8}, CheckpointError, "moe_num_active_primary_experts is 8; .* from 1 to 7"),
    ({"moe_enable_early_router": False}, UnsupportedModelError, "only routers before the attention are supported"),
    ({"moe_enable_secondary_experts": True}, UnsupportedModelError, "moe_enable_secondary_experts is True"),
])
def test_configs_of_other_models_are_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_config({**CONFIG, **fields})


@pytest.mark.parametrize(("key", "value", "message"), [
    ("expert_gating_func", 4, r"expert_gating_func is 4.*only 1 \(softmax\) or 2 \(sigmoid\)"),
    ("block_count", 2**32 - 1, "4294967295 layers, but edgeinfer takes at most 4096"),
])
def test_files_of_other_models_are_refused(key: str, value: int, message: str, tmp_path: Path) -> None:
    source, *_ = make(tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", source, fields={f"smallthinker.{key}": value})
    with pytest.raises(UnsupportedModelError, match=message):
        convert(tmp_path / "model.gguf", tmp_path / "bundle")
