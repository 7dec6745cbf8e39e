"""Interface of the engine's work: the tokens that a request runs next, and the processing of their logits."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ..base.validation import shown, whole
from ..errors import ContextError, PromptError, RequestError
from ..memory_planner import shared_blocks
from ..runner import PROMPT, Cancellation, Segment

if TYPE_CHECKING:
    from ..base.progress import OnProgress, OnPromptProgress
    from ..runner import Runner, Sequence
    from .speculation.controller import Speculation

Result = TypeVar("Result")
MORE = "more KV memory (--kv-memory)"


class Run(NamedTuple):
    """Tokens that a task needs to run after one of its sequences, in one forward pass or several."""

    sequence: Sequence
    ids: Items[int]
    role: int = PROMPT
    last: bool = True
    """True if logits are wanted after the last token."""
    each: bool = False
    """True if logits are wanted after each token."""
    specs: Items[int] = ()
    """Addresses of samples, one for each row of logits, see `Segment.sample_specs`."""
    owner: Any = None
    """Name that the task gives it."""
    whole: bool = False
    """True if all tokens go into one forward pass."""
    prepare: Callable[[], None] | None = None
    """Completes the data that samples read, see `Segment.prepare`."""

    def segment(self, n: int) -> Segment:
        """Return the segment of its first n tokens."""
        ids = self.ids if n == len(self.ids) else self.ids[:n]
        if self.each:
            return Segment(self.sequence, ids, range(n), self.role, None, self.specs[:n], self.prepare)
        if self.last and n == len(self.ids):
            return Segment(self.sequence, ids, (n - 1,), self.role, None, self.specs, self.prepare)
        return Segment(self.sequence, ids, (), self.role)


class Ran(NamedTuple):
    """Result of a run in one forward pass."""

    run: Run
    n: int
    """Tokens that were run."""
    rows: Items[Any]
    """Logits of these tokens, as far as requested: float32 of shape (vocab_size,) each, valid until the next pass."""
    chosen: Items[int] = ()
    """Tokens that the pass decoded by itself."""


class Task(abc.ABC, Generic[Result]):
    """Work of one request, which the engine's thread does: a generation, a beam search, scores.

    The engine gives it a sequence with a beginning of the prompt (`begin`). Before each forward pass it asks for
    `runs`, and passes on their outcome (`take`). It may take the sequences away between any two passes (`release`)
    and begin again later: the task then runs its tokens again.

    Parameters
    ----------
    runner : Runner
    prompt_ids : tokens of the prompt

    Raises
    ------
    RequestError
        The prompt is empty, longer than the context, or holds an id outside the vocabulary.
    """

    n_sequences = 1
    """Sequences that it holds at most."""
    prompt_ids: list[int]
    cached_tokens: int
    preemptions: int
    speculation: Speculation | None = None
    """Drafts tokens for it."""
    passes_alone = False
    """True if its forward passes are its own (`run_pass`), one beside each step of the others."""

    def __init__(self, runner: Runner, prompt_ids: Iterable[int]):
        self.prompt_ids = checked_prompt(prompt_ids, runner)
        self.cached_tokens = 0
        self.preemptions = 0
        """Number of times that its sequences were taken away for others."""
        self.cancellation = Cancellation()
        self.on_progress: OnProgress | None = None
        """Called as the prompt is processed, with the stage ``prompt`` and tokens."""
        self._runner = runner
        self._sequence: Sequence | None = None

    @property
    def sequence(self) -> Sequence | None:
        """The sequence that holds the prompt; None before `begin` and after `release`."""
        return self._sequence

    @property
    @abc.abstractmethod
    def finished(self) -> bool:
        """Return whether nothing is left to do."""

    @property
    def further(self) -> int:
        """Tokens by which a forward pass may continue automatically; 0 where each row of logits is looked at."""
        return 0

    @property
    def known_ids(self) -> list[int]:
        """Tokens that its first sequence will hold at least: the prompt and, after a preemption, more."""
        return self.prompt_ids

    @property
    def most_tokens(self) -> int:
        """Tokens after the prompt that each of its sequences may hold in the end."""
        return 0

    def arrive(self) -> None:
        """Record that the request is handed in: from here on it waits."""

    @abc.abstractmethod
    def begin(self, sequence: Sequence) -> None:
        """Take a sequence that holds a beginning of `known_ids`."""

    def join(self, others: list[Task[Any]]) -> None:
        """Record of the tasks that run already."""

    @abc.abstractmethod
    def runs(self) -> list[Run]:
        """Return the runs that are next, with at least one token; `take` is called before it is asked again."""

    def next_tokens(self) -> int:
        """Return how many tokens `run_pass` takes."""
        return 0

    def run_pass(self) -> None:
        """Run a separate forward pass."""

    @abc.abstractmethod
    def take(self, ran: list[Ran]) -> str:
        """Process the outcome of runs, and return the new text."""

    def release(self) -> None:
        """Release the sequences; the task keeps its state and can `begin` again."""
        if self._sequence is not None:
            self._runner.release(self._sequence)
            self._sequence = None

    @abc.abstractmethod
    def end(self, reason: str = "cancelled") -> str:
        """Finish all that is unfinished for a reason, and return the text that was held back until now."""

    @abc.abstractmethod
    def result(self) -> Result:
        """Return the outcome so far."""

    def cancel(self) -> None:
        """End within 100 ms; from any thread and from signal handlers. Once it is over nothing happens."""
        self.cancellation.cancel()

    def tell(self) -> None:
        """Report how much of the prompt is processed."""
        if self.on_progress is not None and self.sequence is not None:
            self.on_progress("prompt", min(len(self.sequence), len(self.prompt_ids)), len(self.prompt_ids), "")

    def telling(self) -> OnPromptProgress | None:
        """Return the callback for (done, total) in tokens that a runner processes by itself."""
        report, before = self.on_progress, self.cached_tokens
        return None if report is None else lambda done, total: report("prompt", before + done, before + total, "")


def checked_prompt(prompt_ids: Iterable[int], runner: Runner) -> list[int]:
    """Return the prompt as a list of ids; raises `RequestError` for one that this runner cannot run."""
    vocab_size, ctx = runner.model.vocab_size, int(runner.config.ctx or 0)
    if isinstance(prompt_ids, (list, tuple, range)) and len(prompt_ids) > ctx:
        raise too_long(f"has {len(prompt_ids)} tokens", len(prompt_ids), runner)
    ids = list(islice(prompt_ids, ctx + 1))  # an iterator may have no end
    if not ids:
        raise PromptError("The prompt is empty; give some text or at least one token id.")
    for i, token_id in enumerate(ids):
        try:
            ids[i] = token_id if type(token_id) is int else whole(token_id)
        except (TypeError, OverflowError):
            raise PromptError(f"The prompt holds {shown(token_id)}, which is not a token id.") from None
        if not 0 <= ids[i] < vocab_size:
            raise PromptError(
                f"Token id {shown(token_id)} of the prompt is outside the vocabulary; ids are from 0 to "
                f"{vocab_size - 1}."
            )
    if len(ids) > ctx:
        raise too_long(f"has more than {ctx} tokens", ctx + 1, runner)
    return ids


def check_blocks(runner: Runner, what: str, n_prompt: int, room: int, n: int = 1, lower: str = "lower max_tokens",
                 remedy: str = MORE) -> None:
    """Raise `RequestError` for a request that cannot fit the KV pools even when nothing else runs.

    Parameters
    ----------
    what : names the request in the sentence
    n_prompt : tokens of the prompt
    room : tokens that may follow it in each of `n` sequences, the last of which is never run
    lower, remedy : advice for the caller
    """
    pools = [(shared_blocks(n_prompt, room, n, runner.block_tokens), runner.plan.kv_blocks,
              f"of {runner.block_tokens} tokens")]
    if windowed := runner.plan.windowed:
        pools.append((windowed.needed(room, n), windowed.blocks, "of layers with a window"))
    for needed, there, which in pools:
        if needed > there:
            raise RequestError(f"{what} may need {needed} KV blocks {which}, and the model is open for {there}; "
                               f"{lower}, or open it with {remedy}.")


def too_long(what: str, n_tokens: int, runner: Runner) -> ContextError:
    """Return the error for a prompt of at least `n_tokens` tokens."""
    ctx, longest = int(runner.config.ctx or 0), runner.model.max_position_embeddings
    larger = f"open the model with a larger context (--ctx, at most {longest})"
    remedy = larger if n_tokens <= longest else f"the model takes {longest} at most, so shorten it"
    return ContextError(f"The prompt {what}, more than the context of {ctx}; {remedy}.")


def shared(tokens: Items[int], ids: Items[int], most: int) -> int:
    """Return how many first tokens agree, `most` at most."""
    most = min(len(tokens), len(ids), most)
    return next((i for i in range(most) if tokens[i] != ids[i]), most)
