"""The signature of the callbacks that long work reports to; the command line draws it (edgeinfer/cli/progress.py)."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, int, int, str], None]
"""Called with (stage, done, total, item). The total is 0 if unknown, and may grow."""
OnStageProgress = Callable[[int, int, str], None]
"""`OnProgress` for one stage, as `partial(progress, stage)` gives it: called with (done, total, item)."""
OnPromptProgress = Callable[[int, int], None]
"""Called with (done, total) in tokens of a prompt."""
