"""Log-probabilities of given continuations of a prompt: one request, one continuation after the other."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import islice
from typing import TYPE_CHECKING

from ..errors import CancelledError, RequestError
from ..runner import DECODE, Cancellation, Segment
from .completion import Score
from .generation import checked_prompt
from .sampler import log_softmax

if TYPE_CHECKING:
    from ..runner import Runner, Sequence
    from .sampler import Floats


class Scoring:
    """A request that measures continuations instead of making one; used as a `Generation` is.

    The prompt is computed once, and each continuation goes on from it. Their tokens have the role of decoded ones, so
    that a score is the log-probability with which the model, as it was opened, would have written them.

    Parameters
    ----------
    runner : runs the model
    prompt_ids : tokens of the prompt, with the beginning-of-text token
    continuations : text, if it was given as such, and tokens of each

    Raises
    ------
    RequestError
        There is no continuation, one is empty, a token id is outside the vocabulary, or the prompt and a continuation
        do not fit the context.
    """

    def __init__(self, runner: Runner, prompt_ids: Iterable[int],
                 continuations: Items[tuple[str | None, Iterable[int]]]):
        self.prompt_ids = checked_prompt(prompt_ids, runner)
        self.sequence: Sequence | None = None
        self.cached_tokens = 0
        self._runner = runner
        self._cancellation = Cancellation()
        if not continuations:
            raise RequestError("There is no continuation to score; give at least one.")
        room = int(runner.config.ctx or 0) - len(self.prompt_ids)
        self._todo = [(text, self._checked(number, ids, room)) for number, (text, ids) in enumerate(continuations)]
        self._first: Floats | None = None  # log-probabilities behind the prompt
        self._scores: list[Score] = []
        self._cancelled = False

    def _checked(self, number: int, ids: Iterable[int], room: int) -> list[int]:
        listed = list(islice(ids, room + 1))  # an iterator may have no end
        if not listed:
            raise RequestError(f"Continuation {number} is empty; give text or token ids.")
        if len(listed) > room:
            ctx = self._runner.config.ctx
            raise RequestError(f"Continuation {number} has more than {room} tokens, for which the context of {ctx} "
                               f"has room behind the prompt of {len(self.prompt_ids)}; shorten one of them, or open"
                               " the model with a larger context (--ctx).")
        try:
            return checked_prompt(listed, self._runner)
        except RequestError as why:
            raise RequestError(f"Continuation {number}: {why}") from None

    @property
    def finished(self) -> bool:
        """Whether each continuation has its score, or the request was cancelled."""
        return self._cancelled or len(self._scores) == len(self._todo)

    def cancel(self) -> None:
        """End the request within 100 ms."""
        self._cancellation.cancel()

    def start(self, sequence: Sequence) -> str:
        """Prefill the part of the prompt that the sequence does not hold yet."""
        self.sequence, self.cached_tokens = sequence, len(sequence)
        try:
            logits = self._runner.prefill(sequence, self.prompt_ids[len(sequence) :], self._cancellation)
            self._first = log_softmax(logits)
        except CancelledError:
            self._cancelled = True
        return ""

    def step(self) -> str:
        """Score the next continuation."""
        text, ids = self._todo[len(self._scores)]
        try:
            self._scores.append(self._score(text, ids))
        except CancelledError:
            self._cancelled = True
        return ""

    def _score(self, text: str | None, ids: list[int]) -> Score:
        """Compute the logits behind all tokens but the last, in blocks of as many rows as the runner keeps."""
        assert self.sequence is not None and self._first is not None
        runner, sequence, n_prompt = self._runner, self.sequence, len(self.prompt_ids)
        if len(sequence) > n_prompt:
            runner.rollback(sequence, n_prompt, self._cancellation)
        logprobs, greedy = [float(self._first[ids[0]])], ids[0] == int(self._first.argmax())
        step = min(runner.config.outputs, runner.config.prefill_chunk)
        for start in range(0, len(ids) - 1, step):
            block = ids[start : min(start + step, len(ids) - 1)]
            rows = runner.forward([Segment(sequence, block, range(len(block)), DECODE)], self._cancellation)
            for row, following in zip(rows, ids[start + 1 :], strict=False):
                found = log_softmax(row)
                logprobs.append(float(found[following]))
                greedy = greedy and following == int(found.argmax())
        return Score(text, tuple(ids), tuple(logprobs), greedy)

    def end(self) -> None:
        """Count continuations without a score as cancelled."""
        self._cancelled = self._cancelled or not self.finished

    def release(self, keep_first: bool = False) -> Sequence | None:
        """Give the sequence back; `keep_first` returns it as it is, for a request that continues it."""
        sequence, self.sequence = self.sequence, None
        if sequence is None or keep_first:
            return sequence
        self._runner.release(sequence)
        return None

    def result(self) -> list[Score]:
        """Return the score of each continuation; raises `CancelledError` if the request was cancelled."""
        if self._cancelled:
            raise CancelledError("The request was cancelled before all continuations were scored.")
        return self._scores
