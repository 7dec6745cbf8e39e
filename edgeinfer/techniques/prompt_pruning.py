"""The technique ``lazy``: of long prompts only the tokens that matter go through the later layers (LazyLLM)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base.validation import NATS, Rule
from ..errors import UnsupportedModelError, UsageError
from ..registry import COMMANDS, NEVER, Option, Reported, Technique
from ..runner.pruning import MIN_PROMPT, Schedule, calibrated, layers_of

if TYPE_CHECKING:
    from ..graph import Graph
    from ..memory_planner import Region, Request
    from ..runtime import Session

OFF = "off"
STAGES_SEARCHED = 3
"""Boundaries of a schedule that is searched, if none are given."""
FIELDS = "`schedule`, `tokens` in each stage of layers, `share` of the tokens' layers that is computed, `assumed`, " \
    "the assumption about its time, and `said`, the same in words"


def _checked(value: Any) -> Schedule | str:
    """Return a schedule, or `OFF`."""
    if isinstance(value, Schedule) or value == OFF:
        return value
    if not isinstance(value, str):
        raise ValueError
    return Schedule.parse(value)


def _layers(value: Any) -> str:
    """Return a list of boundaries as it was given."""
    if not isinstance(value, str):
        raise ValueError
    layers_of(value)
    return value


def ask(values: Mapping[str, Any]) -> Schedule | None:
    """Return the schedule that the options ask for."""
    lazy, layers, target = values["lazy"], values["lazy_layers"], values["lazy_target"]
    if target is not None:
        if lazy is not None:
            raise UsageError(f"--lazy-target finds the shares that --lazy {lazy} gives; use one or the other.")
        n = STAGES_SEARCHED if layers is None else layers.count(",") + 1
        return Schedule((1.0,) * n, layers_of(layers))
    if lazy in (None, OFF):
        if layers is not None:
            raise UsageError(f"--lazy-layers is {layers:.80}, and without --lazy no prompt is pruned; add --lazy."
                             if lazy is None else f"--lazy-layers is {layers:.80}, and --lazy off prunes no prompt; "
                             "use one or the other.")
        return None
    return lazy if layers is None else replace(lazy, layers=layers_of(layers))


def regions(graph: Graph, request: Request, schedule: Schedule) -> Iterator[Region]:
    """Yield the memory of a prompt beside the program's own: for hidden states between stages, and for ranking.

    Raises `UnsupportedModelError` for a model whose prompts cannot be pruned.
    """
    from ..memory_planner import Region

    if graph.config.kv_layers:
        raise UnsupportedModelError("Layers of this model share the K and V of earlier ones, which run more tokens "
                                    "of a pruned prompt; its prompts cannot be pruned, so leave --lazy out.")
    if graph.config.recurrent:
        raise UnsupportedModelError("Recurrent layers process every token, so prompts of this model cannot be pruned; "
                                    "leave --lazy out.")
    hidden = graph.config.hidden_size
    heads = max((op.kv for op in graph.ops if op.kv and op.kv.stores), key=lambda kv: kv.head_dim)
    score = score_bytes(graph.config.num_attention_heads // heads.heads, heads.head_dim)
    score += 24 if graph.config.alibi else 0  # ALiBi's addend to the scores of a head, and the steps to it
    yield Region("aux", request.ctx * (4 * hidden + score) + 64,
                 f"of {request.ctx} prompt tokens {4 * hidden} bytes each, for the stages of {schedule}, "
                 f"and {score} to choose which tokens continue")


def score_bytes(group: int, head_dim: int) -> int:
    """Return the bytes for each position while tokens are chosen: a head's keys, stored and as floats, and the scores
    of its queries."""
    from ..kernels import abi

    return 8 * abi.padded_head_dim(head_dim) + 12 * group + 32


def attach(session: Session, schedule: Schedule) -> None:
    """Let a session process prompts in stages."""
    from ..runtime import PruningStages

    session.prefill_strategy = PruningStages(session, schedule)


def report(run: Reported) -> dict[str, Any]:
    """Return the outcome of the last prompt of a run, or the prediction for one."""
    name = TECHNIQUE.name
    if run.command == "run":
        last = run.runner.prefill_strategy and run.runner.prefill_strategy.last
        return {name: last and last.report()}
    if run.command not in ("plan", "estimate"):
        return {}
    schedule: Schedule | None = run.settings
    return {name: schedule and schedule.placed(run.model.layers).outlook(run.prompt, run.model.layers)}


def search(schedule: Schedule, divergence: Callable[[Schedule], float], target: float) -> Schedule:
    """Return the schedule that prunes most, with the same boundaries."""
    return calibrated(schedule.layers, divergence, target)


def measurable(schedule: Schedule, prompt: int | None) -> None:
    """Refuse prompts that are too short to be pruned."""
    if prompt is None or prompt < MIN_PROMPT:
        raise UsageError(f"--lazy prunes prompts of {MIN_PROMPT} tokens and more; add --decode P with so many.")


_PRUNING = tuple(command for command in COMMANDS if command != "info")
TECHNIQUE = Technique(
    name="lazy",
    options=(
        Option("lazy", Rule("a Schedule, or text such as keep=0.7,0.5,0.35 or off", _checked, lead="give"),
               "keep=SHARE,...",
               "Fraction of prompt tokens kept at each pruning stage, ranked by attention from the end of the prompt, "
               "such as keep=0.7,0.5,0.35; off disables pruning. An approximation.", unset="off", commands=_PRUNING),
        Option("lazy_layers", Rule("numbers of layers, such as 9,18,27", _layers), "N,...",
               "Layers after which prompt tokens are pruned.", unset="for three stages 30, 60 and 90 % of the layers",
               commands=_PRUNING, of="lazy"),
        Option("lazy_target", NATS, "NATS",
               "With --decode: find the --lazy schedule that prunes most within this mean KL divergence.",
               kind=float, commands=("eval",)),
    ),
    ask=ask,
    exact=lambda schedule: schedule.keep[-1] >= 1,
    alone="prunes one prompt at a time",
    kv=NEVER,  # a prompt cache records which tokens its later layers lack
    settle=lambda schedule, layers: schedule.placed(layers),
    boundaries=lambda schedule: schedule.layers,
    prompt_share=lambda schedule, tokens, depth, layers: schedule.share(schedule.tokens(tokens, depth), layers),
    regions=regions,
    attach=attach,
    report=report,
    fields=(
        ("run", "lazy", "with --lazy: `schedule` of the pruning, `tokens` of the prompt in each stage of layers, "
         "`share` of tokens times layers that was computed, `said`; else null"),
        ("plan", "lazy", f"with --lazy the pruning of the prompt that is estimated: {FIELDS}; else null"),
        ("estimate", "lazy", f"with --lazy the pruning of the prompt: {FIELDS}; else null"),
    ),
    label="pruned",
    target="lazy_target",
    search=search,
    measurable=measurable,
)
