"""Tasks that run on a replica: they are checked like the engine's, and receive the replica's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..engine import Choice, Delta, Embedding, Generation, Scoring, TokenLogprob
from ..errors import CancelledError, EdgeInferError
from .job import EMBEDDING, SCORES, TEXT, Done, Job, Part

if TYPE_CHECKING:
    from ..config import GenerationConfig
    from ..engine import Completion, SpeculationReport
    from ..text import Tokenizer
    from .job import Facts


class Remote:
    """Common base of remote tasks.

    Attributes
    ----------
    on_cancel : callable or None
        Called when the client cancels.
    value
        The outcome, once it is there.
    """

    prompt_ids: list[int]
    cached_tokens: int
    preemptions: int
    on_cancel: Callable[[], None] | None = None
    value: Any = None
    new_tokens = 0

    def cancel(self) -> None:
        """End within 100 ms; from any thread and from signal handlers."""
        self.cancellation.cancel()  # type: ignore[attr-defined]
        if self.on_cancel is not None:
            self.on_cancel()

    def job(self, key: int, salt: bytes) -> Job:
        """Return the part of the request that is still to be run by a replica."""
        raise NotImplementedError

    def take_parts(self, parts: Iterable[Part]) -> int:
        """Append parts of the text; returns the number of new tokens of the longest sample."""
        return 0

    def take_end(self, done: Done) -> None:
        """Record the end."""
        self.value, self.preemptions = done.value, done.preemptions
        self.cached_tokens = min(done.cached_tokens, len(self.prompt_ids))  # the last replica may have had more


class Mirror:
    """One sample of a generation that runs elsewhere; see `Sample`."""

    def __init__(self, index: int):
        self.index, self.finish_reason, self.usage = index, "", None
        self.tokens = list[int]()
        self._skip = 0
        self._text, self._logprobs = list[str](), list[TokenLogprob]()
        self._end: TokenLogprob | None = None
        self._stop_string: str | None = None

    @property
    def n_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens)

    def again(self) -> None:
        """Drop the parts that are known already: another replica begins at the first token."""
        self._skip = len(self.tokens)

    def take(self, part: Part) -> None:
        """Append a part."""
        if self.finish_reason:
            return
        skip = min(self._skip, len(part.ids))
        done = len(self.tokens) - self._skip
        if part.ids[:skip] != self.tokens[done:done + skip]:
            raise EdgeInferError("Two replicas gave different texts for the same request; this is a bug.")
        self._skip -= skip
        self.tokens += part.ids[skip:]
        self._logprobs += part.logprobs[skip:]
        self._text += part.pieces[skip:]
        self._end, self._stop_string, self.finish_reason = part.end, part.stop_string, part.finish_reason

    def finish(self, reason: str) -> str:
        """End it with the text generated so far."""
        self.finish_reason = reason
        return ""

    def choice(self) -> Choice:
        """Return the text generated so far."""
        return Choice(self.index, "".join(self._text), tuple(self.tokens), self.finish_reason,
                      tuple(self._logprobs) or None, None, self._stop_string, self._end)

    def since(self, texts: int, logprobs: int) -> tuple[Delta, int, int]:
        """Return the parts after so many texts and log-probabilities, and the new numbers of these."""
        new, named, reason = self._text[texts:], tuple(self._logprobs[logprobs:]), self.finish_reason
        return Delta(self.index, "".join(new), named, reason, self._end if reason else None), texts + len(new), \
            logprobs + len(named)


class RemoteGeneration(Remote, Generation):
    """A text that is generated elsewhere."""

    def __init__(self, facts: Facts, tokenizer: Tokenizer | None, ids: Iterable[int], config: GenerationConfig,
                 eos_ids: Iterable[int], reuse: bool, skip_special: bool):
        Generation.__init__(self, facts, tokenizer, ids, config, eos_ids, skip_special=skip_special)  # type: ignore[arg-type]
        self._reuse = reuse
        self._report: SpeculationReport | None = None

    def _new_samples(self, tokenizer: Tokenizer | None) -> Items[Any]:
        return [Mirror(index) for index in range(self._config.n)]

    def job(self, key: int, salt: bytes) -> Job:
        """Return the request with its seed, and with the tokens of its only sample."""
        config = {one.name: getattr(self._config, one.name) for one in fields(self._config)}
        options = {**config, "seed": self.seed, "reuse": self._reuse}
        generated: tuple[int, ...] = ()
        if len(self._samples) == 1:
            generated = tuple(self._samples[0].tokens)
        else:
            for one in self._mirrors:
                one.again()
        return Job(key, TEXT, self.prompt_ids, options, salt, self._skip_special, generated)

    def take_parts(self, parts: Iterable[Part]) -> int:
        """Append new tokens and their texts."""
        before = self.new_tokens
        for part in parts:
            self._mirrors[part.number].take(part)
        if (new := max(one.n_tokens for one in self._mirrors) - before) > 0:
            self._took()
        self.new_tokens += new
        return new

    def take_end(self, done: Done) -> None:
        """Record the end."""
        super().take_end(done)
        self._report = done.speculation

    def result(self) -> Completion:
        """Return the outcome so far."""
        return replace(Generation.result(self), speculation=self._report)

    @property
    def _mirrors(self) -> list[Mirror]:
        return self._samples  # type: ignore[return-value]


class RemoteScoring(Remote, Scoring):
    """Scores that are computed elsewhere."""

    def __init__(self, facts: Facts, ids: Iterable[int], continuations: Items[tuple[str | None, Iterable[int]]],
                 top: int, reuse: bool):
        Scoring.__init__(self, facts, ids, continuations, top)  # type: ignore[arg-type]
        self._reuse = reuse

    def job(self, key: int, salt: bytes) -> Job:
        """Return the request."""
        return Job(key, SCORES, self.prompt_ids, {"continuations": [ids for _, ids in self._todo], "reuse": self._reuse,
                                                  "top": self._top}, salt)

    def result(self) -> Any:
        """Return the scores; raises `CancelledError` if it was cancelled."""
        return _value(self)


class RemoteEmbedding(Remote, Embedding):
    """An embedding that is computed elsewhere."""

    def __init__(self, facts: Facts, ids: Iterable[int], pooling: str, normalise: bool):
        Embedding.__init__(self, facts, ids, _not_here, pooling, normalise)  # type: ignore[arg-type]

    def job(self, key: int, salt: bytes) -> Job:
        """Return the request."""
        return Job(key, EMBEDDING, self.prompt_ids, {"pooling": self._pooling, "normalize": self._normalise}, salt)

    def result(self) -> Any:
        """Return the embedding; raises `CancelledError` if it was cancelled."""
        return _value(self)


def _value(task: Remote) -> Any:
    if task.value is None:
        raise CancelledError("The request was cancelled before it was answered.")
    return task.value


def _not_here(*_: Any) -> Any:
    raise AssertionError("computed elsewhere")
