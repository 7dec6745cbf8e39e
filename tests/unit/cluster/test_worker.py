"""The process of a worker: jobs that are cancelled while their next item is computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("msgspec")
from edgeinfer.cluster.job import Job
from edgeinfer.cluster.worker import Engine


class Slow:
    """A model whose next item comes when it is told to."""

    def __init__(self) -> None:
        self.go, self.closed, self.cancelled = asyncio.Event(), 0, list[int]()

    async def run(self, job: Job) -> AsyncGenerator[Any, None]:
        try:
            while True:
                await self.go.wait()
                yield []
        finally:
            self.closed += 1

    def cancel(self, key: int) -> None:
        self.cancelled.append(key)


@pytest.mark.parametrize("read", [False, True])
def test_a_cancelled_job_leaves_nothing_behind(read: bool) -> None:
    async def main() -> None:
        engine, slow = Engine(), Slow()
        engine._serving = slow  # type: ignore[assignment]
        reading = asyncio.ensure_future(engine.begin(Job(7, "text", [1], {})))
        if not read:
            slow.go.set()
            assert await reading == []
        await asyncio.sleep(0)
        await engine.cancel(7)
        slow.go.set()
        await reading  # a part that was there before the model noticed
        assert slow.cancelled == [7] and slow.closed == 1
        assert not engine._items and not engine._read and await engine.more(7) is None

    asyncio.run(main())
