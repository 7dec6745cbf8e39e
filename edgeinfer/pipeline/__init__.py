"""Pipeline parallelism: a model's layers in several stages, each with its own part of the weights and the KV cache.

A stage is a session over a range of layers (`StageSession`), in this process or in one of its own. `PipelineRunner` is
a `Runner` over the stages: it sends token ids to the first, residual rows from each to the next, and takes the logits
of the last. A forward pass goes through in parts, so that the stages work on different parts at the same time.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .calls import Part, StageCalls, StageInfo, StageSegment
    from .open import open_pipeline
    from .process import ProcessStage
    from .runner import PipelineRunner
    from .split import auto_split, check_split, layer_costs, parse_split
    from .stage import LocalStage, Stage

__all__ = ["LocalStage", "Part", "PipelineRunner", "ProcessStage", "Stage", "StageCalls", "StageInfo", "StageSegment",
           "auto_split", "check_split", "layer_costs", "open_pipeline", "parse_split"]
__getattr__ = lazily(__name__, {
    "calls": "Part StageCalls StageInfo StageSegment",
    "open": "open_pipeline",
    "process": "ProcessStage",
    "runner": "PipelineRunner",
    "split": "auto_split check_split layer_costs parse_split",
    "stage": "LocalStage Stage",
})
