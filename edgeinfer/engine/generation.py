"""One request: its prompt is processed, then each forward pass gives every sample a token or a few."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

from ..config import GenerationConfig
from ..errors import RequestError
from ..runner import DECODE
from ..text import Tokenizer
from .candidate import Sample
from .completion import Completion
from .sampler import Sampler
from .speculation.usage import Usage
from .task import MORE, Ran, Run, Task, check_blocks
from .token_times import TokenTimes
from .verification import Draft

if TYPE_CHECKING:
    from ..runner import Runner, Sequence
    from ..text import Constraint
    from .speculation.controller import Speculation

SEED_BITS = 32
"""Bits of seeds that are sampled here: few enough to type one again."""


class Generation(Task[Completion]):
    """A request to continue a prompt by sampling.

    Parameters
    ----------
    runner : runs the model
    tokenizer : None for a bundle without one, whose samples are token ids without text
    prompt_ids : tokens of the prompt, with the beginning-of-text token
    config : how to continue it
    eos_ids : tokens that end the text
    speculation : drafts tokens, which forward passes verify; the text is the same
    begin_form : returns the form of a text that begins, for each sample
    generated : tokens of the only sample that are there already, from a request that was moved here; its text continues
        as it would have continued there
    skip_special : leave special tokens out of the text

    Raises
    ------
    RequestError
        As `Task`, or the request needs more sequences or KV blocks than the runner has.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        prompt_ids: Iterable[int],
        config: GenerationConfig,
        eos_ids: Iterable[int] = (),
        speculation: Speculation | None = None,
        begin_form: Callable[[], Constraint] | None = None,
        generated: Iterable[int] = (),
        skip_special: bool = True,
    ):
        super().__init__(runner, prompt_ids)
        self._config = config
        self.speculation = speculation
        self.seed = int.from_bytes(os.urandom(SEED_BITS // 8), "little") if config.seed is None else config.seed
        self.n_sequences, what = max(config.n, config.beams), "beams" if config.beams > 1 else "samples"
        if self.n_sequences > (most := runner.config.max_sequences):
            raise RequestError(f"{self.n_sequences} {what} were asked for, but the model is open for {most}; open it "
                               f"with max_sequences={self.n_sequences}.")
        if config.stop and tokenizer is None:
            raise RequestError("Stop strings need a tokenizer, and this bundle has none.")
        self._ends = frozenset() if config.ignore_eos else frozenset(eos_ids)
        self.room = min(config.max_tokens, int(runner.config.ctx or 0) - len(self.prompt_ids))
        self._check_room(what)
        self._begin_form, self._skip_special = begin_form, skip_special
        self._samples: Items[Sample] = self._new_samples(tokenizer)
        self._usage = Usage() if speculation else None
        for sample in self._samples:
            sample.usage = self._usage
        self._base: Sequence | None = None
        """Holds the prompt until a sample continues with it."""
        self._chosen = False
        """True if the first tokens are there."""
        self._times = TokenTimes()
        self._taken_over = self._resume(generated)

    def _resume(self, generated: Iterable[int]) -> int:
        """Append tokens that another run has generated; returns their number."""
        ids = list(generated)
        if not ids:
            return 0
        if self.n_sequences != 1 or len(ids) > self.room:
            raise RequestError(f"{len(ids)} generated tokens cannot be taken over by a request for {self.n_sequences} "
                               f"texts of up to {self.room} tokens; give those of one text.")
        self._samples[0].resume(ids, self.room)
        self._chosen = True
        return self._samples[0].n_tokens

    def _check_room(self, what: str) -> None:
        n, n_prompt, room, config = self.n_sequences, len(self.prompt_ids), max(self.room, 0), self._runner.config
        whose, remedy = f"A prompt of {n_prompt} tokens and up to {room} new ones", MORE
        if n > 1:
            whose = f"{n} {what} of up to {room} tokens after a prompt of {n_prompt}"
            if config.kv_memory is None and config.kv_tokens in (None, config.ctx):  # the pool follows own_tokens
                remedy = f"own_tokens={self._config.max_tokens}"
        check_blocks(self._runner, whose, n_prompt, room, n, remedy=remedy)

    def _new_samples(self, tokenizer: Tokenizer | None) -> Items[Sample]:
        return [Sample(self.prompt_ids, self.sampler(index), self._config.stop, tokenizer, self._ends, index,
                       self._begin_form() if self._begin_form else None, self._skip_special)
                for index in range(self._config.n)]

    # -- queries of the engine ----------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True if every sample has its finish reason."""
        return all([sample.finish_reason for sample in self._samples])

    @property
    def sequence(self) -> Sequence | None:
        """The sequence that holds the prompt, later the first sample's."""
        return self._samples[0].sequence if self._base is None else self._base  # an empty one counts as False

    @property
    def live(self) -> list[Sample]:
        """Samples that continue."""
        return [sample for sample in self._samples if not sample.finish_reason]

    @property
    def left(self) -> int:
        """Tokens that each sample may be given besides the next one."""
        return self.room - max(sample.n_tokens for sample in self.live) - 1

    @property
    def needs_each(self) -> bool:
        """True if something is looked at after each token: rows of logits, or the form of the text."""
        return self._begin_form is not None or any([one.sampler.needs_each for one in self._samples])

    @property
    def further(self) -> int:
        """Tokens by which a forward pass may continue automatically."""
        return 0 if self.needs_each else self.left

    @property
    def known_ids(self) -> list[int]:
        """The prompt, and after it the tokens of an only sample."""
        return self._samples[0].tokens if self._config.n == 1 else self.prompt_ids

    @property
    def most_tokens(self) -> int:
        """Tokens after the prompt that each sequence may hold in the end: the last one is never written."""
        return max(self.room - 1, 0)

    def arrive(self) -> None:
        """Start measuring the time to the first token."""
        self._times = TokenTimes()

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence that holds a beginning of the prompt, or of the only sample."""
        self._base = sequence
        if self._times.begin():
            self.cached_tokens = len(sequence)

    def join(self, others: list[Task[Any]]) -> None:
        """Speculate together with a task that runs already, if both have the same settings."""
        for other in others:
            if isinstance(other, Generation) and other.speculation and self.speculation \
                    and other.speculation.key == self.speculation.key:
                self.speculation = other.speculation
                return

    def runs(self) -> list[Run]:
        """Return the rest of the prompt, or the tokens of each live sample that have not run: mostly its last."""
        base, n_prompt, live = self._base, len(self.prompt_ids), self.live
        if base is not None and len(base) < n_prompt:
            specs = (self._samples[0].sampler.address,)
            return [Run(base, self.prompt_ids[len(base) : n_prompt], last=not self._chosen, specs=specs)]
        self._distribute(live)
        return self._decodes(live)

    def _distribute(self, samples: list[Any]) -> None:
        """Let the first sample without a sequence continue with the prompt's, and the others with copies of it."""
        without = [sample for sample in samples if sample.sequence is None]
        if not without:
            return
        if self._base is None:
            raise RequestError("The request was released; make a new one.")
        for sample in without[1:]:
            sample.sequence = self._runner.fork(self._base)
        without[0].sequence, self._base = self._base, None

    def _decodes(self, live: list[Any]) -> list[Run]:
        """Return the tokens of samples with sequences of their own that were not run yet."""
        return [Run(sample.sequence, sample.tokens[len(sample.sequence) :], DECODE, True, False,
                    (sample.sampler.address,), sample, prepare=sample.prepare) for sample in live]

    def take(self, ran: list[Ran]) -> str:
        """Append sampled tokens; returns the new text of the first sample."""
        text, took = "", False
        for run, _, rows, chosen in ran:
            if not len(rows):  # a part of the prompt, or of tokens that are recomputed
                continue
            took = True
            if run.owner is None:
                text += self._take_prompt(rows[0])
            elif isinstance(run.owner, Draft):
                text += self._take_verified(run, rows)
            else:
                text += self._take_decoded(run, rows[0], chosen)
        if took:
            self._took()
        return text

    def _take_prompt(self, row: Any) -> str:
        """Choose the first token of every sample."""
        self._chosen = True
        if self.room <= 0:
            return self.end("length")
        pieces = [sample.take(row, self.room) for sample in self._samples]
        return pieces[0]

    def _take_decoded(self, run: Run, row: Any, chosen: Items[int]) -> str:
        """Append the tokens that a pass decoded by itself, and one from the last row; a text may end within them."""
        sample = run.owner
        text: str = sample.take(row, self.room, chosen)
        if sample.finish_reason:  # its blocks after the end are for the others
            n = min(len(run.sequence), len(sample.tokens))
            if self._runner.can_truncate(run.sequence, n) == n:
                self._runner.truncate(run.sequence, n)
        return text if sample is self._samples[0] else ""

    def _take_verified(self, run: Run, rows: Items[Any]) -> str:
        """Keep draft tokens as long as each is the token that would have been sampled in its place.

        The first that is another is replaced by the one that was sampled; the results after it are discarded.
        """
        sample, proposal, samplers = run.owner
        length = len(run.sequence) - len(run.ids)
        text, sample.accepted = sample.verify(samplers, rows, proposal, self.room)
        self._runner.truncate(run.sequence, length + 1 + sample.accepted)
        return text if sample is self._samples[0] else ""

    def _took(self) -> None:
        """Record of when the longest sample got its latest tokens: all of a forward pass took the same time."""
        new = max(sample.n_tokens for sample in self._samples) - self._taken_over
        self._times.note(new - self._times.steps)

    def end(self, reason: str = "cancelled") -> str:
        """Finish unfinished samples."""
        pieces = [sample.finish(reason) for sample in self._samples if not sample.finish_reason]
        return pieces[0] if pieces else ""

    def release(self) -> None:
        """Release the sequences."""
        if self.speculation:
            self.speculation.release(self._samples)
        if self._base is not None:  # released before it is forgotten: an interruption may come between these lines
            self._runner.release(self._base)
            self._base = None
        for sample in self._samples:
            if sample.sequence is not None:
                self._runner.release(sample.sequence)
                sample.sequence = None

    @property
    def samples(self) -> Items[Sample]:
        """Samples of the request, whose texts other threads may read (`Sample.since`)."""
        return self._samples

    # -- the outcome -------------------------------------------------------------------------------------------------

    def result(self) -> Completion:
        """Return the outcome so far."""
        choices = tuple(sample.choice() for sample in self._samples)
        first = choices[0]
        n_tokens = sum(len(choice.token_ids) for choice in choices)
        longest = max(len(choice.token_ids) for choice in choices) - self._taken_over
        longest = min(longest, self._times.steps)  # of a request that runs, tokens may be there before their times
        started = sum(1 for choice in choices if choice.token_ids)
        return Completion(
            first.text, first.token_ids, len(self.prompt_ids), self.cached_tokens, n_tokens,
            *self._times.figures(longest, n_tokens - self._taken_over - started), first.finish_reason, self.seed,
            first.logprobs, choices, self.speculation.report(self._usage) if self.speculation and self._usage else None,
            self._times.waited_ms, self.preemptions)

    def sampler(self, index: int) -> Sampler:
        """Return the sampler of one sample; it has taken note of the prompt."""
        room = len(self.prompt_ids) + max(self.room, 0)
        sampler = Sampler(self._config, self._runner.model.vocab_size, self.seed, index, room, self._ends)
        sampler.prompt(self.prompt_ids)
        return sampler

    @property
    def token_times(self) -> list[float]:
        """When the request was handed in and when each token of the longest sample came; see `TokenTimes`."""
        return self._times.at
