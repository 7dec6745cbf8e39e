"""Embeddings of a text: the rows in front of the output head, pooled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import CancelledError
from ..runner import Cancellation
from .task import Ran, Run, Task, check_blocks

if TYPE_CHECKING:
    from ..runner import Runner, Sequence

MEAN, LAST = POOLINGS = ("mean", "last")
Rows = Callable[["Sequence", Items[int], Cancellation], NDArray[np.float32]]


class Embedding(Task[NDArray[np.float32]]):
    """A request for the embedding of a text, a chunk of which runs beside each step of the others.

    Parameters
    ----------
    runner : Runner
    prompt_ids : tokens of the text
    rows : runs tokens of a sequence, and returns their rows in front of the output head (`HiddenRows.run`)
    pooling : mean of all rows, or the last one
    normalise : divide by the Euclidean length
    """

    passes_alone = True

    def __init__(self, runner: Runner, prompt_ids: Iterable[int], rows: Rows, pooling: str = MEAN,
                 normalise: bool = True):
        super().__init__(runner, prompt_ids)
        n_tokens = len(self.prompt_ids)
        check_blocks(runner, f"A text of {n_tokens} tokens", n_tokens, 0, lower="shorten it")
        self._rows = rows
        self._pooling, self._normalise = pooling, normalise
        self._sum = np.zeros(0)
        self._pooled: NDArray[np.float32] | None = None
        self._cancelled = False

    @property
    def finished(self) -> bool:
        """True if all tokens were run, or the request was cancelled."""
        return self._cancelled or self._pooled is not None

    def begin(self, sequence: Sequence) -> None:
        """Take an empty sequence."""
        self._sequence, self._sum = sequence, np.zeros(self._runner.model.hidden_size)

    def next_tokens(self) -> int:
        """Return how many tokens the next pass takes."""
        assert self._sequence is not None
        return min(len(self.prompt_ids) - len(self._sequence), self._runner.config.prefill_chunk)

    def run_pass(self) -> None:
        """Run the next chunk."""
        assert self._sequence is not None
        done, n = len(self._sequence), self.next_tokens()
        rows = self._rows(self._sequence, self.prompt_ids[done : done + n], self.cancellation)
        self._sum = rows[-1].astype(np.float64) if self._pooling == LAST else self._sum + rows.sum(0, np.float64)
        if len(self._sequence) == len(self.prompt_ids):
            pooled = self._sum if self._pooling == LAST else self._sum / len(self.prompt_ids)
            length = float(np.linalg.norm(pooled)) if self._normalise else 1.0
            self._pooled = (pooled / (length or 1.0)).astype(np.float32)

    def runs(self) -> list[Run]:
        """Nothing runs together with others."""
        return []

    def take(self, ran: list[Ran]) -> str:
        """Nothing comes of others' passes."""
        return ""

    def end(self, reason: str = "cancelled") -> str:
        """Count an unfinished embedding as cancelled."""
        self._cancelled = self._cancelled or self._pooled is None
        return ""

    def result(self) -> NDArray[np.float32]:
        """Return the embedding, float32 of shape (hidden_size,); raises `CancelledError` if it was cancelled."""
        if self._pooled is None:
            raise CancelledError("The request was cancelled before its embedding was computed.")
        return self._pooled
