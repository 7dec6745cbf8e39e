"""Quantised checkpoints as their own programs write them: independent packing, straight from the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.checkpoints import bfloat16_bytes, make_checkpoint, raw_safetensors, read_tensors

Raw = tuple[str, tuple[int, ...], bytes]
"""Type of safetensors, shape, bytes."""
Packed = tuple[dict[str, Raw], np.ndarray]
"""Parts by their ends of names, and the weights that they stand for (float32)."""
AWQ_PACK = [0, 2, 4, 6, 1, 3, 5, 7]
"""Order of eight outputs in a word, from its lowest four bits."""


def i32(values: np.ndarray) -> Raw:
    return "I32", values.shape, values.astype("<u4").tobytes()


def f16(values: np.ndarray) -> Raw:
    return "F16", values.shape, values.astype("<f2").tobytes()


def f32(values: np.ndarray) -> Raw:
    return "F32", values.shape, values.astype("<f4").tobytes()


def bf16(values: np.ndarray) -> Raw:
    return "BF16", values.shape, bfloat16_bytes(values)


def words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Codes packed along an axis into words of 32 bits, the first one lowest; the end is filled with zeros."""
    per = 32 // bits
    codes = np.moveaxis(codes.astype(np.uint64), axis, -1)
    pad = -codes.shape[-1] % per
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, pad)]).reshape(*codes.shape[:-1], -1, per)
    packed = sum(codes[..., i] << np.uint64(bits * i) for i in range(per))
    return np.moveaxis(packed, -1, axis)


def grouped(rng: np.random.Generator, shape: tuple[int, int], group: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales (out, groups) that fp16 has, and the group of each input."""
    rows, columns = shape
    groups = -(-columns // group)
    scales = rng.uniform(0.002, 0.02, (rows, groups)).astype(np.float16).astype(np.float32)
    return scales, np.arange(columns) // group


def gptq(rng: np.random.Generator, shape: tuple[int, int], bits: int = 4, group: int = 32, sym: bool = True,
         v2: bool = False, order: np.ndarray | None = None) -> Packed:
    """GPTQ: `order` is the g_idx where columns are not in the order of their groups."""
    scales, group_of = grouped(rng, shape, group)
    group_of = group_of if order is None else order
    codes = rng.integers(0, 1 << bits, shape)
    half = 1 << bits - 1
    zeros = np.full(scales.shape, half) if sym else rng.integers(1, (1 << bits) - 1, scales.shape)
    weights = (codes - zeros[:, group_of]) * scales[:, group_of].astype(np.float32)
    parts = {
        ".qweight": i32(words(codes.T, bits, 0)), ".qzeros": i32(words(zeros.T - (not v2), bits, 1)),
        ".scales": f16(scales.T), ".g_idx": i32(group_of),
    }
    return parts, weights.astype(np.float32)


def awq(rng: np.random.Generator, shape: tuple[int, int], group: int = 32) -> Packed:
    """AutoAWQ, version gemm."""
    scales, group_of = grouped(rng, shape, group)
    codes, zeros = rng.integers(0, 16, shape), rng.integers(0, 16, scales.shape)

    def interleaved(values: np.ndarray) -> np.ndarray:
        eights = values.reshape(len(values), -1, 8)
        return words(eights[:, :, AWQ_PACK].reshape(values.shape), 4, 1)

    weights = (codes - zeros[:, group_of]) * scales[:, group_of]
    return {".qweight": i32(interleaved(codes.T)), ".qzeros": i32(interleaved(zeros.T)), ".scales": f16(scales.T)}, (
        weights.astype(np.float32))


def pack_quantized(rng: np.random.Generator, shape: tuple[int, int], group: int = 32, sym: bool = True, bits: int = 4
                   ) -> Packed:
    """compressed-tensors: signed codes plus half of the range."""
    half = 1 << bits - 1
    scales, group_of = grouped(rng, shape, group)
    codes = rng.integers(-half, half, shape)
    zeros = np.zeros(scales.shape, int) if sym else rng.integers(-half, half, scales.shape)
    parts = {".weight_packed": i32(words(codes + half, bits, 1)), ".weight_scale": bf16(scales),
             ".weight_shape": ("I64", (2,), np.array(shape, "<i8").tobytes())}
    if not sym:
        parts[".weight_zero_point"] = i32(words(zeros + half, bits, 0))
    exact = np.frombuffer(bfloat16_bytes(scales), "<u2").astype(np.uint32) << 16
    scales = exact.view(np.float32).reshape(scales.shape)
    return parts, ((codes - zeros[:, group_of]) * scales[:, group_of]).astype(np.float32)


def int_quantized(rng: np.random.Generator, shape: tuple[int, int], least: int = -127) -> Packed:
    """compressed-tensors: a byte for each weight, a scale for each row."""
    scales = grouped(rng, shape, shape[1])[0] / 16
    codes = rng.integers(least, 128, shape)
    return {".weight": ("I8", shape, codes.astype("i1").tobytes()), ".weight_scale": f32(scales)}, (
        (codes * scales).astype(np.float32))


def e4m3_values() -> np.ndarray:
    """Values of the codes, one by one from the definition."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            values.append(np.nan)
        else:
            size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            values.append(-size if sign else size)
    return np.array(values, np.float32)


def finite_e4m3(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Codes of numbers as weights have them: not those of NaN, and not the largest ones."""
    return (rng.integers(0, 2, shape) << 7 | rng.integers(0, 120, shape)).astype("u1")


def float_quantized(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """compressed-tensors: FP8, a scale for each row."""
    scales, _ = grouped(rng, shape, shape[1])
    codes = finite_e4m3(rng, shape)
    weights = e4m3_values()[codes] * (scales / 64)
    return {".weight": ("F8_E4M3", shape, codes.tobytes()), ".weight_scale": f32(scales / 64)}, weights


def fp8_blocks(rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int] = (32, 16)) -> Packed:
    """FP8 with a scale for each block of rows and columns."""
    blocks = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    scales = rng.uniform(1e-4, 1e-3, blocks).astype(np.float32)
    codes = finite_e4m3(rng, shape)
    spread = np.kron(scales, np.ones(block, np.float32))[: shape[0], : shape[1]]
    return {".weight": ("F8_E4M3", shape, codes.tobytes()), ".weight_scale_inv": f32(scales)}, (
        e4m3_values()[codes] * spread)


def mlx(rng: np.random.Generator, shape: tuple[int, int], bits: int = 4, group: int = 32,
        kind: Callable[[np.ndarray], Raw] = f16) -> Packed:
    """MLX: a scale and a bias for each group."""
    scales, group_of = grouped(rng, shape, group)
    scales = scales if bits == 4 else scales / 16
    biases = (-scales * rng.uniform(4, 12, scales.shape) * 2 ** (bits - 4)).astype(np.float16).astype(np.float32)
    if kind is bf16:
        scales, biases = (np.frombuffer(bfloat16_bytes(v), "<u2").astype(np.uint32) << 16 for v in (scales, biases))
        scales, biases = (v.view(np.float32).reshape(shape[0], -1) for v in (scales, biases))
    codes = rng.integers(0, 1 << bits, shape)
    raw = stream(codes, bits)
    weights = codes.astype(np.float32) * scales[:, group_of] + biases[:, group_of]
    return {".weight": ("U32", raw.shape, raw.tobytes()), ".scales": kind(scales),
            ".biases": kind(biases)}, weights


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words of the bits of all codes of a row, one after the other, the lowest first: MLX's packing for any width."""
    each = codes[..., None] >> np.arange(bits) & 1
    rows = np.packbits(each.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little")
    return np.ascontiguousarray(rows).view("<u4")


FP4 = np.concatenate([one := np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]), -one])


def e4m3_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of positive floats of 8 bits, and their values: (8 + fraction) x 2^(exponent - 10)."""
    exponent, fraction = rng.integers(1, 5, shape), rng.integers(0, 8, shape)
    return (exponent << 3 | fraction).astype("u1"), (8 + fraction) * 2.0 ** (exponent - 10)


def mlx_floats(rng: np.random.Generator, shape: tuple[int, int], mode: str = "mxfp4") -> Packed:
    """MLX's formats of floats: codes in words, scales of 8 bits in bytes, no biases."""
    group, bits = (16, 4) if mode == "nvfp4" else (32, 8 if mode == "mxfp8" else 4)
    groups = (shape[0], shape[1] // group)
    exponents = rng.integers(115, 122, groups)
    scales, factors = exponents.astype("u1"), 2.0 ** (exponents - 127)
    if mode == "nvfp4":
        scales, factors = e4m3_scales(rng, groups)
    codes = rng.integers(0, 1 << bits, shape)
    codes[codes & 127 == 127] = 0  # NaN in 8 bits
    sign, exponent, fraction = np.where(codes & 128, -1, 1), codes >> 3 & 15, codes & 7
    eighths = sign * np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10), fraction / 512)
    values = FP4[codes] if bits == 4 else eighths
    raw = stream(codes, bits)
    return {".weight": ("U32", raw.shape, raw.tobytes()), ".scales": ("U8", groups, scales.tobytes())}, \
        (values * np.repeat(factors, group, axis=1)).astype(np.float32)


def fp4_packed(rng: np.random.Generator, shape: tuple[int, int], group: int = 16) -> Packed:
    """compressed-tensors' NVFP4 (scales of E4M3, divided by one of the whole tensor) and MXFP4 (exponents)."""
    groups = (shape[0], shape[1] // group)
    codes, exponents = rng.integers(0, 16, shape), rng.integers(115, 122, groups)
    blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).astype("u1")
    parts: dict[str, Raw] = {".weight_packed": ("U8", blocks.shape, blocks.tobytes())}
    if group == 32:
        factors = 2.0 ** (exponents - 127)
        parts[".weight_scale"] = "U8", groups, exponents.astype("u1").tobytes()
    else:
        stored, factors = e4m3_scales(rng, groups)
        factors = factors / 8
        parts |= {".weight_scale": ("F8_E4M3", groups, stored.tobytes()), ".weight_global_scale": f32(np.array([8.0])),
                  ".input_global_scale": f32(np.array([3.0]))}
    return parts, (FP4[codes] * np.repeat(factors, group, axis=1)).astype(np.float32)


def mxfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> Packed:
    """MXFP4 as gpt-oss has it: bytes of two codes, the first in the lower half, and exponents + 127."""
    levels = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    levels = np.concatenate([levels, -levels])
    codes = rng.integers(0, 16, shape)
    exponents = rng.integers(115, 125, (*shape[:-1], shape[-1] // 32))
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(*exponents.shape, 16).astype("u1")
    weights = levels[codes] * np.repeat(2.0 ** (exponents - 127), 32, axis=-1)
    return {"_blocks": ("U8", blocks.shape, blocks.tobytes()),
            "_scales": ("U8", exponents.shape, exponents.astype("u1").tobytes())}, weights.astype(np.float32)


def bitnet(rng: np.random.Generator, shape: tuple[int, int], auto: bool = False) -> Packed:
    """Ternary codes + 1 of four quarters of the rows in a byte; a scale that divides them, or of another class times.
    """
    codes, scale = rng.integers(-1, 2, shape), np.float32(2.0 ** rng.integers(3, 7))
    fields = (codes + 1).reshape(4, shape[0] // 4, shape[1]).astype("u1")
    data = fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6
    factor = f32(np.array([1 / scale if auto else scale]))
    return {".weight": ("U8", data.shape, data.tobytes()), ".weight_scale": factor}, (codes / scale).astype(np.float32)


def bitnet_online(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """Floats with a mean magnitude of a quarter, which is the scale; those below an eighth become 0."""
    apart = rng.integers(0, 16, prod(shape) // 2) / 64
    floats = np.concatenate([0.25 + apart, 0.25 - apart]) * rng.choice([-1, 1], prod(shape))
    floats = rng.permutation(floats).reshape(shape).astype(np.float32)
    return {".weight": bf16(floats)}, 0.25 * np.clip(np.rint(4 * floats), -1, 1)


AUTOROUND = {"autoround_version": "0.15.0", "provider": "auto-round", "data_type": "int", "iters": 50, "lr": 0.02,
             "nsamples": 8, "seqlen": 64, "batch_size": 4, "low_gpu_mem_usage": True, "supported_types": ["Linear"]}
FORMS: dict[str, tuple[Callable[..., Packed], dict[str, Any], dict[str, Any]]] = {
    "gptq": (gptq, {}, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "gptq v2": (gptq, {"v2": True}, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True,
                                     "desc_act": False, "checkpoint_format": "gptq_v2"}),
    "gptq asymmetric": (gptq, {"sym": False}, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False,
                                               "desc_act": False}),
    "gptq 8 bits": (gptq, {"bits": 8}, {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}),
    "awq": (awq, {}, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
                      "modules_to_not_convert": None}),
    "pack-quantized": (pack_quantized, {}, {}),
    "pack-quantized asymmetric": (pack_quantized, {"sym": False}, {}),
    "int-quantized": (int_quantized, {}, {}),
    "float-quantized": (float_quantized, {}, {}),
    "fp8": (fp8_blocks, {}, {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                             "weight_block_size": [32, 16], "modules_to_not_convert": ["lm_head"]}),
    "bitnet": (bitnet, {}, {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}),
    "bitnet auto": (bitnet, {"auto": True}, {"quant_method": "bitnet", "linear_class": "autobitlinear",
                                             "quantization_mode": "offline", "use_rms_norm": False}),
    "bitnet online": (bitnet_online, {}, {"quant_method": "bitnet", "linear_class": "autobitlinear",
                                          "quantization_mode": "online"}),
    "mlx": (mlx, {}, {"group_size": 32, "bits": 4}),
    "mlx 8 bits": (mlx, {"bits": 8}, {"group_size": 32, "bits": 8}),
    "mlx 2 bits": (mlx, {"bits": 2}, {"group_size": 32, "bits": 2}),
    "mlx 3 bits": (mlx, {"bits": 3}, {"group_size": 32, "bits": 3}),
    "mlx 5 bits": (mlx, {"bits": 5}, {"group_size": 32, "bits": 5}),
    "mlx 6 bits": (mlx, {"bits": 6}, {"group_size": 32, "bits": 6, "mode": "affine"}),
    "mlx mxfp4": (mlx_floats, {}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    "mlx nvfp4": (mlx_floats, {"mode": "nvfp4"}, {"group_size": None, "bits": None, "mode": "nvfp4"}),
    "mlx mxfp8": (mlx_floats, {"mode": "mxfp8"}, {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
    "nvfp4-pack-quantized": (fp4_packed, {}, {}),
    "mxfp4-pack-quantized": (fp4_packed, {"group": 32}, {}),
    "autoround gptq": (gptq, {}, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
                                  "lm_head": False, **AUTOROUND}),
    "autoround gptq 8 bits": (gptq, {"bits": 8}, {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 8, "group_size": 32,
        "sym": True, "block_name_to_quantize": "model.layers", "extra_config": {"lm_head": {"bits": 16}}, **AUTOROUND}),
    "autoround awq": (awq, {}, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False, "sym": True,
                                "version": "gemm", "modules_to_not_convert": ["lm_head"], **AUTOROUND}),
}
"""Cases by name: the packer, its arguments, and the config; those of compressed-tensors are made below."""


def compressed_config(form: str) -> dict[str, Any]:
    """A config of compressed-tensors."""
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    weights = {"pack-quantized": {**four, "symmetric": True},
               "pack-quantized asymmetric": {**four, "symmetric": False},
               "int-quantized": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
               "float-quantized": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
               "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
                                        "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
               "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group",
                                        "group_size": 32, "scale_dtype": "torch.uint8"}}[form]
    activations = {"num_bits": 8, "type": weights["type"], "dynamic": True, "strategy": "token"}
    return {"quant_method": "compressed-tensors", "format": form.split()[0], "quantization_status": "compressed",
            "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations,
                                          "output_activations": None}}}


def config_of(form: str) -> dict[str, Any]:
    """Fields of config.json."""
    if form.startswith("mlx"):
        return {"quantization": FORMS[form][2], "quantization_config": FORMS[form][2]}
    return {"quantization_config": FORMS[form][2] or compressed_config(form)}


def make_packed(
    directory: Path, form: str, *, seed: int = 0, alter: Callable[[str, dict[str, Raw]], None] | None = None,
    options: dict[str, Any] | None = None, **overrides: Any,
) -> dict[str, np.ndarray]:
    """Write a tiny quantised llama; gives the weights that it stands for, by the names of the original.

    Parameters
    ----------
    directory : Path
    form : str
        A key of `FORMS`.
    seed : int
    alter : callable
        May change the parts of a module, whose name it is told.
    options : dict
        For the packer, beside those of the form.
    **overrides
        Fields of config.json, and `model_type`.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 304, **overrides}
    make_checkpoint(directory, seed=seed, **sizes)
    write_config(directory, **config_of(form))
    tensors = read_tensors(directory)
    packer, own, _ = FORMS[form]
    rng = np.random.default_rng(seed)
    raw: dict[str, Raw] = {}
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        outer = any(word in name for word in ("embed", "lm_head", "mlp.gate."))
        linear = values.ndim == 2 and (form.startswith("mlx") or not outer)
        if not linear:
            raw[name] = f16(values)
            tensors[name] = values.astype(np.float16).astype(np.float32)
            continue
        parts, tensors[name] = packer(rng, values.shape, **own, **(options or {}))
        if alter:
            alter(module, parts)
        raw |= {module + end: part for end, part in parts.items()}
    write_raw(directory / "model.safetensors", raw)
    return tensors


def write_raw(path: Path, tensors: dict[str, Raw]) -> None:
    """A safetensors file of parts."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    raw_safetensors(path, header, bytes(data))


def raw_parts(path: Path) -> dict[str, Raw]:
    """The parts in a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    return {name: (entry["dtype"], tuple(entry["shape"]), content[start + entry["data_offsets"][0] :
                                                                  start + entry["data_offsets"][1]])
            for name, entry in header.items() if name != "__metadata__"}


def write_config(directory: Path, **fields: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def raw_of(directory: Path) -> dict[str, Raw]:
    """The tensors of model.safetensors as they are stored."""
    stored = (directory / "model.safetensors").read_bytes()
    size = int.from_bytes(stored[:8], "little")
    header, data = json.loads(stored[8 : 8 + size]), stored[8 + size :]
    header.pop("__metadata__")
    return {name: (entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
            for name, entry in header.items()}
