"""Speculative decoding: drafters propose tokens that the model verifies in one forward pass; the text never changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.validation import Rule, choice, integer
from ..config import CPU, DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS, SPECULATIONS, GenerationConfig, Recipe, RuntimeConfig
from ..errors import RequestError, UsageError
from ..registry import NEVER, RULES, Option, Technique

if TYPE_CHECKING:
    from edgeinfer.memory_planner import DraftMemory, Planner

    from ..base.progress import OnProgress
    from ..bundle import Bundle
    from ..engine import Drafter, Speculation, Times
    from ..engine.speculation.load import Draft
    from ..models.description import ModelDescription
    from ..runner import Runner
    from ..runtime import DraftHeadPlan, SelfDraftPlan
    from ..text import Tokenizer

AUTO, OFF, _, DRAFT, SELF, MTP = SPECULATIONS
WITHOUT_DRAFTS = {"speculate": OFF, "draft": None}
"""Options of a process that drafts nothing, such as a worker that computes prompts alone."""
_COMMANDS = ("run", "plan")


class Drafting(NamedTuple):
    """A drafter of tokens for a model; see `technique.Drafting`."""

    kind: str
    """One of `config.SPECULATIONS`."""
    draft: str | Path | Recipe | None
    """Draft model, or the passes by which the model drafts for itself."""
    draft_tokens: int
    """Maximum number of draft tokens verified in one forward pass."""

    @property
    def rows(self) -> int:
        """`RuntimeConfig.draft_tokens` of the run."""
        return 0 if self.kind == OFF else self.draft_tokens

    @property
    def model(self) -> str | Path | None:
        """The draft model that is opened beside the model."""
        return self.draft if self.kind in (AUTO, DRAFT) and not isinstance(self.draft, Recipe) else None

    def check_device(self, device: str, recurrent: bool) -> None:
        """Raise `UsageError` where a device of onnxruntime cannot run the drafter of a model."""
        if self.kind in (SELF, MTP):
            raise UsageError(f"speculate is {self.kind!r}, and device {device} runs no part of a model by itself; give "
                             "a draft model, or run with device cpu.")
        if recurrent and (self.kind not in (AUTO, OFF) or self.model):
            raise UsageError(f"Draft tokens were asked for, and device {device} keeps no recurrent state from before "
                             "them, to which a model with recurrent layers returns; leave --speculate and --draft out, "
                             "or run with --device cpu.")

    def companion(self, bundle: Bundle, tokenizer: Tokenizer | None, config: RuntimeConfig,
                  progress: OnProgress | None, opened: ExitStack) -> Draft | SelfDraftPlan | DraftHeadPlan | None:
        """Find the draft model, or the part of the model that drafts; most runs have neither."""
        if self.kind == MTP:
            from ..runtime import DraftHeadPlan

            return DraftHeadPlan.of_bundle(bundle)
        if self.kind == SELF:
            from ..runtime import SelfDraftPlan

            return SelfDraftPlan.of_bundle(bundle, config.recipe, self.draft if isinstance(self.draft, Recipe)
                                           else None)
        if self.model is None:
            return None
        from ..engine.speculation.load import Draft

        found = Draft(self.model, bundle, tokenizer, config, progress)
        opened.callback(found.bundle.close)
        return found

    def draft_memory(self, model: ModelDescription, stored: tuple[str | None, int | None],
               config: RuntimeConfig) -> DraftMemory | None:
        """Return the memory of the draft in a plan."""
        from edgeinfer.memory_planner import Planner, draft_memory_of

        from ..models.describe import describe

        def planner(name: str | Path, recipe: Recipe | None = None) -> Planner:
            found = describe(name, *stored, recipe)
            return Planner(found.graph, found.weight_bytes)

        if self.kind == MTP:
            return _head_beside(model)
        if self.kind == SELF:
            from ..runtime import SelfDraftPlan

            own = SelfDraftPlan.of(model.config, config.recipe, _parts(model), partial(planner, model.name))
            return own.draft_memory
        if self.model is None:
            return None
        from ..engine.speculation.load import check_described

        check_described(describe(self.model, *stored), model, config)
        return draft_memory_of(planner(self.model))

    def speculation(self, asked: GenerationConfig, runner: Runner, draft: Runner | None, kept: list[Any],
                    times: Times) -> Speculation | None:
        """Make the speculation of a request; raises `RequestError` where the model was not opened for it."""
        kind, rows = asked.speculate or self.kind, runner.config
        if kind == OFF:
            return None
        if not all(map(_returns, filter(None, (runner, draft)))):
            if kind == AUTO and draft is None:
                return None
            raise RequestError(f"speculate is {kind!r}, and device {runner.device} keeps no recurrent state from "
                               "before draft tokens; leave it out, or open the models with device='cpu'.")
        if not rows.draft_tokens:
            raise RequestError(f"speculate is {kind!r}, and the model was opened with speculate='off'; open it "
                               "without.")
        if (asked.draft_tokens or 0) > rows.draft_tokens:
            raise RequestError(f"draft_tokens is {asked.draft_tokens}, and the model was opened with "
                               f"{rows.draft_tokens}; open it with draft_tokens={asked.draft_tokens}.")
        from ..engine import Speculation

        drafter = _drafter(kind, runner, draft, kept)
        return Speculation(drafter, times, asked.draft_tokens or rows.draft_tokens, rows.outputs,
                           asked=kind != AUTO or not drafter.free)


def _drafter(kind: str, runner: Runner, draft: Runner | None, kept: list[Any]) -> Drafter:
    """Make the drafter of a request."""
    from ..engine import PromptLookup

    if draft is None and kind not in (DRAFT, SELF, MTP):
        return PromptLookup()
    from ..engine import DraftHead, DraftModel, SelfDraft
    from ..runtime import DraftHeadSession, SelfDraftSession

    if isinstance(draft, DraftHeadSession):
        if kind == MTP:
            return DraftHead(runner, draft)
    elif isinstance(draft, SelfDraftSession):
        if kind == SELF:
            return SelfDraft(runner, draft)
    elif draft and kind in (AUTO, DRAFT):
        return DraftModel(draft, runner.model.vocab_size, kept)
    if kind in (DRAFT, SELF, MTP):
        how = "with draft=MODEL" if kind == DRAFT else f"with speculate={kind!r}"
        raise RequestError(f"speculate is {kind!r}, and the model was not opened for that; open it {how}.")
    return PromptLookup()


def _returns(runner: Runner) -> bool:
    """Return whether a runner can forget draft tokens: elsewhere than in our kernels states go on."""
    return runner.device == CPU or not runner.model.recurrent


def _head_beside(model: ModelDescription) -> DraftMemory:
    """Return the memory of the draft head in a plan; only its bundle says whether it has one."""
    from ..bundle import Bundle
    from ..runtime import DraftHeadPlan

    if model.bundle is None:
        raise RequestError(f"Whether {model.name} has a head for further tokens (MTP) is known once it is converted; "
                           "convert it, or leave --speculate mtp out.")
    with Bundle.open(model.bundle) as bundle:
        return DraftHeadPlan.of_bundle(bundle).draft_memory


def _parts(model: ModelDescription) -> frozenset[str]:
    from ..bundle import Bundle

    if model.bundle is None:
        return frozenset()
    with Bundle.open(model.bundle) as bundle:
        return bundle.parts


def drafting(values: Mapping[str, Any]) -> Drafting:
    """Return the drafting that options request; raises `UsageError` if they contradict each other."""
    kind, draft, tokens = (values[one.name] for one in OPTIONS)
    kind = kind or AUTO
    if isinstance(draft, Recipe) and kind != SELF:
        raise UsageError(f"draft is the recipe {draft}, by which a model drafts for itself; give speculate='self', or "
                         "a draft model.")
    if kind == DRAFT and draft is None:
        raise UsageError("speculate is 'draft', and no draft model is given; give one with draft (--draft MODEL).")
    return Drafting(kind, draft, DEFAULT_DRAFT_TOKENS if tokens is None else tokens)


def samples(values: Mapping[str, Any], flags: Collection[str]) -> bool:
    """Return whether flags ask for drafts, which beam search does not use."""
    return any(one.name in flags and values[one.name] not in (None, AUTO, OFF) for one in OPTIONS[:2])


def agree(values: Mapping[str, Any], flags: Collection[str], beams: int) -> Mapping[str, Any]:
    """Return compatible values: of options that exclude each other, flags are refused, and variables give way."""
    (name, kind), (other, draft) = ((one.name, values[one.name]) for one in OPTIONS[:2])
    if beams > 1:
        if other in flags and draft is not None:
            raise UsageError("--draft needs speculative decoding, which beam search does not use; leave --draft or "
                             "--beams out.")
        if name in flags and kind not in (AUTO, OFF):
            raise UsageError(f"--speculate {kind} and --beams exclude each other: beam search verifies no draft "
                             "tokens; use one or the other.")
        return {**values, name: OFF, other: None}
    if draft is None or kind in (AUTO, DRAFT):
        return values
    if name in flags and other in flags:
        raise UsageError(f"--speculate {kind} uses no draft model; leave --draft or --speculate out.")
    return {**values, name: AUTO} if other in flags else {**values, other: None}


def _model_or_recipe(value: Any) -> Any:
    return value if isinstance(value, Recipe) else RULES[OPTIONS[1].name].convert(value)


OPTIONS = (
    Option("speculate", choice(SPECULATIONS), "|".join(SPECULATIONS),
           "Speculative decoding: draft model, prompt lookup, self-draft, the model's head for further tokens (mtp) "
           "or off; auto uses the draft model if given, otherwise prompt lookup. The output never changes.", AUTO,
           commands=_COMMANDS, common=("run",)),
    Option("draft", Rule(RULES["draft"].want, _model_or_recipe), "MODEL",
           "Draft model: a smaller model with the same tokenizer.", commands=_COMMANDS, common=("run",)),
    Option("draft_tokens", integer(1, MAX_DRAFT_TOKENS, f"from 1 to {MAX_DRAFT_TOKENS}"), "N",
           "Maximum number of draft tokens verified in one forward pass.", DEFAULT_DRAFT_TOKENS, int, _COMMANDS),
)
TECHNIQUE = Technique(
    name="speculate",
    options=OPTIONS,
    ask=lambda values: None,
    kv=NEVER,
    drafting=drafting,
    samples=samples,
    agree=agree,
)
