"""Rows in front of the output head, in float32: the source of embeddings.

The program runs up to where rows are gathered for the head. The last norm is computed here, because in the program its
output may be quantised for the head's matmul.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import GatherOutputs, LayerNorm, RmsNorm, Tensor, Weight
from edgeinfer.runner import PROMPT, Cancellation, Segment, Sequence

if TYPE_CHECKING:
    from .session import Session

Floats = NDArray[np.float32]


class HiddenRows:
    """The last norm of a session's model, applied to all tokens.

    Raises `UnsupportedModelError` for a graph in which no norm is in front of the head.
    """

    def __init__(self, session: Session):
        self._session, ops = session, session.graph.ops
        gather = next((op for op in ops if isinstance(op, GatherOutputs)), None)
        norm = next((op for op in ops if isinstance(op, (RmsNorm, LayerNorm)) and gather and op.x == gather.out), None)
        if gather is None or norm is None:
            raise UnsupportedModelError(f"The model {session.model.model_type} has no norm before its head, so it "
                                        "gives no embeddings.")
        self._residual: Tensor = gather.x
        self.stop = next(i for i, one in enumerate(session.program.instructions) if one.op is gather)
        self._norm, self._weight = norm, self._vector(norm.weight)
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        self._bias = self._vector(bias) if bias else 0.0

    def _vector(self, weight: Weight) -> NDArray[np.float64]:
        found = self._session.plan.allocations[weight.name]
        memory = self._session.bundle.weights if found.region == "weights" else \
            self._session.executor.regions[found.region]
        return memory[found.offset :][: 4 * weight.shape[0]].view(np.float32).astype(np.float64)

    def run(self, sequence: Sequence, ids: Items[int], cancel: Cancellation | None) -> Floats:
        """Run tokens, which the sequence holds afterwards; returns their rows, (tokens, hidden_size)."""
        session = self._session
        session.reserve(sequence, len(ids))
        try:
            with session.executor.pool.turn:  # closing the session must leave its memory alone until the rows are read
                session.forward_range(Segment(sequence, ids), 0, self.stop, 0, cancel)
                rows = self.rows(0, len(ids))
        except BaseException:
            session.truncate(sequence, len(sequence))
            raise
        session.append(sequence, ids, PROMPT)
        return rows

    def rows(self, start: int, stop: int) -> Floats:
        """Return the rows of some tokens of a forward pass that ended before instruction `stop`."""
        allocation = self._session.plan.allocations[self._residual.name]
        memory = self._session.executor.regions[allocation.region][allocation.offset :][: stop * allocation.stride]
        x = memory.view(np.float32).reshape(stop, -1)[start:][:, : self._residual.width].astype(np.float64)
        if isinstance(self._norm, LayerNorm):
            x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self._norm.eps)
        return (x * self._weight + self._bias).astype(np.float32)
