"""Quantised checkpoints of models with recurrent layers keep their codes: rows of queries and gates are only moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.graph import build_graph, expected_types, read_config, requested_types
from edgeinfer.quant import WeightType
from edgeinfer.runtime import HiddenRows
from tests.golden_hybrids import CASES
from tests.helpers import golden_cases, reference
from tests.helpers.bundles import weights_of
from tests.helpers.draft_heads import QWEN, head_rows, with_head
from tests.helpers.packers import FORMS, Raw, bf16, config_of, f16, write_config, write_raw
from tests.helpers.sessions import tokens
from tests.models.test_draft_head import opened

SMALL = ("embed", "lm_head", "in_proj_a.", "in_proj_b.", "attn.a_proj.", "attn.b_proj.", "mlp.gate.",
         "shared_expert_gate.", QWEN.both)
"""Matrices that stay as they were."""
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 304}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-5": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                "linear_value_head_dim": 32, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25}},
    "olmo-hybrid": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                    "linear_value_head_dim": 32},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "bamba": {"mamba_n_heads": 8, "mamba_d_state": 16},
}
MODELS["qwen3-5-moe"] = {**MODELS["qwen3-5"], "num_experts": 5, "moe_intermediate_size": 32,
                         "shared_expert_intermediate_size": 64}


def sized(name: str) -> golden_cases.GoldenCase:
    """A case of other sizes, without logits; each expert has tensors of its own."""
    config = {key: value for key, value in (CASES[name] | SIZES | MODELS[name]).items()
              if key != "head_dim" or name not in ("bamba", "olmo-hybrid")}
    shapes = {part.name: part.stored for weight in build_graph(read_config(config), requested_types("f32")).weights
              for source in weight.sources for part in (source.items if source.each else (source,))}
    return golden_cases.load(name)._replace(config=config, tensors={
        tensor: golden_cases.weights(tensor, shape) for tensor, shape in shapes.items()})


def written(name: str, form: str, directory: Path, head: str = "") -> dict[str, np.ndarray]:
    """Write a case of other sizes with its matrices quantised; gives what they stand for.

    It may have a head for further tokens, of floats (``bf16``) or quantised as the layers are (``same``).
    """
    case = with_head(sized(name)) if head else sized(name)
    golden_cases.write_checkpoint(case, directory)
    write_config(directory, **config_of(form))
    packer, own, _ = FORMS[form]
    rng, raw, tensors = np.random.default_rng(0), dict[str, Raw](), dict[str, np.ndarray]()
    for tensor, values in case.tensors.items():
        if head == "bf16" and tensor.startswith((QWEN.layer, QWEN.both)):
            raw[tensor] = bf16(values)
            words = np.frombuffer(raw[tensor][2], "<u2").astype("<u4") << 16
            tensors[tensor] = words.view("<f4").reshape(values.shape)
            continue
        if values.ndim != 2 or any(word in tensor for word in SMALL):
            raw[tensor], tensors[tensor] = f16(values), values.astype(np.float32)
            continue
        parts, tensors[tensor] = packer(rng, values.shape, **own)
        raw |= {tensor.removesuffix(".weight") + end: part for end, part in parts.items()}
    write_raw(directory / "model.safetensors", raw)
    return tensors


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("form", ["gptq", "awq", "pack-quantized", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_codes_are_kept(name: str, form: str, tmp_path: Path) -> None:
    tensors = written(name, form, tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.requantised == ""
    found = weights_of(tmp_path / "out")
    with Bundle.open(tmp_path / "out") as bundle:
        config, types = bundle.config, bundle.types
    near = 2**-11 * 16 * 0.02 if form == "awq" else 3e-8  # a zero point, up to 16, times a scale is a float16
    oracle, compared = reference._State(config, tensors, np.arange(2)), 0
    for weight in build_graph(config, expected_types(types)).weights:
        if weight.combine == "concat" and weight.name in found and weight.kind == "matrix":
            assert types[weight.name].dtype != "f32" or "mixer_in" in weight.name, weight.name
            assert np.allclose(found[weight.name], oracle.whole(weight), rtol=5e-4, atol=near), weight.name
            compared += 1
    assert compared >= 2 * config.num_hidden_layers


@pytest.mark.parametrize(("name", "form", "head"), [
    ("qwen3-5", "gptq", "bf16"), ("qwen3-5", "awq", "bf16"), ("qwen3-5", "mlx", "bf16"), ("qwen3-5-moe", "fp8", "bf16"),
    ("qwen3-5-moe", "fp8", "same"),
    pytest.param("qwen3-5-moe", "pack-quantized", "bf16", marks=pytest.mark.slow),  # experts in groups of 128
    pytest.param("qwen3-5-moe", "gptq", "same", marks=pytest.mark.slow)])
def test_a_head_that_drafts(name: str, form: str, head: str, tmp_path: Path) -> None:
    """It stays in floats where it is in the checkpoint, as in most that are published, or keeps its codes."""
    tensors = written(name, form, tmp_path / "hf", head)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert not any("predict further tokens" in remark for remark in report.remarks)
    with opened(tmp_path / "out", ctx=64, kv="f32") as (own, ahead):
        for part in ("o", "qkv", "experts_down"):
            stored, of_model = (types.get(f"layers.{layer}.{part}") for types, layer in (
                (ahead.graph.types, 4), (own.graph.types, 3)))
            assert stored == (of_model and (WeightType("f16") if head == "bf16" else of_model))
        sequence, ids, given = own.new_sequence(), tokens(12), [np.zeros((1, own.model.hidden_size), np.float32)]
        with patch.object(ahead, "take", lambda segments, take=ahead.take: (
                given.append(HiddenRows(own).rows(0, len(segments[0].ids))), take(segments))):
            own.prefill(sequence, ids[:-1])
        expected = head_rows(own.model, tensors, np.concatenate(given), ids)[-1] @ tensors["lm_head.weight"].T
        found, _ = ahead.ahead([sequence], ids[-1:], [0], 0, 0)
        bound = 0.03 if form == "gptq" and head == "same" else 1e-3  # int8 inputs; FP8 times its scale as f16
        assert np.abs(found[0] - expected).max() < (1e-5 if head == "bf16" else bound) * np.abs(expected).max()
