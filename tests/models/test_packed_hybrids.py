"""Quantised checkpoints of models with recurrent layers keep their codes: rows of queries and gates are only moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.graph import build_graph, expected_types, read_config, requested_types
from tests.golden_hybrids import CASES
from tests.helpers import golden_cases, reference
from tests.helpers.bundles import weights_of
from tests.helpers.packers import FORMS, Raw, config_of, f16, write_config, write_raw

SMALL = ("embed", "lm_head", "in_proj_a.", "in_proj_b.", "attn.a_proj.", "attn.b_proj.")
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


def written(name: str, form: str, directory: Path) -> dict[str, np.ndarray]:
    """Write a case of other sizes with its matrices quantised; gives what they stand for."""
    config = {key: value for key, value in (CASES[name] | SIZES | MODELS[name]).items()
              if key != "head_dim" or name not in ("bamba", "olmo-hybrid")}
    shapes = {source.name: source.stored for weight in build_graph(read_config(config), requested_types("f32")).weights
              for source in weight.sources}
    case = golden_cases.load(name)._replace(config=config, tensors={
        tensor: golden_cases.weights(tensor, shape) for tensor, shape in shapes.items()})
    golden_cases.write_checkpoint(case, directory)
    write_config(directory, **config_of(form))
    packer, own, _ = FORMS[form]
    rng, raw, tensors = np.random.default_rng(0), dict[str, Raw](), dict[str, np.ndarray]()
    for tensor, values in case.tensors.items():
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
    assert report.anew == ""
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
