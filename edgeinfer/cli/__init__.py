"""The command line: one file per command. Contract: docs/cli.md."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]

GARBAGE_OBJECTS = 50_000
"""New objects after which Python looks for cycles; its own 700 cost a short run time in each import."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave the process with its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the program's name; by default what this process was started with.
    """
    gc.set_threshold(GARBAGE_OBJECTS)
    from .app import execute

    sys.exit(execute(list(sys.argv[1:] if arguments is None else arguments)))
