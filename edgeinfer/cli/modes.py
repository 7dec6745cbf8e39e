"""Options with an effect, by mode of `plan`, `estimate` and `recommend`; all others are refused there.

Only flags are refused: a variable or the configuration file is for all commands, and a default says nothing. An option
that no mode names is refused by all of them, so that a new one cannot be forgotten here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import CPU, DEVICES
from ..errors import UsageError

if TYPE_CHECKING:
    from .options import Given

TECHNIQUES = "TECHNIQUES"
"""Stands for the options of all techniques."""
_HARMLESS = (CPU, "off")
"""Values that say the same as no option, where that has no default."""


class Mode(NamedTuple):
    """One way to use a command."""

    where: str
    """Its switch and what it does, as they are in a sentence."""
    uses: frozenset[str]
    """Parameters of the command with an effect."""


def _mode(where: str, uses: str, without: str = "") -> Mode:
    return Mode(where, frozenset(f"{uses} json help_all".split()) - frozenset(without.split()))


_KNOWN = "machine unit program bandwidth cores machine_class memory"
_STORED = "model weights group_size"
_RUN = f"{_STORED} ctx kv budget recipe n {TECHNIQUES}"
_PLANNED = (f"{_RUN} beams max_tokens threads prefill_chunk kv_memory state_memory kv_layout mlock no_mmap serve "
            "max_sequences link html")
_LENGTHS, _DRAFTED = "prompt answer", "draft acceptance draft_tokens speculate"
_ONE_DEVICE = (f"{_RUN} {_KNOWN} storage {_LENGTHS} {_DRAFTED} accepted draft_cost users goodput energy "
               "sparsity rows explain plot html link")
MODES: dict[str, dict[str, Mode]] = {
    "plan": {
        "list": _mode("with --list, which lists the built-in shapes of models", "listed"),
        "prefill": _mode("with --prefill-device, which plans one replica that computes prompts",
                         f"prefill_device {_STORED} machine bandwidth cores machine_class memory ctx budget threads "
                         "prefill_chunk"),
        "compare": _mode("with --compare, which compares all types of weights on one device",
                         f"compare html model {_KNOWN} ctx budget"),
        "nodes": _mode("with --nodes, which plans the layers on the machines that it names",
                       f"nodes link {_STORED} ctx kv budget n {TECHNIQUES} beams max_tokens state_memory "
                       "prefill_chunk no_mmap"),
        "serve": _mode("with --serve, which plans for the requests of many",
                       f"{_PLANNED} {_KNOWN} device storage max_kld", without="n beams max_tokens link html"),
        "here": _mode("on this machine", f"{_PLANNED} device max_kld"),
        "device": _mode("with --device, where onnxruntime runs the model", f"{_PLANNED} device",
                        without="state_memory"),
        "machine": _mode("for a machine that is named or described", f"{_PLANNED} {_KNOWN} storage"),
        "card": _mode("on a card, whose own memory holds all weights", f"{_PLANNED} {_KNOWN}"),
    },
    "estimate": {
        "nodes": _mode("with --nodes, which compares the machines that it names for one sequence",
                       f"nodes link {_STORED} ctx kv budget {_LENGTHS} {TECHNIQUES}"),
        "all": _mode("with --all-devices, which prints one line per device",
                     f"all_devices {_RUN} unit program storage prompt accepted draft_cost sparsity rows"),
        "here": _mode("on this machine", f"{_ONE_DEVICE} max_kld"),
        "machine": _mode("for a machine that is named or described", _ONE_DEVICE),
    },
    "recommend": {
        "model": _mode("with --all-devices and MODEL, which lists the devices for one model",
                       "all_devices model min_speed unit program ctx"),
        "all": _mode("with --all-devices, which lists known devices", "all_devices min_speed use unit program ctx"),
        "one": _mode("without --all-devices, where models are recommended for one device",
                     f"{_KNOWN} min_speed use ctx"),
    },
}
"""The modes of each command, by name."""
NEEDS: dict[str, dict[str, str]] = {
    "plan": {"max_sequences": "serve", "link": "nodes", "html": "compare"},
    "estimate": {"goodput": "users", "rows": "sparsity", "acceptance": "draft", "draft_tokens": "draft",
                 "draft_cost": "accepted", "link": "nodes"},
    "recommend": {},
}
"""Options without effect unless another is given."""
_SAME, _ONE = "both set the tokens of a pass", "drafts are predicted for one sequence"
_FORMULAS = "the formulas are of one token of one sequence"
PAIRS: dict[str, dict[str, str]] = {
    "plan": {},
    "estimate": {"draft speculate": _SAME, "draft accepted": _SAME, "speculate accepted": _SAME,
                 "draft n": _ONE, "speculate n": _ONE, "explain n": _FORMULAS, "explain accepted": _FORMULAS,
                 "explain draft": _FORMULAS, "draft draft_cost": "the time that a draft model takes is predicted",
                 "users n": "each user asks for one answer",
                 "users speculate": "the speed for users is predicted without prompt lookup"},
    "recommend": {},
}
"""Options that exclude each other, and why."""


def check_mode(command: str, name: str, given: Given) -> None:
    """Refuse flags that have no effect in a mode of a command, or that exclude each other.

    Raises
    ------
    UsageError
        With the first such flag, the mode and the remedy.
    """
    mode, said = MODES[command][name], dict(_said(given))
    for one, flag in said.items():
        if one not in mode.uses and not (one in given.techniques and TECHNIQUES in mode.uses):
            raise UsageError(f"{flag} has no effect {mode.where}; leave {'one' if 'with --' in mode.where else 'it'} "
                             "out.")
    for pair, why in PAIRS[command].items():
        first, second = pair.split()
        if first in said and second in said:
            raise UsageError(f"{said[first]} and {said[second]} exclude each other: {why}; leave one out.")
    for one, other in NEEDS[command].items():
        needed = _parameter(given, other)
        if one in said and given.context.params[other] in (None, needed.default):
            value = "" if needed.is_flag else f" {needed.metavar.removesuffix(',...')}"
            raise UsageError(f"{said[one]} requires {_name(needed)}{value}.")


def _said(given: Given) -> Iterator[tuple[str, str]]:
    """Yield the parameters to which the command line gives another value than the default, and how they are written."""
    for one in given.context.command.params:
        name, value = str(one.name), given.context.params.get(one.name)
        if given.by_flag(name) and value not in (one.default, *_HARMLESS):
            written = _name(one) if value is True else f"{_name(one)} {_written(value)}"
            yield ("machine" if name == "device" and value not in DEVICES else name), written


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value!s:.80}" or "''"


def _parameter(given: Given, name: str) -> Any:
    return next(one for one in given.context.command.params if one.name == name)


def _name(parameter: Any) -> str:
    """Return the longest flag of a parameter, or the word for an argument."""
    return max(parameter.opts, key=len) if parameter.opts[0].startswith("-") else str(parameter.metavar)
