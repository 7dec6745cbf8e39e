"""How a model is opened: who runs it, who guesses for it, and which way a bundle that leaves a choice goes."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .config import CPU, Recipe, RuntimeConfig
from .errors import UsageError

if TYPE_CHECKING:
    from .backends import Provider
    from .bundle import Bundle
    from .choice import Choice
    from .draft import Draft
    from .memory_planner import Beside
    from .progress import Progress
    from .runner import Runner
    from .runtime import Lighter, Session
    from .text import Tokenizer


def guesser(kind: str, draft: str | Path | Recipe | None, bundle: Bundle, tokenizer: Tokenizer | None,
            config: RuntimeConfig, progress: Progress | None, opened: ExitStack) -> Draft | Lighter | None:
    """Find the model, or the part of this one, that guesses; most runs have none and import nothing for it."""
    if kind == "self":
        from .runtime import Lighter

        return Lighter.of_bundle(bundle, config.recipe, draft if isinstance(draft, Recipe) else None)
    if draft is None or isinstance(draft, Recipe) or kind not in ("auto", "draft"):
        return None
    from .draft import Draft

    found = Draft(draft, bundle, tokenizer, config, progress)
    opened.callback(found.bundle.close)
    return found


def provider(device: str | None) -> Provider | None:
    """Return who runs a model instead of our own kernels; most runs have nobody and import nothing for it."""
    if device in (None, CPU):
        return None
    from .backends import provider_of

    return provider_of(device)


def settled(device: str | None, provider: Provider | None, bundle: Bundle, config: RuntimeConfig,
            kv: str | None) -> tuple[Provider | None, RuntimeConfig]:
    """Return who runs a bundle, and the settings of the run as that takes them; see `executors.settled`."""
    if provider is None:  # as nearly always: nothing is imported for it
        return None, config
    from . import executors

    return executors.settled(device, provider, bundle, config, kv)


def taken(device: str, provider: Provider | None, path: Path, config: RuntimeConfig,
          kv: str | None) -> tuple[Provider | None, RuntimeConfig]:
    """As `settled`, of a bundle that is not open."""
    if provider is None:
        return None, config
    from .bundle import Bundle

    with Bundle.open(path) as bundle:
        return settled(device, provider, bundle, config, kv)


def session(bundle: Bundle, config: RuntimeConfig, progress: Progress | None, beside: Beside | None) -> Session:
    """Open a model for our own kernels."""
    from .runtime import Session
    from .technique import placer

    return Session(bundle, config, progress=progress and partial(progress, "compile"),
                   loading=progress and partial(progress, "load"), place=placer(bundle.config, bundle), beside=beside)


def opened_on(provider: Provider, bundle: Bundle, config: RuntimeConfig, guesser: Draft | Lighter | None,
              progress: Progress | None, opened: ExitStack) -> tuple[Runner, Runner | None]:
    """Open a model on a device, and behind it its draft model, which gets what it leaves."""
    from .backends import OnnxRunner
    from .runtime import Lighter

    if isinstance(guesser, Lighter):
        raise UsageError(f"speculate is 'self', and device {provider.device} runs no part of a model by itself; give a "
                         "draft model, or run with device cpu.")
    say = progress and partial(progress, "lower")
    runner = OnnxRunner(bundle, config, provider, say)
    opened.callback(runner.close)
    if guesser is None:
        return runner, None
    draft = OnnxRunner(guesser.bundle, guesser.config_on(runner), provider, say, runner.plan)
    runner.plan = runner.plan.beside(draft.plan)
    return runner, draft


def choice(bundle: Bundle, config: RuntimeConfig, max_kld: float | None, beside: Beside | None) -> Choice | None:
    """Choose how to run a bundle that has parts to choose from."""
    if not bundle.approximates:  # as nearly always: nothing is imported for it
        return None
    from .choice import choose

    return choose(bundle, config, max_kld, beside)
