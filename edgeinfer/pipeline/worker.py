"""The process of a stage: opens a session over its layers and carries out the calls that come through standard input.

It ends when its input does, so also when the process that started it has died.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, BinaryIO

from edgeinfer.bundle import Bundle
from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime import Rows, StageSession

from . import wire
from .calls import Part, StageCalls, StageSegment, Wish, as_error
from .process import config_of


class Worker:
    """Carries out messages in order; cancellations take effect as they come."""

    def __init__(self, source: BinaryIO, target: BinaryIO):
        self._source, self._target = source, target
        self._messages: SimpleQueue[tuple[dict[str, Any], Rows | None]] = SimpleQueue()
        self._failed: EdgeInferError | None = None
        self.given_up = 0
        """Number of the last message that was given up, with those before."""

    def run(self) -> None:
        """Open the session and process calls, until the process ends."""
        threading.Thread(target=self._read, daemon=True, name="edgeinfer-calls").start()
        opening, _ = self._messages.get()
        try:
            path, config, first, last = opening["with"]
            calls = StageCalls(StageSession(Bundle.open(path), config_of(config), first, last))
        except Exception as error:
            self._say(opening, as_error(error))
            return
        self._say(opening, calls.info())
        while True:
            message, rows = self._messages.get()
            try:
                answer, made = self._carry_out(calls, message, rows)
            except Exception as error:
                if message["answer"]:
                    self._say(message, as_error(error))
                else:
                    self._failed = self._failed or as_error(error)
                continue
            if message["answer"]:
                failed, self._failed = self._failed, None
                self._say(message, failed or answer, made)

    def _carry_out(self, calls: StageCalls, message: dict[str, Any], rows: Rows | None) -> tuple[Any, Rows | None]:
        name, arguments = message["call"], message["with"]
        if name == "run":
            segments, offset, begins = arguments
            part = Part([StageSegment(*one) for one in segments], offset, begins)
            return None, calls.run(part, rows, Wish(self, message["number"]))
        return calls.call(name, arguments), None

    def _say(self, message: dict[str, Any], answer: Any, rows: Rows | None = None) -> None:
        said = {"error": (type(answer).__name__, str(answer))} if isinstance(answer, EdgeInferError) else {
            "answer": answer}
        wire.send(self._target, {"number": message["number"], **said}, rows)

    def _read(self) -> None:
        try:
            while (message := wire.receive(self._source)) is not None:
                if message[0]["call"] == "cancel":
                    self.given_up = message[0]["with"][0]
                else:
                    self._messages.put(message)
        finally:
            os._exit(0)  # in the middle of a part, too: nobody is there to take it


def serve() -> None:
    """Run a stage on standard input and output, which libraries may no longer print to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        with suppress(BrokenPipeError):  # nobody is there any more
            Worker(sys.stdin.buffer, target).run()
        os._exit(0)
    finally:
        os._exit(1)  # the thread that reads holds a lock that Python needs at its end


if __name__ == "__main__":
    serve()
