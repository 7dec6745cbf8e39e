"""Profile of a test: time per instruction of the program, and per operation with all layers together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .results import GENERATE, Case, OperationTime, Profile
from .traffic import instruction_bytes, instruction_operations

if TYPE_CHECKING:
    from ..runtime import Instruction, Session


def make_profile(session: Session, case: Case, nanoseconds: list[int]) -> Profile:
    """Turn the nanoseconds per instruction of one run of a test into times per token (tg) or per prompt (pp)."""
    divisor = case.tokens if case.kind == GENERATE else 1
    instructions = tuple(
        OperationTime(instruction.label.strip(), instruction.kernel, 1, ns / divisor / 1e9,
                      instruction_bytes(session, case, instruction) / divisor,
                      instruction_operations(session, case, instruction) / divisor)
        for instruction, ns in zip(session.program.instructions, nanoseconds, strict=True)
    )
    groups: dict[tuple[str, str], list[OperationTime]] = {}
    for instruction, item in zip(session.program.instructions, instructions, strict=True):
        groups.setdefault((operation_name(instruction), item.kernel), []).append(item)
    operations = [_together(name, kernel, items) for (name, kernel), items in groups.items()]
    return Profile(case.name, tuple(sorted(operations, key=lambda item: -item.seconds)), instructions)


def operation_name(instruction: Instruction) -> str:
    """Return an instruction's operation without its layer: ``linear qkv`` for ``linear layers.3.qkv``."""
    op = instruction.op
    if op is None or instruction.step:
        return instruction.label.strip()
    weights = [weight.name.removeprefix(f"layers.{op.layer}.") for weight in op.weights[:1]]
    return " ".join([op.name, *weights])


def _together(name: str, kernel: str, items: list[OperationTime]) -> OperationTime:
    return OperationTime(name, kernel, len(items), math.fsum(item.seconds for item in items),
                         math.fsum(item.bytes_read for item in items), math.fsum(item.operations for item in items))
