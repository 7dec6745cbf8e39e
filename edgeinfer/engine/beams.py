"""Beam search: the likeliest continuations of a prompt, several carried on side by side.

A beam is a sample whose tokens are not sampled: each step takes the best continuations of all beams, by the
sum of their log-probabilities. The rules are those of transformers, so that both find the same texts with the same
scores:

* Of the candidates of a step, best first, those that do not end are the next beams. One that ends is a result if it is
  among the first `beams` candidates, and else forgotten.
* The score of a result is its sum divided by (number of generated tokens, the end token included) to the power of
  `length_penalty`. The best results are kept, as many as there are beams.
* With that many results, `early_stopping` says when to end; at the limit of length all candidates end.

A beam that continues takes its parent's sequence over, and only further children of the same parent fork it; sequences
without a child are released before. So there are never more sequences than beams, the prompt's blocks exist once, and a
fork costs no more than a copy of its last block.
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
from ..runner import DECODE
from ..text import Tokenizer
from .candidate import Sample
from .completion import Completion
from .generation import Generation
from .sampler import Sampled, Sampler
from .task import Ran, Run

if TYPE_CHECKING:
    from ..runner import Runner


class Beam(Sample):
    """A continuation, with the sum of its tokens' log-probabilities."""

    total = 0.0
    score: float
    """Set its end."""

    def child(self, sampled: Sampled, total: float, room: int) -> Beam:
        """Return the beam that continues with one more token, or ends with it; it has no sequence yet."""
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
    """Beams that continue, the best first; at the end the results."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, prompt_ids: Iterable[int],
                 config: GenerationConfig, eos_ids: Iterable[int] = ()):
        self._results: list[Beam] = []
        super().__init__(runner, tokenizer, prompt_ids, config, eos_ids)

    def _new_samples(self, tokenizer: Tokenizer | None) -> list[Beam]:
        return [Beam(self.prompt_ids, self.sampler(0), self._config.stop, tokenizer, self._ends, 0)]

    def sampler(self, index: int) -> Sampler:
        """Return the function that edits logits; no kernel chooses from them."""
        sampler = super().sampler(index)
        sampler.address = 0
        return sampler

    @property
    def further(self) -> int:
        """No pass continues by itself: each row of logits is looked at."""
        return 0

    @property
    def known_ids(self) -> list[int]:
        """The prompt."""
        return self.prompt_ids

    def _decodes(self, live: list[Beam]) -> list[Run]:
        """Return the last token of each beam; before that, the tokens that a preemption has dropped.

        The next beams are chosen among all rows, so all come from one forward pass.
        """
        pending = [(beam, beam.tokens[len(beam.sequence) : -1]) for beam in live if beam.sequence is not None]
        lost = [Run(beam.sequence, ids, DECODE, last=False, owner=beam)
                for beam, ids in pending if beam.sequence is not None and ids]
        return lost or super()._decodes(live)

    def take(self, ran: list[Ran]) -> str:
        """Choose the first beams from the prompt's last row, and the next ones from a row of each."""
        wanted = [one for one in ran if len(one.rows)]
        if not wanted:
            return ""
        self._chosen = True
        if self.room <= 0:
            return self.end("length")
        beams = [self._samples[0] if one.run.owner is None else one.run.owner for one in wanted]
        self._choose(beams, [one.rows[0] for one in wanted])
        return ""

    def result(self) -> Completion:
        """Return the outcome so far."""
        done = super().result()
        if done.tok_per_s is None:
            return done
        tokens = done.completion_tokens - sum(1 for choice in done.choices if choice.token_ids)
        _, tpot_ms, tok_per_s = self._times.figures(self._times.steps, tokens)  # beams that were given up included
        return replace(done, tpot_ms=tpot_ms, tok_per_s=tok_per_s)

    def _choose(self, parents: Items[Beam], rows: Items[Any]) -> None:
        """Take the best candidates as the next beams, or as results."""
        beams, survivors, ended = self._config.beams, list[tuple[Beam, Beam]](), list[Beam]()
        for rank, (parent, row, token_id, total) in enumerate(self._candidates(parents, rows)):
            if len(survivors) == beams:
                break
            child = parent.child(parent.sampler.named(token_id, row), total, self.room)
            if not child.finish_reason:
                survivors.append((parent, child))
            elif rank < beams:
                child.score = self._score(total, parent.n_tokens + 1)
                ended.append(child)
        self._times.note(1)
        self._results = self._best([*self._results, *ended])
        if survivors and not self._settled(survivors[0][1]):
            self._go_on(survivors)
        else:
            self._conclude(self._results)

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
        """Return whether the search may stop: no beam, of which this is the best, can still improve the results."""
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
        for parent, children in families:
            if children:
                self._hand_over(parent, children)
        self._samples = live

    def _hand_over(self, parent: Beam, children: list[Beam]) -> None:
        """Let children continue with their parent's sequence, which for the first beams is the prompt's."""
        if parent.sequence is None:
            self._distribute([parent])
        sequence, parent.sequence = parent.sequence, None
        assert sequence is not None
        children[0].sequence = sequence
        for child in children[1:]:
            child.sequence = self._runner.fork(sequence)

    def _give_back(self, beam: Beam) -> None:
        sequence, beam.sequence = beam.sequence, None
        if sequence is not None:
            self._runner.release(sequence)

    def end(self, reason: str = "cancelled") -> str:
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
        """Keep the results and one sequence, whose beginning later requests may share."""
        first, *others = self._samples
        for beam in others:
            self._give_back(beam)
        results = results[: self._config.n]
        for index, beam in enumerate(results):
            beam.index = index
        kept, first.sequence = first.sequence, None
        results[0].sequence = kept
        self._samples = results


def log_probabilities(logits: Any, ids: Any) -> Any:
    """Return the logarithms (float64) of these tokens' probabilities, of float32 logits whose largest is finite."""
    top = logits.max()
    with np.errstate(over="ignore"):
        weights = logits - top
    return weights[ids].astype(np.float64) - math.log(np.exp(weights, out=weights).sum())
