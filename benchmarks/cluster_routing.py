"""Routing between replicas of different speeds (a part of cluster.py).

The replicas only wait, by a clock that skips the waiting, so that the choice is measured and not the machine. Beside it
are the least that any choice can reach, and what a limit would reach from which on requests go to the slow replica.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

from edgeinfer.cluster.job import Done, Facts, Identity, Item, Job, Part, Speeds, WorkerLost
from edgeinfer.cluster.remote_engine import RemoteEngine
from edgeinfer.cluster.tasks import RemoteGeneration
from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.engine import Request

REQUESTS, LOADS = 400, (0.1, 0.25, 0.5)
LATE = 0.05
"""Share of requests beyond a 95th percentile."""
STEPS = 50
"""Limits that are tried for each time of a prompt."""
LEARNED = 0.25
"""Weight of a request in what a replica tells of its speeds, as `engine.PassTimes` weighs this many tokens."""
Row = tuple[str, str, str, str]
"""A line of a table: the quantity, its figure, the figure asked for, and a remark."""


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        loop, self.now = self, 0.0

        class Selector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now


class Waiting:
    """A replica that only waits: prompts one after the other, and a token each `decode` seconds.

    Parameters
    ----------
    number : of the replica
    speeds, known : those that it has, and those that the router knows at first
    ttfts : gets the time to the first token of each request
    """

    def __init__(self, number: int, speeds: Speeds, known: Speeds, ttfts: list[float]):
        config, plan = RuntimeConfig(ctx=1024, max_sequences=16), SimpleNamespace(
            kv_blocks=1 << 16, total_bytes=0, windowed=None, sequence_bytes=lambda n: 0)
        self.name, self._speeds, self._told, self._turn = f"replica {number}", speeds, known, asyncio.Lock()
        self._ttfts, model = ttfts, SimpleNamespace(vocab_size=100)
        self.facts = Facts(config, plan, model, 16, True, "", Identity("", "", ""), known)  # type: ignore[arg-type]

    async def run(self, job: Job) -> AsyncIterator[Item]:
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self._turn:
            await asyncio.sleep(len(job.ids) * self._speeds.prompt)
        self._ttfts.append(clock() - began)
        n = job.options["max_tokens"]
        yield [Part(0, [""], [1], (), "", None, None)]
        await asyncio.sleep((n - 1) * self._speeds.decode)
        self._told = Speeds(*(told + LEARNED * (true - told)
                              for told, true in zip(self._told, self._speeds, strict=True)))
        yield Done(None, 0, 0, 0.0, None, (Part(0, [""] * (n - 1), [1] * (n - 1), (), "length", None, None),),
                   speeds=self._told)

    async def ended(self) -> WorkerLost:
        await asyncio.Event().wait()
        raise AssertionError


def routing(model: str) -> list[Row]:
    """Compare pools of three replicas, one of which is three times slower in one of them, at the same load."""
    rows, fast = [], Speeds(4e-4, 8e-3)
    slow = Speeds(3 * fast.prompt, 3 * fast.decode)
    for load in LOADS:
        even, uneven, unknown = (percentile(ttfts([fast, fast, one], load, known), 0.95)
                                 for one, known in ((fast, fast), (slow, slow), (slow, fast)))
        least_of_any, limited = least(load, fast), best_limit(load, fast)
        rows.append((f"one of three replicas three times slower, at {load:.0%} of the even pool's speed: P95 TTFT "
                     "relative to an even pool", f"{uneven / even:.2f}", "at most 1.3",
                     f"replicas that only wait; {REQUESTS} requests of 256 and 32 tokens; {unknown / even:.2f} if the "
                     f"router takes all for equal at first; the least of any choice is {least_of_any / even:.2f}, "
                     f"{limited[0] / even:.2f} with the best limit"))
    return rows


def ttfts(speeds: list[Speeds], load: float, known: Speeds) -> list[float]:
    """Return the times to first token of requests that come at random; `known` are the speeds of the last replica that
    the router knows at first."""
    loop = SkippingLoop()
    try:
        return loop.run_until_complete(_ttfts(speeds, load, known))
    finally:
        loop.close()


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
    for limit in (prompt * (1 + i / STEPS) for i in range(2 * STEPS + 1)):
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


def best_limit(load: float, speeds: Speeds) -> tuple[float, float]:
    """Return the least P95 TTFT, and the longest TTFT, of a router that sends requests to the slow replica that would
    wait longer than a limit, which is the best one for the requests that came."""
    prompt, found = 256 * speeds.prompt, list[tuple[float, float]]()
    for limit in (prompt * i / STEPS for i in range(2 * STEPS + 1)):
        now, free, times = 0.0, [0.0, 0.0, 0.0], list[float]()
        for _, gap in arrivals(load, 3, speeds):
            ends = [max(one, now) + n * prompt for one, n in zip(free, (1, 1, 3), strict=True)]
            i = min((0, 1), key=ends.__getitem__)
            if ends[i] - prompt - now > limit or ends[2] < ends[i]:
                i = 2
            free[i] = ends[i]
            times.append(ends[i] - now)
            now += gap
        found.append((percentile(times, 0.95), max(times)))
    return min(found)


async def _ttfts(speeds: list[Speeds], load: float, known: Speeds) -> list[float]:
    found = list[float]()
    replicas = [Waiting(i, one, known if i == len(speeds) - 1 else one, found) for i, one in enumerate(speeds)]
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
    engine.close()
    await asyncio.sleep(0.1)
    return found
