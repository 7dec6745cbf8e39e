"""bundle.json: strict reading, canonical writing, and the checks that need no other file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from edgeinfer.base.strict_json import parse_json
from edgeinfer.base.units import MAX_BYTES
from edgeinfer.errors import BundleError

from .config_json import config_from_json
from .format import FORMAT_NAME, FORMAT_VERSION, Header, TensorLayout, UnknownError, end_of_file
from .rows import exact_fields, file_from_json, quantisation_from_json, tensor_from_json, tensor_to_json

HEADER_FILE = "bundle.json"
MAX_HEADER_BYTES = 64 << 20
FIELDS = ("format", "version", "checksum", "made_by", "source", "config", "quantisation", "weights_bytes", "tensors",
          "files")
_WORDS = {list: "a list", str: "a string", int: "a size in bytes"}


def header_to_json(header: Header) -> bytes:
    """The text of bundle.json, one tensor a line, with its own checksum."""
    data: dict[str, Any] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "made_by": header.made_by,
        "source": header.source,
        "config": asdict(header.config),
        "quantisation": asdict(header.quantisation),
        "weights_bytes": header.weights_bytes,
        "tensors": [tensor_to_json(entry) for entry in header.tensors],
        "files": [asdict(entry) for entry in header.files],
    }
    data["checksum"] = checksum(data)
    lines = []
    for key in FIELDS:
        value = data[key]
        if key in ("tensors", "files"):
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            lines.append(f' "{key}": [\n{rows}\n ]' if value else f' "{key}": []')
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def check_tensors(header: Header, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a table of tensors that has not exactly the expected names with the expected shapes."""
    tensors, model_type = {entry.name: entry for entry in header.tensors}, header.config.model_type
    if missing := [name for name in expected if name not in tensors]:
        raise BundleError(f"the tensor {missing[0]!r} is missing.")
    if extra := [name for name in tensors if name not in expected]:
        raise BundleError(f"the tensor {extra[0]!r} is not part of a {model_type} model.")
    for name, shape in expected.items():
        if tensors[name].shape != tuple(shape):
            have = list(tensors[name].shape)
            raise BundleError(f"the tensor {name!r} has shape {have}; the model needs {list(shape)}.")


def header_from_json(text: bytes) -> Header:
    """Parse and check bundle.json.

    Raises
    ------
    BundleError
        For anything that is not exactly a header of this format version; the sentence names the field.
    """
    data = _parse(text)
    if data.get("format") != FORMAT_NAME:
        raise BundleError(f"{HEADER_FILE} is not a bundle header: its format is not {FORMAT_NAME!r}.")
    version = data.get("version")
    if type(version) is not int or version < 1:
        raise BundleError(f"{HEADER_FILE} has no valid format version.")
    if version > FORMAT_VERSION:
        raise BundleError(
            f"the bundle has format version {version}, made by a newer edgeinfer; this one reads up to version "
            f"{FORMAT_VERSION}: upgrade edgeinfer."
        )
    if data.get("checksum") != checksum({key: value for key, value in data.items() if key != "checksum"}):
        raise BundleError(f"{HEADER_FILE} was altered: its checksum does not match; convert the model again.")
    try:
        header = _header(data, version)
    except UnknownError as error:
        maker = _field({"made_by": "", **data}, "made_by", str)
        maker = re.sub(r"[^ -~]", "?", maker)[:60] or "an unknown program"
        raise BundleError(f"{error}; the bundle was written by {maker}: upgrade edgeinfer, or convert the model again "
                          "with this one.") from None
    _check_layout(header)
    return header


def _header(data: dict[str, Any], version: int) -> Header:
    exact_fields(data, FIELDS, HEADER_FILE)
    return Header(
        config=config_from_json(data["config"]),
        quantisation=quantisation_from_json(data["quantisation"]),
        tensors=tuple(tensor_from_json(row, i, version) for i, row in enumerate(_field(data, "tensors", list))),
        files=tuple(file_from_json(row, i, version) for i, row in enumerate(_field(data, "files", list))),
        weights_bytes=_field(data, "weights_bytes", int),
        source=_field(data, "source", str),
        made_by=_field(data, "made_by", str),
        version=version,
    )


def checksum(data: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of the header without its checksum."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _parse(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_HEADER_BYTES:
        raise BundleError(f"{HEADER_FILE} has {len(text)} bytes; the limit is {MAX_HEADER_BYTES}.")
    try:
        data = parse_json(text, unique=True)
    except ValueError as error:
        raise BundleError(f"{HEADER_FILE} is not valid JSON ({str(error)[:120]}); the bundle is damaged.") from None
    if not isinstance(data, dict):
        raise BundleError(f"{HEADER_FILE} is not a JSON object; the bundle is damaged.")
    return data


def _check_layout(header: Header) -> None:
    """Tensors follow each other without overlap, with only the holes of their alignment, up to the file's end."""
    layout, names = TensorLayout(), set()
    for entry in header.tensors:
        if entry.name in names:
            raise BundleError(f"tensor {entry.name!r} occurs twice in {HEADER_FILE}.")
        names.add(entry.name)
        try:
            want = layout.add(entry.nbytes, entry.pieces, entry.stride)
        except BundleError as error:
            raise BundleError(f"tensor {entry.name!r} {error}.") from None
        if entry.offset != want:
            raise BundleError(
                f"tensor {entry.name!r} starts at byte {entry.offset}; without hole or overlap it is {want}."
            )
    if not header.tensors:
        raise BundleError(f"{HEADER_FILE} lists no tensors.")
    try:
        layout.close()
    except BundleError as error:
        raise BundleError(f"the end of the tensors {error}.") from None
    if header.config.experts and not any(entry.pieces for entry in header.tensors):
        raise BundleError("the matrices of an expert are not contiguous, as in older bundles; convert the model again.")
    if header.weights_bytes != (want := end_of_file(layout.end, header.version)):
        raise BundleError(f"weights_bytes is {header.weights_bytes}, but the tensors end at byte {want}.")
    for entry in header.tensors if header.version < 3 else ():
        if entry.type.layout == "neuron":
            raise BundleError(f"tensor {entry.name!r} is in layout neuron as format {header.version} had it, with each "
                              "gate beside its up row; convert the model again.")
    if len({entry.name for entry in header.files}) != len(header.files):
        raise BundleError(f"a file occurs twice in {HEADER_FILE}.")


def _field(data: dict[str, Any], name: str, kind: type) -> Any:
    """A field of the type that it must have; a number is a size in bytes."""
    if type(data[name]) is not kind or (kind is int and not 0 <= data[name] <= MAX_BYTES):
        raise BundleError(f"{HEADER_FILE}: {name} is not {_WORDS[kind]}.")
    return data[name]
