"""Reference pages: ``python -m tests.make_manual`` renews cli.md, environment.md and the tables of
devices.md and python.md in docs/reference."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import typer

from edgeinfer.cli.app import make_app
from edgeinfer.config import GenerationConfig
from edgeinfer.devices import profiles

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reference"

INTRODUCTION = """# Command line

This page is made from the program: `python -m tests.make_manual`.

MODEL is a bundle directory, a checkpoint directory (converted once into the cache, and again when its files change), a
known name (`demo` is embedded), or a model id on the hub (`owner/name`; downloaded and converted once). A directory
takes precedence over a name. Sizes are a number and a unit: `4GiB`, `500MB`.

Exit codes: 0 done; 1 failed, or interrupted with Ctrl-C; 2 wrong usage; 3 does not fit the memory budget (the plan is
printed); 130 Ctrl-C before a command began, 143 SIGTERM. A signal that is ignored at the start, as Ctrl-C is in the
background of a shell, stays ignored. A command fails if standard output is closed or full; errors of standard error are
ignored.

With `--json`, standard output receives one JSON object, and progress and statistics go to standard error. Times are in
milliseconds, sizes in bytes, shares from 0 to 1. An error is `{"error": {"code", "message"}}`, with `regions` and
`total_bytes` of the plan if it does not fit. Without `--json`, an error is one line on standard error;
`EDGEINFER_DEBUG=1` prints its traceback.

Options may also be given as [environment variables](environment.md) or in a configuration file.
"""

ENVIRONMENT = """# Environment variables

This page is made from the program: `python -m tests.make_manual`.

A flag overrides its variable, a variable overrides the configuration file (`edgeinfer config path` prints where it is).

## Of every process

| variable | meaning |
|---|---|
| `EDGEINFER_CACHE` | directory of converted checkpoints and compiled kernels |
| `EDGEINFER_CONFIG` | configuration file of the command line |
| `EDGEINFER_ISA` | instruction set to use instead of the best one |
| `EDGEINFER_LEARN=0` | keep this machine's profile as the probe saved it; runs do not change its constants |
| `EDGEINFER_CHECK=1` | compare every kernel call with its NumPy reference (slow) |
| `EDGEINFER_DEBUG=1` | show where errors come from |

## Of options

Options without a value are 1 or 0. `EDGEINFER_STOP` holds one text.

| variable | option | commands |
|---|---|---|
"""


def environment() -> str:
    """Return the page of environment variables: those of the process, then those of options by name."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    for name, command in commands(typer.main.get_command(make_app())):
        for parameter in command.params:
            for variable in [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []:
                flags, names = found.setdefault(variable, (set(), []))
                flags.add(max(parameter.opts, key=len))
                names.append(name)
    rows = [f"| `{variable}` | {', '.join(f'`{flag}`' for flag in sorted(flags))} | {', '.join(names)} |"
            for variable, (flags, names) in sorted(found.items())]
    return ENVIRONMENT + "\n".join(rows) + "\n"


def manual() -> str:
    """Return the manual as Markdown."""
    parts = [INTRODUCTION]
    for name, command in commands(typer.main.get_command(make_app())):
        parts.append("\n".join(_section(name, command)))
    return "\n".join(parts)


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command of a group with its full name, those of groups inside it too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden
               and p.name != "help_all"]
    words = [p.metavar if p.required else f"[{p.metavar}]" for p in arguments]
    needed = [f"{max(p.opts, key=len)} {p.metavar}" for p in options if p.required]
    yield f"## {' '.join(['edgeinfer', name, *words, *needed])}\n"
    yield from _paragraphs(inspect.cleandoc(command.callback.__doc__ or ""))
    yield "| argument or option | meaning | default | variable |\n|---|---|---|---|"
    hints = get_type_hints(command.callback, include_extras=True)
    for parameter in (*arguments, *options):
        yield _row(parameter, getattr(hints.get(parameter.name), "__metadata__", [parameter])[0].help or "")
    yield ""
    fields = json_fields(name, command)
    if fields:
        yield "Fields of the JSON object:\n"
        for field, meaning in fields.items():
            yield textwrap.fill(f"* `{field}`: {meaning}", 118, subsequent_indent="  ", break_long_words=False,
                                break_on_hyphens=False)
        yield ""


def json_fields(name: str, command: Any) -> dict[str, str]:
    """Return the fields of a command's JSON object: JSON_FIELDS of its module, by the command's name."""
    module = sys.modules[command.callback.__module__]
    return dict(getattr(module, "JSON_FIELDS", {}).get(name, {}))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            lines = paragraph.splitlines()[2:]
            yield "```sh\n" + "\n".join(line.strip() for line in lines) + "\n```\n"
        else:
            yield paragraph + "\n"


def _row(parameter: Any, text: str) -> str:
    """Return a line of the table; `text` is the help as declared: older versions of typer lose that of arguments."""
    if parameter.param_type_name == "argument":
        name = parameter.metavar
    else:
        name = ", ".join(parameter.opts) + ("" if parameter.is_flag else f" {parameter.metavar}")
    text, _, default = text.partition("  [default: ")
    text, _, variable = text.partition("  [env var: ")
    default = default.rstrip("]") or _default(parameter)
    variable = variable.split(",")[0].rstrip("]") or (parameter.envvar or "")
    cells = [f"`{name}`", text, default, f"`{variable}`" if variable else ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(parameter: Any) -> str:
    """Return the default as text; none for flags and for what may be left out."""
    value = parameter.default
    if parameter.required or value is False or not isinstance(value, (str, int, float)):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def device_table() -> str:
    """Return all devices as a Markdown table, with where the bandwidth figures are from."""
    lines = ["| name | device | class | memory, GiB | GB/s | source | reached by decoding, GB/s | source |",
             "|---|---|---|---|---|---|---|---|"]
    for profile in profiles().values():
        sampled = "" if profile.effective_gbs is None else f"{profile.effective_gbs:g}"
        cells = [f"`{profile.name}`", profile.title, profile.device_class, f"{profile.memory_bytes / 2**30:g}",
                 f"{profile.bandwidth_gbs:g}", profile.sources["bandwidth_gbs"], sampled,
                 profile.sources.get("effective_gbs", "")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def request_table() -> str:
    """Return the fields of `GenerationConfig` as a Markdown table, each with the docstring under it."""
    [body] = (one.body for one in ast.parse(inspect.getsource(GenerationConfig)).body if isinstance(one, ast.ClassDef))
    lines = ["| option | default | meaning |", "|---|---|---|"]
    default = GenerationConfig()
    for one, below in itertools.pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            name, meaning = ast.unparse(one.target), " ".join(str(below.value.value).split())
            lines.append(f"| `{name}` | `{getattr(default, name)!r}` | {meaning} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "devices.md": ("devices", device_table), "python.md": ("request options", request_table),
}
"""Of each page that has one, the name of the table made here."""


def renewed(name: str) -> str:
    """Return a page of docs/reference with its table made again."""
    table, make = TABLES[name]
    begin, end = f"<!-- {table}: made by tests.make_manual -->\n", f"<!-- end of {table} -->\n"
    before, found, rest = (DOCS / name).read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    assert found and ended, f"{name} has no lines {begin.strip()!r} and {end.strip()!r}; put them where the table goes"
    return before + begin + make() + end + after


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(manual(), encoding="utf-8")
    (DOCS / "environment.md").write_text(environment(), encoding="utf-8")
    for name in TABLES:
        (DOCS / name).write_text(renewed(name), encoding="utf-8")
