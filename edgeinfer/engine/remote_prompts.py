"""Prompts whose KV blocks come from another process, and are written between the steps of other requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ClosedError, EdgeInferError, RequestError

if TYPE_CHECKING:
    from ..runner import Runner, Sequence

WRITE_SECONDS = 0.002
"""Time that writing may take between two steps; a plane is written whole."""


class RemotePrompt:
    """A prompt that comes.

    Parameters
    ----------
    ids : its tokens

    Attributes
    ----------
    sequence, taken : Sequence or None
        Its blocks; those that its request has.
    error : EdgeInferError or None
        Reason for which its blocks were freed.
    """

    def __init__(self, ids: Items[int]):
        self.ids = ids
        self.sequence: Sequence | None = None
        self.taken: Sequence | None = None
        self.error: EdgeInferError | None = None


class Part(NamedTuple):
    """Blocks of a prompt; None frees them."""

    prompt: RemotePrompt
    data: bytes | memoryview | None
    told: Callable[[], object]
    """Called when they are written, or will not be."""


class RemotePrompts:
    """Prompts that come. Its methods but `put` belong to the thread that runs the model."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._parts: deque[Part] = deque()
        self._held: list[RemotePrompt] = []
        self._writing: Iterator[None] | None = None

    @property
    def waiting(self) -> bool:
        """True if parts are to be written."""
        return bool(self._parts)

    def put(self, part: Part) -> None:
        """Let a part be written; from any thread."""
        self._parts.append(part)

    def write(self) -> None:
        """Write parts for a short time, one plane at least."""
        until = time.perf_counter() + WRITE_SECONDS
        while self._parts:
            part = self._parts[0]
            try:
                if not self._written(part, until):
                    return
            except EdgeInferError as error:
                self._give_back(part.prompt, error)
            self._parts.popleft()
            self._writing = None
            part.told()

    def _written(self, part: Part, until: float) -> bool:
        """Write a part or give its prompt back; returns whether time was left for all of it."""
        prompt = part.prompt
        if part.data is None:
            self._give_back(prompt, RequestError("The prompt did not come."))
        elif prompt.error is None:
            if prompt.sequence is None:
                prompt.sequence = self._runner.new_sequence()
                self._held.append(prompt)
            if self._writing is None:
                self._writing = self._runner.write_blocks(prompt.sequence, part.data, prompt.ids)
            for _ in self._writing:
                if time.perf_counter() > until:
                    return False
        return True

    def take(self, prompt: RemotePrompt) -> Sequence | None:
        """Return the sequence of a prompt that has come whole, which is the caller's from then on."""
        sequence = prompt.sequence
        if sequence is None or not sequence.tokens:
            return None
        self._held.remove(prompt)
        prompt.sequence, prompt.taken = None, sequence
        return sequence

    def keep(self, prompt: RemotePrompt | None, sequence: Sequence) -> bool:
        """Take a sequence back whose request cannot begin yet; returns whether it is that of the prompt."""
        if prompt is None or prompt.taken is not sequence:
            return False
        prompt.sequence, prompt.taken = sequence, None
        self._held.append(prompt)
        return True

    def give_back_one(self) -> bool:
        """Free the blocks of the latest prompt, which is computed here instead; returns whether there was one."""
        if not self._held:
            return False
        self._give_back(self._held[-1], RequestError("Requests that run needed its KV blocks."))
        return True

    def close(self) -> None:
        """Notify all waiting callers that no part will be written."""
        while self._parts:
            part = self._parts.popleft()
            part.prompt.error = ClosedError("The model was closed; open it again.")
            part.told()

    def _give_back(self, prompt: RemotePrompt, error: EdgeInferError) -> None:
        prompt.error = prompt.error or error
        if prompt.sequence is not None:
            self._held.remove(prompt)
            sequence, prompt.sequence = prompt.sequence, None
            if self._parts and self._parts[0].prompt is prompt:
                self._writing = None
            self._runner.release(sequence)
