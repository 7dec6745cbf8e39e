"""The user's configuration file: values of the options that have an environment variable, by the names of their flags.

A flag goes before its variable, a variable before the file, and the file before the default. The file's values are put
into the variables that are not set, so that commands treat both alike.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .. import registry
from ..base.cache_dir import user_directory
from ..base.validation import checked, similar
from ..errors import EdgeInferError, UsageError
from ..registry import OPTIONS, Option

VARIABLE = "EDGEINFER_CONFIG"
"""Moves the file; empty for none."""
MAX_BYTES = 1 << 20
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_from_file: set[str] = set()
"""Variables that hold values of the file."""


@cache
def known() -> dict[str, Option]:
    """Return the keys, names of flags without dashes, with their options."""
    found = {one.key: one for one in (*OPTIONS, *registry.options()) if one.shared and not one.several}
    return dict(sorted(found.items()))


def config_path() -> Path | None:
    """Return where the file is, or would be; None if `EDGEINFER_CONFIG` is empty."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given).expanduser() if given else None
    return user_directory("config") / "config.toml"


def origin(variable: str) -> str:
    """Return whether the value of a variable comes from the environment or from the file."""
    return "file" if variable in _from_file else "environment"


def read() -> dict[str, Any]:
    """Return the file's values by key; empty without a file.

    Raises `UsageError` for a file that is not valid TOML, an unknown key or a value of a wrong type.
    """
    path = config_path()
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"The configuration {path} cannot be read: {error.strerror or error}.") from None
    return parse(data, path)


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """Return the values of a file's content by key; raises as `read`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES} bytes")
        values = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The configuration {path} is not valid TOML ({error or 'nested too deeply'}); fix it with "
                         "'edgeinfer config edit'.") from None
    return {name: check(name, value, f" in {path}") for name, value in values.items()}


def check(name: str, value: Any, where: str = "") -> Any:
    """Return the value of a key as its type; raises `UsageError` with the nearest key, or with the permitted values."""
    if name not in known():
        near = similar(name.removeprefix("--").replace("_", "-"), known())
        hint = f"did you mean {near[0]}?" if near else "'edgeinfer config' lists the keys."
        raise UsageError(f"There is no key {name!r:.80}{where}; {hint}")
    kind = known()[name].kind
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UsageError(f"{name}{where} is {value!r:.80}; it must be {KINDS.get(kind, 'text')}.")
    if isinstance(value, str) and not value.isprintable():
        raise UsageError(f"{name}{where} is {value!r:.80}; it must be text without control characters.")
    checked(f"{name}{where}", value, known()[name].rule)
    return value


def apply() -> None:
    """Put the file's values into the variables that are not set."""
    for name, value in read().items():
        variable = known()[name].variable
        if not os.environ.get(variable):  # an empty one is taken as none
            os.environ[variable] = str(int(value)) if isinstance(value, bool) else str(value)
            _from_file.add(variable)


def withdraw() -> None:
    """Take the file's values out of the variables again."""
    while _from_file:
        os.environ.pop(_from_file.pop(), None)


def write(name: str, value: Any | None) -> Path:
    """Set a key in the file, or remove it; all other lines stay as they are.

    Raises `UsageError` if there is no file to write, and `EdgeInferError` where it cannot be written.
    """
    import json

    from ..base.files import os_errors, replacement

    path = config_path()
    if path is None:
        raise UsageError(f"{VARIABLE} is empty, which turns the configuration file off; unset it, or set it to a file.")
    before = read()
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if line.partition("=")[0].strip().strip("\"'") != name]
    if value is not None:
        text = str(value).lower() if isinstance(value, bool) else \
            json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        kept.append(f"{name} = {text}")
    data = "".join(f"{line}\n" for line in kept).encode()
    wanted = {key: old for key, old in before.items() if key != name} | ({} if value is None else {name: value})
    try:
        same = parse(data, path) == wanted
    except UsageError:
        same = False
    if not same:
        raise UsageError(f"{name} is written over several lines of {path}; change it with 'edgeinfer config edit'.")
    with os_errors(EdgeInferError, f"The configuration {path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path) as file:
            file.write(data)
    return path
