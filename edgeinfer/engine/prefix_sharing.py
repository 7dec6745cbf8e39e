"""Common beginnings of requests that run together: computed once, taken from the prefix cache by the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .request import Request
from .task import shared

if TYPE_CHECKING:
    from ..runner import Runner


class PrefixSharing:
    """Finds and shares the common beginnings of requests that have `reuse` and the same salt."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._common: dict[tuple[int, int], int] = {}
        """Tokens in common of the prompts of two requests."""

    def forget(self, request: Request[Any]) -> None:
        """Forget a request that has ended."""
        self._common = {pair: n for pair, n in self._common.items() if request.number not in pair}

    def follows(self, request: Request[Any], others: list[Request[Any]]) -> bool:
        """Return whether an older request is computing the next block of this prompt, to be shared when it is there."""
        if not request.reuse or request.task.sequence is None or not self._runner.caches_prefixes:
            return False
        held, block = len(request.task.sequence), self._runner.block_tokens
        for other in others:
            if other.number >= request.number or not other.reuse or other.salt != request.salt:
                continue
            ahead = len(other.task.sequence) if other.task.sequence is not None else 0
            common = self._in_common(other, request) // block * block
            if held < common and ahead < common:
                return True
        return False

    def _in_common(self, one: Request[Any], other: Request[Any]) -> int:
        pair = one.number, other.number
        found = self._common.get(pair)
        if found is None:
            ids = other.task.prompt_ids
            found = self._common[pair] = shared(one.task.prompt_ids, ids, len(ids) - 1)
        return found

    def share(self, request: Request[Any], running: Iterable[Request[Any]]) -> None:
        """Put the blocks of a request into the prefix cache, and let those of the `running` ones that waited for
        it continue from there."""
        sequence = request.task.sequence
        if not request.reuse or sequence is None or not self._runner.caches_prefixes:
            return
        self._runner.cache_prefix(sequence, request.salt)
        for other in running:
            if other is not request and other.reuse and other.salt == request.salt:
                self._catch_up(other, request)

    def _catch_up(self, request: Request[Any], other: Request[Any]) -> None:
        """Restart a request whose prompt has a longer prefix in the cache now than it holds."""
        task, block = request.task, self._runner.block_tokens
        held = task.sequence
        if held is None or len(held) >= len(task.prompt_ids) - 1:
            return
        common = min(self._in_common(other, request) if other.number < request.number else 0,
                     len(other.task.sequence or ()))
        if common // block * block <= len(held):
            return
        found = self._runner.from_prefix(task.known_ids, request.salt)
        if len(found) <= len(held):
            self._runner.release(found)
            return
        task.release()
        task.begin(found)
        if not request.task.preemptions:
            task.cached_tokens = max(task.cached_tokens, len(found))

    def keep(self, request: Request[Any]) -> None:
        """Put the blocks of a request that ends, or is preempted, into the prefix cache."""
        sequence = request.task.sequence
        if request.reuse and sequence is not None and len(sequence):
            self._runner.cache_prefix(sequence, request.salt)
