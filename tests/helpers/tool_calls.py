"""The formats of tool calls: what marks a chat template, and how a model writes a call. An oracle of its own, written
from the formats' descriptions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from edgeinfer.server.tools import AnswerParser, CallArguments, CallStart, Content, Event, Reasoning, Tool, format_of

Call = tuple[str, dict[str, Any]]
MARKERS = ("<tool_call>", "</tool_call>", "<function=", "<parameter=x>", "</parameter>", "</function>",
           "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
           "<|tool_call>", "<tool_call|>", "call:", '<|"|>', "<escape>",
           "<start_function_call>", "<end_function_call>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>",
           "to=functions.", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
           "<｜tool▁calls▁end｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "```json", "\n```\n")
THOUGHT_MARKERS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought", "<channel|>")


class Form(NamedTuple):
    """A format: a template that shows it, what a model writes, and what its strings cannot contain."""

    template: str
    write: Callable[[Sequence[Call]], str]
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    banned: tuple[str, ...] = ()
    prompt: str = "<|im_start|>assistant\n"
    content: bool = True


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(arguments)}}}\n</tool_call>'
                     for name, arguments in calls)


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {dumped(arguments)}}}' for name, arguments in calls)


def old_mistral(calls: Sequence[Call]) -> str:
    listed = [{"name": name, "arguments": arguments, "id": "abcDEF123"} for name, arguments in calls]
    return "[TOOL_CALLS]" + dumped(listed)


def new_mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls)


def small_mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcDEF123[ARGS]{dumped(arguments)}" for name, arguments in calls)


def fenced_deepseek(calls: Sequence[Call]) -> str:
    listed = [f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(arguments)}\n```<｜tool▁call▁end｜>"
              for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "\n".join(listed) + "<｜tool▁calls▁end｜>"


def deepseek(calls: Sequence[Call]) -> str:
    listed = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(arguments)}<｜tool▁call▁end｜>"
              for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(listed) + "<｜tool▁calls▁end｜>"


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def qwen_coder(calls: Sequence[Call]) -> str:
    def member(key: str, value: Any) -> str:
        written = str(value) if isinstance(value, bool) or value is None else bare(value)  # as Python writes them
        return f"<parameter={key}>\n{written}\n</parameter>\n"

    return "\n".join(f"<tool_call>\n<function={name}>\n"
                     + "".join(member(key, value) for key, value in arguments.items())
                     + "</function>\n</tool_call>" for name, arguments in calls)


def glm(calls: Sequence[Call], between: str = "\n") -> str:
    return "\n".join(f"<tool_call>{name}{between}" + "".join(
        f"<arg_key>{key}</arg_key>{between}<arg_value>{bare(value)}</arg_value>{between}"
        for key, value in arguments.items()) + "</tool_call>" for name, arguments in calls)


def newer_glm(calls: Sequence[Call]) -> str:
    return glm(calls, "")


def notation(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{notation(value[key], quote)}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(notation(one, quote) for one in value) + "]"
    return dumped(value)


def gemma(calls: Sequence[Call]) -> str:
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{name}{notation(arguments, quote)}<tool_call|>" for name, arguments in calls)


def function_gemma(calls: Sequence[Call]) -> str:
    return "".join(f"<start_function_call>call:{name}{notation(arguments, '<escape>')}<end_function_call>"
                   for name, arguments in calls)


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}<|call|>"
        for name, arguments in calls)


FORMS = {
    "hermes": Form("{{ '<tool_call>' }} <think></think>", hermes),
    "plain": Form("{{ messages }}", hermes, thought=("", "")),
    "qwen_coder": Form("<tool_call> <function=name> <parameter=key>", qwen_coder, ("", ""),
                       ("</parameter>", "\r")),
    "llama": Form("<|start_header_id|> <|python_tag|>", llama, ("", ""), content=False),
    "old_mistral": Form("[TOOL_CALLS][", old_mistral, ("", "")),
    "mistral": Form("[TOOL_CALLS] [ARGS] [THINK] [/THINK]", new_mistral, ("[THINK]", "[/THINK]")),
    "small_mistral": Form("[TOOL_CALLS] [CALL_ID] [ARGS]", small_mistral, ("", "")),
    "gemma": Form("<|tool_call>call: <|channel>thought\n<channel|>", gemma, ("<|channel>thought\n", "\n<channel|>"),
                  ('<|"|>',)),
    "function_gemma": Form("<start_function_call>call:", function_gemma, ("", ""), ("<escape>",)),
    "harmony": Form("<|channel|>analysis<|message|>", harmony,
                    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
                    prompt="<|start|>user<|message|>Hi<|end|><|start|>assistant", content=False),
    "fenced_deepseek": Form("<｜tool▁calls▁begin｜> ```json </think>", fenced_deepseek),
    "deepseek": Form("<｜tool▁calls▁begin｜> <think></think>", deepseek, ("<think>", "</think>")),
    "glm": Form("<tool_call>name <arg_key></arg_key>\n <think></think>", glm, ("\n<think>", "</think>\n"),
                ("</arg_value>",)),
    "newer_glm": Form("<tool_call>name<arg_key></arg_key><arg_value> <think></think>", newer_glm,
                      ("<think>", "</think>"), ("</arg_value>",)),
}


def tool_of(name: str, arguments: dict[str, Any]) -> Tool:
    """Return a tool whose schema describes these arguments."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
             type(None): "null"}
    properties = {key: {"type": kinds[type(value)]} for key, value in arguments.items()}
    return Tool(name, "", {"type": "object", "properties": properties, "required": list(arguments)}, False)


def random_value(rng: random.Random, form: Form, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 2:
        parts = [rng.choice([*MARKERS, *THOUGHT_MARKERS, '"', "\\", "\\n", "\n", "\t", " ", "{", "}", "[", "]", ",",
                             ":", "é", "漢字", "🦜", "'", "word", "null", "12", "\u2028", "<", "|"])
                 for _ in range(rng.randrange(6))]
        text = "".join(parts)
        return "banned" if any(one in text for one in form.banned) else text
    if kind == 6:
        return [random_value(rng, form, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {f"k{i}": random_value(rng, form, depth + 1) for i in range(rng.randrange(4))}
    return [rng.randrange(-10**6, 10**6), rng.uniform(-1e3, 1e3), rng.random() < 0.5, None][kind - 2]


def random_call(rng: random.Random, form: Form) -> Call:
    arguments = {f"arg_{i}": random_value(rng, form) for i in range(rng.randrange(5))}
    return rng.choice(["get_weather", "search-web", "f", "a.b_c9"]), arguments


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def read(form: Form, tools: Sequence[Tool], parts: Sequence[str], prompt: str | None = None) -> list[Event]:
    parser = AnswerParser(format_of(form.template), tools, form.prompt if prompt is None else prompt)
    events = [event for part in parts for event in parser.push(part)]
    return events + parser.flush()


class Said(NamedTuple):
    """The whole of an answer."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def said(events: Sequence[Event]) -> Said:
    """Join the pieces; calls have the numbers 0, 1, ... and ids of their own."""
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    starts = [event for event in events if isinstance(event, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    texts = ["" for _ in starts]
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    assert all(event.text for event in events if not isinstance(event, CallStart)), "an empty piece"
    return Said(reasoning, content, [(start.name, text) for start, text in zip(starts, texts, strict=True)])
