"""What `run` says of layers that are streamed from storage: why, what else would do, and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..sizes import format_size

if TYPE_CHECKING:
    from ..runtime import Session


def notice(session: Session) -> str | None:
    """Return why layers are streamed, and what would do instead; None where all weights are in memory."""
    stream, plan = session.executor.stream, session.plan
    if stream is None:
        return None
    line = (f"{len(plan.parts)} of {session.model.num_hidden_layers} layers are streamed from storage, "
            f"{format_size(stream.bytes_per_walk)} for each token or chunk of the prompt: with all weights in memory "
            f"the run needs {format_size(plan.unstreamed_bytes)}; the budget is {format_size(session.budget_bytes)}.")
    if session.instead is not None:
        line += f" Fits without: {session.instead}."
    if not stream.file.direct:
        line += (" The file system refuses direct I/O, so pages go through the system's cache and are dropped behind "
                 "each read.")
    return line


class Usage:
    """Counts what a request reads from storage, from when it is made on."""

    def __init__(self, session: Session):
        self._session = session
        self._before = self._now()

    def _now(self) -> tuple[int, int, int]:
        executor = self._session.executor
        stream = executor.stream
        return (stream.walks, stream.bytes_read, executor.waited_ns) if stream else (0, 0, 0)

    def report(self) -> dict[str, Any] | None:
        """Return the field ``offload`` of the JSON object; None without streaming."""
        session, stream = self._session, self._session.executor.stream
        if stream is None:
            return None
        walks, nbytes, waited = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return {"decision": "streamed", "layers": len(session.plan.parts), "walks": walks, "flash_bytes": nbytes,
                "flash_bytes_per_token": stream.bytes_per_walk, "io_wait_ms": waited / 1e6,
                "direct": stream.file.direct}


def line(report: dict[str, Any] | None) -> str | None:
    """Return the cost of streaming in one line."""
    if report is None:
        return None
    return (f"streamed: {format_size(report['flash_bytes_per_token'])} from storage per token "
            f"({format_size(report['flash_bytes'])} in {report['walks']} walks), "
            f"{report['io_wait_ms'] / 1000:.1f} s spent waiting for it")
