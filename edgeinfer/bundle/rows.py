"""Rows of bundle.json's lists, of each version of the format, from and to plain JSON values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from edgeinfer.base.units import MAX_BYTES
from edgeinfer.errors import BundleError
from edgeinfer.quant import TYPES, StorageType, WeightType

from .format import PARTS, FileEntry, Quantisation, TensorEntry, UnknownError

_OF_TABLE = {"bits": int, "grid": list, "table": list, "scale": str, "minimum": bool}
_ENTRY = {"shape": list, "offset": int, "nbytes": int, "sha256": str}
# By version; those of 3 are as in 2.
_TYPE = {
    1: {"layout": str, "dtype": str, "group_size": int},
    2: {"layout": str, "group_size": int, **_OF_TABLE},
}
_SHARED = {"pieces": int, "stride": int}
"""Additional fields of tensors that share an allocation with others."""
_OUTLIERS = {"outliers": int}
"""Additional field of matrices whose outlier columns are stored apart."""
_FILE = {1: {"name": str, "nbytes": int, "sha256": str}}
_FILE[2] = _FILE[1] | {"part": str}
_QUANTISATION = {"weights": str, "group_size": int, "embedding": str, "head": str}


def tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    """Return the row of the tensor table, its type stated in full."""
    stored = entry.type
    more = {"pieces": entry.pieces, "stride": entry.stride} if entry.pieces else {}
    more |= {"outliers": stored.outliers} if stored.outliers else {}
    return {
        "name": entry.name, "layout": stored.layout, **_of_table(stored.storage, stored.table),
        "group_size": stored.group_size,
        "shape": list(entry.shape), "offset": entry.offset, "nbytes": entry.nbytes, "sha256": entry.sha256, **more,
    }


def tensor_from_json(row: object, index: int, version: int) -> TensorEntry:
    """Return the entry of the tensor table that a row stands for; a BundleError names its error."""
    shared = _SHARED if isinstance(row, dict) and _SHARED.keys() & row.keys() else {}
    apart = _OUTLIERS if isinstance(row, dict) and "outliers" in row else {}
    data = _row(row, {"name": str} | _TYPE[min(version, 2)] | _ENTRY | shared | apart, f"tensors[{index}]")
    name = data["name"]
    if not re.fullmatch(r"[a-zA-Z0-9_.]{1,200}", name):
        raise BundleError(f"tensors[{index}] has the unusable name {name[:60]!r}.")
    if not all(type(n) is int for n in data["shape"]):
        raise BundleError(f"tensor {name!r} has a shape that is not a list of integers.")
    shape = tuple(data["shape"])
    stored = _stored(data, f"tensor {name!r}")
    if apart and not (stored.quantised and 0 < data["outliers"] < shape[-1]):
        raise BundleError(f"tensor {name!r} has {data['outliers']} columns of outliers, which is out of range.")
    try:
        nbytes = stored.nbytes(shape)
    except BundleError as error:
        raise BundleError(f"tensor {name!r}: {error}") from None
    if data["nbytes"] != nbytes:
        raise BundleError(f"tensor {name!r} has {data['nbytes']} bytes; its shape and type need {nbytes}.")
    if not 0 <= data["offset"] <= MAX_BYTES - nbytes:
        raise BundleError(f"tensor {name!r} has the offset {data['offset']}, which is out of range.")
    _check_sha256(data["sha256"], f"tensor {name!r}")
    pieces, stride = (data[field] for field in _SHARED) if shared else (0, 0)
    if shared and not (0 < pieces <= nbytes and 0 < stride <= MAX_BYTES // pieces):
        raise BundleError(f"tensor {name!r} has {pieces} pieces, {stride} bytes apart, which is out of range.")
    return TensorEntry(name, stored, shape, data["offset"], nbytes, data["sha256"], pieces, stride)


def file_from_json(row: object, index: int, version: int) -> FileEntry:
    """Return the entry that a row of the list of files stands for."""
    data = _row(row, _FILE[min(version, 2)], f"files[{index}]")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}", data["name"]):
        raise BundleError(f"files[{index}] has the unusable name {data['name'][:60]!r}.")
    if data["nbytes"] < 0:
        raise BundleError(f"file {data['name']!r} has {data['nbytes']} bytes.")
    _check_sha256(data["sha256"], f"file {data['name']!r}")
    entry = FileEntry(**data)
    if entry.part and entry.part not in PARTS:
        raise UnknownError(f"file {entry.name!r} is the unknown part {entry.part[:60]!r} of a model")
    return entry


def quantisation_from_json(value: object) -> Quantisation:
    """Return the types that were requested when the bundle was made."""
    quantisation = Quantisation(**_row(value, _QUANTISATION, "quantisation"))
    for dtype in (quantisation.weights, quantisation.embedding, quantisation.head):
        try:
            WeightType.of(dtype, quantisation.group_size)
        except BundleError as error:
            raise UnknownError(f"quantisation: {str(error).rstrip('.')}") from None
    return quantisation


def exact_fields(data: dict[str, Any], names: Iterable[str], where: str, optional: Iterable[str] = ()) -> None:
    """Refuse an object that has not exactly these fields, or lacks others than the optional ones."""
    if unknown := sorted(set(data) - set(names)):
        raise UnknownError(f"{where} has the unknown field {unknown[0][:60]!r}")
    if missing := sorted(set(names) - set(data) - set(optional)):
        raise BundleError(f"{where} lacks the field {missing[0]!r}.")


def _stored(data: dict[str, Any], where: str) -> WeightType:
    """Return the type that the fields describe."""
    name, levels = (data["dtype"], ()) if "dtype" in data else _described({key: data[key] for key in _OF_TABLE}, where)
    try:
        return WeightType(name, data["group_size"], data["layout"], levels, data.get("outliers", 0)).checked()
    except BundleError as error:
        raise UnknownError(f"{where}: {str(error).rstrip('.')}") from None


def _described(fields: dict[str, Any], where: str) -> tuple[str, tuple[int, ...]]:
    """Return the name of the row of the table of types that has these values, and the levels of a tensor's own."""
    for row in TYPES.values():
        if not row.fitted and fields == _of_table(row, row.table):
            return row.name, ()
    levels = tuple(fields["table"])
    if all(type(level) is int for level in levels):
        for row in TYPES.values():
            if row.fitted and fields == _of_table(row, levels) and len(levels) == 1 << row.bits:
                return row.name, levels
    said = ", ".join(f"{key} {json.dumps(value)[:60]}" for key, value in fields.items())
    raise UnknownError(f"{where} has a type that is not known here: {said}")


def _of_table(row: StorageType, table: tuple[int, ...]) -> dict[str, Any]:
    return {"bits": row.bits, "grid": list(row.grid), "table": list(table), "scale": row.scale,
            "minimum": row.minimum}


def _row(row: object, types: dict[str, type], where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BundleError(f"{where} is not a JSON object.")
    exact_fields(row, tuple(types), where)
    for name, kind in types.items():
        if type(row[name]) is not kind:
            raise BundleError(f"{where}.{name} is not of type {kind.__name__}.")
    return row


def _check_sha256(value: str, where: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise BundleError(f"{where} has no valid sha256.")
