"""Random requests over one pool that share beginnings, against the logits of their texts alone."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from edgeinfer.errors import CancelledError, RequestError
from edgeinfer.runner import DECODE, GONE, PROMPT, Segment, Sequence
from edgeinfer.runner.prefix_cache import PrefixCache
from edgeinfer.runtime import Session
from tests.helpers.sessions import scored, session, tokens

CTX, BLOCKS = 240, 64
POOL = {"ctx": CTX, "max_sequences": 4}
"""Options of a session whose pool has BLOCKS blocks."""


def branching(n: int, seed: int = 0) -> list[list[int]]:
    """Texts of a whole context, each of which leaves an earlier one at some place."""
    rng, found = np.random.default_rng(seed), [tokens(CTX, seed)]
    while len(found) < n:
        cut = int(rng.integers(CTX))
        found.append(found[rng.integers(len(found))][:cut] + tokens(CTX - cut, seed + len(found)))
    return found


def logits_alone(path: Path, texts: list[list[int]], **options: Any) -> list[np.ndarray]:
    """Logits after every token of each text, which has the session for itself."""
    with session(path, **{"ctx": CTX, "outputs": 64, **options}) as opened:
        return [scored(opened, text) for text in texts]


class Request:
    """One text, of which a sequence has run a beginning."""

    def __init__(self, sequence: Sequence, text: int, prompt: int, end: int):
        self.sequence, self.text, self.prompt, self.end = sequence, text, prompt, end
        self.patience = 4
        """Times that it may still be disturbed."""


class Crowd:
    """Up to 12 requests in turns and together: prefix hits, forks, cuts, other continuations, cancellations, requests
    that are forgotten, and more blocks than there are.

    Parameters
    ----------
    opened : with options `POOL`
    texts, logits : of `branching` and `logits_alone`
    """

    def __init__(self, opened: Session, texts: list[list[int]], logits: list[np.ndarray], seed: int = 0):
        self.opened, self.texts, self.logits = opened, texts, logits
        self.rng, self.alive, self.counts = np.random.default_rng(seed), list[Request](), Counter[str]()

    def run(self, requests: int) -> Counter[str]:
        """Run so many requests to their ends; returns how often things happened."""
        while self.counts["requests"] < requests or self.alive:
            if len(self.alive) < 12 and self.counts["requests"] < requests:
                self.admit()
            self.step()
            for request in [*self.alive]:
                if len(request.sequence) >= request.end:
                    self.leave(request)
                elif request.patience and self.rng.random() < 0.3:
                    self.disturb(request)
            self.check_books()
        return self.counts

    def admit(self) -> None:
        text, prompt = int(self.rng.integers(len(self.texts))), int(self.rng.integers(1, 200))
        ids = self.texts[text][:prompt]
        sequence = self.opened.from_prefix(ids)
        n = len(sequence)
        assert sequence.tokens == ids[:n] and n % 16 == 0 and n < prompt and sequence.decoded is None
        self.counts.update(requests=1, asked=prompt, hit=n)
        self.alive.append(Request(sequence, text, prompt, prompt + int(self.rng.integers(1, CTX - prompt + 1)) // 4))

    def step(self) -> None:
        """One forward pass over some requests: chunks of prompts, single tokens, and several of a text."""
        order = [self.alive[i] for i in self.rng.permutation(len(self.alive))[: self.rng.integers(1, 5)]]
        parts, budget = list[tuple[Request, int]](), 64
        for request in order:
            left = max(request.prompt - len(request.sequence), 1 if self.rng.random() < 0.7 else 5)
            n = min(left, int(self.rng.choice([7, 16, 64])), budget, CTX - len(request.sequence))
            if n > 0:
                parts.append((request, n))
                budget -= n
        if not parts:
            return
        fits = self.opened.fits([(request.sequence, n) for request, n in parts])
        if not fits and self.rng.random() < 0.7:
            self.counts["waited"] += 1
            return self.leave(self.alive[self.rng.integers(len(self.alive))])
        segments = [self._segment(request, n) for request, n in parts]
        if self.rng.random() < 0.05:
            return self.cancelled(segments)
        try:
            rows = self.opened.forward(segments).copy()
        except RequestError as error:
            assert "KV blocks of 16 tokens are in use" in str(error) and not fits
            self.counts["full"] += 1
            return self.leave(self.alive[self.rng.integers(len(self.alive))])
        self.counts["recounted"] += not fits
        for row, (request, _) in zip(rows, parts, strict=True):
            n = len(request.sequence)
            assert request.sequence.tokens == self.texts[request.text][:n]
            assert row.tobytes() == self.logits[request.text][n - 1].tobytes(), f"other logits than alone after {n}"
        return None

    def _segment(self, request: Request, n: int) -> Segment:
        used = len(request.sequence)
        role = PROMPT if used + n <= request.prompt else DECODE
        return Segment(request.sequence, self.texts[request.text][used : used + n], (n - 1,), role)

    def cancelled(self, segments: list[Segment]) -> None:
        """End a pass after it has written rows that hold NaN."""
        def fail(*given: object) -> None:
            for segment in segments:
                used, blocks = len(segment.sequence), segment.sequence.blocks
                for block in blocks[-(-used // 16) :]:
                    for planes in self.opened.kv.planes:
                        if self.opened.kv.window_layers.isdisjoint(planes.layers):
                            for plane in planes.arrays:
                                plane[:, :, block] = 0xFF
            raise CancelledError("Cancelled.")

        self.counts["cancelled"] += 1
        with mock.patch.object(self.opened, "_run", fail):
            try:
                self.opened.forward(segments)
            except (CancelledError, RequestError):
                return
        raise AssertionError("the pass was not cancelled")

    def disturb(self, request: Request) -> None:
        """Cache, fork or cut a sequence; a cut one continues with any text that begins like it."""
        sequence, n = request.sequence, len(request.sequence)
        request.patience -= 1
        match self.rng.integers(4):
            case 0 | 1:
                self.opened.cache_prefix(sequence)
            case 2 if len(self.alive) < 12:
                self.counts["forks"] += 1
                fork = Request(self.opened.fork(sequence), request.text, request.prompt, request.end)
                fork.patience = request.patience
                self.alive.append(fork)
                self._other_text(fork)
            case 3:
                cut = int(self.rng.integers(n + 1))
                self.counts["cuts"] += cut < n
                self.opened.truncate(sequence, self.opened.can_truncate(sequence, cut))
                self._other_text(request)

    def _other_text(self, request: Request) -> None:
        begun = request.sequence.tokens
        like = [i for i, text in enumerate(self.texts) if text[: len(begun)] == begun]
        request.text = like[self.rng.integers(len(like))]

    def leave(self, request: Request) -> None:
        """Release a sequence, cached or not, or forget it."""
        self.alive.remove(request)
        if self.rng.random() < 0.8:
            self.opened.cache_prefix(request.sequence)
        if self.rng.random() < 0.8:
            self.opened.release(request.sequence)
        else:
            self.counts["forgotten"] += 1

    # -- the books ---------------------------------------------------------------------------------------------------

    def check_books(self) -> None:
        """Check that blocks that tables or the cache name have as many holders at least, and that no other is free."""
        self.check_named([request.sequence for request in self.alive])

    def check_named(self, alive: Iterable[Sequence]) -> None:
        """Check the books with these sequences."""
        kv, alive = self.opened.kv, [*alive]
        self._check(kv.pool, [sequence.blocks for sequence in alive])
        if kv.recent:
            self._check(kv.recent.pool, [sequence.recent.blocks for sequence in alive if sequence.recent])

    def _check(self, pool: PrefixCache, tables: list[list[int]]) -> None:
        named = Counter(block for table in tables for block in table if block != GONE)
        named.update([*pool._keys])
        assert all(pool._holders[block] >= holders for block, holders in named.items()), "too few holders"
        assert not set(pool._free) & set(named), "a free block is named"
        assert len(set(pool._free)) == len(pool._free)
        assert all(pool._holders[block] == 1 and block in pool._keys for block in pool._idle)
        assert all(pool._keys[block] == key for key, block in pool._cached.items())

    def nothing_is_lost(self) -> None:
        """Check that in the end all blocks can be taken."""
        gc.collect()
        kv = self.opened.kv
        self.opened.drop_prefixes()
        for pool in (kv.pool, *([kv.recent.pool] if kv.recent else [])):
            if self.counts["forgotten"]:
                pool.recount([])
            assert pool.n_free == pool.n_blocks and pool.n_cached == 0
        assert not [*kv._living]
