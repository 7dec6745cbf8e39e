"""A stage in a process of its own, which is started here and spoken to through its standard input and output."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

from edgeinfer import errors
from edgeinfer.base.process import check_process, python_command
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.errors import ClosedError, EdgeInferError
from edgeinfer.runner import Cancellation
from edgeinfer.runtime import Rows

from ..base.files import os_errors
from . import wire
from .calls import Part, StageInfo
from .stage import Stage

WAIT_SECONDS = 0.02
"""Longest wait before a cancellation is looked at again."""
END_SECONDS = 5.0
"""Time in which a process whose input is closed ends by itself."""
Answer = tuple[dict[str, Any], Rows | None]


class ProcessStage(Stage):
    """A stage in another process of this machine, which ends when this one and its forks have, however they end.

    Parameters
    ----------
    path : Path
        The bundle.
    config : RuntimeConfig
    first, last : int
        Its layers.
    command : of str, optional
        Starts a process that `worker.serve` runs in.

    Raises
    ------
    EdgeInferError
        As `StageSession`, by `wait`: the process opens its session meanwhile.
    """

    def __init__(self, path: Path, config: RuntimeConfig, first: int, last: int,
                 command: Sequence[str] = ()):
        self._layers, self._opener = (first, last), os.getpid()
        self._sent, self._closed, self._lock = 0, False, threading.Lock()
        self._answers: SimpleQueue[Answer | EdgeInferError | None] = SimpleQueue()
        with os_errors(EdgeInferError, f"The process for the layers {first}-{last} cannot be started"):
            worker, path_of_python = python_command("edgeinfer.pipeline.worker")
            self._process = subprocess.Popen(  # in a session of its own: Ctrl-C on a terminal is for this process
                command or worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                env={**os.environ, "PYTHONPATH": path_of_python})
        self.where = f"process {self._process.pid}"
        assert self._process.stdin and self._process.stdout
        self._to: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True,
                                        name="edgeinfer-stage")
        self._reader.start()
        self._opening = self._send("start", [str(path), plain_config(config), first, last])

    def wait(self) -> None:
        """Return when the stage is open; raises the error of opening it."""
        self.info = StageInfo(*self._answer(self._opening)[0]["answer"])

    @property
    def lost(self) -> bool:
        """True if the process has ended."""
        return not self._closed and self._process.poll() is not None

    def ask(self, name: str, *arguments: Any) -> Any:
        """Make a call and wait for its answer."""
        return self._answer(self._send(name, arguments, answers=True))[0]["answer"]

    def post(self, name: str, *arguments: Any) -> None:
        """Make a call; its error is raised by the next answer."""
        self._send(name, arguments)

    def start(self, part: Part, given: Rows | None) -> None:
        """Send a part; samples and the functions that prepare them stay here."""
        segments = [segment[:5] for segment in part.segments]
        self._started = self._send("run", [segments, part.offset, part.begins], given, answers=True)

    def finish(self, cancel: Cancellation | None) -> Rows:
        """Wait for the rows."""
        rows = self._answer(self._started, cancel)[1]
        assert rows is not None
        return rows

    def give_up(self) -> None:
        """Let all parts that were sent end; their answers are passed over."""
        self._send("cancel", [self._sent])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._opener != os.getpid():  # a fork: the process is its parent's
            return
        with suppress(OSError):
            self._to.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, name: str, arguments: Any, rows: Rows | None = None, answers: bool = False) -> int:
        check_process(self._opener)
        self._sent += 1
        try:
            wire.send(self._to, {"number": self._sent, "call": name, "with": arguments, "answer": answers}, rows)
        except (OSError, ValueError):  # it has ended, or the stage was closed
            raise self._ended() from None
        except BaseException:  # half of a message may have been sent, and no later one would be understood
            self._process.kill()
            raise
        return self._sent

    def _answer(self, number: int, cancel: Cancellation | None = None) -> Answer:
        """Wait for the answer to a call; those to earlier calls, which were given up, are passed over."""
        told = False
        while True:
            if cancel is not None and cancel.asked and not told:
                told = True
                self._send("cancel", [number])
            try:
                answer = self._answers.get(timeout=WAIT_SECONDS if cancel is not None and not told else None)
            except Empty:
                continue
            if answer is None or isinstance(answer, EdgeInferError):
                self._answers.put(answer)  # the next call raises it, too
                raise answer or self._ended()
            if answer[0]["number"] != number:
                continue
            if "error" in answer[0]:
                raise error_of(*answer[0]["error"])
            return answer

    def _ended(self) -> EdgeInferError:
        first, last = self._layers
        if self._closed:
            return ClosedError("The model was closed.")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return EdgeInferError(f"The process of the layers {first}-{last} has ended (exit code "
                              f"{self._process.returncode}); open the model again.")


def _read(stream: BinaryIO, answers: SimpleQueue[Answer | EdgeInferError | None]) -> None:
    """Put messages into a queue, and last the error that ended them."""
    end: EdgeInferError | None = None
    try:
        with stream:
            while (message := wire.receive(stream)) is not None:
                answers.put(message)
    except EdgeInferError as error:
        end = error
    except OSError:  # as the end of the stream
        pass
    finally:
        answers.put(end)


def plain_config(config: RuntimeConfig) -> dict[str, Any]:
    """Return the settings as a JSON object; a stage has no techniques."""
    given = {one.name: getattr(config, one.name) for one in fields(config) if one.name != "techniques"}
    return {**given, "recipe": str(config.recipe)}


def config_of(given: dict[str, Any]) -> RuntimeConfig:
    """Return the settings that `plain_config` wrote."""
    return RuntimeConfig(**{**given, "recipe": Recipe.parse(given["recipe"])})


def error_of(name: str, message: str) -> EdgeInferError:
    """Return an error of another process as the class that it has here."""
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, EdgeInferError) else EdgeInferError(message)
