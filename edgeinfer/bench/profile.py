"""Where the time of a test goes: per record of the program, and per operation with all layers together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .results import GENERATE, Case, OperationTime, Profile
from .traffic import record_bytes, record_operations

if TYPE_CHECKING:
    from ..runtime import Record, Session


def make_profile(session: Session, case: Case, nanoseconds: list[int]) -> Profile:
    """Turn the nanoseconds per record of one run of a test into times per token (tg) or per prompt (pp)."""
    divisor = case.tokens if case.kind == GENERATE else 1
    records = tuple(
        OperationTime(record.label.strip(), record.kernel, 1, ns / divisor / 1e9,
                      record_bytes(session, case, record) / divisor, record_operations(session, case, record) / divisor)
        for record, ns in zip(session.program.records, nanoseconds, strict=True)
    )
    groups: dict[tuple[str, str], list[OperationTime]] = {}
    for record, item in zip(session.program.records, records, strict=True):
        groups.setdefault((operation_name(record), item.kernel), []).append(item)
    operations = [_together(name, kernel, items) for (name, kernel), items in groups.items()]
    return Profile(case.name, tuple(sorted(operations, key=lambda item: -item.seconds)), records)


def operation_name(record: Record) -> str:
    """Return a record's operation without its layer: ``linear qkv`` for ``linear layers.3.qkv``."""
    op = record.op
    if op is None or record.step:
        return record.label.strip()
    weights = [weight.name.removeprefix(f"layers.{op.layer}.") for weight in op.weights[:1]]
    return " ".join([op.name, *weights])


def _together(name: str, kernel: str, items: list[OperationTime]) -> OperationTime:
    return OperationTime(name, kernel, len(items), math.fsum(item.seconds for item in items),
                         math.fsum(item.bytes_read for item in items), math.fsum(item.operations for item in items))
