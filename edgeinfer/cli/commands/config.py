"""`edgeinfer config`: the user's defaults, where each comes from, and changing them."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Annotated, Any

import typer

from ...errors import EdgeInferError, UsageError, printable
from ..options import Json
from ..output import folded, print_json, print_table
from ..settings import VARIABLE, check, config_path, known, read, write

JSON_FIELDS = {
    "config": {
        "path": "the file; null where EDGEINFER_CONFIG is empty",
        "settings": "per key that has a value: `key`, `value` and `origin` (a variable's name, or file)",
    },
}
"""Fields of the JSON object, by command."""
app = typer.Typer(rich_markup_mode=None, invoke_without_command=True,
                  context_settings={"help_option_names": ["-h", "--help"]})
Key = Annotated[str, typer.Argument(metavar="KEY", show_default=False, help="Name of a flag without dashes, such as "
                                                                            "temp or ctx.")]


@app.callback()
def show(command: typer.Context, json: Json = False) -> None:
    """Show and change the defaults of options.

    A flag overrides its environment variable (EDGEINFER_TEMP), a variable the file, and the file the built-in default.
    The file is TOML, with lines such as temp = 0.2; keys are named as the flags. EDGEINFER_CONFIG sets its path.

    \b
    Examples:
      edgeinfer config
      edgeinfer config set threads 2
    """
    if command.invoked_subcommand:
        return
    in_file, found = read(), list[tuple[str, str, str]]()
    for key, option in known().items():
        if given := os.environ.get(option.variable):  # an empty one is taken as none
            found.append((key, given, option.variable))
        elif key in in_file:
            found.append((key, str(in_file[key]), "file"))
    path = config_path()
    if json:
        settings = [{"key": key, "value": value, "origin": origin} for key, value, origin in found]
        print_json({"path": None if path is None else str(path), "settings": settings})
        return
    print(f"{path or 'none'}{'' if path and path.exists() else ' (there is no such file yet)'}\n")
    if found:
        print_table([("key", "value", "from"), *((key, printable(value), origin) for key, value, origin in found)])
        print()
    unset = [key for key in known() if key not in {one[0] for one in found}]
    print("\n".join(folded(f"{'Other keys' if found else 'Keys'}, at their built-in defaults: {', '.join(unset)}.")))
    print("'edgeinfer config set KEY VALUE' changes a default.")


@app.command("path")
def path_() -> None:
    """Print the path of the file."""
    print(_path())


@app.command("set")
def set_(key: Key, value: Annotated[str, typer.Argument(metavar="VALUE", show_default=False)]) -> None:
    """Set a default in the file."""
    kind = known()[key].kind if key in known() else str
    typed: Any = value
    if kind is bool and value.lower() in ("true", "false"):
        typed = value.lower() == "true"
    elif kind in (int, float):
        try:
            typed = kind(value)
        except ValueError:
            typed = value  # which is refused
    print(f"{key} is set in {write(key, check(key, typed))}.")


@app.command("unset")
def unset(key: Key) -> None:
    """Remove a default from the file."""
    if key not in read():
        check(key, None) if key not in known() else None
        raise UsageError(f"{key} is not in {_path()}; 'edgeinfer config' lists its keys.")
    print(f"{key} is no longer set in {write(key, None)}.")


@app.command("edit")
def edit() -> None:
    """Edit the file (with VISUAL or EDITOR), then check it."""
    path = _path()
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ("notepad" if os.name == "nt" else "vi")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode
    except (OSError, ValueError) as error:
        raise EdgeInferError(f"The editor {editor!r} cannot be started: {error}.") from None
    if code:
        raise EdgeInferError(f"The editor {editor!r} ended with the code {code}.")
    print(f"{path} sets {(n := len(read()))} default{'s' * (n != 1)}.")


def _path() -> Any:
    path = config_path()
    if path is None:
        raise UsageError(f"{VARIABLE} is empty, which turns the configuration file off; unset it, or set it to a file.")
    return path
