"""From a prompt and options to a request of the engine: what is generated, and who guesses for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import FLAG, FUNCTION, PATH, Rule, checked
from ..config import GenerationConfig, generation_config
from ..errors import RequestError
from .prompts import Prompt, Prompts

if TYPE_CHECKING:
    from ..engine import Completion, Drafter, Request, Score, Speculation, Stream, Times
    from ..runner import Runner
    from ..runtime import Session


def _listed(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError
    return list(value)


TEXTS_OR_IDS = Rule("a list of texts or of lists of token ids", _listed)


class Requests(Prompts):
    """The part of `LLM` that makes requests."""

    runner: Runner
    draft: Runner | None
    _speculate: str
    _times: Times
    _kept: list[Any]
    """Of the draft, for a request that goes on with the last one's text."""
    _eos_ids: frozenset[int]

    @property
    def session(self) -> Session:
        """The runner, where our own kernels run the model; raises `RequestError` where a device of others does."""
        from ..runtime import Session

        if not isinstance(self.runner, Session):
            raise RequestError(f"The model is run by {self.runner.isa}, not by our own kernels; use runner instead.")
        return self.runner

    def _request(self, ids: Iterable[int], options: Mapping[str, Any]) -> Request[Completion]:
        """Check a request; nothing runs before its first step."""
        from ..engine import BeamSearch, Generation, Request

        options = dict(options)
        reuse, cache, told = (options.pop(name, None) for name in ("reuse", "prompt_cache", "progress"))
        config = generation_config(options)
        reuse = reuse is not None and checked("reuse", reuse, FLAG)
        cache = None if cache is None else Path(checked("prompt_cache", cache, PATH))
        self._queue.check_open()
        request = self._queue.runner, self._tokenizer, ids, config, self._eos_ids
        generation = BeamSearch(*request) if config.beams > 1 else Generation(*request, self._speculation(config))
        generation.told = None if told is None else checked("progress", told, FUNCTION)
        return Request(self._queue, generation, reuse, cache)

    def score(self, prompt: Prompt, continuations: Iterable[Prompt]) -> list[Score]:
        """Return how likely the model finds each of several continuations of a prompt.

        The prompt is computed once. A continuation is tokenised by itself, as text that goes on in the middle: give it
        with the space that belongs to it (``" good"``). Sampling options have no influence.

        Parameters
        ----------
        prompt : str, or token ids
        continuations : texts, or lists of token ids; each with at least one token

        Returns
        -------
        list of Score
            In the order of the continuations: ``logprobs`` of the tokens, their sum ``logprob``, ``mean_logprob``, and
            whether greedy decoding would write them (``greedy``).

        Raises
        ------
        RequestError
            The prompt or a continuation is empty, or both together do not fit the context.
        CancelledError
            The request was cancelled, or the model was closed meanwhile.

        Examples
        --------
        >>> with LLM("demo") as llm:
        ...     best = max(llm.score("The fox was very", [" hungry", " green"]), key=lambda score: score.logprob)
        """
        from ..engine import Request, Scoring

        given = checked("continuations", continuations, TEXTS_OR_IDS)
        ids = self._ids(prompt)
        listed = [(one, self._continuation_ids(one)) if isinstance(one, str) else (None, self._ids(one))
                  for one in given]
        self._queue.check_open()
        return Request(self._queue, Scoring(self._queue.runner, ids, listed)).finish()

    def _speculation(self, config: GenerationConfig) -> Speculation | None:
        """Make what guesses tokens of a request."""
        kind, rows = config.speculate or self._speculate, self.runner.config
        if kind == "off":
            return None
        if not rows.draft_tokens:
            raise RequestError(f"speculate is {kind!r}, and the model was opened with speculate='off'; open it "
                               "without.")
        if (config.draft_tokens or 0) > rows.draft_tokens:
            raise RequestError(f"{config.draft_tokens} guesses were asked for, but the model is open for "
                               f"{rows.draft_tokens}; open it with draft_tokens={config.draft_tokens}.")
        from ..engine import Speculation

        drafter = self._drafter(kind)
        return Speculation(drafter, self._times, config.draft_tokens or rows.draft_tokens, rows.outputs,
                           asked=kind != "auto" or not drafter.free)

    def _drafter(self, kind: str) -> Drafter:
        """Make who guesses; raises `RequestError` where that was not opened."""
        from ..engine import DraftModel, PromptLookup, SelfDraft
        from ..runtime import LighterSession

        if isinstance(self.draft, LighterSession):
            if kind == "self":
                return SelfDraft(self.session, self.draft)
        elif self.draft and kind in ("auto", "draft"):
            return DraftModel(self.draft, self.runner.model.vocab_size, self._kept)
        if kind in ("draft", "self"):
            how = "with draft=MODEL" if kind == "draft" else "with speculate='self'"
            raise RequestError(f"speculate is {kind!r}, and the model was not opened for that; open it {how}.")
        return PromptLookup()

    def _stream(self, ids: Iterable[int], options: Mapping[str, Any]) -> Stream:
        from ..engine import Stream

        asked = generation_config({name: options.get(name) for name in ("config", "n", "beams")})
        if asked.beams != 1:
            raise RequestError(f"A stream gives text as it grows, and which of {asked.beams} beams is the best is "
                               "known at the end; use complete.")
        if asked.n != 1:
            raise RequestError(f"A stream gives one sample, and n is {asked.n}; use complete.")
        return Stream(self._request(ids, options))
