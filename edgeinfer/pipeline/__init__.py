"""Pipeline parallelism: a model's layers in several stages, each with its own part of the weights and the KV cache.

A stage is a session over a range of layers (`StageSession`), in this process or in one of its own. `PipelineRunner` is
a `Runner` over the stages: it sends token ids to the first, residual rows from each to the next, and takes the logits
of the last. A forward pass goes through in parts, so that the stages work on different parts at the same time.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .calls import Part, StageCalls, StageInfo, StageSegment
    from .links import LINKS, Link, link_seconds, parse_link, pass_seconds
    from .open import open_pipeline
    from .parts import PartCounts
    from .process import ProcessStage
    from .runner import PipelineRunner
    from .split import Split, auto_split, check_split, layer_costs, layer_sizes, parse_split
    from .stage import LocalStage, Stage

__all__ = ["LINKS", "Link", "LocalStage", "Part", "PartCounts", "PipelineRunner", "ProcessStage", "Split", "Stage",
           "StageCalls", "StageInfo", "StageSegment", "auto_split", "check_split", "layer_costs", "layer_sizes",
           "link_seconds", "open_pipeline", "parse_link", "parse_split", "pass_seconds"]
__getattr__ = lazily(__name__, {
    "calls": "Part StageCalls StageInfo StageSegment",
    "links": "LINKS Link link_seconds parse_link pass_seconds",
    "open": "open_pipeline",
    "parts": "PartCounts",
    "process": "ProcessStage",
    "runner": "PipelineRunner",
    "split": "Split auto_split check_split layer_costs layer_sizes parse_split",
    "stage": "LocalStage Stage",
})
