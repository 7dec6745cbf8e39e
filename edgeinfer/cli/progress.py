"""Progress of long work on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from ..base import process
from ..base.units import format_size
from .output import say, speed

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

STAGES = {
    "download": "downloading", "convert": "converting", "compile": "compiling kernels", "verify": "verifying",
    "look": "reading headers", "prompt": "reading the prompt",
    "wait": "waiting", "export": "exporting", "lower": "lowering the model for onnxruntime",
    "evaluate": "evaluating", "write": "writing weights", "measure": "measuring", "load": "loading weights",
    "memory": "reading memory", "arithmetic": "multiplying", "storage": "reading storage", "neurons": "measuring FFNs",
    "capture": "reading activations", "factors": "computing predictors", "thresholds": "choosing thresholds",
    "effects": "measuring effects of errors", "ranks": "comparing ranks", "screen": "computing the screen",
    "lambda": "measuring divergence", "calibration": "running random models", "full load": "working at full load",
    "answer": "answering requests",
}
WAITING = "waiting for the process that compiles the kernels"
IN_BYTES = ("download", "convert", "verify", "write", "load", "export", "lower")
IN_TOKENS, ONE_BY_ONE = ("prompt", "evaluate"), ("compile", "look", "calibration", "answer")
COUNTED = {"compile": " kernels", "prompt": " tokens", "evaluate": " tokens", "look": " models",
           "calibration": " models", "answer": " requests"}
"""Units of the stages that count something other than bytes and have a name for it."""
REPEAT_SECONDS, TICK_SECONDS, LINE_SECONDS = 0.1, 0.25, 10.0
"""Between two drawings of the bar, between two looks at the clock while nothing is reported, and between two lines."""
RATE_SECONDS = 10.0
"""Interval over which rates and the remaining time are computed."""
SILENT_SECONDS, TOLD_SECONDS = 0.3, 2.0
"""Durations below which no bar is shown, and below which no line is printed."""
PROMPT_SECONDS, JUDGED_SECONDS = 2.0, 0.5
"""Least predicted time of a prompt that gets a bar, and the time after which its first tokens predict it."""
NEVER_SILENT = ("load",)
"""Stages that are reported only when there is much to do."""
UNTOLD = ("prompt",)
"""Stages whose duration is reported elsewhere, or not at all."""


class ProgressLine:
    """Shows (stage, done, total, item) on standard error. A context manager, which clears the bar.

    A thread draws while nothing is reported, so that the clock continues within a long step; it starts with the first
    report. rich is imported when the first bar is drawn.
    """

    def __init__(self) -> None:
        self._draws = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._bar: Bar | None = None
        self._stage, self._done, self._total = "", 0, 0
        self._began = self._shown = self._heard = 0.0
        self._told: deque[tuple[float, int]] = deque()

    def __call__(self, stage: str, done: int, total: int, item: str) -> None:
        """Report how far a stage has come."""
        now = time.monotonic()
        with self._lock:
            if stage != self._stage:
                self._finish(now)
                self._stage, self._began = stage, now
                self._told.clear()
            if not self._told or now - self._told[-1][0] >= REPEAT_SECONDS:
                self._told.append((now, done))
            while stage != "prompt" and len(self._told) > 2 and now - self._told[1][0] >= RATE_SECONDS:
                self._told.popleft()
            self._done, self._total, self._heard = done, total, now
            if stage in UNTOLD and done >= total:
                self._finish(now)
            else:
                self._show(now)
            if self._stage and self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._ended.set()
        with self._lock:
            if kind is None:
                self._finish(time.monotonic())
            else:
                self._clear()
            self._stage = ""
        if thread := self._thread:
            thread.join(1)

    def _watch(self) -> None:
        """Draw again while nothing is reported, until there is nothing to draw."""
        while not self._ended.wait(TICK_SECONDS):
            with self._lock:
                if not self._stage:
                    self._thread = None
                    return
                self._show(time.monotonic())

    def _due(self, elapsed: float) -> bool:
        """Return whether a stage has taken, or will take, long enough to be shown."""
        if self._stage != "prompt":
            return elapsed >= (SILENT_SECONDS if self._draws else TOLD_SECONDS) or self._stage in NEVER_SILENT
        if not self._draws:
            return elapsed >= LINE_SECONDS
        expected = elapsed * self._total / self._done if self._done and elapsed >= JUDGED_SECONDS else 0.0
        return max(elapsed, expected) >= PROMPT_SECONDS

    def _show(self, now: float) -> None:
        """Draw the bar, or print a line, if it is time for that."""
        elapsed = now - self._began
        if not self._shown and not self._due(elapsed):
            return
        name = WAITING if self._stage == "compile" and not self._total else STAGES.get(self._stage, self._stage)
        if not self._draws:
            if not self._shown and self._stage not in UNTOLD:
                self._shown = now
                say(f"{name} ...")
            elif now - (self._shown or 0.0) >= LINE_SECONDS:
                self._shown = now
                say(f"{name}: {', '.join(filter(None, (self._share().strip(), *self._tuner(now))))}")
        elif now - self._shown >= REPEAT_SECONDS or self._done == self._total:
            if self._bar is None:
                self._bar = _bar()
                process.above = self._above
                self._bar.add_task(name, share="", rate="", left="")
                self._bar.start()
            self._shown = now
            rate, left = self._tuner(now)
            self._bar.update(self._bar.task_ids[0], description=name, completed=self._done,
                             total=self._total or None, share=self._share(), rate=rate, left=left)
            self._bar.refresh()

    def _share(self) -> str:
        """Return how much is done, of how much."""
        if not self._total:
            return ""
        if self._stage in ONE_BY_ONE:
            return f"{self._done:,} of {self._total:,}{COUNTED[self._stage]}"
        share = f"{100 * self._done // self._total:3d} %"
        if self._stage in IN_BYTES:
            return f"{share} of {format_size(self._total)}"
        return f"{share} of {self._total:,}{COUNTED[self._stage]}" if self._stage in COUNTED else share

    def _tuner(self, now: float) -> tuple[str, str]:
        """Return the rate of the last seconds, where it has a unit, and the time left, or the time taken so far."""
        heard = self._heard
        before, done = next((told for told in reversed(self._told) if heard - told[0] >= RATE_SECONDS), self._told[0])
        rate = (self._done - done) / (heard - before) if heard > before else 0.0
        if rate <= 0 or not self._total:
            return "", f"{_clock(now - self._began)} so far"
        seconds = (self._total - self._done) / rate
        seconds = max(seconds, self._left() if self._stage == "prompt" else 0.0) - (now - heard)
        left = f"{_clock(max(seconds, 1.0))} left"
        if self._stage in IN_BYTES:
            return f"{format_size(round(rate))}/s", left
        unit = "tok" if self._stage in IN_TOKENS else "requests" if self._stage == "answer" else ""
        return f"{speed(rate)} {unit}/s" if unit else "", left

    def _left(self) -> float:
        """Return the seconds that a prompt still takes: each token attends to all before it, so a parabola through the
        beginning, the middle and the latest report.
        """
        (start, first), (end, last) = self._told[0], self._told[-1]
        middle, half = min(self._told, key=lambda told: abs(2 * told[1] - first - last))
        x, y, whole = half - first, last - first, self._total - first
        if not 0 < x < y:
            return 0.0
        bend = max(((end - start) / y - (middle - start) / x) / (y - x), 0.0)
        return (whole - y) * ((end - start) / y - bend * y + bend * (whole + y))

    def _finish(self, now: float) -> None:
        """End a stage with how long it took."""
        self._clear()
        if self._shown and self._stage not in UNTOLD and now - self._began >= TOLD_SECONDS:
            say(f"{STAGES.get(self._stage, self._stage)} took {now - self._began:.1f} s")
        self._stage, self._shown = "", 0.0

    def _clear(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            process.above = None
            self._bar.stop()
            self._bar = None

    def _above(self, line: str) -> bool:
        """Print a line above the bar; False if the bar has ended."""
        with self._lock:
            if self._bar is None:
                return False
            self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)
            return True


def _bar() -> Bar:
    """Return a bar that leaves nothing behind and is drawn when it is told to."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=None)]
    columns += [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("share", "rate", "left")]
    return Progress(*columns, console=Console(file=sys.stderr, highlight=False), auto_refresh=False, transient=True,
                   redirect_stdout=False, redirect_stderr=False, expand=True)


def _clock(seconds: float) -> str:
    """Return a duration as a person reads it: ``42 s``, ``3:07``, ``1:02:03``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d}" if whole < 3600 else \
        f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
