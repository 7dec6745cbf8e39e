"""Run the command line in this process, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-m", "edgeinfer"]
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="extra 'plot' is not installed")


@dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on standard output."""
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The one line on standard error, without the program's name."""
        lines = without_stages(self.err).splitlines()
        assert len(lines) == 1 and lines[0].startswith("edgeinfer: "), self.err
        assert lines[0].endswith((".", "?")), lines[0]
        return lines[0].removeprefix("edgeinfer: ")


def without_stages(err: str) -> str:
    """Return what was said but for the stages that slow machines are told of."""
    from edgeinfer.cli.progress import STAGES

    stage = rf"edgeinfer: ({'|'.join(STAGES.values())})( \.\.\.| took [0-9.]+ s|: .*)|" \
        r"edgeinfer: compiling \d+ (more )?kernels? for .*"
    return "".join(line for line in err.splitlines(keepends=True) if not re.fullmatch(stage, line.rstrip("\n")))


def edgeinfer(*arguments: object, stdin: bytes = b"") -> Outcome:
    """Run a command in this process; standard input is a pipe."""
    from edgeinfer.cli import main

    out, err = io.StringIO(), io.StringIO()
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdin = before
    return Outcome(code, out.getvalue(), err.getvalue())


def environment(**variables: str) -> dict[str, str]:
    """This process' environment without our variables but the cache, and with the checkout on the path."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGEINFER_")}
    if "EDGEINFER_CACHE" in os.environ:
        kept["EDGEINFER_CACHE"] = os.environ["EDGEINFER_CACHE"]
    return kept | {"PYTHONPATH": str(ROOT), "EDGEINFER_CONFIG": "", **variables}


def listening() -> None:
    """Let a child hear Ctrl-C although the suite may be deaf to it, as in the background of a shell (`preexec_fn`)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def relative_cost(command: list[str], check: Callable[[subprocess.CompletedProcess[str]], None],
                  imports: str = "numpy, typer") -> float:
    """Processor time of a command over that of imports which it needs, in turns, best of several.

    Both have bytecode, which the command would otherwise make of all that it imports, each time.
    """
    import resource

    variables = environment()
    variables.pop("PYTHONDONTWRITEBYTECODE", None)

    def seconds(words: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, capture_output=True, text=True, env=variables, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if words is command:
            check(done)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    unit = [sys.executable, "-c", f"import {imports}"]
    seconds(command)  # makes bytecode
    pairs = [(seconds(command), seconds(unit)) for _ in range(3)]
    ratio = min(own for own, _ in pairs) / min(other for _, other in pairs)
    print(f"{ratio:.2f} times what the imports take")
    return ratio


def process(*arguments: object, stdin: bytes = b"", **variables: str) -> Outcome:
    """Run a command in a process of its own."""
    command = [*PYTHON, *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, env=environment(**variables), timeout=600)
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())
