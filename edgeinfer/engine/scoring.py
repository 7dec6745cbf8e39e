"""Log-probabilities of given continuations of a prompt: one request, one continuation after the other."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import islice
from typing import TYPE_CHECKING

from edgeinfer.kernels import sampling

from ..errors import CancelledError, RequestError
from ..runner import DECODE
from .completion import Score
from .sampler import log_softmax
from .task import Ran, Run, Task, check_blocks, checked_prompt

if TYPE_CHECKING:
    from ..runner import Runner, Sequence
    from .sampler import Floats


class Scoring(Task[list[Score]]):
    """A request that measures continuations instead of making one.

    The prompt is computed once, and each continuation continues from it. Their tokens have the role of decoded ones, so
    that a score is the log-probability with which the model, as it was opened, would have written them.

    Parameters
    ----------
    runner : runs the model
    prompt_ids : tokens of the prompt, with the beginning-of-text token
    continuations : text, if it was given as such, and tokens of each
    top : likeliest tokens to name in each place

    Raises
    ------
    RequestError
        There is no continuation, one is empty, a token id is outside the vocabulary, or the prompt and a continuation
        do not fit the context or the KV pool.
    """

    def __init__(self, runner: Runner, prompt_ids: Iterable[int],
                 continuations: Items[tuple[str | None, Iterable[int]]], top: int = 0):
        super().__init__(runner, prompt_ids)
        if not continuations:
            raise RequestError("There is no continuation to score; give at least one.")
        room = int(runner.config.ctx or 0) - len(self.prompt_ids)
        self._todo = [(text, self._checked(number, ids, room)) for number, (text, ids) in enumerate(continuations)]
        n_prompt, longest = len(self.prompt_ids), max(len(ids) for _, ids in self._todo)
        check_blocks(runner, f"A prompt of {n_prompt} tokens and a continuation of {longest}", n_prompt, longest,
                     lower="shorten them")
        self._first: Floats | None = None  # log-probabilities after the prompt
        self._logprobs: list[float] = []  # of the continuation that is being scored
        self._greedy, self._top = True, top
        self._tops: list[tuple[tuple[int, float], ...]] = []
        self._scores: list[Score] = []
        self._cancelled = False

    def _checked(self, number: int, ids: Iterable[int], room: int) -> list[int]:
        listed = list(islice(ids, room + 1))  # an iterator may have no end
        if not listed:
            raise RequestError(f"Continuation {number} is empty; give text or token ids.")
        if len(listed) > room:
            ctx = self._runner.config.ctx
            raise RequestError(f"Continuation {number} has more than the {room} tokens that the context of {ctx} "
                               f"leaves after the prompt of {len(self.prompt_ids)}; shorten one of them, or open "
                               "the model with a larger context (--ctx).")
        try:
            return checked_prompt(listed, self._runner)
        except RequestError as why:
            raise RequestError(f"Continuation {number}: {why}") from None

    # -- queries of the engine ----------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True if each continuation has its score, or the request was cancelled."""
        return self._cancelled or len(self._scores) == len(self._todo)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest continuation but its last one."""
        return max(len(ids) for _, ids in self._todo) - 1

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence that holds a beginning of the prompt."""
        self._sequence = sequence
        self._logprobs.clear()
        self._tops.clear()  # of a continuation that a preemption has cut off
        if self._first is None:
            self.cached_tokens = len(sequence)

    def runs(self) -> list[Run]:
        """Return the rest of the prompt, or the next tokens of a continuation but its last one."""
        sequence, n_prompt = self._sequence, len(self.prompt_ids)
        assert sequence is not None
        if (done := len(sequence)) < n_prompt:
            return [Run(sequence, self.prompt_ids[done:], last=self._first is None)]
        _, ids = self._todo[len(self._scores)]
        if not self._logprobs:
            self._start(ids)
        if done != n_prompt + len(self._logprobs) - 1:  # it holds another continuation
            self._runner.rollback(sequence, n_prompt, self.cancellation)
        elif done == n_prompt:
            self._runner.checkpoint(sequence)
        return [Run(sequence, ids[len(sequence) - n_prompt : -1], DECODE, each=True, owner=ids)]

    def take(self, ran: list[Ran]) -> str:
        """Add log-probabilities, and return the scores that are complete."""
        for run, _, rows, _ in ran:
            if run.owner is not None:
                for row in rows:
                    self._note(log_softmax(row), run.owner)
            elif len(rows):
                self._first = log_softmax(rows[0])
        while self._first is not None and not self.finished and self._complete():
            pass
        return ""

    def _complete(self) -> bool:
        """Begin the next continuation if it is not begun, and return whether its score is complete."""
        text, ids = self._todo[len(self._scores)]
        if not self._logprobs:
            self._start(ids)
        if len(self._logprobs) < len(ids):
            return False
        self._scores.append(Score(text, tuple(ids), tuple(self._logprobs), self._greedy, tuple(self._tops)))
        self._logprobs, self._tops = [], []
        return True

    def _start(self, ids: list[int]) -> None:
        """Begin a score with its first token, whose distribution follows the prompt."""
        assert self._first is not None
        self._greedy = True
        self._note(self._first, ids)

    def _note(self, found: Floats, ids: list[int]) -> None:
        """Add the distribution of the next token."""
        following = ids[len(self._logprobs)]
        self._logprobs.append(float(found[following]))
        self._greedy = self._greedy and following == int(found.argmax())
        if self._top:
            best = sampling.top_k_ids(found, self._top)
            self._tops.append(tuple((int(i), float(found[i])) for i in best))

    def end(self, reason: str = "cancelled") -> str:
        """Count continuations without a score as cancelled."""
        self._cancelled = self._cancelled or not self.finished
        return ""

    def result(self) -> list[Score]:
        """Return the score of each continuation; raises `CancelledError` if the request was cancelled."""
        if self._cancelled:
            raise CancelledError("The request was cancelled before all continuations were scored.")
        return self._scores
