"""Techniques: what may change how a model runs, each one object in one file, and the registry that everything asks.

A technique says once what the program has to know of it: its options, by which settings it stays exact, which part of
a bundle it needs, and the functions below. The command line, `LLM`, the gate of `--max-kld`, the choice of a strategy,
the prompt cache, other backends and the manual read the registry; none of them knows a technique by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from .checks import Rule, checked
from .config import Recipe, RuntimeConfig, Step
from .dataclass import dataclass

MODULES = (
    "edgeinfer.sparse.inactive_neurons",
    "edgeinfer.sparse.head_screening",
    "edgeinfer.techniques.topn_attention",
    "edgeinfer.techniques.prompt_pruning",
    "edgeinfer.offload.kept_experts",
    "edgeinfer.offload.cold_neurons",
)
"""Modules with a `TECHNIQUE` each, in the order in which options are listed; imported when somebody asks."""
COMMANDS = ("run", "plan", "estimate", "bench", "eval", "info")
"""Commands that take the options of techniques, and whose JSON objects have their fields."""
NEVER, DECODED, ALWAYS = "never", "decoded", "always"
"""Whether K and V of a text depend on a technique: not at all, those of decoded tokens, or those of prompts too."""


@dataclass(frozen=True)
class Option:
    """One option: keyword of `LLM`, flag, environment variable and key of the configuration file."""

    name: str
    """Of the keyword argument; flag and variable follow from it."""
    rule: Rule
    """Which values it may have."""
    metavar: str
    """Its values as the help shows them."""
    help: str
    """One sentence for the help and the manual."""
    default: Any = None
    """None leaves the model as it is."""
    kind: type = str
    """Type of its value on the command line."""
    commands: tuple[str, ...] = COMMANDS
    """Commands that have it."""
    of: str = ""
    """Option without which it means nothing; where it stands in a variable, it then gives way."""

    @property
    def flag(self) -> str:
        """Its flag."""
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Part:
    """Part of a bundle without which a technique cannot approximate."""

    name: str
    """One of `bundle.PARTS`."""
    read: Callable[[Any], dict[str, str | float]]
    """Returns what the pass needs to know of a `Bundle`'s part, without its arrays; nothing where there is none."""
    shown: tuple[str, ...] = ()
    """Names of settings by which a recipe may ask for a certain one."""


Settings = tuple[tuple[str, Any], ...]
"""Names of techniques with their settings."""


class Reported(NamedTuple):
    """One model in one command, as far as reports need it."""

    command: str
    """One of `COMMANDS`."""
    config: RuntimeConfig
    """Of the run."""
    settings: Any = None
    """Of the technique, or None where it is not used."""
    model: Any = None
    """`describe.ModelDescription`, or in ``info`` the open `Bundle`."""
    runner: Any = None
    """What ran the model, where something ran."""
    prompt: int = 0
    """Tokens of the prompt that is predicted."""


def _mode(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first option as the setting ``mode``; None where it was not given."""
    value = next(iter(values.values()))
    return None if value is None else {"mode": value}


def _nothing(*_: object) -> Iterator[Any]:
    return iter(())


@dataclass(frozen=True)
class Technique:
    """One technique. Functions that it leaves out change nothing.

    With `rewrite` it is a pass over the graph, whose settings are a step of the recipe; without, its settings are in
    `RuntimeConfig.techniques`, and `str` of them names them in measurements and plans.
    """

    name: str
    """Of its pass, its settings and its field in reports."""
    options: tuple[Option, ...] = ()
    """The first one switches it."""
    ask: Callable[[Mapping[str, Any]], Any] = _mode
    """From the values of all options to the settings: None where nothing was asked for, empty for "not at all"."""
    exact: Callable[[Any], bool] = lambda settings: True
    """Whether a model with these settings predicts what it predicts without."""
    by_itself: str = ""
    """Value of the first option that may be used without being asked for, within `--max-kld`; empty for none."""
    part: Part | None = None
    """What it needs of a bundle where it approximates."""
    drafts: bool = False
    """Whether a model may draft for itself with `by_itself` (``--speculate self``)."""
    kv: str = ALWAYS
    """Whether a prompt cache depends on it: `NEVER`, `DECODED` (where it approximates) or `ALWAYS`."""
    rewrite: Callable[..., Any] | None = None
    """``rewrite(graph, **settings) -> Graph``."""
    settle: Callable[[Any, int], Any] = lambda settings, layers: settings
    """``settle(settings, layers)`` fills in what depends on how many layers a model has."""
    boundaries: Callable[[Any], tuple[int, ...]] = lambda settings: ()
    """After which layers tokens of a prompt may be left behind, whose K and V later layers then lack."""
    prompt_share: Callable[[Any, int, int, int], float] = lambda settings, tokens, depth, layers: 1.0
    """``prompt_share(settings, tokens, depth, layers)``: share of a prompt's tokens times layers that is computed."""
    regions: Callable[[Any, Any, Any], Iterable[Any]] = _nothing
    """``regions(graph, request, settings)`` yields the regions of memory that it takes."""
    traffic: Callable[[Any, Any, Any], Any] = lambda traffic, model, settings: traffic
    """``traffic(traffic, model, settings)`` returns what the estimator is to read of a described model."""
    place: Callable[[Any, Any], Any] = lambda model, bundle: None
    """``place(model, bundle)`` returns what finds a plan (`memory_planner.Place`) where not all weights of a model fit,
    whose mode is then the technique's name; None where it has nothing to read when it is wanted. The bundle is None
    for a model that is none yet."""
    reads: Callable[[Any, Any, Any], tuple[float, float] | None] = lambda plan, bundle, profile: None
    """``reads(plan, bundle, profile)`` returns the bytes that a token reads from storage with such a plan, and those of
    one read; None where the profile does not say enough."""
    notice: Callable[[Any], str] = lambda plan: ""
    """Says what such a plan keeps in memory, and what is read."""
    cost: Callable[[Any, int, int, int], dict[str, Any]] = lambda plan, tokens, hits, misses: {}
    """``cost(plan, tokens, hits, misses)`` returns what tokens have read, as reports have it."""
    attach: Callable[[Any, Any], None] = lambda session, settings: None
    """``attach(session, settings)`` adds its prefill strategy, reader or drafter to an open session."""
    report: Callable[[Reported], Mapping[str, Any]] = lambda run: {}
    """Returns its fields of a command's JSON object."""
    fields: tuple[tuple[str, str, str], ...] = ()
    """Command, field and meaning of what `report` returns."""
    label: str = ""
    """What ``plan`` and ``estimate`` put before the words of their field (`said`, `assumed`) for people."""
    target: str = ""
    """Option of ``eval`` with a divergence for which settings are to be found by `search`."""
    search: Callable[[Any, Callable[[Any], float], float], Any] = lambda settings, divergence, target: settings
    """``search(settings, divergence, target)`` returns the boldest settings that diverge by the target at most."""
    measurable: Callable[[Any, int | None], None] = lambda settings, prompt: None
    """``measurable(settings, prompt)`` raises `UsageError` where prompts of so many tokens, or none, show nothing."""

    def step(self, settings: Mapping[str, Any]) -> Step:
        """Return the step of a recipe with these settings."""
        return Step(self.name, tuple(settings.items()))


_USUAL = frozenset(step.name for step in Recipe().steps)


# -- the registry ------------------------------------------------------------------------------------------------------


@cache
def techniques() -> tuple[Technique, ...]:
    """Return all techniques, in the order of `MODULES`."""
    return tuple(import_module(module).TECHNIQUE for module in MODULES)


def technique(name: str) -> Technique | None:
    """Return the technique of a name, which the module of a pass may stand before; None for other passes."""
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
        own = {each.name: values.get(each.name, each.default) for each in one.options}
        plain = {each.name: value if (value := own[each.name]) is None else checked(each.name, value, each.rule)
                 for each in one.options}
        if plain and (settings := one.ask(plain)) is not None:
            yield one, settings


def recipe_with(recipe: Recipe | None = None, /, **values: Any) -> Recipe:
    """Return a recipe with the passes that options ask for, behind the others and instead of their own.

    Raises as `asked_for`.
    """
    recipe = recipe or Recipe()
    for one, settings in asked_for(values):
        if one.rewrite:
            recipe = recipe.replacing(one.name, one.step(settings) if settings else None)
    return recipe


def configured(config: RuntimeConfig, values: Mapping[str, Any]) -> RuntimeConfig:
    """Return the settings of a run with what options, by name, ask for.

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
    """Return the settings of techniques for a model of so many layers."""
    return tuple((name, own if (one := technique(name)) is None or one.rewrite else one.settle(own, layers))
                 for name, own in settings)


def prompt_share(settings: Settings, tokens: int, depth: int, layers: int) -> float:
    """Return the share of a prompt's tokens times layers that is computed, behind `depth` others."""
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
    """Return what finds a plan (`memory_planner.Place`) where not all weights of a model fit; None where nothing does,
    and layers are streamed."""
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
