"""Waking the loop: at once at first and at the end of a request, not too often between; and threads that wait."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec")
from edgeinfer.server import answers, models


def test_events_between_the_first_and_the_end_keep_their_distance() -> None:
    request: Any = SimpleNamespace(ended=False, on_event=None, cancel=lambda: None)

    async def run() -> None:
        loop, arrivals = asyncio.get_running_loop(), answers.Arrivals(request)
        began = loop.time()
        request.on_event()
        await asyncio.wait_for(arrivals.wait(), 10)
        for _ in range(5):
            request.on_event()
        await asyncio.wait_for(arrivals.wait(), 10)
        assert loop.time() - began >= 0.9 * answers.GAP_SECONDS
        with pytest.raises(asyncio.TimeoutError):  # five events were one
            await asyncio.wait_for(arrivals.wait(), 5 * answers.GAP_SECONDS)
        arrivals._next = loop.time() + 3600
        request.on_event()
        request.ended = True
        request.on_event()
        await asyncio.wait_for(arrivals.wait(), 10)

    asyncio.run(run())


def test_a_request_ends_whose_loop_is_closed() -> None:
    cancelled = list[bool]()
    request: Any = SimpleNamespace(ended=False, on_event=None, cancel=lambda: cancelled.append(True))

    async def run() -> None:
        answers.Arrivals(request)

    asyncio.run(run())
    request.on_event()
    assert cancelled == [True]


def test_threads_that_wait_are_used_again() -> None:
    async def run() -> tuple[set[int], int]:
        found = set[int]()
        for _ in range(100):
            found.add(await models.in_thread(threading.get_ident))
            await asyncio.sleep(0.001)
        return found, await models.in_thread(threading.get_ident, short=True)

    found, own = asyncio.run(run())
    assert len(found) < 100 and own == threading.get_ident() not in found


def test_what_fails_in_a_thread_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(models.in_thread(lambda: 1 // 0))
