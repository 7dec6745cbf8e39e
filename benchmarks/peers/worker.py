"""The other side of the protocol: workers as child processes that take turns, stopped while it is not theirs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any


class WorkerError(Exception):
    """A worker that failed, ended or was too slow; the message has its name and its last words."""


class Worker:
    """A child process that answers one JSON object with another. A context manager.

    Between requests it is stopped by a signal: no spinning thread of one side can slow the other.

    Parameters
    ----------
    name : str
        For messages.
    command : list of str
    timeout : float
        Most seconds for an answer, unless a request says otherwise.
    join : callable, optional
        Called in the child before the command begins, such as `ControlGroup.join` of benchmarks/outside.py.
    """

    def __init__(self, name: str, command: list[str], timeout: float = 1800, join: Callable[[], None] | None = None):
        self.name, self._timeout = name, timeout
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (until close)
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                             stderr=self._errors, encoding="utf-8", preexec_fn=join)
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"{name} cannot be started ({command[0]}: {error.strerror}).") from None
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def ask(self, do: str, timeout: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Wake the worker, send a request, wait for its answer, and stop it again.

        Raises
        ------
        WorkerError
        """
        self._signal("SIGCONT")
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout or self._timeout)
        except (BrokenPipeError, OSError):
            line = ""
        except queue.Empty:
            self._process.kill()  # whatever keeps it busy, nobody waits for it any more
            raise WorkerError(f"{self.name} has not answered {do!r} in {timeout or self._timeout:g} s.") from None
        if not line:
            raise WorkerError(f"{self.name} ended during {do!r}: {self._last_words()}")
        self._signal("SIGSTOP")
        try:
            answer = json.loads(line)
        except ValueError:
            raise WorkerError(f"{self.name} answered {do!r} without valid JSON: {line.strip()[:80]!r}") from None
        if "error" in answer:
            raise WorkerError(f"{self.name} cannot {do}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the worker, if need be by force."""
        self._signal("SIGCONT")
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _signal(self, name: str) -> None:
        if hasattr(signal, name) and self._process.poll() is None:  # Windows has no such signals
            os.kill(self._process.pid, getattr(signal, name))

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}"
