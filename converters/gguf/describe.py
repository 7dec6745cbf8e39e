"""Description of a GGUF file's model without reading its tensors: for plans and estimates."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.files import open_plain
from edgeinfer.bundle import Quantisation
from edgeinfer.graph import ModelConfig, TypeOf

from .checkpoint import FACTORS, MAX_FACTORS, GgufCheckpoint, all_tensors, kept
from .config import PURPOSES, config_fields, purpose
from .file import read_headers
from .header import GgufHeader, GgufTensor, PassedOver
from .tokenizer import check_kind

OF_STRUCTURE = ("general.architecture", "general.type", "tokenizer.ggml.model", "tokenizer.ggml.pre",
                "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
"""Fields beyond those of the architecture that a description depends on."""


@dataclass(frozen=True)
class FileDescription:
    """A model of a file, or of a checkpoint, that is quantised already."""

    fields: dict[str, Any]
    """Fields as in a config.json."""
    model: ModelConfig | None
    """The model; None for files without tensors."""
    type_of: TypeOf | None
    """Storage type of each weight after conversion."""
    quantisation: Quantisation | None
    file_types: dict[str, int]
    """Bytes of the file's tensors by type, the largest first."""
    note: str
    """Treatment of its weights, as the end of a sentence."""
    refused: str = ""
    """Reason why converting refuses the checkpoint as it is; empty if it does not."""


def describe_gguf(path: Path, weights: str | None = None, group_size: int | None = None,
                  headers: list[GgufHeader] | None = None) -> FileDescription:
    """Describe the model of a file, of which no more than the header has to be there.

    Parameters
    ----------
    path : Path
        Of a split model the first file.
    weights, group_size : optional
        As for `convert`; by default the types of the file.
    headers : list of GgufHeader, optional
        Of all its parts, where they were read before.

    Raises
    ------
    CheckpointError
        The file is not a GGUF file, is truncated, or its header contradicts itself.
    UnsupportedModelError
        Not even the sizes of its architecture are known, or a key that changes the mathematics is not implemented.
    """
    headers = headers or read_headers(path, PassedOver())
    tensors = all_tensors(headers)
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.nbytes
    sizes = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    if not tensors:
        return FileDescription(config_fields(headers[0], tensors), None, None, None, sizes, "")
    with GgufCheckpoint.open(path, data=False, headers=headers) as checkpoint:
        type_of, quantisation = checkpoint.storage(weights, group_size, None, None, "tile16")
        note = f"requantised as --weights {weights} asks" if weights else kept(
            {name: tensor.kind.name for name, tensor in tensors.items()})
        checkpoint.check(checkpoint.graph(type_of), compare=False)
        return FileDescription({}, checkpoint.config, type_of, quantisation, sizes, note)


def gguf_purpose(header: GgufHeader) -> str:
    """Return the kind of a file that is not a model in words, such as an importance matrix; empty for a model."""
    return PURPOSES[kind].split(",")[0] if (kind := purpose(header)) else ""


def check_tokenizer(header: GgufHeader) -> None:
    """Refuse a kind of tokenizer that is not known, with `TokenizerError`; no token is looked at."""
    check_kind(header.fields, str(header.path))


def gguf_structure(headers: list[GgufHeader]) -> Hashable:
    """Return the facts that a description follows from: files that are equal in it are described by the same words."""
    fields = headers[0].fields
    named = {key: value.tobytes() if isinstance(value, array) else str(value) for key, value in fields.items()
             if not key.startswith(("general.", "tokenizer.")) or key in OF_STRUCTURE}
    tensors = tuple((name, tensor.kind.name, tensor.shape, _factors(header, tensor) if name in FACTORS else b"")
                    for header in headers for name, tensor in header.tensors.items())
    tokens = fields.get("tokenizer.ggml.tokens")
    return tuple(named.items()), tensors, len(tokens) if isinstance(tokens, range) else None


def _factors(header: GgufHeader, tensor: GgufTensor) -> bytes:
    """The factors of a rotation, which decide whether it is understood; this many as any head has."""
    with open_plain(header.path) as file:
        file.seek(header.data + tensor.offset)
        return file.read(min(tensor.nbytes, 4 * MAX_FACTORS))
