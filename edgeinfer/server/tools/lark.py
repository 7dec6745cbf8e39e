"""Grammars in the dialect of Lark that llguidance takes (docs/syntax.md of https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeinfer.errors import RequestError

from .events import Tool
from .schema import STRING, properties_of, required_of, resolved, types_of

_WHITESPACE = r" |\n[ \t]{0,20}"
"""White space between the parts of JSON. Without a limit small models write nothing else."""
_ANY_TEXT = "/(?s:.*)/"


class Lark:
    """A grammar while its rules are collected.

    Parameters
    ----------
    special : ids of the model's special tokens by their text; markers among them are written as tokens
    """

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        self._pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._defined = 0

    def source(self, start: str) -> str:
        """Return the grammar."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]) + "\n"

    def rule(self, body: str, lazy: bool = False) -> str:
        """Add a rule, unless it is there, and return its name."""
        if body not in self._names:
            name = self._names[body] = f"rule{len(self._names)}"
            self._rules[name + ("[lazy]" if lazy else "")] = body
        return self._names[body]

    def new_name(self) -> str:
        """Return a name for `define`."""
        self._defined += 1
        return f"defined{self._defined}"

    def define(self, name: str, body: str) -> None:
        """Add a rule with a name of its own, as one that refers to itself needs."""
        self._rules[name] = body

    def text(self, text: str) -> str:
        """Return a part that is exactly this text."""
        parts, at = [], 0
        for found in self._pattern.finditer(text):
            parts += [_literal(text[at:found.start()]), f"<[{self._special[found.group()]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, _literal(text[at:])])) or '""'

    def up_to(self, end: str) -> str:
        """Return a part that is any text up to and with an end."""
        if self._pattern.search(end):
            return f"{self.rule(_ANY_TEXT)} {self.text(end)}"
        return self.rule(f"{_ANY_TEXT} {_literal(end)}", lazy=True)

    def any_of(self, bodies: Sequence[str]) -> str:
        """Return a part that is one of these."""
        return self.rule(" | ".join(self.rule(body) for body in bodies))

    def repeated(self, part: str, separator: str, more: bool) -> str:
        """Return a part once, or once and more often with separators between."""
        return f"{part} ({separator} {part})*" if more else part

    def json(self, tool: Tool) -> str:
        """Return a part that is the JSON of a tool's arguments."""
        return self.rule(f"%json {_json_schema(arguments_schema(tool), tool)}")

    def members(self, tool: Tool, opening: Callable[[str], str], close: str, between: str) -> str:
        """Return a part that is all required arguments and any of the others, in the schema's order.

        Parameters
        ----------
        tool : Tool
        opening : makes the text before the value of a key
        close : text after each value
        between : text after that
        """
        schema = arguments_schema(tool)
        required, parts = required_of(schema), []
        for key, value in properties_of(schema).items():
            check_key(key, "<>\n", tool)
            body = f"{self.text(opening(key))} {self._value(value, schema, tool, close)} {self.text(between)}"
            parts.append(self.rule(body) + ("" if key in required else "?"))
        return " ".join(parts) or '""'

    def _value(self, schema: Any, root: dict[str, Any], tool: Tool, close: str) -> str:
        """Return a part that is a value without quotes and its end."""
        schema = schema if isinstance(schema, dict) else {}
        types = types_of(schema, root)
        if types == STRING and (listed := choices(schema, root)):
            return f"{self.any_of([self.text(str(value)) for value in listed])} {self.text(close)}"
        if types and "string" not in types:
            body = {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
            return f"{self.rule(f'%json {_json_schema(body, tool)}')} {self.text(close)}"
        return self.up_to(close)


def check_key(key: str, signs: str, tool: Tool) -> None:
    """Raise `RequestError` for the name of an argument that a format without quotes cannot write."""
    if not key.strip() or key != key.strip() or set(key) & set(signs):
        raise RequestError(f"The argument {key!r:.80} of the tool {tool.name!r} has a character that this model's "
                           "format of calls cannot write; rename it, or do not force the call.")


def choices(schema: dict[str, Any], root: dict[str, Any]) -> list[Any]:
    """Return the values that a schema lists, if it does."""
    found = resolved(schema, root)
    schema = found if isinstance(found, dict) else schema
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return listed if isinstance(listed, list) else []


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments; a tool without a schema takes no arguments."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    typed = any(key in tool.parameters for key in ("type", "$ref", "anyOf", "oneOf", "allOf"))
    return tool.parameters if typed else {"type": "object", **tool.parameters}


def _json_schema(schema: dict[str, Any], tool: Tool) -> str:
    options = {"whitespace_pattern": _WHITESPACE, "lenient": not tool.strict}
    return json.dumps({**schema, "x-guidance": options})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
