"""The contract of techniques: each is one object in one file, and the registry lists all.

A technique states once everything that the program needs: its options, the settings that stay exact, the part of a
bundle that it needs, and the functions below. No other file knows a technique by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from ..base.dataclass import dataclass
from ..config import GenerationConfig, RuntimeConfig, Step
from .table import Option

NEVER, DECODED, ALWAYS = "never", "decoded", "always"
"""Whether K and V of a text depend on a technique: not at all, those of decoded tokens, or those of prompts too."""


@dataclass(frozen=True)
class Part:
    """Part of a bundle without which a technique cannot approximate."""

    name: str
    """One of `bundle.PARTS`."""
    read: Callable[[Any], dict[str, str | float]]
    """Returns the facts about a `Bundle`'s part that the pass needs, without its arrays; nothing if there is none."""
    shown: tuple[str, ...] = ()
    """Names of settings by which a recipe may ask for a certain one."""


Settings = tuple[tuple[str, Any], ...]
"""Names of techniques with their settings."""


class Reported(NamedTuple):
    """One model in one command, as far as reports need it."""

    command: str
    """One of `COMMANDS`."""
    config: RuntimeConfig
    """Config of the run."""
    settings: Any = None
    """Settings of the technique, or None if it is not used."""
    model: Any = None
    """`describe.ModelDescription`, or in ``info`` the open `Bundle`."""
    runner: Any = None
    """Runner of the model, if something ran."""
    prompt: int = 0
    """Tokens of the prompt that is predicted."""


def _mode(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first option as the setting ``mode``; None if it was not given."""
    value = next(iter(values.values()))
    return None if value is None else {"mode": value}


def _nothing(*_: object) -> Iterator[Any]:
    return iter(())


class Drafting(Protocol):
    """A drafter of tokens for a model, before the model is open."""

    @property
    def rows(self) -> int:
        """`RuntimeConfig.draft_tokens` of the run."""

    @property
    def model(self) -> Any:
        """Name of the draft model that is opened together with the model, or None."""

    def check_device(self, device: str, recurrent: bool) -> None:
        """Raise `UsageError` where a device of onnxruntime cannot run the drafter of a model."""

    def companion(self, bundle: Any, tokenizer: Any, config: RuntimeConfig, progress: Any, opened: Any) -> Any:
        """Return the drafter to open beside a bundle, or None: its `draft_memory` is in the plan, and `open(session)`
        opens it."""

    def draft_memory(self, model: Any, stored: tuple[str | None, int | None], config: RuntimeConfig) -> Any:
        """Return the memory of the draft for a described model (`memory_planner.DraftMemory`), or None."""

    def speculation(self, asked: GenerationConfig, runner: Any, draft: Any, kept: list[Any], times: Any) -> Any:
        """Return the object that drafts and verifies for a request (`engine.Speculation`), or None."""


@dataclass(frozen=True)
class Technique:
    """One technique. Functions that it leaves out change nothing.

    With `rewrite` it is a pass over the graph, whose settings are a step of the recipe; without, its settings are in
    `RuntimeConfig.techniques`, and `str` of them names them in measurements and plans.
    """

    name: str
    """Name of its pass, its settings and its field in reports."""
    options: tuple[Option, ...] = ()
    """The first one switches it."""
    ask: Callable[[Mapping[str, Any]], Any] = _mode
    """Turns the values of all options into settings: None if nothing was requested, empty for "not at all"."""
    exact: Callable[[Any], bool] = lambda settings: True
    """True if these settings leave a model's predictions unchanged."""
    by_itself: str = ""
    """Value of the first option that may be used without being requested, within `--max-kld`; empty for none."""
    part: Part | None = None
    """Part of a bundle that it needs in order to approximate."""
    alone: str = ""
    """Why requests with it share no forward pass, so that a server has no use for it; empty if they do."""
    drafts: bool = False
    """True if a model may draft for itself with `by_itself` (``--speculate self``)."""
    kv: str = ALWAYS
    """True if a prompt cache depends on it: `NEVER`, `DECODED` (where it approximates) or `ALWAYS`."""
    rewrite: Callable[..., Any] | None = None
    """``rewrite(graph, **settings) -> Graph``."""
    settle: Callable[[Any, int], Any] = lambda settings, layers: settings
    """``settle(settings, layers)`` fills in settings that depend on the number of layers."""
    boundaries: Callable[[Any], tuple[int, ...]] = lambda settings: ()
    """Layers after which prompt tokens may be pruned, whose K and V later layers then lack."""
    prompt_share: Callable[[Any, int, int, int], float] = lambda settings, tokens, depth, layers: 1.0
    """``prompt_share(settings, tokens, depth, layers)``: share of a prompt's tokens times layers that is computed."""
    regions: Callable[[Any, Any, Any], Iterable[Any]] = _nothing
    """``regions(graph, request, settings)`` yields the regions of memory that it takes."""
    traffic: Callable[[Any, Any, Any], Any] = lambda traffic, model, settings: traffic
    """``traffic(traffic, model, settings)`` returns the traffic of a described model for the estimator."""
    place: Callable[[Any, Any], Any] = lambda model, bundle: None
    """``place(model, bundle)`` returns the function that finds a plan (`memory_planner.Placer`) where not all weights
    of a model fit, whose mode is then the technique's name; None if it has nothing to read when it is requested. The
    bundle is None for a model that is none yet."""
    reads: Callable[[Any, Any, Any], tuple[float, float] | None] = lambda plan, bundle, profile: None
    """``reads(plan, bundle, profile)`` returns the bytes that a token reads from storage with such a plan, and those of
    one read; None if the profile does not say enough."""
    notice: Callable[[Any], str] = lambda plan: ""
    """Describes which weights such a plan keeps in memory, and which it reads."""
    cost: Callable[[Any, int, int, int], dict[str, Any]] = lambda plan, tokens, hits, misses: {}
    """``cost(plan, tokens, hits, misses)`` returns the bytes that tokens have read, for reports."""
    attach: Callable[[Any, Any], None] = lambda session, settings: None
    """``attach(session, settings)`` adds its prefill strategy, reader or drafter to an open session."""
    report: Callable[[Reported], Mapping[str, Any]] = lambda run: {}
    """Returns its fields of a command's JSON object."""
    fields: tuple[tuple[str, str, str], ...] = ()
    """Command, field and meaning of the values that `report` returns."""
    label: str = ""
    """Label before its words (`said`, `assumed`) in the output of ``plan`` and ``estimate``."""
    drafting: Callable[[Mapping[str, Any]], Drafting] | None = None
    """Turns the values of its options into a drafter beside a model; nothing that is computed depends on that, so it is
    in no configuration."""
    samples: Callable[[Mapping[str, Any], Collection[str]], bool] = lambda values, flags: False
    """``samples(values, flags)``: whether options given as flags request something that beam search does not
    support."""
    agree: Callable[[Mapping[str, Any], Collection[str], int], Mapping[str, Any]] = lambda values, flags, beams: values
    """``agree(values, flags, beams)`` returns values that go together: contradicting flags raise `UsageError`, and
    values of variables give way."""
    target: str = ""
    """Option of ``eval`` with a divergence for which settings are to be found by `search`."""
    search: Callable[[Any, Callable[[Any], float], float], Any] = lambda settings, divergence, target: settings
    """``search(settings, divergence, target)`` returns the boldest settings that diverge by the target at most."""
    measurable: Callable[[Any, int | None], None] = lambda settings, prompt: None
    """``measurable(settings, prompt)`` raises `UsageError` if prompts of this many tokens, or none, show nothing."""

    def step(self, settings: Mapping[str, Any]) -> Step:
        """Return the step of a recipe with these settings."""
        return Step(self.name, tuple(settings.items()))
