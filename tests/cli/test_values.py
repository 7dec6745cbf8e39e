"""Values that the command line reads by itself: the results and refusals are those of typer's own validators."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any, get_type_hints

import pytest
import typer

from edgeinfer.cli.app import COMMANDS, make_app
from edgeinfer.cli.values import plain, read_plainly
from edgeinfer.errors import UsageError
from tests.helpers.command_line import ROOT, environment

TEXTS = ("", "x", "7", "-7", "+7", "007", "1_000", " 7", "7 ", "0x10", "9" * 15, "9" * 40, "7.0", ".5", "5.", "1e-3",
         "1e3", "1E3", "-1.5", "nan", "inf", "-inf", "true", "no", "a b", "\u0663", "é", "a" * 200)
pytestmark = pytest.mark.usefixtures("no_variables")
NAMES = [name for name in reversed(COMMANDS) if name != "cache"]


def made(command: Any, arguments: list[str]) -> Any:
    """Parse the arguments: return the values of all parameters, or the message of the refusal."""
    try:
        return {name: repr(value) for name, value in command.make_context("x", list(arguments)).params.items()}
    except Exception as error:
        refused = isinstance(error, UsageError) or type(error).__name__ == "BadParameter"
        return "refused" if refused else (type(error).__name__, str(error))


@functools.cache
def first() -> dict[tuple[object, ...], str]:
    """Name the command that tries all texts with an option; the others that have it try some of them."""
    found: dict[tuple[object, ...], str] = {}
    for name in NAMES:
        command = typer.main.get_command(make_app([name])).commands[name]
        for p in command.params:
            found.setdefault(key(p, command), name)
    return found


def key(p: Any, command: Any) -> tuple[object, ...]:
    """Tell options apart by the inputs of their parsing: name, variable, type, and callbacks."""
    return p.opts[-1], p.envvar, repr(get_type_hints(command.callback).get(p.name)), getattr(p.callback, "__name__", "")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_every_option_reads_every_text_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (typer.main.get_command(make_app([name])).commands[name] for _ in range(2))
    read_plainly(ours)
    needed = ["a"] * sum(p.required for p in theirs.params if p.param_type_name == "argument")
    needed += [word for p in theirs.params if p.required and p.param_type_name == "option" for word in (p.opts[0], "a")]
    flags = [p for p in theirs.params if p.param_type_name == "option"]
    cases = [needed, [], ["a"], ["a", "b"], ["a", "b", "c"], ["--", "-a", "b"], [*needed, "--help-me"]]
    cases += [[*needed, flag.opts[-1]] for flag in flags]
    texts = {flag.name: TEXTS if first()[key(flag, theirs)] == name else TEXTS[::5] for flag in flags}
    cases += [[*needed, flag.opts[-1], text] for flag in flags if not flag.is_flag for text in texts[flag.name]]
    cases += [[*needed, flag.opts[0], "1", flag.opts[0], "2"] for flag in flags if not flag.is_flag]
    for case in cases:
        assert made(ours, case) == made(theirs, case), case
    for flag in flags:
        for text in texts[flag.name] if flag.envvar else ():
            with monkeypatch.context() as patch:
                patch.setenv(str(flag.envvar), text)
                assert made(ours, needed) == made(theirs, needed), (flag.envvar, text)
    print(f"{name}: {len(cases)} command lines")


def test_what_takes_more_than_a_glance_is_left_to_typer() -> None:
    assert [plain(int, text) for text in ("12", "-3", "1_2", "1.0", "9" * 16)] == [12, -3, None, None, None]
    assert [plain(float, text) for text in ("12", "-.5", "1e-3", "nan", "1_0.5")] == [12.0, -0.5, 1e-3, None, None]
    assert plain(str, "") == "" and plain(bool, True) is True and plain(bool, "1") is None


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("arguments", [
    ["run", "demo", "x", "-n", "2", "--temp", "0.5", "--stop", "a", "--json"], ["plan", "demo", "--ctx", "64"],
    ["eval", "demo", "--text", "LICENSE", "--tokens", "2"],
])
def test_plain_values_need_no_library_of_validators(arguments: list[str]) -> None:
    """Those of typer's newer versions; and no command but the one that was asked for is imported."""
    code = ("import contextlib, sys\nfrom edgeinfer.cli import main\n"
            "with contextlib.suppress(SystemExit):\n    main(sys.argv[1:])\n"
            "others = ['pydantic', 'rich', 'edgeinfer.cli.commands.bench', 'edgeinfer.cli.commands.convert']\n"
            "others += ['edgeinfer.cli.commands.devices']\n"
            "print(*[name for name in others if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment(), capture_output=True,
                          text=True, check=True)
    assert done.stdout.splitlines()[-1] == "", done.stdout
