"""The calls that a runner makes to a stage: plain numbers and rows, so that they can go to another process."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from edgeinfer.errors import EdgeInferError
from edgeinfer.runner import Cancellation, Segment, Sequence

if TYPE_CHECKING:
    from edgeinfer.runtime import Rows, StageSession

CALLS = frozenset("""abort accept blocks cache_prefix can_truncate checkpoint commit drop drop_prefixes find_prefix fits
    fork open settle truncate""".split())
"""Calls of `StageCalls` from elsewhere beside `run`."""


class StageInfo(NamedTuple):
    """Figures of an open stage."""

    first: int
    last: int
    total_bytes: int
    """Total of its memory plan."""
    kv_blocks: int
    isa: str
    arithmetic: str
    """Instruction sets of the same arithmetic give the same bits."""
    identity: str
    """Identity of the bundle."""


class StageSegment(NamedTuple):
    """New tokens of one sequence in a part of a forward pass; see `Segment`."""

    number: int
    """The sequence."""
    ids: Items[int]
    outputs: Items[int]
    role: int
    parents: Items[int] | None = None
    sample_specs: Items[int] = ()
    """Addresses in this process: they stay here, as `prepare` does."""
    prepare: Callable[[], None] | None = None


class Part(NamedTuple):
    """A part of a forward pass."""

    segments: list[StageSegment]
    offset: int = 0
    """Tokens of the pass that the segments' sequences have run before, as all of their tokens follow the same."""
    begins: Items[tuple[int, int]] = ()
    """Sequences of the pass with their new tokens, for which the stage makes room; only in the first part."""

    @property
    def n_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(len(segment.ids) for segment in self.segments)


class StageCalls:
    """A stage's session and its sequences, by the numbers that the runner gives them."""

    def __init__(self, session: StageSession):
        self.session = session
        self._sequences: dict[int, Sequence] = {}

    def info(self) -> StageInfo:
        """Return the figures of the stage."""
        session = self.session
        assert session.graph.layers
        return StageInfo(*session.graph.layers, session.plan.total_bytes, session.plan.kv_blocks, session.isa,
                         session.executor.kernels.arithmetic, session.bundle.identity)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self, number: int) -> None:
        """Make an empty sequence."""
        self._sequences[number] = self.session.new_sequence()

    def fork(self, source: int, number: int) -> None:
        """Make a copy of a sequence."""
        self._sequences[number] = self.session.fork(self._sequences[source])

    def drop(self, numbers: Items[int]) -> None:
        """Release sequences that the runner has forgotten."""
        for number in numbers:
            if (sequence := self._sequences.pop(number, None)) is not None:  # one stage may have failed to make it
                self.session.release(sequence)

    def truncate(self, number: int, n_tokens: int) -> None:
        """Forget all tokens but the first n."""
        self.session.truncate(self._sequences[number], n_tokens)

    def can_truncate(self, number: int, n_tokens: int) -> int:
        """Return how many of the first n tokens can be kept."""
        return self.session.can_truncate(self._sequences[number], n_tokens)

    def checkpoint(self, number: int) -> None:
        """Keep the state of recurrent layers."""
        self.session.checkpoint(self._sequences[number])

    def accept(self, number: int, n_before: int, path: Items[int]) -> None:
        """Keep one path of a tree."""
        self.session.accept(self._sequences[number], n_before, path)

    def fits(self, wanted: Items[tuple[int, int]]) -> bool:
        """Return whether there is room for this many more tokens of each sequence."""
        return self.session.fits([(self._sequences[number], n) for number, n in wanted])

    def blocks(self) -> tuple[int, int, int, int]:
        """Return the KV blocks: all, the free ones, those that new tokens can have, and the cached ones."""
        session = self.session
        return session.n_blocks, session.free_blocks, session.available_blocks, session.prefix_blocks

    def find_prefix(self, number: int, ids: Items[int], salt: str) -> int:
        """Make a sequence with the longest cached beginning of a prompt; returns its length."""
        self._sequences[number] = found = self.session.from_prefix(ids, bytes.fromhex(salt))
        return len(found)

    def cache_prefix(self, number: int, salt: str) -> None:
        """Cache the full blocks of a sequence."""
        self.session.cache_prefix(self._sequences[number], bytes.fromhex(salt))

    def drop_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.session.drop_prefixes()

    def settle(self) -> None:
        """Return when the process holds all planned memory."""
        self.session.settle()

    # -- a forward pass ----------------------------------------------------------------------------------------------

    def run(self, part: Part, given: Rows | None, cancel: Cancellation | None) -> Rows:
        """Run a part of a forward pass; see `StageSession.run_part`."""
        if part.begins:
            self.session.begin([(self._sequences[number], n) for number, n in part.begins])
        segments = [Segment(self._sequences[one.number], *one[1:]) for one in part.segments]
        return self.session.run_part(segments, part.offset, given, cancel)

    def commit(self, ran: Items[tuple[int, Items[int], int]]) -> None:
        """Commit the tokens of a pass to sequences."""
        self.session.commit([(self._sequences[number], ids, role) for number, ids, role in ran])

    def abort(self, lengths: Items[tuple[int, int]]) -> None:
        """Call a pass off: sequences are as long as they were before it."""
        for number, length in lengths:
            self.session.truncate(self._sequences[number], length)

    def call(self, name: str, arguments: Items[Any]) -> Any:
        """Make a call that came from elsewhere; raises `EdgeInferError` for one that there is not."""
        if name not in CALLS:
            raise EdgeInferError(f"A stage of the pipeline has no call {name!r:.40}; run the same version of edgeinfer "
                                 "everywhere.")
        return getattr(self, name)(*arguments)


class GivesUp(Protocol):
    """Receives calls, some of which are given up."""

    given_up: int
    """Number of the last call that was given up, with those before."""


class Wish(Cancellation):
    """The wish to end a part of a forward pass; see `runner.Cancellation`."""

    def __init__(self, receiver: GivesUp, number: int):
        self._receiver, self._number = receiver, number

    @property
    def asked(self) -> bool:  # type: ignore[override]
        """True if the part with this number, or a later one, was given up."""
        return self._receiver.given_up >= self._number


def as_error(error: Exception) -> EdgeInferError:
    """Return an error that the runner can raise again."""
    return error if isinstance(error, EdgeInferError) else EdgeInferError(
        f"A stage of the pipeline failed ({type(error).__name__}: {error}); open the model again.")
