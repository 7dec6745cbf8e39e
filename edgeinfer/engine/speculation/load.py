"""A draft model: compatibility with the model, memory of both together, and opening."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.memory_planner import default_ctx, draft_config, draft_memory_of

from ...bundle import Bundle
from ...errors import RequestError, TokenizerError
from ...models import resolve, tokenizer_of

if TYPE_CHECKING:
    from edgeinfer.memory_planner import DraftMemory

    from ...base.progress import OnProgress
    from ...config import RuntimeConfig
    from ...graph import ModelConfig
    from ...models.description import ModelDescription
    from ...runtime import Session
    from ...text import Tokenizer

    _Texts = tuple[Path, ModelConfig]
    """A bundle, a checkpoint or a GGUF file, and its config."""

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
        from ...runtime import planner_of

        self.name, self._progress = name, progress
        self.bundle = Bundle.open(resolve(name, progress))
        try:
            _check_weights(name, self.bundle, target)
            _check_context(name, self.bundle.config, target.config, config)
            _check_tokenizer(name, (self.bundle.path, self.bundle.config), (target.path, target.config), tokenizer)
            self.draft_memory: DraftMemory = draft_memory_of(planner_of(self.bundle))
        except BaseException:
            self.bundle.close()
            raise

    def open(self, host: Session) -> Session:
        """Open the draft on the threads of the model that checks, whose plan has room for it."""
        from ...runtime import Session

        say = self._progress
        return Session(self.bundle, draft_config(host.plan, host.budget_bytes), say and partial(say, "compile"),
                       say and partial(say, "load"), host)


def check_described(draft: ModelDescription, target: ModelDescription, config: RuntimeConfig) -> None:
    """Raise as `Draft` where a run would refuse the draft; nothing is converted for it.

    Models that are not on this machine have no tokenizer that could be compared. Weights are compared between bundles;
    checkpoints and GGUF files are the same model if their paths are.
    """
    with ExitStack() as opened:
        if draft.bundle and target.bundle:
            bundles = (opened.enter_context(Bundle.open(path)) for path in (draft.bundle, target.bundle))
            _check_weights(draft.name, *bundles)
        elif draft.path and target.path and os.path.samefile(draft.path, target.path):
            raise _is_itself(draft.name)
    _check_context(draft.name, draft.config, target.config, config)
    if draft.path and target.path:
        _check_tokenizer(draft.name, (draft.path, draft.config), (target.path, target.config))


def _check_weights(name: str | Path, draft: Bundle, target: Bundle) -> None:
    """Raise `RequestError` if a draft is the model that it should speed up."""
    from ...bundle import weights_identity

    if weights_identity(draft.header.tensors) == weights_identity(target.header.tensors):
        raise _is_itself(name)


def _is_itself(name: str | Path) -> RequestError:
    return RequestError(f"The draft {name} is the model itself, whose draft tokens cost as much as they save; give a "
                        "smaller model with the same tokenizer, or let the model draft with a part of itself "
                        "(--speculate self).")


def _check_context(name: str | Path, draft: ModelConfig, target: ModelConfig, config: RuntimeConfig) -> None:
    """Raise `RequestError` if texts of a run are longer than its draft allows."""
    ctx, longest = config.ctx or default_ctx(target), draft.max_position_embeddings
    if ctx > longest:
        raise RequestError(f"The draft {name} has a context of {longest} tokens, and the run one of {ctx}; run with "
                           f"--ctx {longest}, or give a draft with a longer context.")


def _check_tokenizer(name: str | Path, draft: _Texts, target: _Texts, tokenizer: Tokenizer | None = None) -> None:
    """Raise `TokenizerError` if a draft has another tokenizer than the model, which is read if it is not given."""
    files = [path / TOKENIZER for path, _ in (draft, target)]
    if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return
    tokenizer, other = tokenizer or tokenizer_of(target[0]), tokenizer_of(draft[0])
    if said := _difference((tokenizer, target[1].vocab_size), (other, draft[1].vocab_size)):
        raise TokenizerError(f"The draft {name} has another tokenizer than the model: {said}. Give a draft with the "
                             "same one.")


def _difference(target: tuple[Tokenizer | None, int], draft: tuple[Tokenizer | None, int]) -> str:
    """Describe the difference of two tokenizers, or the sizes of the vocabularies if there are none."""
    (tokenizer, size), (other, draft_size) = target, draft
    if tokenizer and other:
        return tokenizer.difference(other)
    if tokenizer or other:
        return f"the {'draft' if tokenizer else 'model'} has none"
    return "" if size == draft_size else f"neither has one, and they have {size} and {draft_size} tokens"
