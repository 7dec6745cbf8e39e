"""Opens a bundle as a pipeline: the last stage in this process, the others each in one of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig, Step
from edgeinfer.graph import LAYER_RANGE, Graph, build_graph, expected_types
from edgeinfer.memory_planner import MemoryPlan, Request, budget_of, fill_budget, resolve
from edgeinfer.runtime import StageSession, check_stage_config, planner_of

from .process import ProcessStage
from .runner import PipelineRunner
from .split import Split, auto_split, check_split, parse_split
from .stage import LocalStage, Stage

AUTO = "auto"


class Place(NamedTuple):
    """The machine of a stage."""

    budget: int
    """Bytes of all stages on it together."""
    threads: int
    name: str = ""
    """Stages of the same machine have the same one."""


Starter = Callable[[int, RuntimeConfig, int], Stage]
"""Starts the stage of a number, counted from 0, with its settings and the bytes of its plan; `Stage.wait` waits for it.
"""


def whole_graph(bundle: Bundle) -> Graph:
    """Return the graph of a bundle whose layers are to be split."""
    return build_graph(bundle.config, expected_types(bundle.types), Recipe(()))


def split_of(text: str, bundle: Bundle, stages: int = 2) -> Split:
    """Return the split that a text names; ``auto`` is one whose stages take equal time on equal machines."""
    graph = whole_graph(bundle)
    return auto_split(graph, [1.0] * stages) if text == AUTO else parse_split(text, graph)


def open_pipeline(bundle: Bundle, config: RuntimeConfig, split: Split, processes: bool = True,
                  progress: OnStageProgress | None = None, loading: OnStageProgress | None = None) -> PipelineRunner:
    """Open the stages of a split on this machine and return their runner.

    The last stage is in this process, where samples choose tokens from its logits.

    Parameters
    ----------
    bundle : Bundle
    config : RuntimeConfig
        Its budget is that of all stages together, its threads are those of each.
    split : of (first layer, last layer)
        As `parse_split` or `auto_split` returns it.
    processes : bool
        False opens all stages in this process, one after the other.
    progress, loading : callable, optional
        As of `Session`, for the stage in this process.

    Raises
    ------
    UsageError, UnsupportedModelError
        The split is not one of the model, or the settings are not for stages.
    EdgeInferError
        As of `StageSession`.
    """
    config = resolve(config, bundle.config)

    def start(number: int, config: RuntimeConfig, nbytes: int) -> Stage:
        if processes:
            return ProcessStage(bundle.path, config, *split[number])
        return LocalStage(StageSession(Bundle.open(bundle.path), config, *split[number]))

    place = Place(budget_of(config), int(config.threads or 1))
    return open_stages(bundle, config, split, [place] * len(split), start, progress, loading)


def open_stages(bundle: Bundle, config: RuntimeConfig, split: Split, places: Items[Place], start: Starter,
                progress: OnStageProgress | None = None, loading: OnStageProgress | None = None) -> PipelineRunner:
    """Open the stages of a split at their places, the last in this process; see `open_pipeline`.

    If the settings ask to fill the budget, the KV pool is the largest that all machines have room for.
    """
    check_split(split, whole_graph(bundle))
    configs = configs_of(bundle, config, split, places)
    with ExitStack() as opened:
        before: list[Stage] = []
        for number, (one, nbytes) in enumerate(configs[:-1]):
            before.append(start(number, one, nbytes))
            opened.callback(before[-1].close)
        own, _ = configs[-1]
        last = LocalStage(StageSession(bundle, own, *split[-1], progress, loading))
        opened.callback(last.close)
        for stage in before:
            stage.wait()
        runner = PipelineRunner(bundle, own, [*before, last])
        opened.pop_all()
    return runner


def configs_of(bundle: Bundle, config: RuntimeConfig, split: Split, places: Items[Place]
               ) -> list[tuple[RuntimeConfig, int]]:
    """Return the settings of each stage, and the bytes of its plan: one KV pool, and of a machine's memory its part.

    The rest, or the deficit, is shared out: each stage's plan then lists alternatives that fit.
    """
    check_stage_config(replace(config, fill_budget=False))
    config = resolve(config, bundle.config)
    rooms, count = {place.name: place.budget for place in places}, Counter(place.name for place in places)
    planners = [planner_of(bundle, config.recipe.replacing(LAYER_RANGE, Step(LAYER_RANGE, (
        ("first", first), ("last", last))))) for first, last in split]

    def plans(request: Request) -> list[MemoryPlan]:
        return [planner.plan(replace(request, threads=place.threads))
                for planner, place in zip(planners, places, strict=True)]

    def taken(found: Items[MemoryPlan]) -> Counter[str]:
        total = Counter[str]()
        for plan, place in zip(found, places, strict=True):
            total[place.name] += plan.total_bytes
        return total

    found = fill_budget(plans, config, lambda found: all(nbytes <= rooms[name]
                                                         for name, nbytes in taken(found).items()))
    total, request = taken(found), found[0].request
    if config.fill_budget:
        config = replace(config, fill_budget=False, kv_tokens=request.kv_tokens, kv_windows=request.kv_windows)
    left = {name: (room - total[name]) // count[name] for name, room in rooms.items()}
    return [(replace(config, threads=place.threads, budget_bytes=max(1, plan.total_bytes + left[place.name])),
             plan.total_bytes)
            for plan, place in zip(found, places, strict=True)]
