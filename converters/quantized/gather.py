"""Find the quantised modules among a checkpoint's tensors: the parts of each become one tensor with a weight's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..checkpoint.safetensors_file import SafetensorsFile
from ..checkpoint.shards import TensorFile
from . import compressed as compressed
from . import decode as decode
from .scheme import Scheme
from .tensor import PackedTensor, Parts, Recent

Decode = Callable[[str, Parts, Scheme, Recent], PackedTensor]
_GPTQ = ("qweight", "qzeros", "scales", "g_idx")
_COMPRESSED = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale")
LEFT_OUT = (".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".output_scale",
            ".k_scale", ".v_scale", ".q_scale")
"""Ends of the names of tensors that say how others quantise activations, K and V."""
ANY: tuple[str, ...] = ()
_FORMS: dict[str, tuple[tuple[str, tuple[str, ...], tuple[str, ...], Decode], ...]] = {
    "gptq": ((".qweight", ANY, _GPTQ, decode.gptq),),
    "awq": ((".qweight", ANY, _GPTQ[:3], decode.awq),),
    "compressed-tensors": (
        (".weight_packed", ANY, ("weight_packed", *_COMPRESSED), compressed.packed),
        (".weight", ("I8", "F8_E4M3"), ("weight", *_COMPRESSED), compressed.bytewise),
    ),
    "fp8": ((".weight", ("F8_E4M3",), ("weight", "weight_scale_inv"), compressed.fp8),),
    "bitnet": ((".weight", ("U8",), ("weight", "weight_scale"), decode.bitnet),
               (".weight", ("F32", "F16", "BF16"), ("weight",), decode.bitnet_online)),
    "mxfp4": (("_blocks", ANY, ("blocks", "scales"), decode.mxfp4),),
    "mlx": ((".weight", ("U32",), ("weight", "scales", "biases"), decode.mlx),),
}
"""Modules by method: suffix and types of the tensor that identifies one, its parts, and their reader."""


def gathered(files: Mapping[str, TensorFile], scheme: Scheme
             ) -> tuple[dict[str, TensorFile], dict[str, PackedTensor], frozenset[str]]:
    """The files of all tensors, those of quantised modules by the weight's name; these alone; and those that are not
    weights.

    Raises
    ------
    CheckpointError
        A part of a module is missing or does not fit the others.
    """
    recent = Recent()
    packed: dict[str, PackedTensor] = {}
    taken: set[str] = set()
    for name in files:
        for end, dtypes, kinds, form in _FORMS[scheme.method]:
            if not name.endswith(end) or (dtypes and files[name].tensors[name].dtype not in dtypes):
                continue
            joint = end[0]
            module = name[: name.rindex(joint)]
            if form is decode.bitnet_online and not (scheme.online and len(files[name].tensors[name].shape) == 2
                                                     and not scheme.leaves_out(module)):
                continue
            stored = {kind: module + joint + kind for kind in kinds}
            found = {kind: (file, part) for kind, part in stored.items()
                     if isinstance(file := files.get(part), SafetensorsFile)}
            parts = Parts(module, found)
            whole = module if joint == "_" else f"{module}.weight"
            packed[whole] = form(whole, parts, scheme, recent)
            taken |= parts.names
    rest: dict[str, TensorFile] = {name: file for name, file in files.items() if name not in taken}
    no_weights = {name for name in rest if name.endswith(LEFT_OUT)} | _zero_biases(rest, packed)
    return rest | packed, packed, frozenset(no_weights)


def _zero_biases(files: Mapping[str, TensorFile], packed: Mapping[str, PackedTensor]) -> set[str]:
    """Biases of quantised modules that add nothing: some programs write them for modules that have none."""
    zero = set()
    for name in packed:
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in files:
            shape = files[bias].tensors[bias].shape
            if len(shape) == 1 and not np.any(files[bias].read(bias, [0], shape[0])):
                zero.add(bias)
    return zero
