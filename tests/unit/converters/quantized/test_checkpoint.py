"""Quantised checkpoints of other architectures than Llama's: mixtures of experts, fused tensors, models that see."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.models.describe import describe
from tests.helpers.bundles import weights_of
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.packers import (
    FORMS,
    Raw,
    compressed_config,
    f16,
    make_packed,
    mxfp4,
    raw_parts,
    write_config,
    write_raw,
)

MOE = {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "norm_topk_prob": True, "torch_dtype": "float16"}


@pytest.mark.parametrize(("form", "stored"), [("gptq", "q4"), ("pack-quantized", "q4"), ("int-quantized", "int8"),
                                              ("fp8", "f16")])
def test_experts_are_stored_as_other_matrices(tmp_path: Path, form: str, stored: str) -> None:
    """Their codes are kept too, the router is floats, and plans know it, from the config alone too."""
    tensors = make_packed(tmp_path / "hf", form, **MOE)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.requantised == "" and (report.rounded == ()) == (stored != "f16")
    types = {tensor.name: tensor.dtype for tensor in report.tensors}
    assert types["layers.0.qkv"] == types["layers.0.experts_gate_up"] == types["layers.1.experts_down"] == stored
    assert types["layers.0.router"] == "f32"
    found = weights_of(tmp_path / "out")
    want = np.stack([tensors[f"model.layers.1.mlp.experts.{i}.down_proj.weight"] for i in range(5)])
    down = found["layers.1.experts_down"].reshape(want.shape)
    assert np.array_equal(down, want) or (stored == "f16" and (abs(down - want) <= 4.9e-4 * abs(want) + 3e-8).all())
    ours = describe(tmp_path / "out")
    (tmp_path / "alone").mkdir()
    (tmp_path / "hf" / "config.json").rename(tmp_path / "alone" / "config.json")
    alone = describe(tmp_path / "alone" / "config.json")
    (tmp_path / "alone" / "config.json").rename(tmp_path / "hf" / "config.json")
    for described in (describe(tmp_path / "hf"), alone):
        assert (described.weight_bytes, described.quantisation) == (ours.weight_bytes, ours.quantisation)


@pytest.mark.parametrize("quantised", [True, False])
def test_experts_that_mlx_has_stacked(tmp_path: Path, quantised: bool) -> None:
    """`switch_mlp`: the bundle is that of the same experts one by one, to the bit."""
    if quantised:
        make_packed(tmp_path / "hf", "mlx", **MOE)
    else:
        make_checkpoint(tmp_path / "hf", dtype="F16", **MOE)
    convert(tmp_path / "hf", tmp_path / "apart")
    file, stacks = tmp_path / "hf" / "model.safetensors", {}
    tensors = raw_parts(file)
    for name in sorted(name for name in tensors if ".experts." in name):
        layer, _, of_expert = name.partition("experts.")
        stacks.setdefault(f"{layer}switch_mlp.{of_expert.split('.', 1)[1]}", []).append(tensors.pop(name))
    for name, (first, *rest) in stacks.items():
        tensors[name] = (first[0], (1 + len(rest), *first[1]), b"".join(part[2] for part in (first, *rest)))
    write_raw(file, tensors)
    report = convert(tmp_path / "hf", tmp_path / "stacked")
    assert report.requantised == "" and (not quantised or report.rounded == ())
    with Bundle.open(tmp_path / "apart") as one, Bundle.open(tmp_path / "stacked") as other:
        assert {"layers.0.experts_gate_up", "layers.1.experts_down"} <= set(other.tensors)
        assert [(entry.name, entry.type, entry.sha256) for entry in one.header.tensors] == [
            (entry.name, entry.type, entry.sha256) for entry in other.header.tensors]


def test_a_packed_gpt2_is_refused(tmp_path: Path) -> None:
    """Its Conv1D may be packed either way round; attention's output is square, so that no shape tells."""
    make_packed(tmp_path / "hf", "gptq")
    write_config(tmp_path / "hf", model_type="gpt2")
    for read in (lambda: convert(tmp_path / "hf", tmp_path / "out"), lambda: describe(tmp_path / "hf")):
        with pytest.raises(UnsupportedModelError, match=r"quantised GPT-2.* convert the checkpoint that was not quan"):
            read()


def test_modules_of_several_groups_and_parts_of_several_types(tmp_path: Path) -> None:
    """compressed-tensors, int4, int8 and FP8 by channel and by block: q and k keep their codes beside a v of floats."""
    config = compressed_config("pack-quantized")
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    config |= {"format": "mixed-precision", "config_groups": {
        "blocks": {"targets": ["re:.*o_proj$"], "weights": {**eight, "strategy": "block", "block_structure": [32, 16]}},
        "all": config["config_groups"]["group_0"],
        "channels": {"targets": ["re:.*v_proj$"], "weights": {**eight, "strategy": "channel"}},
        "int8": {"targets": ["model.layers.1.mlp.down_proj"],
                 "weights": {**eight, "type": "int", "strategy": "channel"}}}}
    forms = {"v_proj": "float-quantized", "o_proj": "fp8", "layers.1.mlp.down_proj": "int-quantized"}
    changed: dict[str, np.ndarray] = {}

    def alter(module: str, parts: dict[str, Raw]) -> None:
        form = next((forms[end] for end in forms if module.endswith(end)), None)
        if form:
            rows, columns = np.frombuffer(parts[".weight_shape"][2], "<i8").tolist()
            packer, own, _ = FORMS[form]
            more = {"block": (32, 16)} if form == "fp8" else {}
            found, changed[f"{module}.weight"] = packer(np.random.default_rng(rows), (rows, columns), **{**own, **more})
            parts.clear()
            parts |= {end.replace("_inv", ""): part for end, part in found.items()}

    tensors = make_packed(tmp_path / "hf", "pack-quantized", alter=alter, torch_dtype="float16") | changed
    write_config(tmp_path / "hf", quantization_config=config)
    convert(tmp_path / "hf", tmp_path / "out")
    with Bundle.open(tmp_path / "out") as bundle:
        types = {name: str(stored) for name, stored in bundle.types.items() if name.startswith("layers.1.")}
    assert {name.removeprefix("layers.1."): stored for name, stored in types.items() if "norm" not in name} == {
        "qkv.0": "q4g32", "qkv.2": "f16", "o": "f16", "gate_up": "q4g32", "down": "int8g128"}
    found = weights_of(tmp_path / "out")
    for i, layer in enumerate(("model.layers.0.", "model.layers.1.")):
        q, k, v, o = (tensors[f"{layer}self_attn.{x}_proj.weight"] for x in "qkvo")
        qk = np.concatenate([q, k])
        assert np.array_equal(found[f"layers.{i}.qkv"][: len(qk)], qk)
        for have, want in ((found[f"layers.{i}.qkv"][len(qk) :], v), (found[f"layers.{i}.o"], o)):
            assert (abs(have - want) <= np.maximum(4.9e-4 * abs(want), 3e-8)).all()
        assert np.array_equal(found[f"layers.{i}.down"], tensors[f"{layer}mlp.down_proj.weight"])
    ours = describe(tmp_path / "out")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    for described in (describe(tmp_path / "hf"), describe(tmp_path / "alone" / "config.json")):
        assert (described.weight_bytes, described.quantisation) == (ours.weight_bytes, ours.quantisation)


@pytest.mark.parametrize("model_type", ["phi3", "gpt_neox", "falcon"])
def test_parts_of_one_tensor_keep_their_scales(tmp_path: Path, model_type: str) -> None:
    """q, k and v of one packed tensor, and gate and up, are rows of it with codes and scales of their own."""
    more = {"falcon": {"multi_query": False, "bias": False}, "phi3": {"pad_token_id": 0}}.get(model_type, {})
    make_packed(tmp_path / "hf", "gptq", model_type=model_type, num_key_value_heads=4, **more)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.rounded == ()
    convert(tmp_path / "hf", tmp_path / "floats", weights="f32")
    found, wanted = weights_of(tmp_path / "out"), weights_of(tmp_path / "floats")
    assert found.keys() == wanted.keys()
    assert [name for name in found if not np.array_equal(found[name], wanted[name])] == []


@pytest.mark.parametrize(("prefix", "form"), [
    ("model.language_model.", "gptq"), ("language_model.model.", "mlx 8 bits"), ("model.", "int-quantized")])
def test_the_text_of_models_that_see(tmp_path: Path, prefix: str, form: str) -> None:
    """By any of the names; the part that sees is left out, and is told of."""
    make_packed(tmp_path / "plain", form, model_type="qwen2")
    make_packed(tmp_path / "sees", form, model_type="qwen2")
    raw = raw_parts(tmp_path / "sees" / "model.safetensors")
    head = "language_model.lm_head" if prefix.startswith("language_model") else "lm_head"
    named = {re.sub(r"^lm_head", head, re.sub(r"^model\.", prefix, name)): part for name, part in raw.items()}
    write_raw(tmp_path / "sees" / "model.safetensors", {**named, "visual.proj.weight": f16(np.ones((8, 8)))})
    write_config(tmp_path / "sees", model_type="qwen2_5_vl", vision_config={"depth": 2})
    report = convert(tmp_path / "sees", tmp_path / "one")
    convert(tmp_path / "plain", tmp_path / "two")
    assert any("1 tensors of what sees pictures" in remark for remark in report.remarks)
    assert (tmp_path / "one/weights.bin").read_bytes() == (tmp_path / "two/weights.bin").read_bytes()
    assert describe(tmp_path / "sees").weight_bytes == describe(tmp_path / "two").weight_bytes


def test_stacked_codes_of_experts_are_kept(tmp_path: Path) -> None:
    make_packed(tmp_path / "hf", "gptq", **MOE)
    raw = {name: part for name, part in raw_parts(tmp_path / "hf" / "model.safetensors").items()
           if ".experts." not in name and "_proj" not in name}
    for i in range(2):
        for part, shape in {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}.items():
            raw[f"model.layers.{i}.self_attn.{part}_proj.weight"] = f16(np.ones(shape))
        for part, stack in {"gate_up_proj": (5, 64, 64), "down_proj": (5, 64, 32)}.items():
            packed, _ = mxfp4(np.random.default_rng(i), stack)
            raw |= {f"model.layers.{i}.mlp.experts.{part}{end}": value for end, value in packed.items()}
    write_raw(tmp_path / "hf" / "model.safetensors", raw)
    write_config(tmp_path / "hf", quantization_config={"quant_method": "mxfp4"})
    assert "mxfp4" in str(describe(tmp_path / "hf").graph.types.values())
    report = convert(tmp_path / "hf", tmp_path / "out")
    stacked = [tensor for tensor in report.tensors if ".experts_" in tensor.name]
    assert [tensor.dtype for tensor in stacked] == 4 * ["mxfp4"] and all(tensor.exact for tensor in stacked)
    packed, want = mxfp4(np.random.default_rng(1), (5, 64, 32))
    np.testing.assert_array_equal(weights_of(tmp_path / "out")["layers.1.experts_down"].reshape(want.shape), want)
