"""The sequences of a pipeline: each stage has its own part of every sequence, under one number."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar

from edgeinfer.base.validation import shown
from edgeinfer.errors import RequestError
from edgeinfer.runner import Runner, Sequence, integers

from .stage import Stage

Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """Serialise calls to the stages with a lock: the figures of `blocks` may be asked for by any thread."""
    @wraps(method)
    def called(self: PipelineSequences, *arguments: Any, **options: Any) -> Any:
        with self._turn:
            return method(self, *arguments, **options)

    return called  # type: ignore[return-value]


class PipelineSequences(Runner):
    """The part of `Runner` that concerns sequences between forward passes, over stages.

    Stages whose layers keep all rows have the same blocks in the same order, so one of them answers for all. Others
    are asked one by one: a sequence is cut, and a prefix found, where all of them can.
    """

    stages: tuple[Stage, ...]
    _alike: bool
    """True if all stages have pools of one size, without windows and recurrent state."""

    def _open_sequences(self) -> None:
        self._turn = threading.RLock()
        self._seen: tuple[int, ...] = (0, 0, 0, 0)
        """Blocks when they were counted last."""
        self._numbers: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._last = 0
        self._gone: deque[int] = deque()
        """Numbers of discarded sequences that the stages have not released yet."""
        near = next((stage for stage in self.stages if not stage.apart), self.stages[0])
        self._asked = (near,) if self._alike else self.stages

    # -- calls to the stages -----------------------------------------------------------------------------------------

    def _post(self, name: str, *arguments: object) -> None:
        for stage in self.stages:
            stage.post(name, *arguments)

    def _number(self, sequence: Sequence) -> int:
        """Return the number of a sequence; those that are gone are released first."""
        if (number := self._numbers.get(sequence)) is None:
            raise RequestError("The sequence belongs to another model that is open; a sequence is used where it was "
                               "made (new_sequence, fork, from_prefix).")
        if self._gone:
            self._post("drop", [self._gone.popleft() for _ in range(len(self._gone))])
        return number

    def _numbered(self, number: int, tokens: Items[int] = ()) -> Sequence:
        """Return the runner's part of a sequence that the stages have under a number."""
        sequence = Sequence(list(tokens))
        self._numbers[sequence] = number
        weakref.finalize(sequence, self._gone.append, number).atexit = False
        return sequence

    def _next(self) -> int:
        self._last += 1
        return self._last

    # -- sequences ---------------------------------------------------------------------------------------------------

    @in_turn
    def new_sequence(self) -> Sequence:
        """Return an empty sequence."""
        number = self._next()
        self._post("open", number)
        return self._numbered(number)

    @in_turn
    def fork(self, sequence: Sequence) -> Sequence:
        """Return a copy that shares the KV blocks until one of the two writes."""
        source, number = self._number(sequence), self._next()
        self._post("fork", source, number)
        return self._numbered(number, sequence.tokens)

    @in_turn
    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n, in all stages or none."""
        number, length = self._number(sequence), len(sequence)
        if not 0 <= n_tokens <= length:
            raise RequestError(f"Cannot cut a sequence of {length} tokens to {shown(n_tokens)}.")
        if not self._alike and 0 < n_tokens < length:
            for stage in self.stages:
                if stage.ask("can_truncate", number, n_tokens) < n_tokens:
                    stage.ask("truncate", number, n_tokens)  # which says why not
        self._post("truncate", number, n_tokens)
        del sequence.tokens[n_tokens:]

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's blocks; those of a stage that has ended are gone anyway."""
        if self.lost:
            sequence.tokens.clear()
        else:
            self.truncate(sequence, 0)

    @property
    def lost(self) -> bool:
        """True if a stage has ended."""
        return any(stage.lost for stage in self.stages)

    @in_turn
    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return how many of the first n tokens all stages can keep."""
        number, n = self._number(sequence), n_tokens
        while not self._alike and (least := min(stage.ask("can_truncate", number, n) for stage in self.stages)) < n:
            n = least
        return n

    @in_turn
    def checkpoint(self, sequence: Sequence) -> None:
        """Keep the state of recurrent layers; see `Runner.checkpoint`."""
        number = self._number(sequence)
        if not self._alike:
            self._post("checkpoint", number)

    @in_turn
    def accept(self, sequence: Sequence, n_before: int, path: Items[int]) -> None:
        """Keep one path of a tree; see `Runner.accept`. If a stage cannot, the tree's tokens are forgotten."""
        number, path = self._number(sequence), list(integers("path", path))
        n = len(sequence) - n_before
        if n_before < 0 or n < 0 or any(not low < high < n for low, high in pairwise((-1, *path))):
            raise RequestError(f"Tokens {shown(path)} after the first {n_before} of {len(sequence)} cannot be kept; "
                               "count a path from 0, each token after the one before.")
        if path == list(range(len(path))):
            return self.truncate(sequence, n_before + len(path))
        tokens = [sequence.tokens[n_before + node] for node in path]
        try:
            for stage in self.stages:
                stage.ask("accept", number, n_before, path)
        except BaseException:
            self._post("truncate", number, n_before)
            del sequence.tokens[n_before:]
            raise
        sequence.tokens[n_before:] = tokens

    @in_turn
    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether context and KV blocks have room for this many more tokens of each; see `Runner.fits`."""
        numbered = [(self._number(sequence), n) for sequence, n in wanted]
        return super().fits(wanted) and all(stage.ask("fits", numbered) for stage in self._asked)

    @property
    def n_blocks(self) -> int:
        """KV blocks of each stage's pool of layers that keep all tokens."""
        return self._blocks(0)

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held nor cached, in the stage that has fewest."""
        return self._blocks(1)

    @property
    def available_blocks(self) -> int:
        """Blocks that are not held by a sequence, in the stage that has fewest."""
        return self._blocks(2)

    @property
    def prefix_blocks(self) -> int:
        """Blocks in the prefix cache, in the stage that has fewest."""
        return self._blocks(3)

    def _blocks(self, which: int) -> int:
        """Count blocks; those counted last where another thread has a forward pass under way."""
        if self._turn.acquire(blocking=False):
            try:
                found = [stage.ask("blocks") for stage in self._asked]
            finally:
                self._turn.release()
            self._seen = tuple(map(min, zip(*found, strict=True)))
        return self._seen[which]

    # -- the prefix cache --------------------------------------------------------------------------------------------

    @property
    def caches_prefixes(self) -> bool:
        """True if blocks are cached."""
        return True

    @in_turn
    def from_prefix(self, ids: Items[int], salt: bytes = b"") -> Sequence:
        """Return a sequence with the longest beginning of a prompt that all stages have cached."""
        ids = list(integers("ids", ids))
        self.check(Sequence(), ids)
        n = len(ids) - 1
        while True:
            number = self._next()
            try:
                found = [stage.ask("find_prefix", number, ids[: n + 1], salt.hex()) for stage in self.stages]
            except BaseException:
                self._gone.append(number)
                raise
            if min(found) == max(found):
                return self._numbered(number, ids[: found[0]])
            self._post("drop", [number])
            n = min(found)

    @in_turn
    def cache_prefix(self, sequence: Sequence, salt: bytes = b"") -> None:
        """Cache the full blocks of a sequence; see `Runner.cache_prefix`."""
        self._post("cache_prefix", self._number(sequence), salt.hex())

    @in_turn
    def drop_prefixes(self) -> None:
        """Empty the prefix caches."""
        self._post("drop_prefixes")

    @in_turn
    def settle(self) -> None:
        """Return when all stages hold all the memory that was planned."""
        for stage in self.stages:
            stage.ask("settle")
