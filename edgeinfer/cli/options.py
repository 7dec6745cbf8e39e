"""Turn the table of options into parameters of a command, and given values into the command's values."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from types import SimpleNamespace
from typing import Annotated, Any, Optional

import typer

from .. import registry
from ..base.validation import checked
from ..config import CPU, DEVICES, SAMPLING, RuntimeConfig
from ..errors import UsageError
from ..registry import COMMANDS, OPTIONS, SERVING, Option, of_command
from .help import REST, show_all
from .output import say

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="GGUF file or checkpoint directory (converted once into the cache), bundle, ollama:NAME, known name, or "
             "id on the hub.",
        show_default=False,
    ),
]
_CONVERTED = typer.Argument(
    metavar="MODEL", show_default=False,
    help="Bundle, or a checkpoint, known name or hub id that was converted before; nothing is converted here.")
Converted = Annotated[str, _CONVERTED]
MaybeConverted = Annotated[str | None, _CONVERTED]


def option(*flags: str, metavar: str | None = None, help: str, group: str = "", hidden: bool = False,
           variable: str | None = None, show_default: bool = True) -> Any:
    """Declare an option of one command, under a heading of its help."""
    return typer.Option(*flags, metavar=metavar, help=help, rich_help_panel=group or None, hidden=hidden,
                        envvar=variable or None, show_envvar=False, show_default=show_default)


def annotation(one: Option, command: str = "") -> Any:
    """Return the annotation of a command's parameter for an option of the table or of a technique.

    Without a command it is under no heading.
    """
    default = one.unset or ("" if one.kind is bool or one.default is None else f"{one.default:g}"
                            if isinstance(one.default, float) else str(one.default))
    text = one.help + (f"  [default: {default}]" if default else "")
    if one.several:
        text += f"  [env var: {one.variable}, one text]" if one.shared else ""
    panel = "" if not command else one.group if command in one.common else REST + one.group
    declared = option(*filter(None, (one.short, one.flag)), metavar=one.metavar or None, help=text, group=panel,
                      variable="" if one.several else one.variable, show_default=False)
    kind: Any = list[str] if one.several else one.kind
    return Annotated[kind if one.default is not None else Optional[kind], declared]  # noqa: UP045


def _of_table(name: str) -> Option:
    return next(one for one in OPTIONS if one.name == name)


Json, Threads = annotation(_of_table("json")), annotation(_of_table("threads"))
Weights, GroupSize = annotation(_of_table("weights")), annotation(_of_table("group_size"))
"""Options that commands beside those of the table have too."""


def source(context: typer.Context, name: str) -> str:
    """Return where a parameter's value is from: COMMANDLINE, ENVIRONMENT or DEFAULT."""
    found = context.get_parameter_source(name)
    return found.name if found else ""


class Given(SimpleNamespace):
    """Values of a command's options by name, checked by their rules, and where each came from.

    Attributes
    ----------
    context : typer.Context
    techniques : dict
        Values of the options of techniques, by name.
    """

    context: typer.Context
    techniques: dict[str, Any]

    def by_flag(self, name: str) -> bool:
        """Return whether the flag was given."""
        return source(self.context, name) == "COMMANDLINE"

    def by_variable(self, name: str) -> bool:
        """Return whether the value is of its variable: a value for all commands contradicts no flag of one."""
        return source(self.context, name) == "ENVIRONMENT"

    @property
    def flags(self) -> frozenset[str]:
        """Names of the options that were given as flags."""
        return frozenset(filter(self.by_flag, vars(self)))

    def runtime(self, **more: Any) -> RuntimeConfig:
        """Return the settings of the run, techniques included; `more` are fields that the options do not say.

        A recipe or KV type is checked here, so this comes before anything is opened.
        """
        named = {one.name: getattr(self, one.name) for one in fields(RuntimeConfig)
                 if one.name != "techniques" and hasattr(self, one.name)}
        if hasattr(self, "no_mmap"):
            named["mmap"] = not self.no_mmap
        return registry.configured(
            RuntimeConfig(**{**named, "budget_bytes": getattr(self, "budget", None), **more}), self.techniques)

    def kv_on(self, device: str) -> str | None:
        """Return the type of the KV cache that was requested; None for the own type of a device other than cpu: the
        default of cpu, also where it is in the variable, is none that others have.
        """
        return self.kv if device == CPU or self.kv != RuntimeConfig.kv or self.by_flag("kv") else None

    def stored(self, model: str | None) -> tuple[str | None, int | None]:
        """Return type and group size of the weights; where variables say them, bundles stay as they are stored."""
        asked = [name for name in ("weights", "group_size") if getattr(self, name) is not None]
        if asked and model and not any(map(self.by_flag, asked)):
            from ..bundle import is_bundle
            from ..models import DEMO

            if model == DEMO or is_bundle(os.path.expanduser(model)):
                return None, None
        return self.weights, self.group_size


NOTHING: Any = None
"""Default of a parameter `given`, which always gets its values."""


def takes(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command, by its name, its options of the table and those of all techniques.

    They are where its parameter `given` is, which gets their values.
    """
    like = COMMANDS[0] if command in SERVING else command
    of_techniques = tuple(registry.options(like))
    known = (*of_command(command), *of_techniques)

    def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in signature.parameters.values()
               if one.name != "given"]
        parameters = [_parameter("context", typer.Context), *own,
                      *(_parameter(one.name, annotation(one, like), one.default) for one in _sorted(known)),
                      *_further(known)]

        @wraps(function)
        def called(**values: Any) -> Any:
            values.pop("help_all")
            return function(**{one.name: values.pop(one.name) for one in own},
                            given=_given(values.pop("context"), known, of_techniques, values))

        del called.__wrapped__  # typer would ask it for its parameters
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return with_options


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _sorted(known: tuple[Option, ...]) -> list[Option]:
    """Return options by the headings of the help."""
    groups = [one.group for one in OPTIONS]
    return sorted(known, key=lambda one: groups.index(one.group))


def _further(known: tuple[Option, ...]) -> list[inspect.Parameter]:
    """Return ``--help-all``, and ``--device`` as it named machines once, where that has no other meaning."""
    more = [_parameter("help_all", Annotated[bool, typer.Option(
        "--help-all", is_eager=True, callback=show_all,
        help="Show all options and their environment variables.")], False)]
    if {one.name for one in known} & {"machine", "device"} == {"machine"}:
        more.append(_parameter("device", Annotated[Optional[str], option(  # noqa: UP045
            "--device", metavar="NAME", help="Former name of --machine.", hidden=True,
            variable=_of_table("device").variable)], None))
    return more


def _given(context: typer.Context, known: tuple[Option, ...], of_techniques: tuple[Option, ...],
           values: dict[str, Any]) -> Given:
    """Check the values of options; a variable gives way to a flag that it contradicts."""
    given = Given(context=context, techniques={}, **values)
    if "device" in values:
        _name_machine(given, {one.name for one in known})
    for one in known:
        value = getattr(given, one.name)
        if one.several:
            variable = os.environ.get(one.variable) if one.shared else None
            value = value or ([variable] if variable else [])
        elif value is not None and not (one.of and given.by_variable(one.name)):
            value = checked(one.flag, value, one.rule)
        if one.of and getattr(given, one.of) in (None, "off") and given.by_variable(one.name):
            value = None
        setattr(given, one.name, value)
    given.techniques = {one.name: getattr(given, one.name) for one in of_techniques}
    return given


def _name_machine(given: Given, known: set[str]) -> None:
    """Take a machine that `--device` names, as it once did, for `--machine`, and say so."""
    named, by_flag = given.device, given.by_flag("device")
    if named in (None, *DEVICES):
        if "device" not in known and by_flag:
            raise UsageError(f"--device {named} selects an executor, and estimate is for hardware; give --machine NAME "
                             "('edgeinfer devices' lists names).")
        return
    if by_flag and not named.strip():
        raise UsageError(f"--device is {named!r}; give one of {', '.join(DEVICES)}, or a machine by --machine NAME.")
    where = f"--device {named}" if by_flag else f"EDGEINFER_DEVICE={named}"
    if "machine" in known and given.machine is None:
        say(f"{where} names a machine; write --machine {named}, or set EDGEINFER_MACHINE.")
        given.machine, given.device = named, None
    elif not by_flag:
        given.device = None
    elif "machine" in known:
        raise UsageError(f"{where} and --machine {given.machine} both name a machine; leave --device out.")


SAMPLES = "n"
"""Option of requests for several answers."""


def agreeing(given: Given, asked: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Return the options of a request without those that are in variables, or are defaults, and contradict flags.

    Beams and settings of sampling exclude each other, and a chat shows its text as it grows.
    """
    sampled = [name for name in SAMPLING if given.by_flag(name) and (name, asked[name]) != ("temperature", 0)]
    if not given.by_flag("beams") and (chat or sampled):
        asked = {**asked, "beams": 1}
    if not given.by_flag(SAMPLES) and (chat or asked["beams"] > 1):
        asked = {**asked, SAMPLES: 1 if chat else min(asked[SAMPLES], asked["beams"])}
    if asked["beams"] == 1:
        return {name: value for name, value in asked.items() if name != "length_penalty" or given.by_flag(name)}
    if sampled:
        flag = next(one.flag for one in OPTIONS if one.name == sampled[0])
        raise UsageError(f"{flag} {asked[sampled[0]]} applies to sampling, and --beams does not sample; "
                         "use one or the other.")
    return {name: value for name, value in asked.items() if name not in SAMPLING}


def searching(given: Given) -> int:
    """Return the beams; if a variable asks for them, they give way to flags that beam search does not support."""
    gives_way = not given.by_flag("beams") and registry.samples(given.techniques, given.flags)
    return 1 if gives_way else given.beams
