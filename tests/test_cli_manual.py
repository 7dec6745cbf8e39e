"""docs/cli.md is what the program says about itself."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from edgeinfer.cli.app import make_app
from tests.command_line import edgeinfer
from tests.make_manual import commands, json_fields, manual

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == manual(), "run: python -m tests.make_manual"


def test_every_flag_of_help_is_on_the_page() -> None:
    page = manual()
    names = re.findall(r"^## edgeinfer (cache \w+|\w+)", page, re.MULTILINE)
    assert {"run", "convert", "info", "verify", "eval", "warmup", "cache list", "cache clear"} <= set(names)
    for name in names:
        section = page.split(f"## edgeinfer {name}")[1].split("\n## ")[0]
        shown = edgeinfer(*name.split(), "--help")
        assert shown.code == 0 and shown.err == ""
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown.out.split("Options:")[1])) - {"--help", "--json"}
        assert not [flag for flag in flags if flag not in section], name


def test_every_command_with_json_names_its_fields() -> None:
    for name, command in commands(typer.main.get_command(make_app())):
        assert json_fields(name, command) or "--json" not in {flag for p in command.params for flag in p.opts}, name


def test_shared_flags_have_their_variables() -> None:
    page = manual()
    names = "MAX_TOKENS CTX THREADS TEMP TOP_K TOP_P MIN_P SEED STOP KV BUDGET JSON"
    for name in names.split():
        assert f"`EDGEINFER_{name}`" in page
