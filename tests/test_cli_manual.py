"""docs/reference/cli.md agrees with the program's help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from edgeinfer.cli.app import COMMANDS as PROGRAM
from edgeinfer.cli.app import make_app, make_listing
from edgeinfer.registry import COMMANDS, GROUPS, OPTIONS, of_command
from tests.helpers.command_line import edgeinfer
from tests.make_manual import commands, environment, json_fields, manual

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == manual(), "run: python -m tests.make_manual"
    variables = PAGE.with_name("environment.md").read_text(encoding="utf-8")
    assert variables == environment(), "run: python -m tests.make_manual"


def test_every_flag_of_help_is_on_the_page() -> None:
    page = manual()
    names = re.findall(r"^## edgeinfer (cache \w+|\w+)", page, re.MULTILINE)
    assert {"run", "convert", "info", "verify", "eval", "warmup", "cache list", "cache clear"} <= set(names)
    seen = 0
    for name in names:
        section = page.split(f"## edgeinfer {name}")[1].split("\n## ")[0]
        shown = edgeinfer(*name.split(), "--help")
        if "--help-all" in shown.out:
            shown = edgeinfer(*name.split(), "--help-all")
        assert shown.code == 0 and shown.err == ""
        flags = set(re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]+)", shown.out, re.MULTILINE))
        flags -= {"--help", "--help-all", "--json"}
        seen += len(flags)
        assert not [flag for flag in flags if flag not in section], name
    assert seen > 100


def test_every_command_with_json_names_its_fields() -> None:
    for name, command in commands(typer.main.get_command(make_app())):
        assert json_fields(name, command) or "--json" not in {flag for p in command.params for flag in p.opts}, name


def test_the_list_of_commands_is_that_of_the_commands_themselves() -> None:
    listed, every = (typer.main.get_command(make()).commands for make in (make_listing, make_app))
    assert {name: command.get_short_help_str(200) for name, command in every.items()} == PROGRAM == \
        {name: command.help for name, command in listed.items()}


def test_shared_flags_have_their_variables() -> None:
    page = manual()
    assert not [one.flag for one in OPTIONS if len(one.commands) > 1 and f"`{one.variable}`" not in page]
    names = "MAX_TOKENS CTX TEMP SEED STOP WEIGHTS GROUP_SIZE KV_LAYOUT PREFILL_CHUNK SAMPLES MACHINE"
    assert not [name for name in names.split() if f"`EDGEINFER_{name}`" not in page]


def test_help_shows_what_people_need_under_headings_and_help_all_the_rest() -> None:
    for command in COMMANDS:
        few, every = (edgeinfer(command, flag) for flag in ("--help", "--help-all"))
        assert few.code == every.code == 0
        for one in of_command(command):
            shown = re.compile(rf"^  (?:-\w, )?{one.flag}\b(?!-)", re.MULTILINE)
            assert shown.search(every.out), (command, one.flag)
            assert bool(shown.search(few.out)) == (command in one.common), (command, one.flag)
    few = edgeinfer("run", "--help").out
    headings = re.findall(r"^(\w+):$", few, re.MULTILINE)
    assert headings == ["Arguments", *GROUPS, "Help"]
    assert len(re.findall(r"^  (?:-\w, )?--[a-z]", few.split("\nHelp:")[0], re.MULTILINE)) == 21


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_and_completes(tmp_path: Path, shell: str) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": f"/bin/{shell}",
                   "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # which asks the parent: a shell, or not
    program = [sys.executable, "-m", "edgeinfer"]
    done = subprocess.run([*program, "--install-completion", shell], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "installed" in done.stdout, done.stderr
    assert any("_EDGEINFER_COMPLETE" in path.read_text() for path in tmp_path.rglob("*edgeinfer*"))
    asked = {**environment, "_EDGEINFER_COMPLETE": "complete_bash", "COMP_WORDS": "edgeinfer run --reci",
             "COMP_CWORD": "2"}
    assert subprocess.run(program, env=asked, capture_output=True, text=True).stdout.split() == ["--recipe"]
