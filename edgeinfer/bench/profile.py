"""Where the time of a test goes: per record of the program, and per operation with all layers together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .results import GENERATE, Case, OperationTime, Profile
from .traffic import record_bytes, record_operations

if TYPE_CHECKING:
    from ..runtime import Session


def make_profile(session: Session, case: Case, nanoseconds: list[int]) -> Profile:
    """Turn the nanoseconds per record of one run of a test into times per token (tg) or per prompt (pp)."""
    divisor = case.tokens if case.kind == GENERATE else 1
    records = tuple(
        OperationTime(record.op.strip(), record.kernel, 1, ns / divisor / 1e9,
                      record_bytes(session, case, record) / divisor, record_operations(session, case, record) / divisor)
        for record, ns in zip(session.program.records, nanoseconds, strict=True)
    )
    groups: dict[tuple[str, str], list[OperationTime]] = {}
    for item in records:
        groups.setdefault((operation_name(item.operation), item.kernel), []).append(item)
    operations = [_together(name, kernel, items) for (name, kernel), items in groups.items()]
    return Profile(case.name, tuple(sorted(operations, key=lambda item: -item.seconds)), records)


def operation_name(text: str) -> str:
    """A record's operation without its layer: ``linear layers.3.qkv`` is ``linear qkv``."""
    words = text.split()
    if "layer" in words:
        at = words.index("layer")
        words = words[:at] + words[at + 2 :]
    return " ".join(word.split(".", 2)[2] if word.startswith("layers.") else word for word in words)


def _together(name: str, kernel: str, items: list[OperationTime]) -> OperationTime:
    return OperationTime(name, kernel, len(items), math.fsum(item.seconds for item in items),
                         math.fsum(item.bytes_read for item in items), math.fsum(item.operations for item in items))
