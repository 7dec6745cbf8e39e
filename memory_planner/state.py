"""Slots of recurrent state: how many there are, and where each layer's part is in a slot."""

from __future__ import annotations

from collections.abc import Iterable

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.units import format_size, round_up
from edgeinfer.graph import Op

SLOT_UNIT = 4096
"""Slots are a multiple of it: files of prompts have them in rows of as many bytes."""
SPARES = 1
"""Slots for the state to restore when a prompt's pass is cancelled: one at a time."""
CHECKPOINTS = 4
"""Checkpoints where no memory for them is asked for."""


@dataclass(frozen=True)
class StatePlan:
    """Recurrent state of a run: slots of one size, each with all that the layers keep of a sequence."""

    offsets: dict[str, int]
    """Offset in a slot of each operation's part, by the operation's label."""
    slot_bytes: int
    sequences: int
    checkpoints: int
    """Slots for states that later requests continue from, beside those of the sequences and a spare one."""

    @property
    def slots(self) -> int:
        """Slots in all."""
        return self.sequences + SPARES + self.checkpoints

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.slots * self.slot_bytes + 64

    @property
    def reason(self) -> str:
        """Return the purpose of the region."""
        return (f"recurrent state: {self.slots} slots x {self.slot_bytes} bytes ({self.sequences} "
                f"sequence{'s' * (self.sequences > 1)}, {SPARES} spare, {self.checkpoints} checkpoints)")


def plan_state(ops: Iterable[Op], sequences: int, state_memory: int | None) -> StatePlan | None:
    """Lay out the recurrent state of a graph's operations, or return None."""
    offsets, end = {}, 0
    for op in ops:
        if nbytes := op.state_bytes:
            offsets[op.label] = end
            end += round_up(nbytes, 64)
    if not end:
        return None
    slot = round_up(end, SLOT_UNIT)
    checkpoints = CHECKPOINTS if state_memory is None else state_memory // slot
    return StatePlan(offsets, slot, sequences, checkpoints)


def too_small(state: StatePlan | None, state_memory: int | None) -> str:
    """Return the sentence about memory that holds not one checkpoint; empty if it does, or if none is wanted."""
    if not state_memory or state is None or state_memory >= state.slot_bytes:
        return ""
    return (f"The state memory of {format_size(state_memory)} is too small for one checkpoint, which takes "
            f"{state.slot_bytes:,} bytes; raise --state-memory, or give 0 for none.")
