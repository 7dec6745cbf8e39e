"""A draft model beside a model: which one may draft for it, what both need together, and how it is opened."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.memory_planner import beside_draft, default_ctx, draft_config

from ...bundle import Bundle, weights_identity
from ...errors import RequestError, TokenizerError
from ...models import resolve
from ...runtime import Session, planner_of
from ...text import Tokenizer

if TYPE_CHECKING:
    from edgeinfer.memory_planner import Beside

    from ...base.progress import OnProgress
    from ...config import RuntimeConfig
    from ...graph import ModelConfig
    from ...models.describe import ModelDescription

TOKENIZER = "tokenizer.json"


class Draft:
    """A draft model of a model, found and checked; `open` takes its memory.

    Parameters
    ----------
    name : whatever `models.resolve` takes
    target : Bundle
        Of the model that checks.
    tokenizer : Tokenizer or None
        Of that model.
    config : RuntimeConfig
        Of its run.
    progress : callable, optional
        As for `LLM`.

    Raises
    ------
    RequestError
        It is the model itself, or its context is shorter than that of the run.
    TokenizerError
        Its tokenizer is another.
    """

    def __init__(self, name: str | Path, target: Bundle, tokenizer: Tokenizer | None, config: RuntimeConfig,
                 progress: OnProgress | None = None):
        self.name, self._progress = name, progress
        self.bundle = Bundle.open(resolve(name, progress))
        try:
            _check_weights(name, self.bundle, target)
            _check_context(name, self.bundle.config, target.config, config)
            _check_tokenizer(name, self.bundle, target, tokenizer)
            self.beside: Beside = beside_draft(planner_of(self.bundle))
        except BaseException:
            self.bundle.close()
            raise

    def open(self, host: Session) -> Session:
        """Open the draft on the threads of the model that checks, whose plan has room for it."""
        say = self._progress
        return Session(self.bundle, draft_config(host.plan, host.budget_bytes), say and partial(say, "compile"),
                       say and partial(say, "load"), host)


def check_described(draft: ModelDescription, target: ModelDescription, config: RuntimeConfig) -> None:
    """Raise as `Draft` where a run would refuse the draft, as far as descriptions tell; those of models that are not
    converted yet have no tokenizer.
    """
    with ExitStack() as opened:
        small, large = (one.bundle and opened.enter_context(Bundle.open(one.bundle)) for one in (draft, target))
        if small and large:
            _check_weights(draft.name, small, large)
        _check_context(draft.name, draft.config, target.config, config)
        if small and large:
            _check_tokenizer(draft.name, small, large)


def _check_weights(name: str | Path, draft: Bundle, target: Bundle) -> None:
    """Raise `RequestError` if a draft is the model that it should speed up."""
    if weights_identity(draft.header.tensors) == weights_identity(target.header.tensors):
        raise RequestError(f"The draft {name} is the model itself, whose draft tokens cost as much as they save; give "
                           "a smaller model with the same tokenizer, or let the model draft with a part of itself "
                           "(--speculate self).")


def _check_context(name: str | Path, draft: ModelConfig, target: ModelConfig, config: RuntimeConfig) -> None:
    """Raise `RequestError` if texts of a run are longer than its draft allows."""
    ctx, longest = config.ctx or default_ctx(target), draft.max_position_embeddings
    if ctx > longest:
        raise RequestError(f"The draft {name} has a context of {longest} tokens, and the run one of {ctx}; run with "
                           f"--ctx {longest}, or give a draft with a longer context.")


def _check_tokenizer(name: str | Path, draft: Bundle, target: Bundle, tokenizer: Tokenizer | None = None) -> None:
    """Raise `TokenizerError` if a draft has another tokenizer than the model, which is read if it is not given."""
    if TOKENIZER in target.files and TOKENIZER in draft.files \
            and (target.path / TOKENIZER).read_bytes() == (draft.path / TOKENIZER).read_bytes():
        return
    tokenizer = tokenizer or Tokenizer.of_model(target.path, target.files, target.config)
    if said := _difference(target, tokenizer, draft):
        raise TokenizerError(f"The draft {name} has another tokenizer than the model: {said}. Give a draft with the "
                             "same one.")


def _difference(target: Bundle, tokenizer: Tokenizer | None, draft: Bundle) -> str:
    """Say what differs between their tokenizers."""
    other = Tokenizer.of_model(draft.path, draft.files, draft.config)
    if tokenizer and other:
        return tokenizer.difference(other)
    if tokenizer or other:
        return f"the {'draft' if tokenizer else 'model'} has none"
    sizes = target.config.vocab_size, draft.config.vocab_size
    return "" if sizes[0] == sizes[1] else f"neither has one, and they have {sizes[0]} and {sizes[1]} tokens"
