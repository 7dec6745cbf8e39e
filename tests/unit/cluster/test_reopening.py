"""A worker of Ray that starts late, or again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec")
from edgeinfer.cluster import actor
from edgeinfer.cluster.job import Failed, Identity, Job, Refused, WorkerLost
from edgeinfer.errors import EdgeInferError

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


@pytest.mark.parametrize(("reserved", "sentence"), [
    (True, "Ray has reserved its memory, and its process does not run after 0 s"),
    (False, "of which 2.00 GB for all 2 are not free; lower --budget")])
def test_a_process_that_does_not_start_lacks_memory_only_if_that_is_not_reserved(
        monkeypatch: pytest.MonkeyPatch, reserved: bool, sentence: str) -> None:
    monkeypatch.setattr(actor, "START_SECONDS", 0.0)
    monkeypatch.setattr(actor, "SLOW_START_SECONDS", 0.0)
    worker = object.__new__(actor.ActorWorker)
    worker.name, worker._failed, worker._node = "worker", RayError, actor.Node("id", "here", 1, 1 << 30, 0)
    worker._actor = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: asyncio.sleep(60)))
    with pytest.raises(EdgeInferError, match=f"The worker cannot start: .*{sentence}"):
        asyncio.run(worker.started(2, 2_000_000_000, lambda: reserved))


class TaskError(RayError):
    pass


@pytest.mark.parametrize(("error", "lost"), [(RayError("The node is gone"), True), (TaskError("KeyError"), False)])
def test_only_errors_of_its_own_code_are_no_loss(error: Exception, lost: bool) -> None:
    """A machine that falls silent gives other errors than a process that ends."""
    async def raising(*asked: Any) -> Any:
        raise error

    worker = object.__new__(actor.ActorWorker)
    worker.name, worker._failed, worker._raised = "worker", RayError, TaskError
    worker._actor = SimpleNamespace(begin=SimpleNamespace(remote=raising), post=SimpleNamespace(remote=raising))

    async def items() -> list[Any]:
        return [item async for item in worker.run(Job(0, "completion", [1], {}))]

    if lost:
        for call in (items, lambda: worker.post("/v1/completions", b"{}")):
            with pytest.raises(WorkerLost, match="The node is gone"):
                asyncio.run(call())
    else:
        (failed,) = asyncio.run(items())
        assert isinstance(failed, Failed) and "The worker failed: KeyError" in str(failed[0])
        with pytest.raises(EdgeInferError, match="The worker failed: KeyError"):
            asyncio.run(worker.post("/v1/completions", b"{}"))
