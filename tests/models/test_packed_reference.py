"""Quantised tensors as the programs themselves write and read them: MLX, compressed-tensors, transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import convert
from edgeinfer.converters.checkpoint.safetensors_file import SafetensorsFile
from edgeinfer.converters.quantized.config import take_scheme
from edgeinfer.converters.quantized.gather import gathered
from tests import make_golden
from tests.golden_parts import LLAMA
from tests.helpers import golden_cases
from tests.helpers.packers import compressed_config
from tests.helpers.sessions import scored, session

pytestmark = pytest.mark.reference
SHAPE = (80, 96)
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}


def read(path: Path, config: dict[str, Any], name: str) -> np.ndarray:
    """One weight of a file, dequantised."""
    file = SafetensorsFile(path)
    _, scheme = take_scheme(config)
    assert scheme
    _, packed, _ = gathered(dict.fromkeys(file.tensors, file), scheme)
    shape = packed[name].tensors[name].shape
    values = packed[name].block(0, int(np.prod(shape[:-1]))).values().reshape(shape)
    file.close()
    return values


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_mlx(tmp_path: Path, bits: int, group: int, dtype: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    weights = mx.random.normal((SHAPE[0], 256), key=mx.random.key(bits + group)).astype(getattr(mx, dtype))
    codes, scales, biases = mx.quantize(weights, group_size=group, bits=bits)
    parts = {"a.b.weight": codes, "a.b.scales": scales, "a.b.biases": biases}
    mx.save_safetensors(str(tmp_path / "m.safetensors"), parts)
    found = read(tmp_path / "m.safetensors", {"quantization": {"group_size": group, "bits": bits}}, "a.b.weight")
    exact = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
    # one rounding there (a fused product and sum), two here
    assert np.abs(found - np.array(exact)).max() <= 1e-6 * np.abs(found).max()


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_mlx_floats(tmp_path: Path, mode: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    weights = mx.random.normal((SHAPE[0], 256), key=mx.random.key(1))
    codes, scales = mx.quantize(weights, mode=mode)
    mx.save_safetensors(str(tmp_path / "m.safetensors"), {"a.b.weight": codes, "a.b.scales": scales})
    found = read(tmp_path / "m.safetensors", {"quantization": {"group_size": None, "bits": None, "mode": mode}},
                 "a.b.weight")
    assert np.array_equal(found, np.array(mx.dequantize(codes, scales, mode=mode, dtype=mx.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "mxfp8", "mixed_2_6", "mixed_3_6", "mixed_4_6"])
def test_a_model_that_mlx_lm_converts(tmp_path: Path, recipe: str) -> None:
    """Logits of MLX in float32, with the weights as their codes say."""
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    case = make_golden.with_transformers("mlx", {
        **LLAMA, "vocab_size": 128, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 192, "num_hidden_layers": 8, "rope_theta": 10000.0, "rope_scaling": None})
    golden_cases.write_checkpoint(case, tmp_path / "hf")
    how = {"quant_predicate": recipe} if recipe.startswith("mixed") else {"q_mode": recipe}
    mlx_lm.convert(str(tmp_path / "hf"), str(tmp_path / "mlx"), quantize=True, **how)
    model, _ = mlx_lm.utils.load_model(tmp_path / "mlx")
    model.set_dtype(mx.float32)
    expected = np.array(model(mx.array([case.ids]))[0])
    convert(tmp_path / "mlx", tmp_path / "bundle", weights="f32")
    with session(tmp_path / "bundle", kv="f32", outputs=16) as opened:
        assert np.abs(scored(opened, case.ids) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("form", "scheme"), [("nvfp4-pack-quantized", "NVFP4A16"), ("mxfp4-pack-quantized", "MXFP4"),
                                              ("mxfp8-quantized", "MXFP8")])
def test_compressed_tensors_floats(tmp_path: Path, form: str, scheme: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme",
                                  reason="compressed-tensors is not installed")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from safetensors.torch import save_file

    preset = schemes.preset_name_to_scheme(scheme, ["Linear"])
    torch.manual_seed(1)
    weights = torch.randn(SHAPE)
    size = preset.weights.group_size
    most = weights.reshape(SHAPE[0], -1, size).abs().amax(-1)
    state = {"weight": weights, "weight_scale": torch.exp2(torch.floor(torch.log2(most)) - 2)}
    if scheme == "NVFP4A16":
        state |= {"weight_global_scale": torch.tensor([64.0]), "weight_scale": (most / 6 * 64).clamp(max=448)}
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, preset)
    save_file({f"m.{name}": value.contiguous() for name, value in stored.items()}, tmp_path / "m.safetensors")
    weights_config = preset.weights.model_dump(mode="json", exclude_none=True)
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
              "config_groups": {"group_0": {"weights": weights_config, "targets": ["Linear"]}}}
    found = read(tmp_path / "m.safetensors", {"quantization_config": config}, "m.weight")
    exact = compressor.decompress(stored, preset)["weight"].float().numpy()
    assert np.abs(found - exact).max() <= 2**-8 * np.abs(exact).max()  # theirs is rounded to bfloat16


@pytest.mark.parametrize("form", ["pack-quantized", "pack-quantized asymmetric", "int-quantized", "float-quantized"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compressed_tensors(tmp_path: Path, form: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    calculated = pytest.importorskip("compressed_tensors.quantization.utils").calculate_qparams
    from safetensors.torch import save_file

    config = compressed_config(form)
    args = quantization.QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    torch.manual_seed(1)
    weights = torch.randn(SHAPE, dtype=getattr(torch, dtype))
    grouped = weights.reshape(SHAPE[0], -1, args.group_size or SHAPE[1])
    scale, zero = calculated(grouped.amin(-1), grouped.amax(-1), args)
    compressor = compressors.BaseCompressor.get_value_from_registry(form.split()[0])
    state = {"weight": weights, "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    save_file({f"m.{name}": value.contiguous() for name, value in stored.items()}, tmp_path / "m.safetensors")
    found = read(tmp_path / "m.safetensors", {"quantization_config": config}, "m.weight")
    want = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in stored.items()}
    exact = compressor.decompress(want, scheme)["weight"].float().numpy()
    assert np.array_equal(found, exact)


def test_fp8_blocks(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers is not installed")
    from safetensors.torch import save_file

    codes = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE).mul(7).remainder(127).to(torch.uint8)
    codes = torch.where(torch.arange(SHAPE[1]) % 2 == 0, codes, codes + 128).view(torch.float8_e4m3fn)
    scales = torch.rand(3, 3) / 1000
    save_file({"m.weight": codes, "m.weight_scale_inv": scales}, tmp_path / "m.safetensors")
    found = read(tmp_path / "m.safetensors", {"quantization_config": FP8}, "m.weight")
    want = fp8._dequantize_fp8_weight(codes, scales, [32, 32], torch.float32)
    assert np.array_equal(found, want.numpy())


def test_mxfp4(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    from safetensors.torch import save_file

    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 10, 4), dtype=torch.uint8)
    save_file({"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}, tmp_path / "m.safetensors")
    found = read(tmp_path / "m.safetensors", {"quantization_config": {"quant_method": "mxfp4"}}, "e.gate_up_proj")
    want = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # (experts, inputs, outputs)
    assert np.array_equal(found, want.transpose(1, 2).numpy())


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bitnet(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    bitnet = pytest.importorskip("transformers.integrations.bitnet", reason="transformers is not installed")
    from safetensors.torch import save_file

    torch.manual_seed(3)
    codes, scale = torch.randint(-1, 2, (24, 33)), torch.tensor([0.25])
    save_file({"m.weight": bitnet.pack_weights(codes.clone()), "m.weight_scale": scale}, tmp_path / "m.safetensors")
    section = {"quant_method": "bitnet", "linear_class": kind}
    found = read(tmp_path / "m.safetensors", {"quantization_config": section}, "m.weight")
    assert np.array_equal(found, codes.numpy() * (4 if kind == "bitlinear" else 0.25))
