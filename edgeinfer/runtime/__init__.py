"""The runtime: program, executor and session (tokens to logits)."""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

if TYPE_CHECKING:
    from .calibration import Covariance, Firing, Largest, Rows, capture, in_groups
    from .executor import Executor
    from .fallback import SparseFfn, decide, dense_layers, everywhere, predicted_time
    from .lighter import Lighter, LighterSession
    from .lowering import Lowering, lower, rows
    from .memory import allocate
    from .planning import plan_run, planner_of
    from .program import Program, Record
    from .session import Session
    from .slots import EXPERTS_KERNEL, RESOLVE_KERNEL, Slots
    from .stages import Stages
    from .stream import Stream
    from .taps import Taps, View, Visit, open_plain
    from .weight_readers import read_on_demand

__all__ = ["EXPERTS_KERNEL", "RESOLVE_KERNEL", "Covariance", "Executor", "Firing", "Largest", "Lighter",
           "LighterSession", "Lowering", "Program", "Record", "Rows", "Session", "Slots", "SparseFfn", "Stages",
           "Stream", "Taps", "View", "Visit", "allocate", "capture", "decide", "dense_layers", "everywhere",
           "in_groups", "lower", "open_plain", "plan_run", "planner_of", "predicted_time", "read_on_demand", "rows"]
__getattr__ = lazily(__name__, {
    "executor": "Executor", "fallback": "SparseFfn decide dense_layers everywhere predicted_time",
    "lighter": "Lighter LighterSession", "lowering": "Lowering lower rows",
    "program": "Program Record", "planning": "plan_run planner_of", "session": "Session",
    "slots": "EXPERTS_KERNEL RESOLVE_KERNEL Slots", "weight_readers": "read_on_demand",
    "stages": "Stages", "stream": "Stream",
    "memory": "allocate", "taps": "Taps View Visit open_plain",
    "calibration": "Covariance Firing Largest Rows capture in_groups",
})
