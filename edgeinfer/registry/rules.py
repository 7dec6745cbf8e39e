"""The rules of all options of the Python API by name, whichever function takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..base.units import parse_size
from ..base.validation import (
    FLAG,
    FUNCTION,
    NATS,
    OBJECT,
    PATH,
    TEXT,
    Rule,
    checked,
    choice,
    instance,
    integer,
    number,
    whole,
)
from ..config import (
    BEAMS,
    FFN_LAYOUTS,
    GROUP_SIZES,
    WEIGHT_TYPES,
    GenerationConfig,
    Recipe,
    RuntimeConfig,
)


def _group(value: Any) -> int:
    size = whole(value)
    if size not in GROUP_SIZES:
        raise ValueError
    return size


_SIZE = Rule("a size such as 4GiB, or a number of bytes", lambda size: parse_size(
    size if isinstance(size, str) else whole(size)))
_SIZE_OR_NONE = Rule("a size such as 4GiB, a number of bytes, or 0 for none", lambda size: 0 if size == "0" else
                     parse_size(size) if isinstance(size, str) else whole(size) and parse_size(whole(size)))
_GROUP = Rule(f"one of {', '.join(map(str, GROUP_SIZES))}", _group, lead="choose")


def _split(value: Any) -> Any:
    return value if callable(value) else TEXT.convert(value)


def _recipe(value: Any) -> Recipe:
    return Recipe.parse(value) if isinstance(value, str) else instance(Recipe, "").convert(value)


def _of(kind: type) -> dict[str, Rule]:
    return {one.name: one.metadata["rule"] for one in fields(kind) if "rule" in one.metadata}


RULES: dict[str, Rule] = {
    **_of(RuntimeConfig), **_of(GenerationConfig),
    "model": PATH, "source": PATH, "destination": PATH, "prompt_cache": PATH, "prefix_file": PATH, "draft": PATH,
    "budget": _SIZE, "kv_memory": _SIZE, "state_memory": _SIZE_OR_NONE, "beams": BEAMS, "max_kld": NATS,
    "recipe": Rule("a Recipe, or text such as fuse_input+sparse:mode=off", _recipe),
    "device": TEXT, "split": Rule("the layers of each process, such as 0-15,16-31, or auto", _split),
    "weights": choice(WEIGHT_TYPES), "embedding": choice(WEIGHT_TYPES), "group_size": _GROUP,
    "ffn_layout": choice(FFN_LAYOUTS), "origin": instance(str, "text"),
    "overwrite": FLAG, "reuse": FLAG, "template_options": OBJECT,
    "progress": FUNCTION, "announce": FUNCTION, "on_progress": FUNCTION, "in_tiles": FUNCTION,
    "calibration": FUNCTION, "chooser": FUNCTION,
    "max_queue": integer(1, float("inf"), "1 or more"),
    "rank": integer(1, float("inf"), "1 or more"), "epochs": integer(0, 100, "from 0 to 100"),
}
"""Options that mean the same wherever they occur."""
CONVERSION = {**RULES, "head": choice(WEIGHT_TYPES)}
"""Rules of a conversion, in which `head` is the type of the output head's weights."""
MAKING = {**RULES, "max_kld": number(lambda nats: 0 < nats < float("inf"), "a finite number above 0")}
"""Range for makers of approximations, whose divergence can be measured as 0 but not requested to be."""


NEEDED = ("model", "source", "destination")
"""Options without a default."""


def plain(options: Mapping[str, Any], rules: Mapping[str, Rule] = RULES) -> dict[str, Any]:
    """Return options in plain form, checked by their rules; None means the default and stays None.

    Raises
    ------
    UsageError
        A value is of a wrong type or out of its range.
    """
    return {name: None if value is None and name not in NEEDED else checked(name, value, rules[name])
            for name, value in options.items()}
