"""A session over a range of layers: one stage of a pipeline, which takes rows from the stage before.

A forward pass may go through a stage in parts, chunks of prompts one after the other, so that the stages of a pipeline
work on different parts at the same time. A stage commits the tokens of a pass when all stages have run
them (`commit`), or none (`abort`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig, Step
from edgeinfer.errors import EdgeInferError
from edgeinfer.graph import LAYER_RANGE, GivenRows
from edgeinfer.runner import Cancellation, Segment, Sequence

from .planning import check_stage_config
from .session import Session

Rows = NDArray[np.float32]


class StageSession(Session):
    """Runs the layers first .. last of a bundle; its plan and its memory have nothing of the other layers.

    Parameters
    ----------
    bundle : Bundle
    config : RuntimeConfig
    first, last : int
    progress, loading : callable, optional
        As of `Session`.

    Raises
    ------
    UsageError
        The settings ask for a technique, or size KV by memory, which differs from stage to stage.
    UnsupportedModelError
        The model cannot be split there.
    BudgetError, BundleError
        As of `Session`.
    """

    def __init__(self, bundle: Bundle, config: RuntimeConfig, first: int, last: int,
                 progress: OnStageProgress | None = None, loading: OnStageProgress | None = None):
        check_stage_config(config)
        step = Step(LAYER_RANGE, (("first", first), ("last", last)))
        config = replace(config, recipe=config.recipe.replacing(LAYER_RANGE, step))
        super().__init__(bundle, config, progress, loading)
        given = next((op.out for op in self.graph.ops if isinstance(op, GivenRows)), None)
        self._given: Rows | None = None
        if given:
            place, n = self.plan.allocations[given.name], self.plan.request.tokens
            rows = self.executor.regions[place.region][place.offset :][: n * place.stride].view(np.float32)
            self._given = rows.reshape(n, -1)[:, : given.width]
        self.leads = self.graph.logits.rows == "tokens"
        """True if another stage follows, which takes the rows of this one; else it has the output head."""

    def begin(self, wanted: Items[tuple[Sequence, int]]) -> None:
        """Make room for this many tokens of each sequence, or raise `RequestError` and leave all as they are."""
        try:
            for sequence, n_tokens in wanted:
                self.reserve(sequence, n_tokens)
        except BaseException:
            self.abort([sequence for sequence, _ in wanted])
            raise

    def run_part(self, segments: Items[Segment], offset: int, given: Rows | None,
                 cancel: Cancellation | None = None) -> Rows:
        """Run tokens that begin `offset` rows after the ends of their sequences, in room that `begin` made.

        Parameters
        ----------
        segments : of which only the last stage needs outputs and samples
        offset : tokens of the pass that the sequences have run before
        given : rows of the stage before, one for each token in the order of its forward pass; None for the first stage
        cancel : ends the part within 100 ms

        Returns
        -------
        float32 array
            Rows for the next stage, or logits; valid until the next part.
        """
        if self.leads:
            segments = [one._replace(outputs=(), sample_specs=(), prepare=None) for one in segments]
        self._admit(segments)
        n = sum(len(segment.ids) for segment in segments)
        with self.executor.pool.turn:
            if self._given is not None:
                if given is None or given.shape != (n, self._given.shape[1]):
                    raise EdgeInferError(f"A stage was given rows of shape {given if given is None else given.shape} "
                                         f"for {n} tokens of {self._given.shape[1]} values.")
                self._given[:n] = given
            logits = self._run(segments, 0, None, offset, cancel)
        if self.kv.states:
            for segment in segments:
                self.kv.states.end(segment.sequence, len(segment.ids), 0, offset)
        return self._logits[:n] if self.leads else logits

    def commit(self, ran: Items[tuple[Sequence, Items[int], int]]) -> None:
        """Commit the tokens of a role that all parts of a pass have run."""
        for sequence, ids, role in ran:
            self.append(sequence, ids, role)

    def abort(self, sequences: Items[Sequence]) -> None:
        """Call a pass off: its sequences are as they were before `begin`."""
        for sequence in sequences:
            self.truncate(sequence, len(sequence))

    def close(self) -> None:
        """Free all memory; see `Session.close`."""
        super().close()
        self._given = None
