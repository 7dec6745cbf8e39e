"""Help of a command: options under headings, and --help-all, which shows those that --help leaves out."""

from __future__ import annotations

import re
from typing import Any

import typer

REST = "+"
"""Text before the heading of options that only ``--help-all`` shows."""
_SHOW_ALL = "edgeinfer.help_all"


def show_all(context: typer.Context, wanted: bool) -> None:
    """Print the help with all options and end, if ``--help-all`` is given."""
    if wanted:
        context.meta[_SHOW_ALL] = True
        print(context.get_help())
        raise typer.Exit


def _help_line(parameter: Any, context: Any) -> tuple[str, str] | None:
    """Return name and help of a parameter; the environment variable is a part of ``--help-all`` alone."""
    if not (line := parameter.get_help_record(context)):
        return None
    name, text = line[0], line[1].partition("  [env var: ")[0]
    if parameter.param_type_name == "argument":
        name = re.sub(r" <\S+>$", "", name)  # newer versions of typer name the type of Python
    if parameter.envvar and context.meta.get(_SHOW_ALL):
        text = f"{text[:-1]}; " if text.endswith("]") else f"{text}  ["
        text += f"env: {parameter.envvar}]"
    return name, text


def _help_panels(command: Any, context: Any, formatter: Any) -> None:
    """Write arguments and options of a command under their headings."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    ends: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        panel = getattr(parameter, "rich_help_panel", None) or "Options"
        if panel.startswith(REST) and not context.meta.get(_SHOW_ALL):
            continue
        if line := _help_line(parameter, context):
            panel = "Arguments" if parameter.param_type_name == "argument" else panel.removeprefix(REST)
            (ends if parameter.name in ("help", "help_all") else panels.setdefault(panel, [])).append(line)
    panels.setdefault("Help" if len(panels) > 2 else "Options", []).extend(ends)
    for panel, lines in panels.items():
        if lines:
            with formatter.section(panel):
                formatter.write_dl(lines)


def with_headings(kind: type) -> type:
    """Return typer's class of commands with options under headings in the help, and options whose value may be left
    out: those whose metavar is in brackets get an empty text then.
    """
    def parse_args(self: Any, context: Any, arguments: list[str]) -> Any:
        optional = {flag for one in self.params if (one.metavar or "").startswith("[") for flag in one.opts}
        values = [f"{given}=" if given in optional and following[:1] in ("", "-") else given
                  for given, following in zip(arguments, [*arguments, ""][1:], strict=True)]
        return kind.parse_args(self, context, values)  # type: ignore[attr-defined]

    return type("Command", (kind,), {"format_options": _help_panels, "parse_args": parse_args})
