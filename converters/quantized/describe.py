"""Description of a quantised checkpoint from its config and its files' headers: for plans and estimates."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from edgeinfer.config import GROUP_SIZES
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import ModelConfig, Source, build_graph, read_config, requested_types

from ..checkpoint.directory import WEIGHTS, quantisation_of
from ..checkpoint.expert_names import with_experts
from ..checkpoint.safe_path import checkpoint_file
from ..checkpoint.shards import INDEX_FILE, SINGLE_FILE
from ..gguf.describe import FileDescription
from .checkpoint import Kinds, PackedCheckpoint, refuse_dear, storage_of
from .config import take_scheme
from .kinds import PackedKind
from .scheme import Scheme

FLOAT_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
"""Types of safetensors by torch's names."""
KEPT = "taken as it is, codes and scales kept where there is a type for them"
DEAR = (f"not all of it can be taken as it is, yet, so these figures are those of convert --weights {WEIGHTS}, which "
        "requantises")


def describe_packed(fields: Mapping[str, Any], folder: Path | None, weights: str | None = None,
                    group_size: int | None = None) -> FileDescription:
    """Describe a model whose weights are quantised.

    Parameters
    ----------
    fields : mapping
        Of config.json.
    folder : Path, optional
        Where its weights may be; without them the config tells which modules are quantised.
    weights, group_size : optional
        As for `convert`; by default the checkpoint's types.

    Raises
    ------
    CheckpointError, UnsupportedModelError
        As converting would.
    """
    sizes: dict[str, int] = {}
    if folder and (checkpoint_file(folder, INDEX_FILE) or checkpoint_file(folder, SINGLE_FILE, anywhere=True)):
        with closing(PackedCheckpoint.open(folder)) as checkpoint:
            model, kinds = checkpoint.config, checkpoint.kinds
            checkpoint.check(checkpoint.graph(requested_types()))
            for name in checkpoint.files:
                tensor = checkpoint.tensor(name)
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    else:
        rest, scheme = take_scheme(fields)
        model = read_config(rest)
        dtype = FLOAT_NAMES.get(str(fields.get("dtype") or fields.get("torch_dtype")), "BF16")
        kinds = expected_kinds(model, scheme, dtype) if scheme else {}
    sizes = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    return _described(model, kinds, sizes, weights, group_size)


def _described(model: ModelConfig, kinds: Kinds, sizes: dict[str, int], weights: str | None, group_size: int | None
               ) -> FileDescription:
    note, refused = f"requantised as --weights {weights} asks" if weights else KEPT, ""
    try:
        if weights is None:
            refuse_dear(kinds, "The checkpoint")
            return FileDescription({}, model, *storage_of(model, kinds), sizes, note, refused)
    except UnsupportedModelError as error:
        note, refused = DEAR, str(error)
    weights, group = weights or WEIGHTS, group_size or GROUP_SIZES[0]
    type_of = requested_types(weights, group)
    return FileDescription({}, model, type_of, quantisation_of(type_of, weights, group), sizes, note,
                           refused)


def expected_kinds(model: ModelConfig, scheme: Scheme, dtype: str) -> dict[str, PackedKind | str]:
    """Predict the kind of each tensor from the config alone; `dtype` is the type of those that are not quantised."""
    kinds: dict[str, PackedKind | str] = {}
    for weight in with_experts(build_graph(model, requested_types("f32")), ()).weights:
        for source in weight.sources if weight.kind != "vector" else ():
            left_out = scheme.leaves_out(source.name.removesuffix(".weight"))
            kinds[source.name] = dtype if left_out else _kind(scheme, source)
    return kinds


def _kind(scheme: Scheme, source: Source) -> PackedKind:
    columns, module = source.stored[-1], source.name.removesuffix(".weight")
    scheme = scheme.of_group(module)
    bits, size, mode = scheme.of_module(module)
    if mode != "affine":
        return PackedKind(mode.upper(), "e4m3" if mode == "mxfp8" else "e2m1", size)
    size = size if size < columns else 0
    unsigned = "" if scheme.symmetric else "u"
    if scheme.floats and bits == 4:
        return PackedKind("NVFP4" if size == 16 else "MXFP4", "e2m1", size)
    if scheme.method == "fp8" or scheme.floats:
        high, wide = scheme.block
        return PackedKind("FP8", "e4m3", wide or size, high or 1)
    packing = {"gptq": "GPTQ", "awq": "AWQ", "mlx": "MLX", "bitnet": "BitNet"}.get(scheme.method, scheme.method)
    if scheme.method == "mxfp4":
        return PackedKind("MXFP4", "e2m1", size)
    ordered = scheme.ordered and size > 0
    return PackedKind(packing, f"{unsigned}int{bits}", size, 1, ordered, "as its files say" if ordered else "")
