"""Beam search: the likeliest continuations of a prompt, several carried on side by side.

A beam is a sample whose tokens are not sampled: each step takes the best of what all beams could go on with, by the sum
of their log-probabilities. The rules are those of transformers, so that both find the same texts with the same scores:

* Of the candidates of a step, best first, those that do not end are the next beams. One that ends is a result if it is
  among the first `beams` candidates, and else forgotten.
* The score of a result is its sum divided by (number of generated tokens, the end token included) to the power of
  `length_penalty`. The best results are kept, as many as there are beams.
* With that many results, `early_stopping` says when to end; at the limit of length all candidates end.

A beam that goes on takes its parent's sequence over, and only further children of the same parent fork it; sequences
without a child are released before. So there are never more sequences than beams, the prompt's blocks exist once, and
a fork costs no more than a copy of its last block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.kernels import sampling

from ..config import GenerationConfig
from ..errors import RequestError
from ..memory_planner import shared_blocks
from ..text import Tokenizer
from .candidate import Sample
from .completion import Completion
from .generation import Generation
from .sampler import Sampled, Sampler

if TYPE_CHECKING:
    from ..runner import Runner


class Beam(Sample):
    """A continuation, with the sum of its tokens' log-probabilities."""

    total = 0.0
    score: float
    """Set its end."""

    def child(self, sampled: Sampled, total: float, room: int) -> Beam:
        """Return the beam that goes on with one more token, or ends with it; it has no sequence yet."""
        child = copy(self)
        child.sequence, child.total = None, total
        child.tokens, child._text, child._logprobs = list(self.tokens), list(self._text), list(self._logprobs)
        child._decoder, child._stops = self._decoder and self._decoder.fork(), copy(self._stops)
        child._accept(sampled, room)
        return child


class BeamSearch(Generation):
    """A request that is answered by beam search; used as any `Generation`, but that all text comes at the end.

    Raises
    ------
    RequestError
        As `Generation`, or the beams could need more KV blocks than the runner has.
    """

    _samples: list[Beam]
    """Those that go on, the best first; at the end the results."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, prompt_ids: Iterable[int],
                 config: GenerationConfig, eos_ids: Iterable[int] = ()):
        super().__init__(runner, tokenizer, prompt_ids, config, eos_ids)
        self._results: list[Beam] = []
        n_prompt, beams, there = len(self.prompt_ids), config.beams, runner.plan.kv_blocks
        if (needed := shared_blocks(n_prompt, self.room, beams, runner.block_tokens)) > there:
            raise RequestError(
                f"{beams} beams of up to {self.room} tokens behind a prompt of {n_prompt} may need {needed} KV blocks "
                f"of {runner.block_tokens} tokens, and the model is open for {there}; lower max_tokens, or open it "
                f"with own_tokens={config.max_tokens}.")
        windowed = runner.plan.windowed
        if windowed and (needed := windowed.needed(self.room, beams)) > windowed.blocks:
            raise RequestError(
                f"{beams} beams of up to {self.room} tokens may need {needed} KV blocks of layers with a window, and "
                f"the model is open for {windowed.blocks}; lower max_tokens, or open it with "
                f"own_tokens={config.max_tokens}.")

    def _new_samples(self, tokenizer: Tokenizer | None) -> list[Beam]:
        return [Beam(self.prompt_ids, self.sampler(0), self.stop, tokenizer, self._ends, 0)]

    def sampler(self, index: int) -> Sampler:
        """Return what edits logits; no kernel chooses from them."""
        sampler = super().sampler(index)
        sampler.address = 0
        return sampler

    def step(self) -> str:
        """Decode a token of every beam and choose the next beams."""
        beams = self._samples
        sequences, ids = [self._own_sequence(beam) for beam in beams], [beam.last_id for beam in beams]
        logits = self._unless_cancelled(lambda: self._runner.decode(sequences, ids, self._cancellation))
        return "" if logits is None else self._choose(beams, logits)

    def result(self) -> Completion:
        """Return the outcome so far."""
        done = super().result()
        if done.tok_per_s is None:
            return done
        seconds, steps = self._times[-1] - self._times[1], len(self._times) - 2  # beams that were given up included
        tokens = done.completion_tokens - sum(1 for choice in done.choices if choice.token_ids)
        return replace(done, tpot_ms=1000 * seconds / steps, tok_per_s=tokens / seconds)

    def _choose(self, samples: Items[Any], logits: Any, chosen: Items[list[int]] = ()) -> str:
        """Take the best candidates as the next beams, or as results."""
        beams, survivors, ended = self._config.beams, list[tuple[Beam, Beam]](), list[Beam]()
        for rank, (parent, row, token_id, total) in enumerate(self._candidates(samples, logits)):
            if len(survivors) == beams:
                break
            child = parent.child(parent.sampler.named(token_id, row), total, self.room)
            if not child.finish_reason:
                survivors.append((parent, child))
            elif rank < beams:
                child.score = self._score(total, parent.n_tokens + 1)
                ended.append(child)
        self._took(1)
        self._results = self._best([*self._results, *ended])
        if survivors and not self._settled(survivors[0][1]):
            self._go_on(survivors)
        else:
            self._conclude(self._results)
        return ""

    def _candidates(self, beams: Items[Beam], rows: Any) -> Iterator[tuple[Beam, Any, int, float]]:
        """Yield beam, its logits, token and sum of log-probabilities, best first: enough for `beams` that do not end.
        """
        most = max(2, 1 + len(self._ends)) * self._config.beams
        found: list[tuple[float, int, int]] = []
        for number, (beam, row) in enumerate(zip(beams, rows, strict=True)):
            edited = beam.sampler.edited(row)
            allowed = beam.sampler.allowed(edited)
            if allowed is None:
                continue
            ids = sampling.top_k_ids(allowed, most)
            totals = beam.total + np.where(allowed[ids] > -np.inf, log_probabilities(edited, ids), -np.inf)
            found += zip((-totals).tolist(), [number] * len(ids), ids.tolist(), strict=True)
        found.sort()
        for loss, number, token_id in found[:most]:
            if loss < math.inf:  # else logit_bias or the mask forbids it
                yield beams[number], rows[number], token_id, -loss

    def _score(self, total: float, length: int) -> float:
        return float(total / max(length, 1) ** self._config.length_penalty)

    def _best(self, results: list[Beam]) -> list[Beam]:
        return sorted(results, key=lambda beam: -beam.score)[: self._config.beams]

    def _settled(self, best: Beam) -> bool:
        """Whether the search may stop: no beam, of which this is the best, can still improve the results."""
        early, length = self._config.early_stopping, best.n_tokens
        if len(self._results) < self._config.beams:
            return False
        if early == "never" and self._config.length_penalty > 0:
            length = self.room
        return early is True or self._score(best.total, length) <= self._results[-1].score

    def _go_on(self, survivors: list[tuple[Beam, Beam]]) -> None:
        """Give the children of beams their sequences."""
        families = [(parent, [child for one, child in survivors if one is parent]) for parent in self._samples]
        for parent, children in families:
            if not children:
                self._give_back(parent)
        live = [child for _, child in survivors]
        self._samples = [*live, *self._samples]  # whatever interrupts this, `release` finds each sequence
        for parent, (first, *others) in ((parent, children) for parent, children in families if children):
            first.sequence, parent.sequence = self._own_sequence(parent), None
            for child in others:
                child.sequence = self._runner.fork(first.sequence)
        self._samples = live

    def _give_back(self, beam: Beam) -> None:
        sequence, beam.sequence = beam.sequence, None
        if sequence is not None:
            self._runner.release(sequence)

    def _finish(self, reason: str) -> str:
        """End the search early: the beams so far are ranked, and have this reason."""
        if self.finished:
            return ""
        for beam in self._samples:
            beam.finish(reason)
            beam.score = self._score(beam.total, beam.n_tokens)
        best = self._best([*self._results, *self._samples])
        for beam in best:
            beam.finish_reason = reason
        self._conclude(best)
        return ""

    def _conclude(self, results: list[Beam]) -> None:
        """Keep the results and one sequence, for a request that continues it."""
        first, *others = self._samples
        for beam in others:
            self._give_back(beam)
        results = results[: self._config.n]
        for index, beam in enumerate(results):
            beam.index = index
        sequence, first.sequence = first.sequence, None
        results[0].sequence = sequence
        self._samples = results


def log_probabilities(logits: Any, ids: Any) -> Any:
    """Return the logarithms (float64) of these tokens' probabilities, of float32 logits whose largest is finite."""
    top = logits.max()
    with np.errstate(over="ignore"):
        weights = logits - top
    return weights[ids].astype(np.float64) - math.log(np.exp(weights, out=weights).sum())
