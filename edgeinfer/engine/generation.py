"""One request: its prompt is prefilled, then each step gives every sample one more token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from ..base.validation import shown, whole
from ..config import GenerationConfig
from ..errors import CancelledError, ContextError, RequestError
from ..runner import DECODE, Cancellation, Segment
from ..text import Tokenizer
from .candidate import Sample
from .completion import Completion
from .sampler import Sampler

if TYPE_CHECKING:
    from ..base.progress import OnProgress
    from ..runner import Runner, Sequence
    from .speculation.controller import Speculation

SEED_BITS = 32
"""Of seeds sampled here; short enough to be typed again."""


class Generation:
    """A request to a runner.

    `start` prefills the prompt and gives the first tokens, `step` the next ones, until `finished`; then `result` tells
    the outcome and `release` gives the sequences back. All of them belong to one thread at a time; `cancel` may be
    called from any thread and from signal handlers.

    Parameters
    ----------
    runner : runs the model
    tokenizer : None for a bundle without one, whose samples are token ids without text
    prompt_ids : tokens of the prompt, with the beginning-of-text token
    config : how to continue it
    eos_ids : tokens that end the text
    speculation : drafts tokens, of which a forward pass checks several; the text is the same

    Raises
    ------
    RequestError
        The prompt is empty or longer than the context, a token id is outside the vocabulary, or the request needs
        more sequences than the runner has.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        prompt_ids: Iterable[int],
        config: GenerationConfig,
        eos_ids: Iterable[int] = (),
        speculation: Speculation | None = None,
    ):
        self.prompt_ids = checked_prompt(prompt_ids, runner)
        self._runner = runner
        self._config = config
        self._speculation = speculation
        self.seed = secrets.randbits(SEED_BITS) if config.seed is None else config.seed
        most, what = runner.config.max_sequences, "beams" if config.beams > 1 else "samples"
        if (asked := max(config.n, config.beams)) > most:
            raise RequestError(f"{asked} {what} were asked for, but the model is open for {most}; open it with "
                               f"max_sequences={asked}.")
        if config.stop and tokenizer is None:
            raise RequestError("Stop strings need a tokenizer, and this bundle has none.")
        self._ends = frozenset() if config.ignore_eos else frozenset(eos_ids)
        self.room = min(config.max_tokens, int(runner.config.ctx or 0) - len(self.prompt_ids))
        self._samples: Items[Sample] = self._new_samples(tokenizer)
        self.cached_tokens = 0
        self._cancellation = Cancellation()
        self._times: list[float] = []
        self.told: OnProgress | None = None
        """Called as the prompt is processed, with the stage ``prompt`` and tokens."""

    def _new_samples(self, tokenizer: Tokenizer | None) -> Items[Sample]:
        return [Sample(self.prompt_ids, self.sampler(index), self.stop, tokenizer, self._ends, index)
                for index in range(self._config.n)]

    def _tell(self, told: OnProgress, done: int, total: int) -> None:
        told("prompt", self.cached_tokens + done, self.cached_tokens + total, "")

    @property
    def finished(self) -> bool:
        """Whether every sample has its finish reason."""
        return all(sample.finish_reason for sample in self._samples)

    @property
    def sequence(self) -> Sequence | None:
        """The first sample's sequence."""
        return self._samples[0].sequence

    def cancel(self) -> None:
        """End the request within 100 ms; its samples finish as ``cancelled``. Once it is over nothing happens."""
        self._cancellation.cancel()

    def start(self, sequence: Sequence) -> str:
        """Prefill what the sequence does not hold yet and choose the first token of every sample.

        Parameters
        ----------
        sequence : holds a proper prefix of the prompt; belongs to this request until `release`

        Returns
        -------
        str
            New text of the first sample.
        """
        self._samples[0].sequence = sequence
        self.cached_tokens = len(sequence)
        self._times = [time.perf_counter()]
        ids, spec = self.prompt_ids[len(sequence) :], self._samples[0].sampler.address
        told = self.told and partial(self._tell, self.told)
        logits = self._unless_cancelled(lambda: self._runner.prefill(sequence, ids, self._cancellation, spec, told))
        if logits is None or self.finished:
            return ""
        if self.room <= 0:
            return self._finish("length")
        return self._choose(self._samples, [logits] * len(self._samples))

    def step(self) -> str:
        """Give every live sample a token, or a few; returns the new text of the first sample."""
        live = [sample for sample in self._samples if not sample.finish_reason]
        sequences = [self._own_sequence(sample) for sample in live]
        text = self._unless_cancelled(lambda: self._advance(live, sequences))
        return text or ""

    def _advance(self, live: list[Sample], sequences: list[Sequence]) -> str:
        """Run over the last token of each sample, and over draft tokens behind it, if there are any."""
        room = self.room - max(sample.n_tokens for sample in live) - 1
        speculation, each = self._speculation, any(sample.sampler.needs_each for sample in live)
        if speculation and speculation.idle:
            speculation = None
        if speculation:
            most = min(room + 1, self._runner.config.outputs)
            if proposals := speculation.proposals(live, room, self._cancellation,
                                              lambda: self._runner.room(sequences, most) - 1, each):
                return self._verify(live, sequences, proposals)
        ids, sample_specs = [sample.last_id for sample in live], [sample.sampler.address for sample in live]
        before = [len(sequence) for sequence in sequences]
        further = 0 if each else room
        logits = self._runner.decode(sequences, ids, self._cancellation, sample_specs, further)
        chosen = [sequence.tokens[length + 1 :] for sequence, length in zip(sequences, before, strict=True)]
        text = self._choose(live, logits, chosen)
        for sample, sequence in zip(live, sequences, strict=True):
            if sample.finish_reason:  # its blocks behind the end are for the others
                self._runner.truncate(sequence, min(len(sequence), len(sample.tokens)))
        if speculation:
            speculation.plain(1 + len(chosen[0]))
        return text

    def _verify(self, live: list[Sample], sequences: list[Sequence], proposals: list[list[int]]) -> str:
        """Run over draft tokens, and keep them as long as each is the token that would have been sampled in its place.

        The first that is another is replaced by the one that was sampled; what was computed behind it is forgotten.
        """
        lengths = [len(sequence) for sequence in sequences]
        samplers = [sample.sampler.following(proposal) for sample, proposal in zip(live, proposals, strict=True)]
        rows = iter(self._runner.forward([
            Segment(sequence, (sample.last_id, *proposal), range(len(proposal) + 1), DECODE,
                    sample_specs=[sampler.address for sampler in sample_specs])
            for sequence, sample, proposal, sample_specs in zip(sequences, live, proposals, samplers, strict=True)
        ], self._cancellation))
        taken = [sample.verify(sample_specs, list(islice(rows, len(sample_specs))), proposal, self.room)
                 for sample, sample_specs, proposal in zip(live, samplers, proposals, strict=True)]
        for sequence, length, (_, right) in zip(sequences, lengths, taken, strict=True):
            self._runner.truncate(sequence, length + 1 + right)
        self._took_tokens()
        assert self._speculation
        self._speculation.verified(proposals, [right for _, right in taken])
        return taken[0][0] if live[0] is self._samples[0] else ""

    def _own_sequence(self, sample: Sample) -> Sequence:
        """Return the sample's sequence; before its first decode that is a fork of the prompt's."""
        if sample.sequence is None:
            if self._samples[0].sequence is None:
                raise RequestError("The request was released; make a new one.")
            sample.sequence = self._runner.fork(self._samples[0].sequence)
        return sample.sequence

    def _unless_cancelled(self, run: Any) -> Any:
        """Return what `run` gives; None, with all samples finished, if the request is cancelled before or meanwhile."""
        try:
            if not self._cancellation.asked:
                return run()
        except CancelledError:
            pass
        self._finish("cancelled")
        return None

    def _choose(self, samples: Items[Sample], logits: Any, chosen: Items[list[int]] = ()) -> str:
        """Take in the tokens that a pass went on with, the same number for each sample, and one from each last row.

        A text may end in the middle of them.
        """
        pieces = [sample.take(row, self.room, gone_on)
                  for sample, row, gone_on in zip(samples, logits, chosen or repeat(()), strict=False)]
        self._took_tokens()
        if samples[0] is self._samples[0]:
            return pieces[0]
        return ""

    def _took_tokens(self) -> None:
        """Take note of when the longest sample got its latest tokens: all of a forward pass took the same time."""
        self._took(max(sample.n_tokens for sample in self._samples) - len(self._times) + 1)

    def _took(self, steps: int) -> None:
        """Take note of when these steps ended."""
        before = self._times[-1]
        each = (time.perf_counter() - before) / max(steps, 1)
        self._times.extend(before + each * step for step in range(1, steps + 1))

    def _finish(self, reason: str) -> str:
        pieces = [sample.finish(reason) for sample in self._samples if not sample.finish_reason]
        return pieces[0] if pieces else ""

    def end(self) -> None:
        """Finish unfinished samples as cancelled."""
        self._finish("cancelled")

    def release(self, keep_first: bool = False) -> Sequence | None:
        """Give the sequences back; `keep_first` returns the first one instead, for a request that continues it."""
        kept = None
        if self._speculation:
            self._speculation.release()
        for sample in self._samples:
            sequence, sample.sequence = sample.sequence, None
            if sequence is None:
                continue
            if keep_first and sample.index == 0:
                kept = sequence
            else:
                self._runner.release(sequence)
        return kept

    def result(self) -> Completion:
        """Return the outcome so far."""
        choices = tuple(sample.choice() for sample in self._samples)
        first = choices[0]
        n_tokens = sum(len(choice.token_ids) for choice in choices)
        longest = max(len(choice.token_ids) for choice in choices)
        ttft_ms = tpot_ms = tok_per_s = None
        if n_tokens:
            ttft_ms = 1000 * (self._times[1] - self._times[0])
        if longest >= 2:
            seconds = self._times[longest] - self._times[1]
            tpot_ms = 1000 * seconds / (longest - 1)
            started = sum(1 for choice in choices if choice.token_ids)
            tok_per_s = (n_tokens - started) / seconds
        return Completion(
            first.text, first.token_ids, len(self.prompt_ids), self.cached_tokens, n_tokens, ttft_ms, tpot_ms,
            tok_per_s, first.finish_reason, self.seed, first.logprobs, choices,
            self._speculation.report() if self._speculation else None,
        )

    def sampler(self, index: int) -> Sampler:
        """Return the sampler of one sample; it has taken note of the prompt."""
        room = len(self.prompt_ids) + max(self.room, 0)
        sampler = Sampler(self._config, self._runner.model.vocab_size, self.seed, index, room, self._ends)
        sampler.prompt(self.prompt_ids)
        return sampler

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of the request."""
        return self._config.stop


def checked_prompt(prompt_ids: Iterable[int], runner: Runner) -> list[int]:
    """Return the prompt as a list of ids; raises `RequestError` for one that this runner cannot run."""
    vocab_size, ctx = runner.model.vocab_size, int(runner.config.ctx or 0)
    if isinstance(prompt_ids, (list, tuple, range)) and len(prompt_ids) > ctx:
        raise too_long(f"has {len(prompt_ids)} tokens", len(prompt_ids), runner)
    ids = list(islice(prompt_ids, ctx + 1))  # an iterator may have no end
    if not ids:
        raise RequestError("The prompt is empty; give some text or at least one token id.")
    for i, token_id in enumerate(ids):
        try:
            ids[i] = token_id if type(token_id) is int else whole(token_id)
        except (TypeError, OverflowError):
            raise RequestError(f"The prompt holds {shown(token_id)}, which is not a token id.") from None
        if not 0 <= ids[i] < vocab_size:
            raise RequestError(
                f"Token id {shown(token_id)} of the prompt is outside the vocabulary; ids are from 0 to "
                f"{vocab_size - 1}."
            )
    if len(ids) > ctx:
        raise too_long(f"has more than {ctx} tokens", ctx + 1, runner)
    return ids


def too_long(what: str, n_tokens: int, runner: Runner) -> ContextError:
    """Return the error for a prompt of at least `n_tokens` tokens."""
    ctx, longest = int(runner.config.ctx or 0), runner.model.max_position_embeddings
    larger = f"open the model with a larger context (--ctx, at most {longest})"
    remedy = larger if n_tokens <= longest else f"the model takes {longest} at most, so shorten it"
    return ContextError(f"The prompt {what}, more than the context of {ctx}; {remedy}.")
