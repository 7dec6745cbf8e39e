"""A worker's side of the protocol: one JSON object a line in, one out. The standard library only: it runs anywhere."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any


def serve(handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer requests such as ``{"do": "run", "kind": "pp", "tokens": 512, "depth": 0}`` until the input ends.

    Output of libraries goes to standard error, so that it cannot be mistaken for an answer.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = handlers[request.pop("do")](**request)
        except Exception as error:  # errors of a peer belong to the report, and the worker continues
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def peak_rss_bytes() -> int | None:
    """Most physical memory of this process, or None if the system does not say (outside Linux)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None


def process_age_ms() -> float | None:
    """Milliseconds since the system started this process, or None if it does not say (outside Linux)."""
    try:
        with open("/proc/self/stat", "rb") as stat, open("/proc/uptime", "rb") as uptime:
            ticks = int(stat.read().rsplit(b")", 1)[1].split()[19])
            return 1000 * (float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:
        return None


def token_ids(vocab_size: int, n_tokens: int) -> list[int]:
    """The same ids for every peer; none is a special token."""
    return [3 + (7919 * i + 12345) % (vocab_size - 3) for i in range(n_tokens)]


def random_ids(seed: int, vocab_size: int, n_tokens: int) -> list[int]:
    """Tokens in no order, the same for every peer; none is a special token."""
    random = Random(seed)
    return [random.randrange(3, vocab_size) for _ in range(n_tokens)]


class Runner:
    """Runs tests on one sequence; a peer says how to process tokens and how to forget them.

    Parameters
    ----------
    vocab_size : int
    process : called with token ids; their logits (of the last one at least) are computed when it returns
    truncate : called with the number of tokens to keep; all of them, where a test is to come back to
    """

    def __init__(self, vocab_size: int, process: Callable[[list[int]], None], truncate: Callable[[int], None]):
        self._vocab_size, self._process, self._truncate, self._length = vocab_size, process, truncate, 0

    def run(self, kind: str, tokens: int, depth: int) -> dict[str, Any]:
        """Seconds to process a prompt (pp) or to generate tokens one by one (tg) after `depth` tokens of context."""
        if self._length > depth:
            self._truncate(depth)
            self._length = depth
        if self._length < depth:
            self._process(token_ids(self._vocab_size, depth - self._length))
            self._length = depth
        self._truncate(depth)
        ids = token_ids(self._vocab_size, tokens)
        began = time.perf_counter()
        if kind == "pp":
            self._process(ids)
        else:
            for token in ids:
                self._process([token])
        seconds = time.perf_counter() - began
        self._truncate(depth)
        return {"seconds": seconds}
