"""Progress of long work: one line that is rewritten on a terminal, two lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time

from ..sizes import format_size
from .output import say

STAGES = {
    "download": "downloading", "convert": "converting", "compile": "compiling kernels", "verify": "verifying",
    "look": "looking at models",
    "wait": "waiting", "export": "exporting", "lower": "lowering the model for onnxruntime",
    "evaluate": "evaluating", "write": "writing weights", "measure": "measuring", "load": "loading weights",
    "memory": "reading memory", "arithmetic": "multiplying", "storage": "reading storage",
    "capture": "reading activations", "factors": "computing predictors", "thresholds": "choosing thresholds",
        "ranks": "comparing ranks", "screen": "computing the screen",
    "price": "measuring divergence", "calibration": "running random models", "full load": "working at full load",
}
IN_BYTES = ("download", "convert", "verify", "write", "load", "export", "lower")
REPEAT_SECONDS = 0.1
SILENT_SECONDS = 0.3
"""What takes no longer is not worth a line."""
NEVER_SILENT = ("load",)
"""Stages that are told of only when there is much to do."""


class ProgressLine:
    """Shows (stage, done, total, item) on standard error. A context manager, which clears the line."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._stage = ""
        self._began = self._shown = 0.0
        self._width = 0

    def __call__(self, stage: str, done: int, total: int, item: str) -> None:
        """Tell how far a stage has come."""
        now = time.monotonic()
        if stage != self._stage:
            self._finish(now)
            self._stage, self._began, self._shown = stage, now, 0.0
        if now - self._began < SILENT_SECONDS and stage not in NEVER_SILENT:
            return
        if not self._rewrites and not self._shown:
            self._shown = now
            say(f"{STAGES.get(stage, stage)} ...")
        if self._rewrites and (now - self._shown >= REPEAT_SECONDS or done == total):
            self._shown = now
            self._rewrite(f"{STAGES.get(stage, stage)} {_share(stage, done, total)} {item}")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self._finish(time.monotonic())
        elif self._rewrites:
            self._rewrite("")

    def _finish(self, now: float) -> None:
        """End a stage with how long it took."""
        if self._shown:
            self._rewrite("")
            say(f"{STAGES.get(self._stage, self._stage)} took {now - self._began:.1f} s")
        self._stage, self._shown = "", 0.0

    def _rewrite(self, text: str) -> None:
        if not self._rewrites:
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:<{self._width}}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)
        self._width = len(text)


def _share(stage: str, done: int, total: int) -> str:
    if not total:
        return "..."
    percent = f"{100 * done // total:3d} %"
    if stage in IN_BYTES:
        return f"{percent} of {format_size(total)}"
    return f"{percent} ({done}/{total})"
