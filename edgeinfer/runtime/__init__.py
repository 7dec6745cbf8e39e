"""The runtime: program, executor and session (tokens to logits)."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .draft_head import DraftHeadPlan, DraftHeadSession
    from .execution.executor import Executor
    from .hidden import HiddenRows
    from .memory import allocate
    from .planning import check_stage_config, or_exact, plan_run, planner_of
    from .program.lowering.base import EXPERTS_KERNEL, RESOLVE_KERNEL
    from .program.lowering.lower import Lowering, lower, rows
    from .program.program import Instruction, Program
    from .prompt_pruning import PruningStages
    from .self_draft import SelfDraftPlan, SelfDraftSession
    from .session import Session
    from .sparse_fallback import SparseFfn, decide, dense_layers, everywhere, predicted_time
    from .stage import Rows, StageSession
    from .weights.on_demand import read_on_demand

__all__ = ["EXPERTS_KERNEL", "RESOLVE_KERNEL", "DraftHeadPlan", "DraftHeadSession", "Executor", "HiddenRows",
           "Instruction", "Lowering", "Program", "PruningStages", "Rows", "SelfDraftPlan", "SelfDraftSession",
           "Session", "SparseFfn", "StageSession", "allocate", "check_stage_config", "decide", "dense_layers",
           "everywhere", "lower", "or_exact", "plan_run", "planner_of", "predicted_time", "read_on_demand", "rows"]
__getattr__ = lazily(__name__, {
    "execution.executor": "Executor", "sparse_fallback": "SparseFfn decide dense_layers everywhere predicted_time",
    "self_draft": "SelfDraftPlan SelfDraftSession", "program.lowering.lower": "Lowering lower rows",
    "program.program": "Program Instruction", "session": "Session",
    "planning": "check_stage_config or_exact plan_run planner_of",
    "program.lowering.base": "EXPERTS_KERNEL RESOLVE_KERNEL", "weights.on_demand": "read_on_demand",
    "stage": "Rows StageSession",
    "prompt_pruning": "PruningStages",
    "memory": "allocate", "draft_head": "DraftHeadPlan DraftHeadSession", "hidden": "HiddenRows",
})
