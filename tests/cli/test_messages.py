"""Messages: values that are too long for a sentence, names of models that are unknown or known by their shape alone."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from edgeinfer import bench
from edgeinfer.errors import BudgetError, EdgeInferError, UsageError, shortened
from edgeinfer.graph import builtin_shapes
from edgeinfer.models import KNOWN_NAMES
from tests.helpers.command_line import edgeinfer

LONG = "x" * 20_000
WORDS = "a word " * 3_000
MOST = 900
"""Characters of a message, its limits and remedies included."""


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "probe_machine", None, raising=False)


@pytest.mark.slow(keep=24)
@pytest.mark.parametrize("value", [LONG, WORDS])
@pytest.mark.parametrize("arguments", [
    ("plan", "VALUE"), ("run", "VALUE", "x"), ("convert", "VALUE", "there"), ("info", "VALUE"), ("verify", "VALUE"),
    ("estimate", "VALUE"), ("plan", "demo", "--ctx", "VALUE"), ("plan", "demo", "--budget", "VALUE"),
    ("plan", "demo", "--kv", "VALUE"), ("plan", "demo", "--weights", "VALUE"), ("plan", "demo", "--machine", "VALUE"),
    ("plan", "demo", "--recipe", "VALUE"), ("plan", "demo", "--VALUE"), ("bench", "--shape", "VALUE"),
    ("bench", "demo", "-p", "VALUE"), ("run", "demo", "x", "--temp", "VALUE"), ("eval", "demo", "--text", "VALUE"),
    ("cache", "clear", "VALUE"), ("devices", "VALUE"), ("devices", "m1-max", "--plot", "VALUE"), ("VALUE",),
    ("devices", "--probe", "--plot", "VALUE.svg"), ("estimate", "demo", "--accepted", "VALUE"),
])
def test_a_long_value_leaves_the_message_a_sentence(arguments: tuple[str, ...], value: str) -> None:
    done = edgeinfer(*(argument.replace("VALUE", value) for argument in arguments))
    assert done.code in (1, 2) and done.out == ""
    assert len(done.sentence) <= (MOST if value == LONG else 2 * MOST + 100)  # unquoted words are cut as a whole


def test_what_is_shortened_and_what_is_not() -> None:
    plain = "The model's file is longer than the layers' tables say, which the device's memory cannot hold. " * 4
    assert shortened(plain) == plain and shortened("short " + LONG[:300]) == "short " + LONG[:300]
    assert shortened(f"kv is {LONG!r}; choose one of int8, f16.") == (
        f"kv is '{'x' * 49}[... 19902 characters ...]{'x' * 49}'; choose one of int8, f16.")
    assert shortened(f"{WORDS!r} is not a size: {plain}").endswith(f" is not a size: {plain}")
    assert len(shortened("no quotes, no end: " + WORDS)) < 1700
    assert str(UsageError(LONG)) == shortened(LONG) == str(pickle.loads(pickle.dumps(UsageError(LONG))))
    assert str(BudgetError("small", None, 5)) == "small" and str(EdgeInferError()) == ""


@pytest.mark.slow(keep=20)
@pytest.mark.parametrize("name", sorted(set(builtin_shapes()) - set(KNOWN_NAMES)))
def test_a_known_shape_is_not_answered_with_another_model(name: str) -> None:
    """`run` needs weights: the message names commands that do without, and a remedy."""
    sentence, shape = edgeinfer("run", name.upper(), "Once").sentence, builtin_shapes()[name]
    without = "" if shape.family else " without weights,"
    assert sentence.startswith(f"'{name.upper()}' is a built-in shape{without} for 'edgeinfer plan ")
    assert sentence.endswith(f"edgeinfer does not run models of its family, {shape.family}." if shape.family else
                             f"or its id on the hub, {shape.source}.")


def test_an_unknown_name_gets_a_few_names_and_the_command_that_lists_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("run", "plan", "estimate", "convert"):
        weights = command in ("run", "convert")
        sentence = edgeinfer(command, "zzzzzz", *(("x",) if weights else ("--machine", "m1"))).sentence
        listing = "edgeinfer models" if weights else "edgeinfer plan --list"
        assert f"'{listing}' lists" in sentence and len(sentence) < 300
    assert "did you mean 'llama-3.2-1b'" in edgeinfer("run", "llama-3.2-1", "x").sentence
    listed = edgeinfer("plan", "--list", "--json").json["models"]
    assert [item["name"] for item in listed] == list(builtin_shapes())
    shown = edgeinfer("plan", "--list").out.splitlines()
    assert {line.split()[0] for line in shown if line} > set(builtin_shapes()) and max(map(len, shown)) <= 90
    assert edgeinfer("plan").sentence.startswith("Missing argument 'MODEL'")


def test_what_a_terminal_would_obey_is_spelt_out() -> None:
    assert str(UsageError("name \x1b[2J\n\ud800 and ä is wrong.")) == "name \\x1b[2J\\n\\ud800 and ä is wrong."
