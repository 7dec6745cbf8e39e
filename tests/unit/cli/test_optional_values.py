"""Options whose value may be left out: those whose metavar is in brackets."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
import typer.core
from typer.testing import CliRunner

from edgeinfer.cli.help import with_headings

APP = typer.Typer()


@APP.command(cls=with_headings(typer.core.TyperCommand))
def command(source: str = "", run: Annotated[str | None, typer.Option("--run", metavar="[FILE]")] = None,
            flag: Annotated[bool, typer.Option("--flag")] = False) -> None:
    """Print the given values."""
    print(repr(run), flag)


@pytest.mark.parametrize("arguments, said", [
    ([], "None False"), (["--run"], "'' False"), (["--run", "--flag"], "'' True"),
    (["--run", "a.txt"], "'a.txt' False"),
    (["--run=a.txt"], "'a.txt' False"), (["--flag", "--run"], "'' True"),
])
def test_a_value_may_be_left_out(arguments: list[str], said: str) -> None:
    assert CliRunner().invoke(APP, arguments).output.strip() == said
