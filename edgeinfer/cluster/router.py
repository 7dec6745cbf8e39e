"""The choice of a replica for a request: the one that has the beginning of its prompt, or the one that is soonest done.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from edgeinfer.kernels import abi

from ..engine import SHARED_STEP
from .job import Facts, Speeds

EXPECTED_TOKENS = 128
"""Tokens of an answer that are counted on where more are allowed: texts mostly end by themselves."""
CALL_SECONDS = 0.01
"""Time that is counted for the calls by which a prompt goes from one replica to another."""
NEW_WEIGHT = 0.1
"""Weight of a prompt in the mean speed of the way on which it came."""


class Need(NamedTuple):
    """Work that a request asks for.

    Attributes
    ----------
    blocks : hashes of the whole blocks of its prompt, each of all tokens up to its end
    prompt : tokens of the prompt
    new : tokens that it may generate
    """

    blocks: list[bytes]
    prompt: int
    new: int


class Load:
    """A replica as the router knows it: speeds, work, and beginnings that its prefix cache has.

    Attributes
    ----------
    there : bool
        Whether it answers.
    sent : int
        Requests that it was given.
    """

    def __init__(self, name: str, facts: Facts):
        self.name, self.facts, self.speeds = name, facts, facts.speeds
        self._most = facts.plan.kv_blocks * facts.block_tokens // abi.BLOCK_TOKENS
        self.there, self.sent = True, 0
        self.work: dict[int, list[int]] = {}
        """Prompt tokens to compute and tokens to generate, by request."""
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def cached(self, need: Need) -> int:
        """Return how many tokens of a prompt it has."""
        n = 0
        for block in need.blocks:
            if block not in self._blocks:
                break
            n += 1
        return min(n * abi.BLOCK_TOKENS, need.prompt - 1)

    def wait(self) -> float:
        """Return the seconds until it begins with another request."""
        prompts = sum(prompt for prompt, _ in self.work.values()) * self.speeds.prompt
        over = len(self.work) + 1 - self.facts.config.max_sequences
        if over <= 0:
            return prompts
        left = sorted(new for _, new in self.work.values())
        return prompts + left[min(over, len(left)) - 1] * self._step(len(self.work))

    def seconds(self, need: Need) -> float:
        """Return the seconds until it has answered a request."""
        running = min(len(self.work) + 1, self.facts.config.max_sequences)
        return (self.wait() + (need.prompt - self.cached(need)) * self.speeds.prompt
                + min(need.new, EXPECTED_TOKENS) * self._step(running))

    def _step(self, sequences: int) -> float:
        return self.speeds.decode * (1 + SHARED_STEP * (sequences - 1))

    def begin(self, key: int, need: Need, keeps: bool = True) -> None:
        """Note a request that it gets, and whether its prompt will be in the prefix cache."""
        self.work[key] = [need.prompt - self.cached(need), min(need.new, EXPECTED_TOKENS)]
        self.sent += 1
        if keeps:
            self.has(need.blocks)

    def progress(self, key: int, tokens: int) -> None:
        """Note that a request has got tokens."""
        work = self.work[key]
        work[:] = 0, max(work[1] - tokens, 1)

    def end(self, key: int) -> None:
        """Note that a request has ended."""
        self.work.pop(key, None)

    def has(self, blocks: Collection[bytes]) -> None:
        """Note beginnings that its prefix cache has; as there, those that were not used for longest are dropped."""
        if not self.facts.caches_prefixes:
            return
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def learn(self, speeds: Speeds | None) -> None:
        """Record the speeds that it has measured itself, but for its link; one that is 0 was not measured since it was
        opened again."""
        old = self.speeds
        if speeds is not None:
            self.speeds = Speeds(speeds.prompt or old.prompt, speeds.decode or old.decode, old.link)

    def learn_link(self, seconds: float) -> None:
        """Record the seconds per byte of a transferred prompt."""
        link = self.speeds.link
        self.speeds = self.speeds._replace(link=link + NEW_WEIGHT * (seconds - link))

    def lose(self) -> None:
        """Note that it is gone with its prefix cache; each of its requests notices by itself."""
        self.there = False
        self._blocks.clear()


def choose(loads: Sequence[Load], need: Need) -> Load:
    """Return the replica for a request.

    It is the one with the most of its prompt, unless waiting there takes longer than computing that part elsewhere;
    otherwise the one that is soonest done.
    """
    most = max(loads, key=lambda one: (one.cached(need), -one.seconds(need)))
    if cached := most.cached(need):
        soonest = min(one.wait() for one in loads)
        if most.wait() - soonest <= cached * most.speeds.prompt:
            return most
    return min(loads, key=lambda one: (one.seconds(need), one.sent))


def apart(load: Load, helpers: Iterable[Load], need: Need) -> Load | None:
    """Return the replica that computes the prompt of a request for the one that answers, if that pays; or None.

    It pays if the prompt and its way take less time than it takes the other one, counted once more for each request
    there, which would wait as long. A prompt is on its way while it is computed, but for its last chunk.
    """
    own = (need.prompt - load.cached(need)) * load.speeds.prompt
    last = min(need.prompt - 1, int(load.facts.config.prefill_chunk or need.prompt))
    way, after = (load.facts.plan.sequence_bytes(n) * load.speeds.link for n in (need.prompt - 1, last))

    def seconds(one: Load) -> float:
        computing = (need.prompt - one.cached(need)) * one.speeds.prompt
        return one.wait() + max(computing + after, way) + CALL_SECONDS

    best = min((one for one in helpers if need.prompt <= int(one.facts.config.ctx or 0)), key=seconds, default=None)
    return best if best and seconds(best) < load.wait() + own * (1 + len(load.work)) else None


def blocks_of(ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Return the hashes of the whole blocks of a prompt."""
    return list(_hashes(ids, salt))


def _hashes(ids: Sequence[int], salt: bytes) -> Iterator[bytes]:
    before = hashlib.blake2b(salt, digest_size=16).digest()
    for end in range(abi.BLOCK_TOKENS, len(ids) + 1, abi.BLOCK_TOKENS):
        block = array("q", ids[end - abi.BLOCK_TOKENS:end]).tobytes()
        before = hashlib.blake2b(before + block, digest_size=16).digest()
        yield before
