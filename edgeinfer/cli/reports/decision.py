"""Report on the choice of how a bundle runs: the same words and fields in every command."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...config import RuntimeConfig
from ..output import say
from . import streaming

if TYPE_CHECKING:
    from edgeinfer.memory_planner import DraftMemory

    from ...llm.strategy import Choice
    from ...models.description import ModelDescription
    from ...runner import Runner

FIELD = ("of bundles with a predictor or a screen: `name` of the strategy that run chooses here (resident, sparse, "
         "sparse from flash, experts from flash, streamed, or refused), `tok_per_s` and `read_bytes` from storage per "
         "token as predicted, `others` that fit, `refused` with reasons, `basis` of the predictions, `said`; else null")
"""Description of the field `decision` of a JSON object."""
_RUNTIME = RuntimeConfig()


def described_as_run(
    model: ModelDescription, config: RuntimeConfig, max_kld: float, draft_memory: DraftMemory | None = None
) -> tuple[ModelDescription, Choice | None, dict[str, Any] | None]:
    """Return a bundle's description with the recipe that `run` would choose on this machine, the choice, and its field.

    Other models are as they were, without a choice.
    """
    if model.bundle is None:
        return model, None, None
    from ...bundle import Bundle
    from ...llm.strategy import strategy_report  # which imports NumPy
    from ...models.describe import describe

    with Bundle.open(model.bundle) as bundle:
        choice, found = strategy_report(bundle, config, max_kld, draft_memory)
    if choice and choice.strategy.config.recipe != config.recipe:
        described = describe(model.bundle, recipe=choice.strategy.config.recipe)
        model = replace(described, name=model.name, source=model.source)
    return model, choice, found


def approximation(session: Runner, by_itself: bool) -> dict[str, Any] | None:
    """Return the measured cost of a run's approximations, and whether they were automatic; None without any."""
    config = session.config
    if config.recipe == _RUNTIME.recipe and not config.techniques:  # as nearly always: nothing is imported for it
        return None
    from ...quality.gate import of_run

    said = of_run(session.bundle, session.config)
    return said and {**said, "by_itself": by_itself}


def announce(session: Runner, choice: Choice | None, cost: dict[str, Any] | None, max_kld: float,
             quiet: bool = False) -> None:
    """Report on standard error the reads from storage; unless `quiet`, also the chosen strategy with reason and
    cost."""
    if choice and not quiet:
        say(choice.sentence())
    if why := streaming.notice(session):
        say(why)
    if cost and not quiet:
        why = f"; enabled because it is within --max-kld {max_kld:g}" if cost["by_itself"] else ""
        say(f"Approximate, {cost['said']}{why}.")
