"""A download and conversion in a process of its own, whose memory goes back to the system before the model runs.

So a run takes the planned memory, also if it converts first. The parent talks to the child through its pipes:
a request as the first line of standard input, where a second line asks it to stop and the end means that the parent
has died; progress and the outcome, each a line of JSON, on standard output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from edgeinfer import errors
from edgeinfer.base.process import python_command, say
from edgeinfer.base.progress import OnProgress
from edgeinfer.errors import EdgeInferError

STOP_SECONDS = 10.0
"""Argument by which a child is asked to remove its unfinished output."""


def convert_apart(
    source: str | Path, destination: Path, weights: str | None, group_size: int | None, *, hub: bool = False,
    origin: str = "", progress: OnProgress | None = None,
) -> list[str]:
    """Convert a checkpoint as `convert` does, over a bundle that is there; `hub`: `source` is an id, fetched first.

    Returns
    -------
    list of str
        Sentences for the user: remarks, and the errors of both steps where quantised weights were quantised again.

    Raises
    ------
    EdgeInferError
        As `fetch` and `convert`, or if the process was ended from outside.
    """
    request = {"source": os.fspath(source), "hub": hub, "destination": os.fspath(destination), "weights": weights,
               "group_size": group_size, "origin": origin}
    child, ended = _start(), False
    try:
        with suppress(OSError):  # of a child that has ended already, which is reported below
            child.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
        for line in child.stdout or ():
            what, content = json.loads(line)
            ended = what != "progress"
            if what == "done":
                return list(content)
            if what == "error":
                raise getattr(errors, content[0])(content[1])
            if what == "bug":
                raise RuntimeError(f"The process that converts {source} failed:\n{content}")
            if progress:
                progress(*content)
        ended = True
        raise EdgeInferError(f"The process that converts {source} was killed (exit code {child.wait()}); "
                             "the system may have been short of memory; try again.")
    finally:
        _end(child, ask=not ended)


def _start() -> subprocess.Popen[bytes]:
    """Start a child that finds edgeinfer where this process did, and nothing in the working directory.

    In a session of its own: Ctrl-C on a terminal reaches the parent, which asks the child to stop.
    """
    command, path = python_command("edgeinfer.converters.subprocess")
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
                            start_new_session=True)


def _end(child: subprocess.Popen[bytes], ask: bool) -> None:
    """End a child that has said its last word; one that has not is asked to stop and waited for."""
    try:
        if ask:
            with suppress(OSError):
                child.stdin.write(b"stop\n")  # type: ignore[union-attr]
                child.stdin.flush()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
    finally:
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        child.wait()


def main() -> int:
    """Perform the request; the outcome is the last line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries is not an answer
    commands = sys.stdin.buffer
    request = json.loads(commands.readline())

    def tell(what: str, content: Any = None) -> None:
        answers.write(json.dumps([what, content]).encode() + b"\n")
        answers.flush()

    threading.Thread(target=_obey, args=(commands,), daemon=True).start()
    try:
        outcome: tuple[str, Any] = ("done", _convert(request, lambda *content: tell("progress", content)))
    except EdgeInferError as error:
        outcome = "error", (type(error).__name__, str(error))
    except KeyboardInterrupt:
        return 1
    except OSError as error:
        outcome = "error", ("EdgeInferError", f"{error.filename or request['source']}: {error.strerror or error}.")
    except MemoryError:
        outcome = "error", ("EdgeInferError", f"The system has too little memory to convert {request['source']}.")
    except Exception:
        outcome = "bug", traceback.format_exc()
    tell(*outcome)
    return 0


def _convert(request: dict[str, Any], progress: OnProgress) -> list[str]:
    from .conversion import convert
    from .hub.download import fetch

    source = request["source"]
    if request["hub"]:
        source = fetch(source, progress=partial(progress, "download"))
    report = convert(source, request["destination"], weights=request["weights"], group_size=request["group_size"],
                     overwrite=True, origin=request["origin"], announce=say, progress=partial(progress, "convert"))
    return report.sentences


def _obey(commands: BinaryIO) -> None:
    """Wait for the parent: stop tidily on its word, or at once if it has died and its successor may start over."""
    if commands.readline():
        import _thread

        _thread.interrupt_main()
    else:
        os._exit(1)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:  # the parent's word may come at any moment
        code = 1
    sys.stderr.flush()
    os._exit(code)  # the thread that waits for the parent's word holds a lock that Python needs at its end
