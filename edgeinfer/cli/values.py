"""Values of options that can be read at a glance, without the validators of typer.

typer checks values, even for a plain string, with a library that takes longer to import than all else of the parser.
Plain texts, whole numbers and decimal numbers are read here; everything else, and everything that is to be refused, is
left to typer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import UsageError

NUMBERS = {int: "a whole number", float: "a number"}
"""Types of numbers, in words."""
_WHOLE, _DECIMAL = re.compile(r"-?[0-9]{1,15}"), re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e-?[0-9]{1,3})?")


def read_plainly(command: Any) -> None:
    """Let the parameters of a command, and of those in it, read plain values themselves."""
    for inner in getattr(command, "commands", {}).values():
        read_plainly(inner)
    hints = get_type_hints(command.callback) if command.callback else {}
    ordinary = command.get_params

    def get_params(context: Any) -> list[Any]:
        parameters = ordinary(context)  # with --help, which the command makes only then
        for parameter in parameters:
            if "process_value" not in vars(parameter):
                parameter.process_value = partial(_process, parameter.process_value, parameter,
                                                  *_kind(hints.get(parameter.name, bool)))
        return list(parameters)

    command.get_params = get_params


def plain(kind: Any, value: Any) -> Any:
    """Return the value of an option as bool, str, int, float or path; None if that takes more than a glance."""
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind is Path and isinstance(value, str):  # no parameter asks for more of one than its name
        return Path(value)
    if kind is int and isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if kind is float and isinstance(value, str) and _DECIMAL.fullmatch(value):
        return float(value)
    return None


def _process(ordinary: Callable[[Any, Any], Any], parameter: Any, kind: Any, several: bool, context: Any,
             value: Any) -> Any:
    """Return the result of the parameter's own `process_value`."""
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "DEFAULT" and not parameter.required:
        read = () if value is None and several else value
    else:
        items = [plain(kind, item) for item in (value if several and isinstance(value, (list, tuple)) else [value])]
        if None in items:
            try:
                return ordinary(context, value)
            except Exception as error:
                if kind not in NUMBERS or type(error).__name__ != "BadParameter":
                    raise
                name = parameter.envvar if source and source.name == "ENVIRONMENT" else max(parameter.opts, key=len)
                raise UsageError(f"{name} is {value!r:.80}; it must be {NUMBERS[kind]}.") from None
        read = items if several else items[0]
    return parameter.callback(context, parameter, read) if parameter.callback else read


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether there may be several."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) is list:
        return kinds[0], True
    return _kind(kinds[0]) if len(kinds) == 1 else (hint, False)
