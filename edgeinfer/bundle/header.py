"""bundle.json: strict reading, canonical writing, and the checks that need no other file."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from typing import Any

from edgeinfer.errors import BundleError

from .config_json import config_from_json, config_to_json
from .format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    LINE_BYTES,
    MAX_BYTES,
    FileEntry,
    Header,
    Quantisation,
    TensorEntry,
    alignment,
    check_type,
    round_up,
    stored_bytes,
)

HEADER_FILE = "bundle.json"
MAX_HEADER_BYTES = 64 << 20
FIELDS = ("format", "version", "checksum", "made_by", "source", "config", "quantisation", "weights_bytes", "tensors",
          "files")
TENSOR_FIELDS = {"name": str, "layout": str, "dtype": str, "group_size": int, "shape": list, "offset": int,
                 "nbytes": int, "sha256": str}
FILE_FIELDS = {"name": str, "nbytes": int, "sha256": str}
QUANTISATION_FIELDS = {"weights": str, "group_size": int, "embedding": str, "head": str}


def header_to_json(header: Header) -> bytes:
    """The text of bundle.json, one tensor a line, with its own checksum."""
    data: dict[str, Any] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "made_by": header.made_by,
        "source": header.source,
        "config": config_to_json(header.config),
        "quantisation": asdict(header.quantisation),
        "weights_bytes": header.weights_bytes,
        "tensors": [{**asdict(entry), "shape": list(entry.shape)} for entry in header.tensors],
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


def header_from_json(text: bytes) -> Header:
    """Parse and check bundle.json.

    Raises
    ------
    BundleError
        For anything that is not exactly a header of this format version; the sentence names the field.
    """
    data = _parse(text)
    if data.get("format") != FORMAT_NAME:
        raise BundleError(f"{HEADER_FILE} is no bundle header: its format is not {FORMAT_NAME!r}.")
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
    _exact_fields(data, FIELDS, HEADER_FILE)
    header = Header(
        config=config_from_json(data["config"]),
        quantisation=_quantisation(data["quantisation"]),
        tensors=tuple(_tensor(row, i) for i, row in enumerate(_list(data, "tensors"))),
        files=tuple(_file(row, i) for i, row in enumerate(_list(data, "files"))),
        weights_bytes=_integer(data["weights_bytes"], "weights_bytes"),
        source=_string(data["source"], "source"),
        made_by=_string(data["made_by"], "made_by"),
    )
    _check_places(header)
    return header


def checksum(data: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of the header without its checksum."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _parse(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice in one object")
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    if len(text) > MAX_HEADER_BYTES:
        raise BundleError(f"{HEADER_FILE} has {len(text)} bytes; the limit is {MAX_HEADER_BYTES}.")
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{HEADER_FILE} is not valid JSON ({str(error)[:120]}); the bundle is damaged.") from None
    if not isinstance(data, dict):
        raise BundleError(f"{HEADER_FILE} is no JSON object; the bundle is damaged.")
    return data


def _check_places(header: Header) -> None:
    """Tensors follow each other without overlap, with only the holes of their alignment, up to the file's end."""
    end, names = 0, set()
    for entry in header.tensors:
        if entry.name in names:
            raise BundleError(f"tensor {entry.name!r} occurs twice in {HEADER_FILE}.")
        names.add(entry.name)
        want = round_up(end, alignment(entry.nbytes))
        if entry.offset != want:
            raise BundleError(
                f"tensor {entry.name!r} starts at byte {entry.offset}; without hole or overlap it is {want}."
            )
        end = entry.offset + entry.nbytes
    if not header.tensors:
        raise BundleError(f"{HEADER_FILE} lists no tensors.")
    if header.weights_bytes != round_up(end, LINE_BYTES):
        raise BundleError(
            f"weights_bytes is {header.weights_bytes}, but the tensors end at byte {round_up(end, LINE_BYTES)}."
        )
    if len({entry.name for entry in header.files}) != len(header.files):
        raise BundleError(f"a file occurs twice in {HEADER_FILE}.")


def _tensor(row: object, index: int) -> TensorEntry:
    data = _row(row, TENSOR_FIELDS, f"tensors[{index}]")
    name = data["name"]
    if not re.fullmatch(r"[a-zA-Z0-9_.]{1,200}", name):
        raise BundleError(f"tensors[{index}] has the unusable name {name[:60]!r}.")
    if not all(type(n) is int for n in data["shape"]):
        raise BundleError(f"tensor {name!r} has a shape that is no list of integers.")
    shape = tuple(data["shape"])
    try:
        nbytes = stored_bytes(data["layout"], data["dtype"], data["group_size"], shape)
    except BundleError as error:
        raise BundleError(f"tensor {name!r}: {error}") from None
    if data["nbytes"] != nbytes:
        raise BundleError(f"tensor {name!r} has {data['nbytes']} bytes; its shape and type need {nbytes}.")
    if not 0 <= data["offset"] <= MAX_BYTES - nbytes:
        raise BundleError(f"tensor {name!r} has the offset {data['offset']}, which is out of range.")
    _check_sha256(data["sha256"], f"tensor {name!r}")
    return TensorEntry(**{**data, "shape": shape})


def _file(row: object, index: int) -> FileEntry:
    data = _row(row, FILE_FIELDS, f"files[{index}]")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}", data["name"]):
        raise BundleError(f"files[{index}] has the unusable name {data['name'][:60]!r}.")
    if data["nbytes"] < 0:
        raise BundleError(f"file {data['name']!r} has {data['nbytes']} bytes.")
    _check_sha256(data["sha256"], f"file {data['name']!r}")
    return FileEntry(**data)


def _quantisation(value: object) -> Quantisation:
    quantisation = Quantisation(**_row(value, QUANTISATION_FIELDS, "quantisation"))
    for dtype in (quantisation.weights, quantisation.embedding, quantisation.head):
        group_size = quantisation.group_size if dtype in ("q4", "int8") else 0
        try:
            check_type("tile16", dtype, group_size)
        except BundleError as error:
            raise BundleError(f"quantisation: {error}") from None
    return quantisation


def _row(row: object, types: dict[str, type], where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BundleError(f"{where} is no JSON object.")
    _exact_fields(row, tuple(types), where)
    for name, kind in types.items():
        if type(row[name]) is not kind:
            raise BundleError(f"{where}.{name} is not of type {kind.__name__}.")
    return row


def _exact_fields(data: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    if unknown := sorted(set(data) - set(names)):
        raise BundleError(f"{where} has the unknown field {unknown[0][:60]!r}.")
    if missing := sorted(set(names) - set(data)):
        raise BundleError(f"{where} lacks the field {missing[0]!r}.")


def _check_sha256(value: str, where: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise BundleError(f"{where} has no valid sha256.")


def _list(data: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(data[name], list):
        raise BundleError(f"{HEADER_FILE}: {name} is no list.")
    return data[name]


def _integer(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_BYTES:
        raise BundleError(f"{HEADER_FILE}: {name} is no size in bytes.")
    return value


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BundleError(f"{HEADER_FILE}: {name} is no string.")
    return value
