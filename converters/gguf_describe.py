"""What a GGUF file says of its model before anything of its tensors is read: for plans and estimates."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from edgeinfer.bundle import Quantisation
from edgeinfer.dataclass import dataclass
from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.graph import ModelConfig, TypeOf, read_outline, requested_types

from .checkpoint import WEIGHTS
from .gguf_checkpoint import GgufCheckpoint, all_tensors
from .gguf_config import config_fields, is_outline
from .gguf_file import GgufHeader, read_headers

TOLERANCE = 0.01
"""Largest difference between the parameters that the fields of a family that cannot run give and its tensors'."""


@dataclass(frozen=True)
class FileDescription:
    """A model of a file, or of a checkpoint, that is quantised already."""

    fields: dict[str, Any]
    """As those of a config.json."""
    model: ModelConfig | None
    """None for families that cannot run, and for files without tensors."""
    type_of: TypeOf | None
    """How its weights will be stored."""
    quantisation: Quantisation | None
    file_types: dict[str, int]
    """Bytes of the file's tensors by type, the largest first."""
    note: str
    """What becomes of them; the end of a sentence."""


def describe_gguf(path: Path, weights: str | None = None, group_size: int | None = None) -> FileDescription:
    """Describe the model of a file, of which no more than the header has to be there.

    Parameters
    ----------
    path : Path
        Of a split model the first file.
    weights, group_size : optional
        As for `convert`; by default the types of the file.

    Raises
    ------
    CheckpointError
        The file is no GGUF file, is cut short, or its header contradicts itself.
    UnsupportedModelError
        Not even the sizes of its architecture are known, or a key that changes the mathematics is not implemented.
    """
    headers = read_headers(path)
    tensors = all_tensors(headers)
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.nbytes
    sizes = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    if is_outline(headers[0]) or not tensors:
        fields = config_fields(headers[0], tensors)
        _compare(fields, headers, path)
        note = "edgeinfer does not run this family, yet: these figures are those of converting the original"
        return FileDescription(fields, None, None, None, sizes, note)
    with GgufCheckpoint.open(path, data=False) as checkpoint:
        try:
            type_of, quantisation = checkpoint.storage(weights, group_size, None, None, "tile16")
            note = f"quantised anew as --weights {weights} asks" if weights else "taken as it is, codes and scales kept"
        except UnsupportedModelError:
            if weights or group_size:
                raise
            type_of, quantisation = checkpoint.storage(WEIGHTS, None, None, None, "tile16")
            note = (f"not all of these types can be held without loss, yet, so these figures are those of convert "
                    f"--weights {WEIGHTS}, which quantises anew")
        checkpoint.check(checkpoint.graph(type_of))
        return FileDescription({}, checkpoint.config, type_of, quantisation, sizes, note)


def _compare(config: dict[str, Any], headers: list[GgufHeader], path: Path) -> None:
    """Refuse fields and tensors of a family that cannot run which do not belong to the same model."""
    outline = read_outline(config, str(path))
    if outline is None:
        return
    tensors = all_tensors(headers)
    count = outline.graph(requested_types()).weight_count
    stored = sum(prod(tensor.shape) for name, tensor in tensors.items() if not name.startswith("rope_"))
    if tensors and abs(stored - count) > TOLERANCE * count:
        raise CheckpointError(f"The header of {path} contradicts itself: its fields make a model of {count:,} "
                              f"parameters, but its tensors have {stored:,}; download it again.")
