"""Verification of an export: the graph, every tensor and the files of its folder against the checksums in the model's
metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from edgeinfer.base.files import open_plain
from edgeinfer.base.units import round_up
from edgeinfer.errors import BundleError

from ...base.progress import OnStageProgress
from .data import ALIGNMENT
from .destination import CONFIG_FILE, MODEL_FILE
from .model import GRAPH_KEY, PREFIX, graph_sha256
from .packages import import_onnx

READ_BYTES = 1 << 20
MAX_MODEL_BYTES = 256 << 20
"""Largest size of a model without its data."""


class Verified(NamedTuple):
    """Report on a comparison."""

    model: Path
    tensors: int
    files: int
    nbytes: int


class _Entry(NamedTuple):
    name: str
    offset: int
    nbytes: int
    sha256: str


def is_export(path: str | Path) -> bool:
    """Return whether a name means an export: DST.onnx, or a folder for onnxruntime-genai."""
    path = Path(path)
    return (path.suffix == ".onnx" and not path.is_dir()) or (path / CONFIG_FILE).is_file()


def verify_export(path: str | Path, progress: OnStageProgress | None = None) -> Verified:
    """Compare a model and its external data with the checksums that the export wrote.

    Raises
    ------
    BundleError
        The model or its data are missing, truncated, altered or none of ours; the sentence names the tensor.
    UsageError
        The package onnx is not installed.
    """
    path = Path(path)
    model_path = path / MODEL_FILE if path.is_dir() else path
    try:
        model, about = _read_model(model_path)
        location, entries = _entries(model, about)
        _compare(model_path.with_name(location), entries, int(about["data_bytes"]), progress)
        beside = json.loads(about["files"]) if path.is_dir() else {}
        for name, sha256 in beside.items():
            _check_file(path, name, sha256)
    except BundleError as error:
        raise BundleError(f"Cannot use the export {path}: {error}") from None
    except OSError as error:
        raise BundleError(f"Cannot use the export {path}: {error.strerror or error}.") from None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):  # sealed by another program
        raise BundleError(f"Cannot use the export {path}: its metadata do not belong to an export.") from None
    return Verified(model_path, len(entries), 2 + len(beside), model_path.stat().st_size + int(about["data_bytes"]))


def _read_model(path: Path) -> tuple[Any, dict[str, str]]:
    onnx = import_onnx("edgeinfer verify of an export")
    try:
        with open_plain(path) as file:
            text = file.read(MAX_MODEL_BYTES)
    except FileNotFoundError:
        raise BundleError(f"there is no {path.name}.") from None
    try:
        model = onnx.load_model_from_string(text)
    except Exception:  # protobuf's own classes
        raise BundleError(f"{path.name} is not an ONNX model, or was damaged; export it again.") from None
    about = {entry.key.removeprefix(PREFIX): entry.value for entry in model.metadata_props
             if entry.key.startswith(PREFIX)}
    if "data_identity" not in about:
        raise BundleError(f"{path.name} is not an export of edgeinfer's, so there is nothing to compare it with.")
    if about.get(GRAPH_KEY.removeprefix(PREFIX)) != graph_sha256(model):
        raise BundleError(f"{path.name} was altered: its checksum does not match; export it again.")
    return model, about


def _entries(model: Any, about: dict[str, str]) -> tuple[str, list[_Entry]]:
    """The file of external data, which is beside the model, and the tensors in it, in order."""
    sums, entries, files = json.loads(about["tensors"]), [], set()
    for tensor in model.graph.initializer:
        if where := {entry.key: entry.value for entry in tensor.external_data}:
            files.add(where["location"])
            entries.append(_Entry(tensor.name, int(where["offset"]), int(where["length"]), sums[tensor.name]))
    if len(files) != 1 or Path(location := files.pop()).name != location:
        raise BundleError("it does not name its data file.")
    entries, end = sorted(entries, key=lambda entry: entry.offset), 0
    for entry in entries:
        if entry.offset != round_up(end, ALIGNMENT) or entry.nbytes < 0:
            raise BundleError(f"the tensor {entry.name!r} does not directly follow the one before it.")
        end = entry.offset + entry.nbytes
    if end != int(about["data_bytes"]):
        raise BundleError("its data file does not end with its last tensor.")
    return location, entries


def _compare(path: Path, entries: list[_Entry], nbytes: int, progress: OnStageProgress | None) -> None:
    try:
        file = open_plain(path)
    except FileNotFoundError:
        raise BundleError(f"its data {path.name} are missing; they belong beside the model.") from None
    with file:
        size = file.seek(0, 2)
        if size != nbytes:
            how = "truncated" if size < nbytes else "too long"
            raise BundleError(f"{path.name} is {how}: {size} bytes instead of {nbytes}; copy or export it again.")
        end = 0
        for entry in entries:
            file.seek(end)
            if any(file.read(entry.offset - end)):
                raise BundleError(f"{path.name} was altered between its tensors; copy or export it again.")
            own = hashlib.sha256()
            for part in _parts(file, entry.nbytes):
                own.update(part)
            end = entry.offset + entry.nbytes
            if own.hexdigest() != entry.sha256:
                raise BundleError(f"the tensor {entry.name!r} in {path.name} was altered; copy or export it again.")
            if progress:
                progress(end, nbytes, entry.name)


def _parts(file: Any, nbytes: int) -> Iterator[bytes]:
    while nbytes and (part := file.read(min(nbytes, READ_BYTES))):
        nbytes -= len(part)
        yield part


def _check_file(folder: Path, name: str, sha256: str) -> None:
    if Path(name).name != name:
        raise BundleError(f"its metadata name {name!r}, which is not a file of its folder.")
    own = hashlib.sha256()
    try:
        with open_plain(folder / name) as file:
            while part := file.read(READ_BYTES):
                own.update(part)
    except FileNotFoundError:
        raise BundleError(f"its {name} is missing; export it again.") from None
    if own.hexdigest() != sha256:
        raise BundleError(f"its {name} is another model's, or was altered; export it again.")
