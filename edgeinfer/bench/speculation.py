"""Cost of verifying draft tokens, the acceptance from which speculation pays, and the speed at a given acceptance.

A text is replayed: the model runs with all the work of decoding, its own choice is sampled and set aside, and the
text's next token is taken instead. So the time of any text can be measured with any weights, including random ones, and
a drafter is right exactly as often as the text prescribes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..config import GenerationConfig
from ..engine import Drafter, DraftHead, DraftModel, Generation, Sampled, Sampler, Speculation, Times, run_alone
from ..runner import DECODE, Segment
from .repetitions import token_ids

if TYPE_CHECKING:
    from ..engine import Completion
    from ..runner import Cancellation, DraftRunner, Runner

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
"""Tokens of a forward pass."""
PROPOSALS = (1, 2, 3, 5, 7)
"""Draft lengths that the controller chooses from by default."""
REPLAYED_TOKENS = 128


class OneByOne:
    """A runner that never takes steps by itself: each token is replaced before the next one is run."""

    def __init__(self, runner: Runner):
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(self, sequences: Any, ids: Any, cancel: Any = None, sample_specs: Any = (), further: int = 0) -> Any:
        """Run over one token of each sequence."""
        return self._runner.decode(sequences, ids, cancel, sample_specs)


class ReplayedSampler(Sampler):
    """Takes the next token of a text, whatever was sampled."""

    text: Items[int] = ()
    right = 1.0
    """Share of tokens that are the text's; the others are their neighbours in the vocabulary."""
    accepted_before = 1.0
    """The same of a draft's."""

    def sample(self, logits: Any) -> Sampled:
        """Return the text's next token, or a wrong one: for a position in the text always the same."""
        sampled = super().sample(logits)
        if self._position >= len(self.text):
            return sampled
        return Sampled(stated(self.text, self._position, self.right, self._vocab_size))

    def for_draft(self, vocab_size: int, n: int) -> Sampler:
        """Return the sampler of a draft."""
        other = super().for_draft(vocab_size, n)
        assert isinstance(other, ReplayedSampler)
        other.right = self.accepted_before
        return other


def stated(text: Items[int], position: int, right: float, vocab_size: int) -> int:
    """Return the token at a position of a text, or in a share of the positions a wrong one."""
    return (text[position] + (random.Random(position).random() >= right)) % vocab_size


class StatedProposals(Drafter):
    """Is right in a stated share of its draft tokens, without effort."""

    name = "lookup"

    def __init__(self, text: Items[int], right: float, vocab_size: int):
        self._text, self._right, self._vocab_size = text, right, vocab_size

    def propose(self, texts: Items[Any], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        """Return the text's next tokens, some of them wrong."""
        ends = [(len(text.tokens), min(len(text.tokens) + n, len(self._text))) for text in texts]
        return [[stated(self._text, position, self._right, self._vocab_size) for position in range(*end)]
                for end in ends]

    def release(self, texts: Items[Any]) -> None:
        """Do nothing: no memory is held."""


class Replayed(Generation):
    """A request that writes a given text.

    Parameters
    ----------
    runner : forward passes it
    prompt, text : tokens
    speculation : the drafter, if there is one
    right : share of the draft tokens of a draft model that are right
    """

    def __init__(self, runner: Runner, prompt: Items[int], text: Items[int], speculation: Speculation | None = None,
                 right: float = 1.0):
        self._whole, self._right = (*prompt, *text), right
        config = GenerationConfig(max_tokens=len(text), seed=0, ignore_eos=True)
        super().__init__(cast("Runner", OneByOne(runner)), None, prompt, config, (), speculation)

    def sampler(self, index: int) -> Sampler:
        """Return the drafter that replays the text."""
        sampler = ReplayedSampler(self._config, self._runner.model.vocab_size, self.seed, index, len(self._whole))
        sampler.text, sampler.accepted_before = self._whole, self._right
        sampler.prompt(self.prompt_ids)
        return sampler

    def run(self) -> Completion:
        """Write the text and return the outcome."""
        return run_alone(self, self._runner)


class SpeculationBench(NamedTuple):
    """Cost and gain of verifying draft tokens."""

    seconds: dict[int, float]
    """Median time of a forward pass over this many tokens."""
    draft_seconds: float | None
    """Seconds of a token of the draft model; None without one."""
    self_seconds: float | None
    """The same of a part of the model itself."""
    mtp_seconds: float | None
    """The same of the model's head for further tokens."""
    pays_from: dict[str, float | None]
    """Least acceptance, per drafter, with which drafting is faster than not drafting; None if there is none."""
    stated: dict[str, float] | None
    """Figures at the requested acceptance: `accept`, `plain_t_per_s`, `t_per_s`, `gain`, `tokens_per_walk`,
    `predicted` (the gain by these times)."""


def measure_speculation(runner: Runner, draft: Runner | None, depth: int, repetitions: int,
                        accept: float | None, ahead: DraftRunner | None = None) -> SpeculationBench:
    """Measure forward passes over several tokens after a context, a draft's, and replay a text at a stated acceptance.

    Parameters
    ----------
    runner : with rows of logits for the most tokens of `COUNTS`
    draft : on the same threads
    depth : tokens of context
    repetitions : of each; those of different numbers of tokens take turns
    accept : share of right draft tokens that a text is replayed with
    ahead : a part of the model itself that drafts, or its head for further tokens, which drafts the replayed text
    """
    from ..runtime import DraftHeadSession

    head = ahead if isinstance(ahead, DraftHeadSession) else None
    ids = token_ids(runner.model.vocab_size)
    prompt = [next(ids) for _ in range(max(depth, 1))]
    seconds = pass_times(runner, prompt, repetitions)
    drafted = None if draft is None else pass_times(draft, [
        token % draft.model.vocab_size for token in prompt], repetitions, (1,))[1]
    own = None if ahead is None else ahead_seconds(runner, ahead, prompt, repetitions)
    part, further = (None, own) if head else (own, None)
    pays = {name: pays_from(seconds, cost) for name, cost in (("lookup", 0.0), ("draft", drafted), ("self", part),
                                                              ("mtp", further)) if cost is not None}
    found = None
    if accept is not None:
        text = [next(ids) for _ in range(REPLAYED_TOKENS)]
        if known := draft.model.vocab_size if draft else head.vocab_size if head else 0:
            text = [token % min(known, runner.model.vocab_size) for token in text]
        found = _at_acceptance(runner, draft, head, prompt, text, accept, repetitions)
        found["predicted"] = max(gain(seconds, drafted or further or 0.0, accept, n) for n in PROPOSALS)
    return SpeculationBench(seconds, drafted, part, further, pays, found)


def pass_times(runner: Runner, prompt: Items[int], repetitions: int, counts: Items[int] = COUNTS) -> dict[int, float]:
    """Return the median seconds of forward passes over several tokens after a prompt, with logits of all."""
    sequence, ids = runner.new_sequence(), token_ids(runner.model.vocab_size)
    runner.prefill(sequence, prompt)
    taken: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(repetitions + 1):
        for n, times in taken.items():
            segment = Segment(sequence, [next(ids) for _ in range(n)], range(n), DECODE)
            began = time.perf_counter()
            runner.forward([segment])
            times.append(time.perf_counter() - began)
            runner.rollback(sequence, len(prompt))
    runner.release(sequence)
    return {n: statistics.median(times[1:]) for n, times in taken.items()}


def ahead_seconds(runner: Runner, ahead: DraftRunner, prompt: Items[int], repetitions: int) -> float:
    """Return the median seconds of a token that a part of the model drafts after a prompt."""
    sequence, times = runner.new_sequence(), []
    runner.prefill(sequence, prompt)
    for token in repeat(prompt[0], repetitions + 1):
        began = time.perf_counter()
        ahead.ahead([sequence], [token], [0], 0, 0)
        times.append(time.perf_counter() - began)
        runner.rollback(sequence, len(prompt))
    runner.release(sequence)
    return statistics.median(times[1:])


def gain(seconds: Mapping[int, float], draft: float, accept: float, n: int) -> float:
    """Return the speed of passes over n draft tokens beside that of single tokens (arXiv 2211.17192, theorem 3.8)."""
    tokens = sum(accept**position for position in range(n + 1))
    return tokens * seconds[1] / (n * draft + seconds[n + 1])


def pays_from(seconds: Mapping[int, float], draft: float) -> float | None:
    """Return the lowest acceptance, in hundredths, at which draft tokens pay, or None."""
    return next((a / 100 for a in range(101) if max(gain(seconds, draft, a / 100, n) for n in PROPOSALS) > 1), None)


def _at_acceptance(runner: Runner, draft: Runner | None, head: DraftRunner | None, prompt: Items[int],
                   text: Items[int], accept: float, repetitions: int) -> dict[str, float]:
    """Replay a text with draft tokens and without, alternately."""
    times, plain, proposed = Times(), [], []
    most, rows = PROPOSALS[-1], int(runner.config.outputs)
    for repetition in range(repetitions + 1):
        plain.append(Replayed(runner, prompt, text).run())
        drafter: Drafter
        if draft is None and head:
            drafter = DraftHead(runner, head)
        elif draft is None:
            drafter = StatedProposals((*prompt, *text), accept, runner.model.vocab_size)
        else:
            drafter = DraftModel(cast("Runner", OneByOne(draft)), runner.model.vocab_size)
        named = bool(draft or head)  # as `--speculate` and `--draft` name one
        proposed.append(Replayed(runner, prompt, text, Speculation(drafter, times, most, rows, asked=named),
                                 accept).run())
        if not repetition:  # a first time, which learns how long forward passes take
            plain, proposed = [], []
    speeds = [statistics.median(one.tok_per_s or 0.0 for one in runs) for runs in (plain, proposed)]
    gains = [(b.tok_per_s or 0.0) / (a.tok_per_s or 1.0) for a, b in zip(plain, proposed, strict=True)]
    each = [one.speculation.tokens_per_walk or 1.0 for one in proposed if one.speculation]
    return {"accept": accept, "plain_t_per_s": speeds[0], "t_per_s": speeds[1], "gain": statistics.median(gains),
            "tokens_per_walk": statistics.median(each)}
