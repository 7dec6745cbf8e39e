"""Opens a bundle as a pipeline on this machine: the last stage in this process, the others each in one of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.memory_planner import default_threads, process_budget
from edgeinfer.runtime import StageSession, check_stage_config

from .process import ProcessStage
from .runner import PipelineRunner
from .split import Split, check_split
from .stage import LocalStage, Stage


def open_pipeline(bundle: Bundle, config: RuntimeConfig, split: Split, processes: bool = True,
                  progress: OnStageProgress | None = None, loading: OnStageProgress | None = None) -> PipelineRunner:
    """Open the stages of a split and return their runner.

    The last stage is in this process, where samples choose tokens from its logits.

    Parameters
    ----------
    bundle : Bundle
    config : RuntimeConfig
        Of each stage: budget and threads are those of a process. Processes get equal shares of what is not given.
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
    check_stage_config(config)
    check_split(split, build_graph(bundle.config, expected_types(bundle.types), Recipe(())))
    if processes:
        config = replace(config, threads=config.threads or max(1, default_threads() // len(split)),
                         budget_bytes=config.budget_bytes or process_budget() // len(split))
    with ExitStack() as opened:
        before: list[Stage] = []
        for first, last in split[:-1]:
            before.append(ProcessStage(bundle.path, config, first, last) if processes else
                          LocalStage(StageSession(Bundle.open(bundle.path), config, first, last)))
            opened.callback(before[-1].close)
        last_stage = LocalStage(StageSession(bundle, config, *split[-1], progress, loading))
        opened.callback(last_stage.close)
        for stage in before:
            if isinstance(stage, ProcessStage):
                stage.wait()
        runner = PipelineRunner(bundle, config, [*before, last_stage])
        opened.pop_all()
    return runner
