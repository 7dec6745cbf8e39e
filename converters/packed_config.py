"""What a checkpoint's config says of its quantised weights: how they are packed, and which columns share a scale."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

from edgeinfer.dataclass import dataclass
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import QUANTISED, ConfigReader

from .json_file import CONFIG_FILE

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
"""Values of quant_method that are understood."""
READ = "GPTQ, AWQ, compressed-tensors, FP8 by blocks, MXFP4 and MLX"
REMEDY = f"convert the checkpoint that was not quantised, or one in a packing that is read ({READ}), or a GGUF file"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
"""Of compressed-tensors."""
MLX_GROUPS = (32, 64, 128)

# What a config says of how its weights were found, or of other programs that run them.
_HARMLESS = {
    "gptq": """model_name_or_path model_file_base_name damp_percent damp_auto_increment true_sequential static_groups
    meta use_exllama disable_exllama exllama_config max_input_length batch_size dataset tokenizer block_name_to_quantize
    module_name_preceding_first_block pad_token_id cache_block_outputs modules_in_block_to_quantize backend
    use_cuda_fp16 model_seqlen act_group_aware hyb_act mse v2 gptaq lm_head quant_method method desc_act""",
    "awq": """modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse exllama_config backend quant_method""",
    "compressed-tensors": """ignore kv_cache_scheme global_compression_ratio version quant_method""",
    "fp8": """modules_to_not_convert modules_to_convert activation_scheme ignored_layers dequantize quant_method""",
    "mxfp4": """modules_to_not_convert dequantize quant_method""",
}
# Of a group of compressed-tensors: activations are quantised here as edgeinfer does.
_HARMLESS_GROUP = "input_activations output_activations"
_HARMLESS_WEIGHTS = "observer observer_kwargs dynamic actorder scale_dtype zp_dtype"


@dataclass(frozen=True)
class Scheme:
    """How the weights of a checkpoint are packed; which of them are is seen from their tensors."""

    method: str
    """One of `METHODS`, or mlx."""
    bits: int = 0
    group_size: int = 0
    """Columns that share a scale; 0 for a whole row."""
    symmetric: bool = True
    """GPTQ: whether all zero points are half of the range."""
    ordered: bool = False
    """Whether columns may be in groups in another order than their own; their tensors tell."""
    stored_minus_one: bool = False
    """GPTQ: whether zero points are stored less one."""
    group_sizes: tuple[int, ...] = ()
    """compressed-tensors: of all groups of modules; which one a module has is seen from its scales."""
    block: tuple[int, int] = (0, 0)
    """FP8: rows and columns that share a scale; 0 for one scale."""
    blocks: tuple[tuple[int, int], ...] = ()
    """compressed-tensors: of all groups of modules, as `group_sizes`."""
    groups: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    """compressed-tensors: names of modules, patterns (``re:``) or classes of them, and how these are packed."""
    modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """MLX: modules with bits and group of their own."""
    floats: bool = False
    """compressed-tensors: whether codes are floats of 8 bits."""
    left_out: tuple[str, ...] = ()
    """Names of modules that are not quantised, or patterns of them (``re:``); a part of a name is enough."""

    def of_module(self, name: str) -> tuple[int, int]:
        """Bits and group of a module."""
        return self.modules.get(name, (self.bits, self.group_size))

    def of_group(self, module: str) -> Scheme:
        """How the config says that a module is packed: a group that names it goes before one of all of a class.

        For plans from a config alone; tensors tell more than patterns that are not understood.
        """
        named = [scheme for targets, scheme in self.groups if any(_fits(target, module) for target in targets)]
        classes = [scheme for targets, scheme in self.groups if any(target.isidentifier() for target in targets)]
        return next(iter((*named, *classes)), self)

    def leaves_out(self, module: str) -> bool:
        """Whether the config says that a module is not quantised."""
        return any(_fits(pattern, module) for pattern in self.left_out)


def _fits(pattern: str, module: str) -> bool:
    """Whether a module is meant: by a part of its name, or by a pattern of which only ``.*`` is understood.

    Patterns are strangers' programs, of which some never end. One with more in it fits nothing: this is for plans from
    a config alone, and tensors tell for the rest. In a part of a name a star stands for anything (gpt-oss).
    """
    at, regular = 0, pattern.startswith("re:")
    pieces = pattern[3:].replace("\\.", "\0").strip("^$").split(".*") if regular else pattern.split("*")
    for piece in pieces:
        piece = piece.replace("\0", ".")
        found = module.find(piece, at) if not regular or re.fullmatch(r"[\w.\-]*", piece) else -1
        if found < 0:
            return False
        at = found + len(piece)
    return True


def take_scheme(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Scheme | None]:
    """The config of the model that was quantised, and how; None where it was not.

    Raises
    ------
    UnsupportedModelError
        The weights are packed in a way that is not read; the sentence names it and what can be done.
    CheckpointError
        A number is none.
    """
    found = [key for key in QUANTISED if fields.get(key)]
    if not found:
        return dict(fields), None
    if fields.get("model_type") == "gpt2":
        raise UnsupportedModelError(f"{CONFIG_FILE} is of a quantised GPT-2, whose matrices programs have packed by "
                                    f"rows or by columns, and the files do not say which; {REMEDY}.")
    rest = {key: value for key, value in fields.items() if key not in QUANTISED}
    key = "quantization" if "quantization" in found else found[0]
    section = ConfigReader(fields[key], f"{CONFIG_FILE}, {key}")
    if key == "quantization":
        return rest, _mlx(section, fields[key])
    method = section.get("quant_method")
    if method is None:
        raise UnsupportedModelError(f"{section.where} names no quant_method, so its packing is unknown; {REMEDY}.")
    if not isinstance(method, str) or method not in METHODS:
        raise _refused(section, "quant_method", method)
    for name in _HARMLESS[method].split():
        section.get(name)
    scheme = _READERS[method](section)
    section.refuse_unread()
    return rest, scheme


def _refused(section: ConfigReader, name: str, value: Any) -> UnsupportedModelError:
    return section.unsupported(name, value, REMEDY)


def _bits(section: ConfigReader, name: str = "bits", allowed: tuple[int, ...] = (4, 8)) -> int:
    bits: int = section.integer(name, high=64)
    if bits not in allowed:
        raise _refused(section, name, bits)
    return bits


def _group(section: ConfigReader, name: str = "group_size") -> int:
    """Columns that share a scale; -1 and null stand for a whole row."""
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
    if not section.flag("zero_point", True):
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
    """How the modules of a group are packed."""
    for harmless in _HARMLESS_WEIGHTS.split():
        weights.get(harmless)
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise _refused(weights, "type", kind)
    bits = _bits(weights, "num_bits", (8,) if kind == "float" else (4, 8))
    strategy = weights.get("strategy")
    if strategy not in (None, "group", "channel", "tensor", "block"):
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
    _check_mlx(section)
    modules: dict[str, tuple[int, int]] = {}
    left_out: list[str] = []
    for name, value in given.items():
        module = "." in name or name == "lm_head"
        if isinstance(value, dict) and module:
            own = ConfigReader(value, f"{section.where}, {name}")
            _check_mlx(own)
            modules[name] = _bits(own), own.integer("group_size")
            own.refuse_unread()
        elif value is False and module:
            left_out.append(name)
        elif not (value is True and module):
            continue
        section.get(name)
    section.refuse_unread()
    return Scheme("mlx", _bits(section), section.integer("group_size"), symmetric=False, modules=modules,
                  left_out=tuple(left_out))


def _check_mlx(section: ConfigReader) -> None:
    if section.get("mode", "affine") != "affine":
        raise _refused(section, "mode", section.get("mode"))
    _bits(section)
    if section.integer("group_size") not in MLX_GROUPS:
        raise _refused(section, "group_size", section.get("group_size"))


_READERS: dict[str, Callable[[ConfigReader], Scheme]] = {
    "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _mxfp4,
}
