"""Sequences of a forward pass, their slots and states, as references of recurrent layers read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import abi
from ..view import InstructionView, memory


class Run(NamedTuple):
    """The tokens of one sequence in a pass."""

    first: int
    tokens: int
    base: int
    """Tokens that the sequence has before them."""
    slot: int
    """Offset of its slot in the region."""

    @property
    def stored(self) -> int:
        """First of its tokens after the stored state (abi/state.py)."""
        end = self.base + self.tokens
        return end // abi.JOURNAL_TOKENS * abi.JOURNAL_TOKENS - self.base if self.tokens > abi.JOURNAL_TOKENS else 0


def runs(view: InstructionView) -> Iterator[Run]:
    """Yield the sequences of a pass."""
    n = view.count(abi.COUNT_SEQUENCES)
    words = abi.SEQUENCE_BYTES // 8
    address = memory(view.ctx + abi.CTX_SEQUENCES, np.int64, (1,))[0]
    table = memory(int(address), np.int64, (n, words))
    bases = view.tokens(abi.TOKEN_BASE)
    for row in table.tolist():
        first = row[abi.SEQUENCE_FIRST // 8]
        yield Run(first, row[abi.SEQUENCE_TOKENS // 8], int(bases[first]), row[abi.SEQUENCE_SLOT // 8])


def ring(view: InstructionView, operand: int, at: int, rows: int, row_bytes: int, columns: int) -> NDArray[Any]:
    """Rows of float32 in a slot."""
    return view.array(operand, np.float32, (rows, columns), (row_bytes, 4), at)
