"""The signature of the callbacks that long work reports to; the command line draws it (edgeinfer/cli/progress.py)."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int, str], None]
"""Called with (stage, done, total, item). The total is 0 where it is not known, and may grow."""
Counted = Callable[[int, int, str], None]
"""A `Progress` of one stage, as `partial(progress, stage)` gives it: called with (done, total, item)."""
