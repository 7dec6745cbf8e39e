"""Each option of `plan`, `estimate` and `recommend` changes the answer of a mode, or is refused in it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import registry
from edgeinfer.cli.app import _command
from edgeinfer.cli.modes import MODES, NEEDS, TECHNIQUES
from tests.helpers.command_line import Outcome, edgeinfer

SHAPE, NODES = "llama-3.1-8b", ("--nodes", "rpi5 16gb,m4")
BASES: dict[str, tuple[str, ...]] = {
    "plan list": ("--list",),
    "plan prefill": (SHAPE, "--prefill-device", "cuda", "--machine", "rtx4090"),
    "plan nodes": (SHAPE, "--nodes", "rpi5 16gb,rpi5 16gb"),
    "plan compare": (SHAPE, "--compare", "--machine", "rtx4090"),
    "plan serve": (SHAPE, "--serve", "--machine", "rpi5 8gb"),
    "plan here": (SHAPE, "--budget", "20GiB"),
    "plan device": (SHAPE, "--device", "cuda", "--budget", "20GiB"),
    "plan machine": (SHAPE, "--machine", "m4 16gb"),
    "plan card": (SHAPE, "--machine", "rtx4090"),
    "estimate nodes": (SHAPE, *NODES),
    "estimate all": (SHAPE, "--all-devices"),
    "estimate machine": (SHAPE, "--machine", "m4 16gb"),
    "recommend model": (SHAPE, "--all-devices"),
    "recommend all": ("--all-devices",),
    "recommend one": ("--machine", "m4 16gb"),
}
"""A command line of each mode, but of estimates on this machine, which is not probed."""
ALL = ("estimate all", "recommend all", "recommend model")
NAMING = ("machine", "bandwidth", "cores", "machine_class", "memory", "unit", "program")
VALUES: dict[str, tuple[str, ...]] = {
    "model": ("qwen3-4b",), "weights": ("int8",), "group_size": ("64",), "device": ("onnx-cpu",), "machine": ("rpi4",),
    "unit": ("gpu",), "program": ("llama.cpp",), "storage": ("hdd",), "recipe": ("attention:top=64",),
    "max_tokens": ("9999",), "n": ("3",), "beams": ("3",), "ctx": ("3000",), "kv": ("f32",), "budget": ("7GiB",),
    "kv_memory": ("1GiB",), "state_memory": ("1GiB",), "mlock": (), "no_mmap": (), "kv_layout": ("pages",),
    "threads": ("7",), "prefill_chunk": ("64",), "max_kld": ("0",), "bandwidth": ("100",), "cores": ("8",),
    "machine_class": ("nvidia",), "memory": ("8GiB",), "serve": (), "compare": (), "listed": (), "nodes": ("rpi5,m4",),
    "max_sequences": ("40",), "link": ("10GbE",), "prefill_device": ("onnx-cpu",), "prompt": ("700",),
    "accepted": ("2.5",), "draft_cost": ("0.3",), "users": ("4",), "answer": ("99",), "goodput": ("ttft:500",),
    "draft": ("llama-3.2-1b",), "acceptance": ("0.4",), "draft_tokens": ("1",), "speculate": ("lookup",),
    "energy": (), "sparsity": ("0.8",), "rows": ("4KiB",), "explain": (), "all_devices": (), "min_speed": ("20",),
    "use": ("code",), "plot": ("a.svg",), "html": ("a.html",), "lazy": ("keep=0.7,0.5,0.35",),
    "lazy_layers": ("9,18,27",), "attention": ("top:64",), "sparse": ("predict",), "head": ("screened",),
}
"""A value of each option that is not its default."""
OTHERWISE: dict[tuple[str, str], tuple[str, ...]] = {
    **dict.fromkeys((("plan prefill", "machine"), ("plan card", "machine"), ("plan compare", "machine")), ("rtx3090",)),
    **{(f"plan {mode}", "speculate"): ("off",) for mode in ("here", "machine", "card", "device", "serve", "nodes")},
    ("plan device", "kv"): ("f32",),
}
"""Other values in some modes."""
ELSE: dict[str, dict[str, tuple[str, ...]]] = {
    "state_memory": {SHAPE: ("lfm2-1.2b",)}, "draft_tokens": {"--serve": ("--serve", "--max-sequences", "2")},
    "speculate": {"--serve": ("--serve", "--max-sequences", "2")},
}
"""Other words on the command line of an option."""
DESCRIBED = {"bandwidth": "90", "cores": "4", "machine_class": "laptop", "memory": "32GiB"}
SWITCHES = {"listed", "prefill_device", "nodes", "compare", "all_devices", "serve"}
"""Options that change the mode."""
SILENT = {
    "max_kld": "is for bundles with an approximation", "plot": "is its file", "html": "is its file",
    "storage": "is for weights that memory cannot hold", "kv_layout": "is for GPUs; processors have pages",
    "unit": "is for machines with several", "device": "is a former name of --machine",
}
"""Options that change the answer of other models and machines, and why."""


def _parameters(command: str) -> dict[str, Any]:
    return {str(one.name): one for one in _command(command).commands[command].params
            if one.name not in ("json", "help_all", "help")}


def _written(command: str, name: str, values: tuple[str, ...]) -> list[str]:
    """Return an option as it is given."""
    one = _parameters(command)[name]
    return [*([max(one.opts, key=len)] if one.opts[0].startswith("-") else []), *values]


def _uses(mode: str, name: str) -> bool:
    command, kind = mode.split()
    uses = MODES[command][kind].uses
    return name in uses or (TECHNIQUES in uses and name in {one.name for one in registry.options(command)})


def _without(words: list[str], flag: str) -> list[str]:
    """Return words without an option and its value."""
    if flag not in words:
        return words
    start = words.index(flag)
    end = start + 1 + (start + 1 < len(words) and not words[start + 1].startswith("-"))
    return words[:start] + words[end:]


@cache
def _answer(*words: str) -> Outcome:
    return edgeinfer(*words, "--json")


def _cases() -> Iterator[Any]:
    for mode in BASES:
        for name in _parameters(mode.split()[0]):
            slow = _uses(mode, name) and (mode in ALL or name == "plot")
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(mode, name, marks=marks, id=f"{mode} {name}")


@pytest.mark.parametrize("command", MODES)
def test_each_mode_has_a_command_line_and_each_option_a_value(command: str) -> None:
    assert {mode.split()[1] for mode in BASES if mode.split()[0] == command} == set(MODES[command]) - {"here"} | (
        {"here"} if command == "plan" else set())
    assert set(_parameters(command)) <= set(VALUES)
    for one in MODES[command].values():
        assert one.uses - {TECHNIQUES, "json", "help_all"} <= set(_parameters(command)), one


def test_estimates_on_this_machine_have_one_option_more() -> None:
    found = MODES["estimate"]
    assert found["here"].uses - found["machine"].uses == {"max_kld"} and found["machine"].uses <= found["here"].uses


@pytest.mark.parametrize(("mode", "name"), list(_cases()))
def test_no_option_is_silent(mode: str, name: str, tmp_path: Path) -> None:
    """It changes the answer or is refused; an option that no mode uses is refused by the name of its flag."""
    command, values = mode.split()[0], OTHERWISE.get((mode, name), VALUES[name])
    base = [word for given in BASES[mode] for word in ELSE.get(name, {}).get(given, (given,))]
    if name in DESCRIBED and _uses(mode, name):
        base = _without(base, "--machine")
        base += [word for one, value in DESCRIBED.items() for word in _written(command, one, (value,))]
    if (needed := NEEDS[command].get(name)) and _uses(mode, name):
        base = _without(base, "--" + needed) + _written(command, needed, VALUES[needed])
    asked = [str(tmp_path / word) if word in ("a.svg", "a.html") else word for word in _written(command, name, values)]
    rest = [word for word in base if word != SHAPE] if name == "model" else _without(base, asked[0])
    after = edgeinfer(command, *rest, *asked, "--json")
    if _uses(mode, name):
        assert after.code in (0, 3) or (after.code == 2 and "bug" not in after.err), after.err
        assert after.code == 2 or name in SILENT or name in SWITCHES or after.json != _answer(command, *base).json
    else:
        other = name in SWITCHES or (name in NAMING and "here" in mode) or (mode == "recommend all" and name == "model")
        assert after.code == 2 or other, after.out
