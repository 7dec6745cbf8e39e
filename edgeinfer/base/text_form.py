"""The form that a text is asked to have: JSON, a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

import json
from typing import Any

from ..errors import UsageError
from .dataclass import dataclass
from .validation import shown

JSON_OBJECT, JSON_SCHEMA, REGEX, GRAMMAR = KINDS = ("json_object", "json_schema", "regex", "grammar")
MAX_SOURCE_BYTES = 256 << 10
"""Longest source of a form."""
MAX_DEPTH = 64
"""Deepest nesting of a JSON schema."""


@dataclass(frozen=True)
class TextForm:
    """The form of a text."""

    kind: str
    """One of `KINDS`."""
    source: str = ""
    """The schema as JSON, the pattern, or the grammar (Lark, or llama.cpp's GBNF); empty for any JSON object."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"A form of the kind {self.kind!r:.40} is not known; choose one of {', '.join(KINDS)}.")
        if len(self.source.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
            raise UsageError(f"The {self.kind} has {len(self.source)} characters; at most {MAX_SOURCE_BYTES} bytes "
                             "are taken.")


def text_form(value: Any) -> TextForm:
    """Return the form that a value means.

    Parameters
    ----------
    value : a `TextForm`; OpenAI's ``response_format`` (``{"type": "json_object"}``, ``{"type": "json_schema",
        "json_schema": {"schema": ...}}``), also with the types ``regex`` (``"pattern"``) and ``grammar``
        (``"grammar"``); a JSON schema; or a pydantic model

    Raises
    ------
    UsageError
        It is none of these.
    """
    if isinstance(value, TextForm):
        return value
    if callable(schema_of := getattr(value, "model_json_schema", None)):  # a pydantic model
        return schema_form(schema_of())
    if not isinstance(value, dict):
        raise UsageError(f"{shown(value)} is not a response format; give {{'type': 'json_object'}}, a JSON schema, or "
                         "a pydantic model.")
    kind = value.get("type")
    if kind == JSON_OBJECT:
        return schema_form(value["schema"]) if "schema" in value else TextForm(JSON_OBJECT)
    if kind == JSON_SCHEMA:
        inner = value.get("json_schema", value.get("schema"))
        return schema_form(inner.get("schema", inner) if isinstance(inner, dict) else inner)
    for name, field in ((REGEX, "pattern"), (GRAMMAR, "grammar")):
        if kind == name:
            source = value.get(field)
            if not isinstance(source, str) or not source:
                raise UsageError(f"A form of the type {name} needs a text {field!r}.")
            return TextForm(name, source)
    return schema_form(value)


def schema_form(schema: Any) -> TextForm:
    """Return the form of a JSON schema; raises `UsageError` for one that is no object, not JSON, or too deep."""
    if not isinstance(schema, dict):
        raise UsageError(f"A JSON schema is an object, and this is a {type(schema).__name__}.")
    if (depth := _depth(schema)) > MAX_DEPTH:
        raise UsageError(f"The JSON schema is nested {depth} deep or more; at most {MAX_DEPTH} are taken.")
    try:
        return TextForm(JSON_SCHEMA, json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"The JSON schema cannot be written as JSON: {error}.") from None


def _depth(value: Any) -> int:
    """Return how deep a value is nested, up to a little more than is allowed."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
                 if isinstance(inner, (dict, list))]
        depth += 1
    return depth
