"""A worker of Ray that starts again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec")
from edgeinfer.cluster import actor
from edgeinfer.cluster.job import Identity, Refused, WorkerLost

HERE = Identity("1", "bundle", "avx2")


class RayError(Exception):
    pass


def reopened(monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> None:
    """Open a worker, and again with these outcomes of its actor."""
    monkeypatch.setattr(actor, "RETRY_SECONDS", 0.0)
    left = [HERE, *outcomes]

    async def opening(*asked: Any) -> Any:
        if isinstance(found := left.pop(0), Exception):
            raise found
        return found

    worker = object.__new__(actor.ActorWorker)
    worker.name, worker.asked, worker._failed = "worker", ("m", "m", {}), RayError
    worker._actor = SimpleNamespace(open=SimpleNamespace(remote=opening))

    async def main() -> None:
        assert await worker.opened() == HERE
        await worker.reopen()

    asyncio.run(main())
    assert not left


def test_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reopened(monkeypatch, RayError("unavailable"), Refused("no memory", "budget", 3), HERE)


@pytest.mark.parametrize("other", [HERE._replace(bundle="another"), HERE._replace(version="2")])
def test_another_model_is_refused(monkeypatch: pytest.MonkeyPatch, other: Identity) -> None:
    with pytest.raises(WorkerLost, match="edgeinfer or the bundle was replaced there"):
        reopened(monkeypatch, other)
