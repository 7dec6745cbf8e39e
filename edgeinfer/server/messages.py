"""Convert messages and tools of OpenAI's API for chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from ..base.strict_json import parse_json
from .errors import ApiError
from .tools import Tool

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[^\s\x00-\x1f\x7f\"\\<>\[\]{}`]{1,128}")
"""Names of functions that every format of tool calls can write."""


def template_messages(messages: Iterable[Mapping[str, Any]], places: Iterable[str] | None = None,
                      field: str = "messages") -> list[dict[str, Any]]:
    """Return the messages of a conversation; raises `ApiError` for one that no model here can read.

    Parameters
    ----------
    messages : as OpenAI's chat completions have them
    places : where each is in the request, for errors; by default at its index
    field : of the request, that holds them
    """
    where = (f"{field}[{i}]" for i in count()) if places is None else places
    found = [_message(place, one) for place, one in zip(where, messages)]  # noqa: B905 (the places may have no end)
    if not found:
        raise ApiError(400, f"{field} is empty; give at least one message.", param=field)
    return found


def _message(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role is {str(role)[:40]!r}; choose one of {', '.join(ROLES)}.", param=where)
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = given.get("tool_calls")
    for old in ("function_call", "audio"):
        if given.get(old) is not None:
            raise ApiError(400, f"{where}.{old} is not supported here; give tool_calls or text instead.",
                           param=f"{where}.{old}", code="unsupported_parameter")
    content = given.get("content")
    if content is None and not calls and role != "assistant":
        raise ApiError(400, f"{where} has no content; give text.", param=f"{where}.content")
    made["content"] = "" if content is None else text_of(content, f"{where}.content")
    if calls is not None and calls != []:
        made["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(given.get(name), str):
            made[name] = given[name]
    return made


def text_of(content: Any, where: str) -> str:
    """Return the text of a message that is text, or a list of parts; raises `ApiError` for parts that are no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is neither text nor a list of parts.", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise ApiError(400, f"{where} has a part of the type {str(kind)[:40]!r}; this server's models read text "
                                "alone.", param=where, code="unsupported_content")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ApiError(400, f"{where} has a part without text.", param=where)
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return an assistant's tool calls with arguments as objects, as templates want them."""
    made = []
    for one in calls if isinstance(calls, list) else [{}]:
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{where} is not a list of calls with a function each.", param=where)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments or "{}")
            except ValueError as error:
                raise ApiError(400, f"{where}: the arguments of {function['name'][:60]!r} are not JSON: {error}.",
                               param=where) from None
        if not isinstance(arguments, dict):
            raise ApiError(400, f"{where}: the arguments of {function['name'][:60]!r} are not a JSON object.",
                           param=where)
        made.append({"id": one.get("id", ""), "type": "function",
                     "function": {"name": function["name"], "arguments": arguments}})
    return made


def with_text_arguments(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have arguments as text, for templates that expect text.

    Such templates also want no content beside calls.
    """
    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [{**one, "content": one["content"] or None, "tool_calls": [*map(as_text, calls)]}
            if (calls := one.get("tool_calls")) else one for one in messages]


def called_with(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call in a message as an object; None for a call that was cut off within them."""
    try:
        return parse_json(call["function"]["arguments"] or "{}")
    except ValueError:
        return None


def tools_of(tools: list[dict[str, Any]] | None, name_field: str = "function.name",
             schema_field: str = "function.parameters") -> list[Tool]:
    """Return the functions that the model may call; raises `ApiError` for a tool that is none.

    Parameters
    ----------
    tools : as OpenAI's API has them
    name_field, schema_field : their names in the API of the request, for errors
    """
    made: dict[str, Tool] = {}
    for i, one in enumerate(tools or ()):
        where = f"tools[{i}]"
        if one.get("type") != "function":
            raise ApiError(400, f"{where}.type is {str(one.get('type'))[:40]!r}; only functions are called.",
                           param=where)
        function = one.get("function", one)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ApiError(400, f"{where}.{name_field} must have 1 to 128 characters and no spaces, quotes, "
                                "backslashes or brackets.", param=f"{where}.{name_field}")
        if name in made:
            raise ApiError(400, f"{where}: there are two functions {name!r}; give each a name of its own.", param=where)
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise ApiError(400, f"{where}.{schema_field} must be a JSON schema of the type 'object'.",
                           param=f"{where}.{schema_field}")
        made[name] = Tool(name, str(function.get("description") or ""), parameters, bool(function.get("strict")))
    return list(made.values())


def template_tools(tools: Iterable[Tool]) -> list[dict[str, Any]] | None:
    """Return tools in the form that chat templates expect; None without tools."""
    return [{"type": "function", "function": {"name": one.name, "description": one.description,
                                              "parameters": one.parameters}} for one in tools] or None


def choice_of(choice: str | Mapping[str, Any] | None, tools: list[Tool]) -> str | Tool:
    """Return the request of `tool_choice`: none, auto, required, or the one tool that is to be called."""
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise ApiError(400, f"tool_choice is {choice[:40]!r}; choose none, auto, required, or a function.",
                           param="tool_choice")
        if choice == "required" and not tools:
            raise ApiError(400, "tool_choice is 'required' and there are no tools.", param="tool_choice")
        return choice
    if choice.get("type", "function") != "function":
        raise ApiError(400, f"tool_choice.type is {str(choice['type'])[:40]!r}; choose none, auto, required, or a "
                            "function.", param="tool_choice")
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    for one in tools:
        if one.name == name:
            return one
    raise ApiError(400, f"tool_choice names {str(name)[:60]!r}, which is none of the tools.", param="tool_choice")
