"""The command line: one file per command. Contract: docs/reference/cli.md."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # mypy takes it for true; importing typing would take time
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main"]

GARBAGE_OBJECTS = 100_000
"""New objects after which Python looks for cycles: more than a short run makes, which would wait 20 ms for it."""
LONG_RUNS = ("serve", "batch")
"""Commands that leave this as it is by default: cycles would grow to 18 MB in a server."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and leave the process with its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments after the program's name. By default those of this process; then the process is the
        program's own, from its standard streams to its end, and otherwise its caller's, who gets a `SystemExit`.
    """
    if arguments is not None:
        from .app import execute

        sys.exit(execute(list(arguments)))
    if not sys.argv[1:] or sys.argv[1] not in LONG_RUNS:
        gc.set_threshold(GARBAGE_OBJECTS)
    try:
        from .program import leave, open_streams, watch_signals

        watch_signals()
    except KeyboardInterrupt:  # Ctrl-C before our handler was there
        os._exit(128 + 2)
    open_streams()
    from .app import execute

    leave(execute(sys.argv[1:]))
