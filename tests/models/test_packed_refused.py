"""Quantised checkpoints that are not read, or whose parts do not fit: refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import convert, open_checkpoint
from edgeinfer.errors import CheckpointError, UnsupportedModelError
from tests.helpers.checkpoints import refused
from tests.helpers.packers import Raw, f16, f32, i32, make_packed, raw_of, write_config, write_raw

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'.*a packing that is read"),
    ({"quant_method": "hqq"}, "quant_method is 'hqq'"),
    ({"quant_method": "quanto"}, "quant_method is 'quanto'"),
    ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
    ({"quant_method": ["gptq"]}, r"quant_method is \['gptq'\]"),
    ({"bits": 4, "group_size": 32}, "names no quant_method"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits is 3"),
    ({"quant_method": "gptq", "bits": "x", "group_size": 32}, "bits is 'x'; it must be a whole number"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; it must be"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "format is 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:.*down": {"bits": 8}}}, "dynamic is"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "adapter": {"path": "x"}}, "adapter is"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version is 'gemv'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}, "zero_point is False"),
    ({"quant_method": "awq", "bits": 8, "group_size": 32}, "bits is 8"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format is 'marlin-24'"),
    ({"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}, "format is 'mxfp6-pack-quantized'"),
    ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fake"}, "packing_format is"),
    ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type is 'mx_fp'"),
    ({"quant_method": "gptq", "bits": 4, "autoround_version": "0.15", "extra_config": {"a": {"bits": 8}}},
     "extra_config is"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "autoround_version": "0.15", "super_bits": 6},
     "super_bits is 6"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "frozen"},
     "quantization_status is 'frozen'"),
    ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config is"),
    ({"quant_method": "compressed-tensors", "transform_config": {"R1": {}}}, "transform_config is"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is {}"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 2}}}}, "num_bits is 2"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 6, "type": "float"}}}},
     "num_bits is 6"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "x"}}}},
     "strategy is 'x'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
    ({"quant_method": "fp8", "scale_fmt": "odd"}, "scale_fmt is 'odd'"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "it must be a list of names of modules"),
    ({"quant_method": "fp8", "rotation": "hadamard"}, "rotation is 'hadamard'"),
    ({"quant_method": "bitnet", "quantization_mode": "later"}, "quantization_mode is 'later'"),
    ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm is True"),
    ({"quant_method": "bitnet", "linear_class": "linear"}, "linear_class is 'linear'"),
]


@pytest.mark.slow(keep=18)
@pytest.mark.parametrize(("config", "said"), CONFIGS)
def test_packings_that_are_not_read(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    make_packed(tmp_path / "hf", "gptq")
    write_config(tmp_path / "hf", quantization_config=config)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=said):
        convert(tmp_path / "hf", tmp_path / "out")


@pytest.mark.parametrize(("config", "said"), [
    ({"group_size": 64, "bits": 4, "mode": "mxfp4"}, "group_size is 64"),
    ({"group_size": 32, "bits": 4, "mode": "mxfp2"}, "mode is 'mxfp2'"),
    ({"group_size": 16, "bits": 8, "mode": "nvfp4"}, "bits is 8"),
    ({"group_size": 64, "bits": 7}, "bits is 7"),
    ({"group_size": 16, "bits": 4}, "group_size is 16"),
    ({"group_size": 64, "bits": 4, "rotated": True}, "rotated is True"),
    ({"group_size": 64, "bits": 4, "a.b": {"group_size": 64, "bits": 1}}, "quantization, a.b: bits is 1"),
])
def test_mlx_that_is_not_read(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    make_packed(tmp_path / "hf", "mlx")
    write_config(tmp_path / "hf", quantization=config)
    with pytest.raises(UnsupportedModelError, match=said):
        convert(tmp_path / "hf", tmp_path / "out")


def without(part: str) -> Any:
    return lambda parts: parts.pop(part)


def instead(part: str, raw: Raw) -> Any:
    return lambda parts: parts.update({part: raw})


PARTS: list[tuple[str, Any, str]] = [
    ("gptq", without(".scales"), "The quantised module model.layers.0.mlp.down_proj has no scales"),
    ("gptq", without(".qzeros"), "has no qzeros"),
    ("mlx", without(".biases"), "has no biases"),
    ("pack-quantized", without(".weight_shape"), "has no weight_shape"),
    ("fp8", without(".weight_scale_inv"), "has no weight_scale_inv"),
    ("gptq", instead(".scales", f16(np.ones((2, 64)))), r"has the shape \[2, 64\]; .* it must be \[3, 64\]"),
    ("gptq", instead(".scales", i32(np.ones((3, 64)))), "has the type I32; it must be F16 or BF16 or F32"),
    ("gptq", instead(".scales", f16(np.full((3, 64), np.nan))), "has a scale that is NaN or infinite"),
    ("mlx", instead(".biases", f16(np.full((64, 3), np.inf))), "has a bias that is NaN or infinite"),
    ("mlx mxfp8", instead(".scales", ("U8", (64, 3), b"\xff" * 192)), "has a scale that is NaN or infinite"),
    ("mlx mxfp4", instead(".weight", ("U32", (), b"\0" * 4)), r"has the shape \[\]; .* it must be \[n, n\], 2 size"),
    ("bitnet", instead(".weight", ("U8", (0, 96), b"")), r"\[0, 96\]; .* it must be \[n, n\], 2 sizes of 1 or more\."),
    ("gptq", instead(".g_idx", i32(np.full(96, 3))), "has the group 3; there are groups 0 to 2"),
    ("gptq", instead(".g_idx", i32(np.full(96, 2**32 - 1))), "has the group -1"),
    ("gptq", instead(".g_idx", i32(np.zeros(95))), r"has the shape \[95\]"),
    ("gptq", instead(".qzeros", i32(np.zeros((3, 8)))), "has other zero points than 8, but the config says sym"),
    ("gptq asymmetric", instead(".qzeros", i32(np.full((3, 8), 2**32 - 1))), "has a zero point of 16, beyond 4 bits"),
    ("awq", instead(".qweight", i32(np.zeros((95, 8)))), "rows of 95 weights, which groups of 32 do not fill"),
    ("pack-quantized", instead(".weight_shape", ("I64", (2,), np.array([64, 95], "<i8").tobytes())), r"needs \[64, 96"),
    ("pack-quantized", instead(".weight_shape", ("I64", (2,), np.array([64, 9], "<i8").tobytes())),
     r"says that its shape is \[64, 9\], but has 64 rows of 12 words"),
    ("fp8", instead(".weight_scale_inv", f32(np.ones((3, 6)))), r"it must be \[2, 6\]"),
    ("fp8", instead(".weight", ("F8_E4M3", (64, 96), bytes([127]) * 6144)), "has the value nan at"),
    ("bitnet", without(".weight_scale"), "has no weight_scale"),
    ("bitnet", instead(".weight_scale", f32(np.array([0.0]))), r"is 0; it must be from 1.53e-05 to 1.68e\+07"),
    ("bitnet", instead(".weight_scale", f32(np.array([1e-45]))), "is 1.4013e-45; .* so that fp16 holds its reciprocal"),
    ("bitnet auto", instead(".weight_scale", f32(np.array([1e-45]))),
     r"is 1.4013e-45; it must be from 5.96e-08 to 6.55e\+04, so that fp16 holds it: download"),
    ("bitnet", instead(".weight_scale", f32(np.ones(2))), r"has the shape \[2\]; .* it must be \[1\]"),
]


@pytest.mark.slow(keep=12)
@pytest.mark.filterwarnings("error")  # a sentence alone, without NumPy's warning above it
@pytest.mark.parametrize(("form", "change", "said"), PARTS)
def test_parts_that_do_not_fit(tmp_path: Path, form: str, change: Any, said: str) -> None:
    def alter(module: str, parts: dict[str, Raw]) -> None:
        if module == "model.layers.0.mlp.down_proj":
            change(parts)

    make_packed(tmp_path / "hf", form, alter=alter)
    with pytest.raises(CheckpointError, match=said) as caught:
        convert(tmp_path / "hf", tmp_path / "out", weights="q4")
    assert str(caught.value).endswith(".") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("form", "parts"), [
    ("fp8", {".weight_scale_inv": ("F8_E8M0", b"\x7a")}),
    ("int-quantized", {".weight_scale": ("F32", np.float32(0.25).tobytes()), ".weight_zero_point": ("I8", b"\x03")}),
])
def test_one_scale_of_a_module_may_have_no_dimension(tmp_path: Path, form: str, parts: dict[str, tuple[str, bytes]]
                                                     ) -> None:
    module, found = "model.layers.0.mlp.down_proj", []
    for number, shape in enumerate([(1,), ()]):
        def alter(name: str, had: dict[str, Raw], shape: tuple[int, ...] = shape) -> None:
            if name == module:
                had.update({part: (dtype, shape, raw) for part, (dtype, raw) in parts.items()})

        make_packed(tmp_path / str(number), form, alter=alter)
        with open_checkpoint(tmp_path / str(number)) as checkpoint:
            found.append(checkpoint.read(f"{module}.weight", [0], 64 * 96))
    assert found[0].any() and np.array_equal(*found)


def test_a_module_that_was_left_whole_is_not_lost(tmp_path: Path) -> None:
    make_packed(tmp_path / "hf", "gptq")
    raw = raw_of(tmp_path / "hf")
    raw.pop("model.layers.0.mlp.up_proj.qweight")
    write_raw(tmp_path / "hf" / "model.safetensors", raw)
    assert "lacks the tensor model.layers.0.mlp.up_proj.weight" in refused(tmp_path / "hf")
