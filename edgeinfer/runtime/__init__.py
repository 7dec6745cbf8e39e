"""The runtime: program, executor and session (tokens to logits)."""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

if TYPE_CHECKING:
    from .executor import Executor
    from .lowering import Lowering, lower, rows
    from .memory import allocate
    from .program import Program, Record
    from .session import Session

__all__ = ["Executor", "Lowering", "Program", "Record", "Session", "allocate", "lower", "rows"]
__getattr__ = lazily(__name__, {
    "executor": "Executor", "lowering": "Lowering lower rows", "program": "Program Record", "session": "Session",
    "memory": "allocate",
})
