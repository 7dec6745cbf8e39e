"""A head that drafts further tokens (multi-token prediction, arXiv 2412.19437) beside the session of its model.

It is a program of its own over the session's sequences. The K and V of its layer are in the session's blocks, as one
more layer, so that forks, cached prefixes and prompt caches have them. After each forward pass of the session it reads
the rows in front of the output head and runs over the same tokens: row t is made of token t and of the row of token
t - 1, zeros where that is not known. So it can draft at any time; with less context it drafts worse.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Bundle, own_weights, part_extents, read_draft_head
from edgeinfer.config import Recipe
from edgeinfer.errors import RequestError
from edgeinfer.graph import DRAFT_WORDS, GivenRows, Graph, KvAccess, words_of
from edgeinfer.memory_planner import MemoryPlan, Placement, Planner, Region
from edgeinfer.runner import Cancellation, Segment, Sequence

from .execution.forward import Logits
from .execution.tables import decoded_last
from .hidden import HiddenRows
from .memory import copy_in
from .planning import offsets_of
from .self_draft import HOME, DraftPlan, Planned, SelfDraftSession, plan_program
from .session import Session

ROWS_AT_ONCE = 64
"""Rows that are normed at a time."""
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class DraftHeadPlan(DraftPlan):
    """The draft head of a bundle, as plans see it."""

    planner: Planner
    stores: tuple[KvAccess, ...]
    refusal: ClassVar[str] = ("Weights of the model are read from storage, where its head for further tokens does not "
                              "draft; leave --speculate mtp out.")

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> DraftHeadPlan:
        """Return that of a bundle; raises `RequestError` if it has none, and `BundleError` if it is damaged."""
        if (graph := read_draft_head(bundle, Recipe.parse("fuse_input"))) is None:
            raise RequestError(f"{bundle.path} has no head for further tokens (MTP), so --speculate mtp cannot draft: "
                               "its family has none here, or its files did not have all of its tensors. "
                               "Use --speculate lookup, or a draft model (--draft).")
        offsets = offsets_of(bundle)
        offsets[DRAFT_WORDS] = offsets[words_of(bundle.config)]
        stores = tuple(op.kv for op in graph.ops if op.kv and op.kv.stores)
        return cls(Planner(graph, bundle.weights_bytes, offsets), stores)

    def _planned(self, host: MemoryPlan) -> Planned:
        return Planned(self.planner.graph, _plan(self.planner, host))

    def open(self, host: Session) -> DraftHeadSession:
        """Take its memory, beside an open session whose plan has room for it."""
        return DraftHeadSession(host, *self.check(host.plan))


class DraftHeadSession(SelfDraftSession):
    """Runs ahead of a session with its sequences, each token on the row of the one before.

    Parameters
    ----------
    host : Session
        Whose sequences it continues with; closed after this one.
    graph, plan : see `Planned`
    """

    def __init__(self, host: Session, graph: Graph, plan: MemoryPlan):
        super().__init__(host, graph, plan)
        self._host, self._behind = host, HiddenRows(host)
        self._own = HiddenRows(self)
        given = plan.allocations[next(op.out.name for op in graph.ops if isinstance(op, GivenRows))]
        rows = self.executor.regions[given.region][given.offset :][: plan.request.tokens * given.stride]
        self._given: Floats = rows.view(np.float32).reshape(plan.request.tokens, -1)[:, : host.model.hidden_size]
        self._kept: weakref.WeakKeyDictionary[Sequence, tuple[int, Floats]] = weakref.WeakKeyDictionary()
        """Latest rows that the session has given for each sequence, and the position of the first."""
        self._taken: list[tuple[Sequence, int, Floats]] = []
        self._drafted: weakref.WeakKeyDictionary[Sequence, Floats] = weakref.WeakKeyDictionary()
        """Rows of the head itself for the latest draft tokens."""
        self.row_reader, host.row_reader = _Own(self), self

    def load_own(self, host: Session, regions: dict[str, NDArray[np.uint8]]) -> None:
        """Copy its weights, which are a file of their own."""
        path, found = part_extents(self.bundle, "draft_head")
        at = {weight.name: self.plan.allocations[weight.name].offset for weight in own_weights(self.graph)}
        copy_in([(found[name][0], regions[HOME][at[name] :][: found[name][1]]) for name in at], path)

    # -- after a forward pass of the session ---------------------------------------------------------------------------

    @property
    def stop(self) -> int:
        """Return the session's instruction before which its rows are read."""
        return self._behind.stop

    def take(self, segments: Items[Segment]) -> None:
        """Put the normed row of each token where the next token's is given; keep the last ones of each sequence."""
        first, self._taken = 0, []
        for sequence, ids, *_ in decoded_last(segments):
            n = len(ids)
            for start in range(0, n, ROWS_AT_ONCE):
                stop = min(start + ROWS_AT_ONCE, n)
                rows = self._behind.rows(first + start, first + stop)
                self._given[first + start + 1 : first + min(stop + 1, n)] = rows[: min(stop + 1, n) - start - 1]
            self._given[first] = self._row(sequence)
            kept = min(n, self._host.plan.request.outputs, len(rows))
            self._taken.append((sequence, len(sequence) + n - kept, rows[len(rows) - kept :]))
            first += n

    def follow(self, segments: Items[Segment], cancel: Cancellation | None) -> None:
        """Run over the same tokens, without drafting."""
        self._run([segment._replace(outputs=(), sample_specs=(), prepare=None) for segment in segments], 0,
                  self._own.stop, 0, cancel)
        for sequence, position, rows in self._taken:
            self._kept[sequence] = position, rows

    def forked(self, sequence: Sequence, copy: Sequence) -> None:
        """Let a fork have the rows that are kept of a sequence."""
        if sequence in self._kept:
            self._kept[copy] = self._kept[sequence]

    def _row(self, sequence: Sequence) -> Floats:
        """The row of a sequence's last token; zeros if it is not known."""
        position, rows = self._kept.get(sequence, (0, self._given[:0]))
        at = len(sequence) - 1 - position
        return rows[at] if 0 <= at < len(rows) else np.zeros(self._given.shape[1], np.float32)

    # -- drafting ------------------------------------------------------------------------------------------------------

    def ahead(self, sequences: Items[Sequence], ids: Items[int], sample_specs: Items[int], offset: int, further: int,
              cancel: Cancellation | None = None) -> tuple[Logits, list[list[int]]]:
        """Run over a token of each sequence, on the rows of the tokens before; see `runner.DraftRunner`."""
        with self.executor.pool.turn:
            for i, sequence in enumerate(sequences):
                self._given[i] = self._drafted[sequence] if offset else self._row(sequence)
            return super().ahead(sequences, ids, sample_specs, offset, further, cancel)

    def drafted(self, segments: Items[Segment]) -> None:
        """Keep its own rows: the next draft tokens are made of them."""
        rows = self._own.rows(0, len(segments))
        for segment, row in zip(segments, rows, strict=True):
            self._drafted[segment.sequence] = row

    def close(self) -> None:
        """Free its memory; the session continues without it."""
        if self._host.row_reader is self:
            self._host.row_reader = None
        super().close()
        self._given = self._given[:0]


class _Own(NamedTuple):
    """Reads a head's own rows while it drafts; see `forward.RowReader`."""

    head: DraftHeadSession

    @property
    def stop(self) -> int:
        return self.head._own.stop

    def take(self, segments: Items[Segment]) -> None:
        self.head.drafted(segments)

    def follow(self, segments: Items[Segment], cancel: Cancellation | None) -> None:
        """Do nothing: there is no sequence of its own to update."""

    def forked(self, sequence: Sequence, copy: Sequence) -> None:
        """Sequences are the session's."""


def _plan(planner: Planner, host: MemoryPlan) -> MemoryPlan:
    """Plan the program's own regions, for forward passes over as many tokens as the session's."""
    plan = plan_program(planner, host, host.request.tokens, "head that drafts")
    own = {name: replace(placement, region=HOME) for name, placement in plan.allocations.items()
           if placement.region == "resident" and name not in host.allocations}
    rows = host.request.sequences * host.request.outputs * 4 * planner.graph.config.hidden_size
    words = host.allocations[words_of(planner.graph.config)]
    return replace(plan, regions=tuple(_regions(plan, own, rows)), allocations={**plan.allocations, **own,
                                                                                DRAFT_WORDS: words})


def _regions(plan: MemoryPlan, own: dict[str, Placement], rows: int) -> Iterator[Region]:
    nbytes = max(placement.offset + placement.nbytes for placement in own.values()) + 64
    yield Region(HOME, nbytes, f"head that drafts: {len(own)} weights in memory of the process")
    yield from plan.regions
    yield Region("rows", rows, f"head that drafts: latest rows of {plan.request.sequences} sequences")
