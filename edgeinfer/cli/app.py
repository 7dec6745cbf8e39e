"""The commands together, and the handling of errors: one sentence and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core

from ..base import process
from ..base.validation import similar
from ..errors import DestinationError, EdgeInferError, UsageError, shortened
from . import settings
from .help import with_headings
from .output import alternative_object, print_json, say
from .program import SENTENCES, Terminated, interruptible
from .values import read_plainly

COMMANDS = {
    "run": "Continue a text, answer a message, or chat.",
    "serve": "Serve models over HTTP.",
    "batch": "Answer a file of requests.",
    "chat": "Chat with a model that a server runs.",
    "models": "List the models on this machine that edgeinfer finds.",
    "pull": "Download a model and convert it into the cache.",
    "rm": "Delete the converted bundles of a model.",
    "ps": "List running edgeinfer processes, with their model and memory.",
    "info": "Describe a bundle or a GGUF file.",
    "plan": "Print a model's memory and speed, and whether it fits.",
    "estimate": "Predict the speed of a model on this or another machine.",
    "recommend": "Recommend models for a device, or devices for a speed.",
    "devices": "List the known devices, show one, or measure this machine.",
    "bench": "Measure the speed of a model.",
    "eval": "Measure perplexity on a text, and divergence from a reference.",
    "convert": "Convert a checkpoint or GGUF file to a bundle.",
    "sparsify": "Create a bundle whose FFNs skip inactive neurons.",
    "export": "Export a model to ONNX.",
    "verify": "Verify all checksums of a bundle.",
    "embed": "Print the embeddings of texts, one JSON object per line.",
    "warmup": "Compile the kernels for this machine.",
    "cache": "List or delete converted models and compiled kernels.",
    "config": "Show and change the defaults of options.",
    "cluster": "Join machines to a Ray cluster, for batch --ray and serve --ray.",
}
"""The commands and how their help begins, so that the list of them imports none."""
MEMBERS = {"eval": "evaluate", "cache": "app", "config": "app", "cluster": "app"}
"""Commands whose functions, or groups of commands, have another name."""
MODULES = dict.fromkeys(("pull", "rm", "ps"), "local")
"""Modules of commands that share one."""
EXIT_FAILED, EXIT_USAGE = 1, 2
COMPLETION = "_EDGEINFER_COMPLETE"
"""Variable with which a shell asks for completions."""
TYPER_INTERRUPTED = 130
"""Exit code of newer versions of typer after Ctrl-C; older ones raise `Abort`. Our commands return 0 or 1."""
HELP = """Run language models on this machine.

\b
edgeinfer run demo "Once upon a time"      continue a text with the embedded model
edgeinfer run model-Q4_K_M.gguf            chat with a model, on a terminal
edgeinfer models                           list the models on this machine
edgeinfer plan llama-3.1-8b                memory and speed of a model, before a download
"""
EPILOG = """\b
'edgeinfer COMMAND --help' shows the options that most people need, --help-all the rest. Options mean the same in
every command; environment variables (EDGEINFER_TEMP for --temp) and 'edgeinfer config' set their defaults.
Sizes are written 4GiB or 500MB. EDGEINFER_CACHE sets the cache directory, EDGEINFER_ISA the instruction set;
EDGEINFER_DEBUG=1 prints tracebacks of errors.
Exit codes: 0 done; 1 failed or interrupted; 2 wrong usage; 3 does not fit the memory budget.
"""


HEADED = with_headings(typer.core.TyperCommand)


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the application with its commands, or with some of them: each module takes its time to import."""
    app = _without_commands()
    for name in names:
        module = import_module(f".commands.{MODULES.get(name, name)}", __package__)
        command = getattr(module, MEMBERS.get(name, name))
        if isinstance(command, typer.Typer):
            for inner in command.registered_commands:
                inner.cls = HEADED
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=HEADED)(command)
    return app


def make_listing() -> typer.Typer:
    """Return the application as far as its own help shows it."""
    app = _without_commands()
    for name, help in COMMANDS.items():
        app.command(name, help=help)(_without_commands)
    return app


def _without_commands() -> typer.Typer:
    app = typer.Typer(
        name="edgeinfer", help=HELP, epilog=EPILOG, add_completion=True, rich_markup_mode=None,
        pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_program)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"edgeinfer {__version__}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def execute(arguments: list[str]) -> int:
    """Run the command that the arguments name and return its exit code."""
    if arguments[:1] == ["models"] and arguments[1:2] and arguments[1] in MODULES and not os.path.isdir(arguments[1]):
        arguments = arguments[1:]  # models pull, models rm, models ps
    process.reports_json = _wants_json(arguments)
    command: Any = None
    try:
        with interruptible():
            if arguments[:1] not in ([], ["config"], ["--help"], ["-h"], ["--version"]):
                settings.apply()
                process.reports_json = _wants_json(arguments)
            command = _command(*arguments[:1])
            result = command.main(args=arguments or ["--help"], prog_name="edgeinfer", standalone_mode=False)
            sys.stdout.flush()
            if result == TYPER_INTERRUPTED:
                raise KeyboardInterrupt
    except BaseException as error:
        if os.environ.get("EDGEINFER_DEBUG") == "1" and not isinstance(error, SystemExit):
            import traceback

            traceback.print_exc()
        return _failed(error, _wants_json(arguments), command)
    finally:
        settings.withdraw()
    return result if isinstance(result, int) else 0


@cache
def _command(first: str = "") -> Any:
    """Return the program with the command that is the first argument; otherwise with all, or their list if that does.

    A process that runs many, such as a test, makes each once.
    """
    if first in COMMANDS:
        app = make_app([first])
    else:
        app = make_app() if first == "--" or COMPLETION in os.environ else make_listing()
    command = typer.main.get_command(app)
    read_plainly(command)
    return command


def _failed(error: BaseException, as_json: bool, command: Any) -> int:
    """Report an error and return its exit code."""
    if isinstance(error, SystemExit):
        if isinstance(error, Terminated):
            say(SENTENCES[signal.SIGTERM])
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    if isinstance(error, BrokenPipeError):  # the reader has closed the output, as in `| head`
        return EXIT_FAILED
    code, message, exit_code = _described(error, command)
    message = shortened(message)
    if as_json:
        with contextlib.suppress(DestinationError, OSError):  # it may be standard output that failed
            _print_error(error, code, message)
    else:
        _print_plan(error)
    say(message)
    return exit_code


def _described(error: BaseException, command: Any) -> tuple[str, str, int]:
    """Return code, sentence and exit code of an error."""
    if isinstance(error, EdgeInferError):
        return error.code, str(error), error.exit_code
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "cancelled", "Interrupted.", EXIT_FAILED
    if hasattr(error, "format_message"):  # typer's usage errors, whose class has moved between its versions
        return UsageError.code, _usage_sentence(error, command), EXIT_USAGE
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return EdgeInferError.code, f"{where}{error.strerror or error}.", EXIT_FAILED
    if isinstance(error, MemoryError):
        return EdgeInferError.code, "Out of memory; lower --ctx or --budget.", EXIT_FAILED
    text = " ".join(str(error).split())
    return "internal", (
        f"An unexpected error, which is a bug: {type(error).__name__}: {text} (EDGEINFER_DEBUG=1 shows where)."
    ), EXIT_FAILED


def _usage_sentence(error: Any, command: Any) -> str:
    """Return typer's message as one sentence with the nearest name and where to read more."""
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption":
        name = error.option_name
        known = [flag for parameter in context.command.params for flag in parameter.opts] if context else []
        near = similar(name, known)
        message = f"There is no option {name}" + (f"; did you mean {near[0]}?" if near else ".")
    elif message.startswith("No such command"):
        group = context.command if context else command
        typed = message.split("'")[1]
        near = similar(typed, list(group.commands))
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(sorted(group.commands))}."
        message = f"There is no command {typed!r}; {hint}"
    where = context.command_path if context else "edgeinfer"
    return f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} See '{where} --help'."


def _print_error(error: BaseException, code: str, message: str) -> None:
    plan = getattr(error, "plan", None)
    report: dict[str, Any] = {"error": {"code": code, "message": message}}
    if plan is not None:
        report["fits"] = False
        report["regions"] = [{"name": region.name, "bytes": region.bytes} for region in plan.regions]
        report["total_bytes"] = plan.total_bytes
        report["budget_bytes"] = getattr(error, "budget_bytes", None)
        if plan.device_bytes:
            report["device_bytes"] = plan.device_bytes
            report["device_budget_bytes"] = getattr(error, "device_budget_bytes", None)
        report["alternatives"] = [alternative_object(option) for option in getattr(error, "alternatives", ())]
    print_json(report)


def _print_plan(error: BaseException) -> None:
    """Print the memory plan that did not fit."""
    plan = getattr(error, "plan", None)
    if plan is not None:
        from .output import plan_lines

        for line in plan_lines(plan):
            print(line, file=sys.stderr)


def _wants_json(arguments: list[str]) -> bool:
    """Return whether the answer is to be JSON, also where the arguments cannot be understood."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in before or os.environ.get("EDGEINFER_JSON", "").lower() in ("1", "true", "t", "yes", "y", "on")
