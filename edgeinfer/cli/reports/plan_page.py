"""The page `/plan` of the server: model and device from lists, and the report of `estimate` for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from html import escape
from typing import Any

from edgeinfer import devices

from ... import registry
from ...base.validation import Rule, checked, integer, similar
from ...config import DEFAULT_DRAFT_TOKENS, KV_TYPES, WEIGHT_TYPES, Recipe, RuntimeConfig
from ...errors import EdgeInferError, UsageError
from ...models import sizes
from ..lengths import MAX_TOKENS, TOKENS, Words, lengths_of
from .page import document, estimate_body
from .users import MAX_USERS

MODEL, MACHINE, CTX, PROMPT, ANSWER, USERS = "qwen3-8b", "rpi5", 4096, 512, 200, 1
FIELDS = ("model", "machine", "memory", "weights", "kv", "storage", "ctx", "prompt", "answer", "users")
WORDS = Words("a context of", "A prompt of", "the answer")
"""The lengths as the page names them."""
SCRIPT = ('"use strict";const form=document.forms[0];form.addEventListener("change",()=>{if(form.reportValidity())'
          'form.submit()});')
"""Asks again as soon as something is chosen; without scripts the button does."""


def plan_page(query: Mapping[str, str]) -> tuple[bytes, str, int]:
    """Return the page for a query of the address, its content policy, and the status of the answer.

    Models are built-in shapes and devices known profiles: nothing is read from the disk or the hub.
    """
    status = 200
    try:
        body = _report(query)
        title = f"{query.get('model', MODEL)} on {query.get('machine', MACHINE)}"
    except EdgeInferError as error:
        body, title, status = f'<p class="answer no">{escape(str(error))}</p>', "edgeinfer", 400
    data, policy = document(title, f"{_form(query)}{body}", SCRIPT, meta=False)
    return data, f"{policy}; frame-ancestors 'none'", status


def _report(query: Mapping[str, str]) -> str:
    from ...models.describe import describe
    from .comparison import compared
    from .estimate_object import estimate_object
    from .on_gpu import Cards
    from .questions import Questions

    for name in query:
        if name not in FIELDS:
            near = similar(name, FIELDS)
            raise UsageError(f"There is no field {name!r:.80}; " + (f"did you mean {near[0]}?" if near else
                                                                    f"there are {', '.join(FIELDS)}."))
    model = _one_of(query, "model", MODEL, sizes.names())
    device = devices.profiles()[_one_of(query, "machine", MACHINE, devices.profiles())]
    weights, kv = _one_of(query, "weights", "q4", WEIGHT_TYPES), _one_of(query, "kv", "int8", KV_TYPES)
    storage = _one_of(query, "storage", "", ("", *devices.storages())) or None
    ctx, prompt, answer = (_number(query, *one) for one in (("ctx", CTX), ("prompt", PROMPT), ("answer", ANSWER)))
    users = _number(query, "users", USERS, integer(1, MAX_USERS, f"from 1 to {MAX_USERS}"))
    gib = _one_of(query, "memory", "", ("", *(str(gib) for each in devices.profiles().values()
                                              for gib in each.memory_gib)))
    if gib in map(str, device.memory_gib):  # else of the device that was chosen before
        device = replace(device, memory_bytes=int(gib) << 30)
    profile = devices.equipped(devices.chosen(device), storage)
    described = describe(model, weights)
    lengths = lengths_of(described.config, ctx, prompt, answer, WORDS)
    config = registry.configured(RuntimeConfig(kv=kv, draft_tokens=DEFAULT_DRAFT_TOKENS),
                                 {one.name: one.default for one in registry.options("estimate")})
    cards = Cards(lambda: describe(model, weights, None, Recipe(())), config, None if kv == RuntimeConfig.kv else kv)
    settled = replace(config, recipe=described.recipe,
                      techniques=registry.settled(config.techniques, described.layers))
    out = estimate_object(described, profile, ctx, prompt, kv, (1.0, None), settled, 1, cards,
                          Questions(users if users > 1 else None, answer, storage=storage, plots=True).within(lengths))
    return estimate_body({**out, "decision": None}, compared(model, model, profile, ctx, kinds=sizes.TYPES))


def _one_of(query: Mapping[str, str], name: str, default: str, known: Iterable[str]) -> str:
    value = query.get(name, default)
    if value not in set(known):
        raise UsageError(f"There is no {name} {value!r:.80} in the list; choose another.")
    return value


def _number(query: Mapping[str, str], name: str, default: int, rule: Rule = TOKENS) -> int:
    text = query.get(name, str(default))
    length = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else text
    return int(checked(f"The {name}", length, rule))


def _form(query: Mapping[str, str]) -> str:
    known = devices.profiles()
    device = known.get(query.get("machine", MACHINE))
    machines = sorted(((name, one.title) for name, one in known.items()), key=lambda row: row[1].lower())
    usual = device.memory_bytes >> 30 if device else 0
    memory = [("" if gib == usual else str(gib), f"{gib} GB") for gib in sorted(device.memory_gib)] if device else []
    return ('<form method="get" action="/plan">'
            + _select("model", "Model", query.get("model", MODEL), [(name, name) for name in sorted(sizes.names())])
            + _select("machine", "Device", query.get("machine", MACHINE), machines)
            + (_select("memory", "Memory", query.get("memory", ""), memory) if len(memory) > 1 else "")
            + _select("weights", "Weights", query.get("weights", "q4"), [(name, name) for name in WEIGHT_TYPES])
            + _select("kv", "KV cache", query.get("kv", "int8"), [(name, name) for name in KV_TYPES])
            + _select("storage", "Storage", query.get("storage", ""),
                      [("", "usual"), *((name, one.title) for name, one in devices.storages().items())])
            + "".join(_field(name, label, query.get(name, str(default))) for name, label, default in (
                ("ctx", "Context", CTX), ("prompt", "Prompt", PROMPT), ("answer", "Answer", ANSWER)))
            + _field("users", "Users", query.get("users", str(USERS)), MAX_USERS)
            + "<button>Update</button></form>")


def _select(name: str, label: str, chosen: str, rows: list[tuple[str, str]]) -> str:
    options = "".join(f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>{escape(text)}</option>'
                      for value, text in rows)
    return f'<label>{label}<select name="{name}">{options}</select></label>'


def _field(name: str, label: str, value: Any, most: int = MAX_TOKENS) -> str:
    return (f'<label>{label}<input name="{name}" type="number" min="1" max="{most}" required '
            f'value="{escape(str(value)[:12])}"></label>')
