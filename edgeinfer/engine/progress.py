"""The text of a request while it grows, for a client that looks whenever it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .candidate import Delta
from .generation import Generation

if TYPE_CHECKING:
    from .completion import Completion
    from .request import Request


class Progress:
    """Reads the samples of a request; unread parts stay in them, so a slow client costs no memory.

    Parameters
    ----------
    request : of a `Generation`; its `every_step` makes the engine call `on_event` when there is something to read
    """

    def __init__(self, request: Request[Completion]):
        assert isinstance(request.task, Generation)
        self._samples = request.task.samples
        self._marks = [(0, 0)] * len(self._samples)
        self._ended = [False] * len(self._samples)
        request.every_step = True

    def read(self) -> list[Delta]:
        """Return the new parts, one delta at most for each sample; the last of a sample has its finish reason."""
        found = []
        for i, sample in enumerate(self._samples):
            if self._ended[i]:
                continue
            delta, *mark = sample.since(*self._marks[i])
            self._marks[i] = (mark[0], mark[1])
            self._ended[i] = bool(delta.finish_reason)
            if delta.text or delta.logprobs or delta.finish_reason:
                found.append(delta)
        return found
