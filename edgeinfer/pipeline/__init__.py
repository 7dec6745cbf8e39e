"""Pipeline parallelism: a model's layers in several stages, each with its own part of the weights and the KV cache.

A stage is a session over a range of layers (`StageSession`), in this process or in one of its own. `PipelineRunner` is
a `Runner` over the stages: it sends token ids to the first, residual rows from each to the next, and takes the logits
of the last. A forward pass goes through in parts, so that the stages work on different parts at the same time.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .calls import Part, StageCalls, StageInfo, StageSegment, Wish, as_error
    from .links import LINKS, Link, link_seconds, parse_link, pass_seconds
    from .open import AUTO, Place, open_pipeline, open_stages, split_of, whole_graph
    from .parts import PartCounts
    from .process import ProcessStage, config_of, error_of, plain_config
    from .runner import PipelineRunner
    from .split import Split, auto_split, layer_costs, layer_sizes, parse_split
    from .stage import LocalStage, Stage

__all__ = ["AUTO", "LINKS", "Link", "LocalStage", "Part", "PartCounts", "PipelineRunner", "Place", "ProcessStage",
           "Split", "Stage", "StageCalls", "StageInfo", "StageSegment", "Wish", "as_error", "auto_split", "config_of",
           "error_of", "layer_costs", "layer_sizes", "link_seconds", "open_pipeline", "open_stages", "parse_link",
           "parse_split", "pass_seconds", "plain_config", "split_of", "whole_graph"]
__getattr__ = lazily(__name__, {
    "calls": "Part StageCalls StageInfo StageSegment Wish as_error",
    "links": "LINKS Link link_seconds parse_link pass_seconds",
    "open": "AUTO Place open_pipeline open_stages split_of whole_graph",
    "parts": "PartCounts",
    "process": "ProcessStage config_of error_of plain_config",
    "runner": "PipelineRunner",
    "split": "Split auto_split layer_costs layer_sizes parse_split",
    "stage": "LocalStage Stage",
})
