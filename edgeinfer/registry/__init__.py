"""Options and techniques, which everything asks: commands, `LLM`, planner, estimator, backends and the manual.

`table.py` has the options of the commands, `rules.py` their valid values, `interface.py` the contract of techniques;
this file is the registry of techniques.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from ..base.validation import checked
from ..config import Recipe, RuntimeConfig
from ..errors import UsageError
from .interface import ALWAYS, DECODED, NEVER, Drafting, Part, Reported, Settings, Technique
from .rules import CONVERSION, MAKING, RULES, plain
from .table import COMMANDS, GROUPS, OPTIONS, SERVING, UNITS, Option, of_command

__all__ = [
    "ALWAYS", "COMMANDS", "CONVERSION", "DECODED", "GROUPS", "MAKING", "MODULES", "NEVER", "OPTIONS", "RULES",
    "SERVING", "UNITS", "Drafting", "Option", "Part", "Reported", "Settings", "Technique", "agreed", "asked_for",
    "check_served", "configured", "drafting", "each", "fields", "in_use", "of_command", "options", "placer", "plain",
    "prompt_share", "recipe_with", "reports", "said", "samples", "settled", "technique", "techniques",
    "with_techniques",
]

MODULES = (
    "edgeinfer.sparse.inactive_neurons",
    "edgeinfer.sparse.head_screening",
    "edgeinfer.techniques.topn_attention",
    "edgeinfer.techniques.prompt_pruning",
    "edgeinfer.techniques.speculation",
    "edgeinfer.offload.kept_experts",
    "edgeinfer.offload.cold_neurons",
)
"""Modules with a `TECHNIQUE` each, in the order in which options are listed; imported on first use."""
_USUAL = frozenset(step.name for step in Recipe().steps)


@cache
def techniques() -> tuple[Technique, ...]:
    """Return all techniques, in the order of `MODULES`."""
    return tuple(import_module(module).TECHNIQUE for module in MODULES)


def technique(name: str) -> Technique | None:
    """Return the technique of a name, which the module of a pass may be before; None for other passes."""
    if not name or name in _USUAL:  # most runs have no other passes and import nothing for them
        return None
    return next((one for one in techniques() if one.name == name.rpartition(".")[2]), None)


def options(command: str = "") -> Iterator[Option]:
    """Yield the options of all techniques, or those that a command has."""
    for one in techniques():
        yield from (each for each in one.options if not command or command in each.commands)


def fields(command: str) -> dict[str, str]:
    """Return the fields of a command's JSON object that are of techniques, with their meaning."""
    return {name: meaning for one in techniques() for where, name, meaning in one.fields if where == command}


def asked_for(values: Mapping[str, Any]) -> Iterator[tuple[Technique, Any]]:
    """Yield the techniques that values of options, by name, say something of, with their settings.

    Raises
    ------
    UsageError
        A value is of a wrong type or out of its range.
    """
    for one in techniques():
        if (own := _values(one, values)) and (settings := one.ask(own)) is not None:
            yield one, settings


def check_served(values: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an option of a technique whose requests cannot run together."""
    for one, settings in asked_for(values):
        if one.alone and settings:
            raise UsageError(f"{one.options[0].flag} {one.alone}, and a server runs many requests together; leave it "
                             "out.")


def _values(one: Technique, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a technique's options, checked."""
    own = {each.name: (values.get(each.name, each.default), each.rule) for each in one.options}
    return {name: None if value is None else checked(name, value, rule) for name, (value, rule) in own.items()}


def drafting(values: Mapping[str, Any]) -> Drafting:
    """Return the drafter for a model by the values of options. Raises as `asked_for`, or if they contradict."""
    return next(one.drafting(_values(one, values)) for one in techniques() if one.drafting)


def samples(values: Mapping[str, Any], flags: Collection[str]) -> bool:
    """Return whether options given as flags request something that beam search does not support."""
    return any(one.samples(values, flags) for one in techniques())


def agreed(values: Mapping[str, Any], flags: Collection[str], beams: int) -> Mapping[str, Any]:
    """Return the values of options as they go together; contradicting flags raise `UsageError`."""
    for one in techniques():
        values = one.agree(values, flags, beams)
    return values


def recipe_with(recipe: Recipe | None = None, /, **values: Any) -> Recipe:
    """Return a recipe with the passes that options ask for, after the others and instead of their own.

    Raises as `asked_for`.
    """
    recipe = recipe or Recipe()
    for one, settings in asked_for(values):
        if one.rewrite:
            recipe = recipe.replacing(one.name, one.step(settings) if settings else None)
    return recipe


def configured(config: RuntimeConfig, values: Mapping[str, Any]) -> RuntimeConfig:
    """Return the settings of a run with those that options, by name, request.

    Raises as `asked_for`.
    """
    found = tuple((one.name, settings) for one, settings in asked_for(values) if settings and not one.rewrite)
    return replace(config, recipe=recipe_with(config.recipe, **values), techniques=found or config.techniques)


def in_use(config: RuntimeConfig) -> Settings:
    """Return the techniques that a run uses: name and settings of each, those of passes as their step has them."""
    steps = ((step.name.rpartition(".")[2], step.settings) for step in config.recipe.steps if technique(step.name))
    return (*steps, *config.techniques)


def each(settings: Settings) -> Iterator[tuple[Technique, Any]]:
    """Yield techniques with their settings, of passes as a dict."""
    for name, own in settings:
        if one := technique(name):
            yield one, dict(own) if one.rewrite else own


def settled(settings: Settings, layers: int) -> Settings:
    """Return the settings of techniques for a model of this many layers."""
    return tuple((name, own if (one := technique(name)) is None or one.rewrite else one.settle(own, layers))
                 for name, own in settings)


def prompt_share(settings: Settings, tokens: int, depth: int, layers: int) -> float:
    """Return the share of a prompt's tokens times layers that is computed, after `depth` others."""
    share = 1.0
    for one, own in each(settings):
        share *= one.prompt_share(own, tokens, depth, layers)
    return share


def said(command: str, report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield label and words of the fields that techniques with a label have in a report, for people."""
    for one in techniques():
        for where, name, _ in one.fields:
            if one.label and where == command and (found := report.get(name)):
                words = [found[key] for key in ("said", "assumed") if found.get(key)]
                yield from [(one.label, "; ".join(words))] if words else []


def placer(model: Any, bundle: Any = None) -> Any:
    """Return the function that finds a plan (`memory_planner.Placer`) where not all weights of a model fit; None where
    nothing does, and layers are streamed."""
    return next((found for one in techniques() if (found := one.place(model, bundle))), None)


def with_techniques(traffic: Any, model: Any, recipe: Recipe) -> Any:
    """Return a described model's traffic as all techniques leave it."""
    steps = {step.name: dict(step.settings) for step in recipe.steps}
    for one in techniques():
        traffic = one.traffic(traffic, model, steps.get(one.name))
    return traffic


def reports(run: Reported) -> dict[str, Any]:
    """Return the fields of all techniques in a command's JSON object."""
    own = {one.name: settings for one, settings in each(in_use(run.config))}
    found: dict[str, Any] = {}
    for one in techniques():
        found |= one.report(run._replace(settings=own.get(one.name)))
    return found
