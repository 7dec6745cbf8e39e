"""Types of values by their JSON schema, for formats that write values without quotes."""

from __future__ import annotations

import json
from typing import Any

from .events import Tool
from .json_text import parsed

STRING = frozenset({"string"})
_MAX_STEPS = 200
"""Schemas that are looked at for one property; references may go round in circles."""


def property_of(tool: Tool, key: str) -> dict[str, Any]:
    """Return the schema of an argument; an empty one if the tool does not describe it."""
    found = properties_of(tool.parameters).get(key)
    return found if isinstance(found, dict) else {}


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of an object's members."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def required_of(schema: dict[str, Any]) -> list[Any]:
    """Return the names of the members that an object must have."""
    found = schema.get("required")
    return found if isinstance(found, list) else []


def types_of(schema: dict[str, Any], root: dict[str, Any]) -> frozenset[str]:
    """Return the types that a value may have; none if the schema does not say."""
    types: set[str] = set()
    waiting: list[Any] = [schema]
    for _ in range(_MAX_STEPS):
        if not waiting:
            break
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        named = one.get("type")
        if isinstance(named, (str, list)):
            types |= {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
        else:
            for key in ("anyOf", "oneOf", "allOf"):
                waiting += one[key] if isinstance(one.get(key), list) else []
            waiting.append(resolved(one, root))
            types |= {type_name(value) for value in _values(one)}
    return frozenset(types)


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """Return the target of ``$ref`` within the root; None if there is none or it leads nowhere."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    value: Any = root
    for part in reference[2:].split("/"):
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def _values(schema: dict[str, Any]) -> list[Any]:
    listed = schema.get("enum")
    return [*(listed if isinstance(listed, list) else ()), *([schema["const"]] if "const" in schema else ())]


def type_name(value: Any) -> str:
    """Return JSON schema's name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, (bool, int, float)):
        return "boolean" if isinstance(value, bool) else "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written without quotes: by its type if that is known, else by its looks."""
    bare = text.strip()
    try:
        kind = type_name(parsed(bare))
    except ValueError:
        word = {"True": "true", "False": "false", "None": "null"}.get(bare)  # as Python and its templates write them
        if word and (("null" if word == "null" else "boolean") in types or not types):
            return word
        return json.dumps(text, ensure_ascii=False)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return bare if fits or "string" not in types else json.dumps(text, ensure_ascii=False)
