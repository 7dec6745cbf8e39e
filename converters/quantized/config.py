"""Quantisation of a checkpoint according to its config: the packing, and the columns that share a scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import QUANTISED, ConfigReader, family_of

from ..checkpoint.json_file import CONFIG_FILE
from .scheme import Scheme

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "bitnet")
"""Values of quant_method that are understood."""
READ = "GPTQ, AWQ, AutoRound's of both, compressed-tensors, FP8 by blocks, MXFP4, BitNet and MLX"
REMEDY = f"convert the checkpoint that was not quantised, or one in a packing that is read ({READ}), or a GGUF file"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
           "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
"""Formats of compressed-tensors."""
MLX_GROUPS, MLX_BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)
MLX_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Modes of MLX beside affine, with the bits and group that each has."""

# Fields about the method that found the weights, or about other programs that run them.
_HARMLESS = {
    "gptq": """model_name_or_path model_file_base_name damp_percent damp_auto_increment true_sequential static_groups
    meta use_exllama disable_exllama exllama_config max_input_length batch_size dataset tokenizer block_name_to_quantize
    module_name_preceding_first_block pad_token_id cache_block_outputs modules_in_block_to_quantize backend
    use_cuda_fp16 model_seqlen act_group_aware hyb_act mse v2 gptaq lm_head quant_method method desc_act""",
    "awq": """modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse exllama_config backend quant_method""",
    "compressed-tensors": """ignore kv_cache_scheme global_compression_ratio version quant_method""",
    "fp8": """modules_to_not_convert modules_to_convert activation_scheme ignored_layers dequantize quant_method""",
    "mxfp4": """modules_to_not_convert dequantize quant_method""",
    "bitnet": """modules_to_not_convert quant_method rms_norm_eps""",
}
# Of AutoRound beside those of the packing that it writes; like others' activations, its are not taken over.
_HARMLESS_AUTOROUND = """autoround_version provider amp batch_size enable_minmax_tuning enable_norm_bias_tuning
enable_quanted_input gradient_accumulate_steps iters lr minmax_lr low_gpu_mem_usage nsamples scale_dtype seqlen
supported_types quant_block_list to_quant_block_names block_name_to_quantize dataset backend act_bits act_data_type
act_group_size act_sym act_dynamic static_kv_dtype static_kv_granularity static_attention_dtype
static_attention_granularity"""
_AUTOROUND_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
# Of a group of compressed-tensors: activations are quantised here as edgeinfer does.
_HARMLESS_GROUP = "input_activations output_activations"
_HARMLESS_WEIGHTS = "observer observer_kwargs dynamic actorder scale_dtype zp_dtype"


def take_scheme(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Scheme | None]:
    """The config of the model that was quantised, and how; None if it was not.

    Raises
    ------
    UnsupportedModelError
        The weights are packed in a way that is not read; the sentence names it and a remedy.
    CheckpointError
        A number is none.
    """
    found = [key for key in QUANTISED if fields.get(key)]
    if not found:
        return dict(fields), None
    if why := family_of(fields.get("model_type")).ambiguous:
        raise UnsupportedModelError(f"{CONFIG_FILE} is of {why}; {REMEDY}.")
    rest = {key: value for key, value in fields.items() if key not in QUANTISED}
    key = "quantization" if "quantization" in found else found[0]
    section = ConfigReader(fields[key], f"{CONFIG_FILE}, {key}")
    if key == "quantization":
        return rest, _mlx(section, fields[key])
    method = section.get("quant_method")
    if section.has("autoround_version") or method == "auto-round":
        method = _autoround(section, method)
    if method is None:
        raise UnsupportedModelError(f"{section.where} names no quant_method, so its packing is unknown; {REMEDY}.")
    if not isinstance(method, str) or method not in METHODS:
        raise _refused(section, "quant_method", method)
    for name in _HARMLESS[method].split():
        section.get(name)
    scheme = _READERS[method](section)
    section.refuse_unread()
    return rest, scheme


def _autoround(section: ConfigReader, method: Any) -> Any:
    """The packing that AutoRound has written."""
    for name in _HARMLESS_AUTOROUND.split():
        section.get(name)
    if section.get("data_type", "int") != "int":
        raise _refused(section, "data_type", section.get("data_type"))
    own = section.get("extra_config") or {}
    if not isinstance(own, dict) or any(not isinstance(one, dict) or one.get("bits", 0) < 16 for one in own.values()):
        raise _refused(section, "extra_config", own)  # modules with bits or groups of their own
    if method != "auto-round":
        return method
    packing = section.get("packing_format")
    if packing not in _AUTOROUND_PACKINGS:
        raise _refused(section, "packing_format", packing)
    return _AUTOROUND_PACKINGS[packing]


def _refused(section: ConfigReader, name: str, value: Any) -> UnsupportedModelError:
    return section.unsupported(name, value, REMEDY)


def _bits(section: ConfigReader, name: str = "bits", allowed: tuple[int, ...] = (4, 8)) -> int:
    bits: int = section.integer(name, high=64)
    if bits not in allowed:
        raise _refused(section, name, bits)
    return bits


def _group(section: ConfigReader, name: str = "group_size") -> int:
    """Columns that share a scale; -1 and null mean a whole row."""
    value = section.get(name)
    return 0 if value in (-1, None) else section.integer(name)


def _names(section: ConfigReader, *keys: str) -> tuple[str, ...]:
    found: list[str] = []
    for key in keys:
        value = section.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise section.unsupported(key, value, "it must be a list of names of modules")
        found += value or []
    return tuple(found)


def _gptq(section: ConfigReader) -> Scheme:
    for name in ("checkpoint_format", "format"):
        if section.has(name) and section.get(name) not in ("gptq", "gptq_v2"):
            raise _refused(section, name, section.get(name))
    if section.get("pack_dtype") not in (None, "int32"):
        raise _refused(section, "pack_dtype", section.get("pack_dtype"))
    for name in ("dynamic", "is_marlin_format"):
        if section.get(name):
            raise _refused(section, name, section.get(name))
    v2 = "gptq_v2" in (section.get("checkpoint_format"), section.get("format"))
    left_out = () if section.get("lm_head") else ("lm_head",)
    return Scheme("gptq", _bits(section), _group(section), section.flag("sym", True),
                  section.flag("desc_act") and not section.get("static_groups"), not v2, left_out=(*left_out, "embed"))


def _awq(section: ConfigReader) -> Scheme:
    for name in ("version", "format"):
        version = section.get(name, "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise _refused(section, name, version)
    section.get("sym")  # of AutoRound, which stores zero points of 8 then
    if not section.flag("zero_point", True) and not section.has("autoround_version"):
        raise _refused(section, "zero_point", False)
    group = _group(section, "q_group_size") if section.has("q_group_size") else _group(section)
    bits = _bits(section, "w_bit" if section.has("w_bit") else "bits", (4,))
    return Scheme("awq", bits, group, symmetric=False,
                  left_out=(*_names(section, "modules_to_not_convert"), "lm_head", "embed"))


def _compressed(section: ConfigReader) -> Scheme:
    _refuse_format(section, FORMATS)
    if section.has("quantization_status"):
        section.choice("quantization_status", section.get("quantization_status"), ("compressed",))
    sparsity = section.section("sparsity_config")
    if sparsity and sparsity.get("format") != "dense":
        raise _refused(section, "sparsity_config", sparsity.get("format"))
    if section.get("transform_config"):
        raise _refused(section, "transform_config", section.get("transform_config"))
    found: list[tuple[tuple[str, ...], Scheme]] = []
    given = section.get("config_groups")
    groups = section.section("config_groups")
    for name in given if groups else ():
        one = groups.section(name) if groups else None
        weights = one.section("weights") if one else None
        if one is None or weights is None:
            raise _refused(section, "config_groups", given)
        _refuse_format(one, FORMATS)
        for harmless in _HARMLESS_GROUP.split():
            one.get(harmless)
        found.append((_names(one, "targets"), _compressed_weights(weights)))
        weights.refuse_unread()
        one.refuse_unread()
    if not found:
        raise _refused(section, "config_groups", given)
    schemes = [scheme for _, scheme in found]
    return replace(schemes[0], groups=tuple(found), group_sizes=tuple(sorted({one.group_size for one in schemes})),
                   blocks=tuple(sorted({one.block for one in schemes if one.block != (0, 0)})),
                   left_out=(*_names(section, "ignore"), "embed"))


def _refuse_format(section: ConfigReader, known: tuple[str, ...]) -> None:
    if section.has("format") and section.get("format") not in known:
        raise _refused(section, "format", section.get("format"))


def _compressed_weights(weights: ConfigReader) -> Scheme:
    """Return how the modules of a group are packed."""
    for harmless in _HARMLESS_WEIGHTS.split():
        weights.get(harmless)
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise _refused(weights, "type", kind)
    bits = _bits(weights, "num_bits")
    strategy = weights.get("strategy")
    if strategy not in (None, "group", "channel", "tensor", "block", "tensor_group"):
        raise _refused(weights, "strategy", strategy)
    size, structure = _group(weights), weights.get("block_structure")
    block = (0, 0) if structure is None else _block(weights, "block_structure")
    symmetric, ordered = weights.flag("symmetric", True), weights.get("actorder") in ("group", True)
    return Scheme("compressed-tensors", bits, size, symmetric, ordered, block=block, floats=kind == "float")


def _block(section: ConfigReader, name: str) -> tuple[int, int]:
    value = section.get(name)
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 2**31 for n in value)):
        raise section.unsupported(name, value, "it must be the rows and the columns that share a scale")
    return value[0], value[1]


def _fp8(section: ConfigReader) -> Scheme:
    fmt = section.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise _refused(section, "fmt", fmt)
    if section.get("expert_dtype", "fp8") != "fp8":
        raise _refused(section, "expert_dtype", section.get("expert_dtype"))
    scale = section.get("scale_fmt")
    if scale not in (None, "ue8m0", "float"):
        raise _refused(section, "scale_fmt", scale)
    block = _block(section, "weight_block_size") if section.has("weight_block_size") else (0, 0)
    return Scheme("fp8", 8, block=block,
                  left_out=(*_names(section, "modules_to_not_convert", "ignored_layers"), "lm_head", "embed"))


def _mxfp4(section: ConfigReader) -> Scheme:
    return Scheme("mxfp4", 4, 32, left_out=(*_names(section, "modules_to_not_convert"), "lm_head", "embed"))


def _mlx(section: ConfigReader, given: Mapping[str, Any]) -> Scheme:
    """Bits and group of all modules; a field that is named as a module has those of one, or says that it has none."""
    bits, size, mode = _mlx_numbers(section)
    modules: dict[str, tuple[int, int, str]] = {}
    left_out: list[str] = []
    for name, value in given.items():
        module = "." in name or name == "lm_head"
        if isinstance(value, dict) and module:
            own = ConfigReader(value, f"{section.where}, {name}")
            modules[name] = _mlx_numbers(own)
            own.refuse_unread()
        elif value is False and module:
            left_out.append(name)
        elif not (value is True and module):
            continue
        section.get(name)
    section.refuse_unread()
    return Scheme("mlx", bits, size, symmetric=False, mode=mode, modules=modules, left_out=tuple(left_out))


def _mlx_numbers(section: ConfigReader) -> tuple[int, int, str]:
    """Return bits, group and mode; null stands for the mode's default (4 bits in groups of 64 if it is affine)."""
    mode = section.get("mode") or "affine"
    if mode != "affine" and (not isinstance(mode, str) or mode not in MLX_MODES):
        raise _refused(section, "mode", mode)
    default = MLX_MODES.get(mode, (4, 64))
    bits, size = (one if section.get(name) is None else section.integer(name)
                  for name, one in zip(("bits", "group_size"), default, strict=True))
    if bits not in (MLX_BITS if mode == "affine" else default[:1]):
        raise _refused(section, "bits", bits)
    if size not in (MLX_GROUPS if mode == "affine" else default[1:]):
        raise _refused(section, "group_size", size)
    return bits, size, mode


def _bitnet(section: ConfigReader) -> Scheme:
    for name, known in (("quantization_mode", ("offline", "online")), ("use_rms_norm", (False,)),
                        ("linear_class", ("bitlinear", "autobitlinear"))):
        if section.get(name, known[0]) not in known:
            raise _refused(section, name, section.get(name))
    divided = section.get("linear_class", "bitlinear") == "bitlinear"
    online = not divided and section.get("quantization_mode") == "online"  # the other class has codes alone
    return Scheme("bitnet", 2, divided=divided, online=online, left_out=("lm_head", "embed", *_names(
        section, "modules_to_not_convert")))


_READERS: dict[str, Callable[[ConfigReader], Scheme]] = {
    "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _mxfp4, "bitnet": _bitnet,
}
