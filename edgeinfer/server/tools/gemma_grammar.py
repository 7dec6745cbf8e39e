"""The grammar of arguments in Gemma's notation, made from their JSON schema."""

from __future__ import annotations

import json
from typing import Any

from edgeinfer.errors import RequestError

from .events import Tool
from .lark import Lark, arguments_schema, check_key, choices
from .schema import properties_of, required_of, resolved, types_of

_SCALARS = {
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"
_MAX_DEPTH = 32


def arguments_rule(lark: Lark, tool: Tool, quote: str) -> str:
    """Return the part of a grammar that is a tool's arguments, in braces.

    Types, listed values, items, properties, required and alternatives are followed; other keywords, such as limits of
    numbers, are not.

    Raises
    ------
    RequestError
        The schema is nested too deep.
    """
    return _Notation(lark, tool, quote).object(arguments_schema(tool), 0)


class _Notation:
    def __init__(self, lark: Lark, tool: Tool, quote: str):
        self._lark, self._tool, self._root, self._quote = lark, tool, arguments_schema(tool), quote
        self._references: dict[str, str] = {}

    def value(self, schema: Any, depth: int) -> str:
        """Return a part that is a value."""
        if depth > _MAX_DEPTH:
            raise RequestError(f"The parameters of a tool are nested deeper than {_MAX_DEPTH}; a call cannot be "
                               "forced in this model's format.")
        schema = schema if isinstance(schema, dict) else {}
        if listed := choices(schema, self._root):
            return self._lark.any_of([self._lark.text(self._written(value)) for value in listed])
        if isinstance(target := resolved(schema, self._root), dict):
            return self._reference(schema["$ref"], target, depth)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list) and schema[key] and "type" not in schema:
                return self._lark.any_of([self.value(one, depth + 1) for one in schema[key]])
        types = types_of(schema, self._root) or (*_SCALARS, "string")
        return self._lark.any_of([self._typed(name, schema, depth) for name in sorted(types)])

    def _reference(self, path: str, target: dict[str, Any], depth: int) -> str:
        """Return the rule of a schema's reference, which may refer to itself."""
        if path not in self._references:
            name = self._references[path] = self._lark.new_name()
            self._lark.define(name, self.value(target, depth + 1))
        return self._references[path]

    def _typed(self, name: str, schema: dict[str, Any], depth: int) -> str:
        if name == "object":
            return self.object(schema, depth)
        if name == "array":
            item = self._lark.rule(self.value(schema.get("items"), depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if name in _SCALARS:
            return _SCALARS[name]
        return f"{self._lark.text(self._quote)} {self._lark.up_to(self._quote)}"

    def object(self, schema: dict[str, Any], depth: int) -> str:
        """Return a part that is an object; its keys are sorted, as the models were trained."""
        properties, required = properties_of(schema), required_of(schema)
        if not properties and schema.get("additionalProperties") is not False:
            member = self._lark.rule(f'{_ANY_KEY} ":" {self.value(schema.get("additionalProperties"), depth + 1)}')
            return f'"{{" ({member} ("," {member})*)? "}}"'
        first, later = "", '""'  # continuations at the beginning, and after another member
        for key in sorted(properties, reverse=True):
            check_key(key, "<:,{}[]\n", self._tool)
            member = self._lark.rule(f"{self._lark.text(key + ':')} {self.value(properties[key], depth + 1)}")
            if key in required:
                first, later = f"{member} {later}", f'"," {member} {later}'
            else:
                first = f"{member} {later} | {first}" if first else f"({member} {later})?"
                later = f'("," {member})? {later}'
            first, later = self._lark.rule(first), self._lark.rule(later)
        return f'"{{" {first} "}}"'

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return self._quote + value + self._quote
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._written(value[key])}" for key in sorted(value)) + "}"
        return json.dumps(value)
