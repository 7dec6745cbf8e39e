"""Routing between replicas of different speeds (a part of cluster.py).

The replicas only wait, so that the choice is measured and not the machine; beside it is the least that any choice can
reach.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

from edgeinfer.cluster.job import Done, Facts, Identity, Item, Job, Part, Speeds
from edgeinfer.cluster.remote_engine import RemoteEngine
from edgeinfer.cluster.tasks import RemoteGeneration
from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.engine import Request

REQUESTS, LOADS = 400, (0.1, 0.25, 0.5)
LATE = 0.05
"""Share of requests beyond a 95th percentile."""
Row = tuple[str, str, str, str]
"""A line of a table: the quantity, its figure, the figure asked for, and a remark."""


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Waiting:
    """A replica that only waits: prompts one after the other, and a token each `decode` seconds."""

    def __init__(self, number: int, speeds: Speeds, config: RuntimeConfig):
        plan = SimpleNamespace(kv_blocks=1 << 16, total_bytes=0, windowed=None,
                               sequence_bytes=lambda n: 0)
        self.name, self._speeds, self._turn = f"replica {number}", speeds, asyncio.Lock()
        self.facts = Facts(config, plan, SimpleNamespace(vocab_size=100), 16, True, "", Identity("", "", ""),  # type: ignore[arg-type]
                           speeds)

    async def run(self, job: Job) -> AsyncIterator[Item]:
        async with self._turn:
            await asyncio.sleep(len(job.ids) * self._speeds.prompt)
        n = job.options["max_tokens"]
        yield [Part(0, [""], [1], (), "", None, None)]
        await asyncio.sleep((n - 1) * self._speeds.decode)
        yield Done(None, 0, 0, 0.0, None, (Part(0, [""] * (n - 1), [1] * (n - 1), (), "length", None, None),))


def routing(model: str) -> list[Row]:
    """Compare pools of three replicas, one of which is three times slower in one of them, at the same load."""
    rows, speeds = [], Speeds(4e-4, 8e-3)
    for load in LOADS:
        even, uneven = (percentile(asyncio.run(_ttfts([speeds, speeds, Speeds(n * speeds.prompt, n * speeds.decode)],
                                                      load)), 0.95) for n in (1, 3))
        rows.append((f"one of three replicas three times slower, at {load:.0%} of the even pool's speed: P95 TTFT "
                     "relative to an even pool", f"{uneven / even:.2f}", "at most 1.3",
                     f"replicas that only wait; {REQUESTS} requests of 256 and 32 tokens; the least of any choice is "
                     f"{1000 * least(load, speeds) / even:.2f}"))
    return rows


def arrivals(load: float, pool: int, speeds: Speeds) -> Iterator[tuple[list[int], float]]:
    """Yield prompts, and the seconds until the next one."""
    draw = random.Random(7)
    for _ in range(REQUESTS):
        yield [draw.randrange(100) for _ in range(256)], draw.expovariate(load * pool / (256 * speeds.prompt))


def least(load: float, speeds: Speeds) -> float:
    """Return the least P95 TTFT of two replicas and one that is three times slower, for who knows all arrivals.

    Within less than three times a prompt's seconds only the two fast ones answer. Prompts are alike, so giving each in
    its turn to the one that is free first, unless it would be late, leaves the fewest that are late.
    """
    prompt = 256 * speeds.prompt
    for limit in (prompt * (1 + i / 50) for i in range(101)):
        now, free, late = 0.0, [0.0, 0.0], 0
        for _, gap in arrivals(load, 3, speeds):
            free.sort()
            end = max(free[0], now) + prompt
            if end - now > limit * 1.000001:
                late += 1
            else:
                free[0] = end
            now += gap
        if late <= LATE * REQUESTS:
            return limit
    return 3 * prompt


async def _ttfts(speeds: list[Speeds], load: float) -> list[float]:
    """Return the times to first token of requests that come at random."""
    config = RuntimeConfig(ctx=1024, max_sequences=16)
    replicas = [Waiting(i, one, config) for i, one in enumerate(speeds)]
    engine, waits = RemoteEngine(replicas, 1 << 20, print), []  # type: ignore[arg-type]
    for ids, gap in arrivals(load, len(speeds), min(speeds)):
        task = RemoteGeneration(replicas[0].facts, None, ids, GenerationConfig(max_tokens=32, ignore_eos=True), (),
                                False, True)
        request: Request[Any] = Request(engine, task)  # type: ignore[arg-type]
        request.start()
        waits.append(request)
        await asyncio.sleep(gap)
    while not all(one.ended for one in waits):
        await asyncio.sleep(0.1)
    return [one.task.result().ttft_ms for one in waits]
