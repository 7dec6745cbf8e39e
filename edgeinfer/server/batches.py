"""OpenAI's batches: /v1/batches, which the server answers beside its other requests, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import EdgeInferError
from .batch import URLS, Answered, InProcess, Patient, Results, Row, Rows, answer_all, line_of, opened
from .errors import ApiError
from .files import MAX_FILES, Kept, Store, missing, page
from .http import Call, Reply, new_id
from .models import in_thread

if TYPE_CHECKING:
    from .server import Server

WINDOW, WINDOW_SECONDS = "24h", 86400
MAX_ROWS = 50_000
OVER = ("completed", "failed", "expired", "cancelled")
MAX_METADATA = 16
MAX_BATCHES = 1000
"""Batches of a key that are kept."""
OUTPUTS = ("output_file_id", "error_file_id")
"""Fields of the files that a batch writes."""


class Batch(msgspec.Struct, omit_defaults=True):
    """A batch, as it is described in the folder."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    completion_window: str = WINDOW
    status: str = "validating"
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    error: str | None = None

    def shown(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        errors = None if self.error is None else {"object": "list", "data": [
            {"code": "invalid_request", "message": self.error, "param": None, "line": None}]}
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {"id": self.id, "object": "batch", "endpoint": self.endpoint, "errors": errors,
                "input_file_id": self.input_file_id, "completion_window": self.completion_window,
                "status": self.status, "output_file_id": self.output_file_id, "error_file_id": self.error_file_id,
                "created_at": self.created_at, "expires_at": self.created_at + WINDOW_SECONDS,
                **{f"{name}_at": self.times.get(name) for name in names},
                "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
                "metadata": self.metadata}

    def move(self, status: str) -> None:
        """Note that it has another status from now on."""
        self.status = status
        self.times = {**self.times, status: int(time.time())}


class Batches:
    """The batches of a server.

    Parameters
    ----------
    server : Server
    folder : where files and batches are kept
    """

    def __init__(self, server: Server, folder: Path):
        self._server, self.store = server, Store(folder)
        self._waiting = dict[str, Batch]()
        self._running: Batch | None = None
        self._task: asyncio.Task[None] | None = None
        self._run: asyncio.Task[None] | None = None
        self._closed = False

    def claim(self) -> None:
        """Lock the folder, and continue its unfinished batches; raises `ApiError` if another server has it."""
        if self.store.claim():
            self._resume()

    def resume(self) -> None:
        """Continue the unfinished batches, unless another server has the folder."""
        if not self.store.folder.is_dir():
            return
        with contextlib.suppress(ApiError):
            self.claim()

    def _resume(self) -> None:
        for one in reversed(self.store.all("batch_", Batch, None)):
            if one.status == "cancelling":
                one.move("cancelled")
                self._keep(one)
            elif one.status not in OVER:
                self.add(one)

    def add(self, batch: Batch) -> None:
        """Let a batch run after those before it."""
        self._waiting[batch.id] = batch
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())

    def find(self, name: str, owner: str) -> Batch:
        """Return a batch of a key; raises `ApiError` where it has none of this name."""
        for one in (self._running, *self._waiting.values()):
            if one is not None and (one.id, one.owner) == (name, owner):
                return one
        found: Batch = self.store.read(name, Batch, "batch")
        if found.owner != owner:
            raise missing("batch", name)
        return found

    def cancel(self, batch: Batch) -> None:
        """End a batch with the answers that it has."""
        if batch.id in self._waiting:
            del self._waiting[batch.id]
            batch.move("cancelled")
        elif self._run is not None and batch is self._running:
            batch.move("cancelling")
            self._run.cancel()
        self._keep(batch)

    def check_files(self, owner: str, new: int) -> None:
        """Raise `ApiError` unless a key may have further files, beside those that its batches are going to write."""
        due = sum(one.output_file_id is None for one in self.store.all("batch_", Batch, owner)
                  if one.status not in OVER)
        if len(self.store.all("file-", Kept, owner)) + len(OUTPUTS) * due + new > MAX_FILES:
            raise ApiError(400, f"This key has {MAX_FILES} files, including {len(OUTPUTS)} for each unfinished batch, "
                                "and that is the maximum; delete some.", code="too_many_files")

    def make_room(self, owner: str) -> None:
        """Make room for one more batch of a key: its oldest ones that are over are forgotten; raises `ApiError`."""
        self.check_files(owner, len(OUTPUTS))
        kept = self.store.all("batch_", Batch, owner)
        over = [one for one in kept if one.status in OVER]
        for one in over[max(MAX_BATCHES - 1 - len(kept) + len(over), 0):]:
            self.store.forget(one.id)

    def check_unused(self, file: str) -> None:
        """Raise `ApiError` for a file of a batch that is not over."""
        for one in (self._running, *self._waiting.values()):
            if one is not None and file in (one.input_file_id, one.output_file_id, one.error_file_id):
                raise ApiError(409, f"The file {file} is used by {one.id}; cancel the batch first.", code="in_use")

    async def close(self) -> None:
        """Leave all batches as they are; another server continues them."""
        self._closed = True
        for task in (self._run, self._task):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(one for one in (self._task,) if one), return_exceptions=True)
        self.store.release()

    async def _work(self) -> None:
        while self._waiting and not self._closed:
            batch = self._running = self._waiting.pop(next(iter(self._waiting)))
            self._run = asyncio.ensure_future(self._answer(batch))
            left = batch.created_at + WINDOW_SECONDS - time.time()
            try:
                await asyncio.wait_for(self._run, max(left, 0.0))
                batch.move("completed")
            except asyncio.TimeoutError:
                batch.move("expired")
            except asyncio.CancelledError:
                if batch.status != "cancelling":  # the server ends
                    return
                batch.move("cancelled")
            except (EdgeInferError, ApiError) as error:
                batch.error = str(error)
                batch.move("failed")
            except Exception as error:
                self._server.log_failure(error)
                batch.error = "The server failed; its log says more."
                batch.move("failed")
            self._running = None
            try:
                self._leave_out_empty(batch)
                self._keep(batch)
            except (ApiError, OSError) as error:  # of a full disk: the next start of the server continues it
                self._server.log(f"The batch {batch.id} is {batch.status}, which cannot be noted: {error}")

    async def _answer(self, batch: Batch) -> None:
        """Check the input, and answer its rows in the output and, where they are refused, in the file of errors."""
        source = self.store.content(self.store.find(batch.input_file_id, batch.owner))
        with await in_thread(lambda: Rows(source, MAX_ROWS)) as rows:
            if wrong := next((row for row in rows.all if row.url != batch.endpoint), None):
                raise ApiError(400, f"Line {wrong.number} has the url {wrong.url!r}, and the endpoint of the batch is "
                                    f"{batch.endpoint!r}.")
            for name in OUTPUTS:
                if getattr(batch, name) is None:
                    setattr(batch, name, self.store.add(batch.owner, f"{batch.id}_{name[:-8]}.jsonl",
                                                        "batch_output").id)
            batch.total = len(rows.all)
            if batch.status == "validating":
                batch.move("in_progress")
            self._keep(batch)
            async with contextlib.AsyncExitStack() as held:
                files = [await held.enter_async_context(opened(Results(self._path(getattr(batch, name)), rows.all,
                                                                        batch.id))) for name in OUTPUTS]
                done = files[0].done | files[1].done
                batch.completed, batch.failed = len(files[0].done), len(files[1].done)

                def write(row: Row, answered: Answered) -> None:
                    good = answered.status == 200
                    results = files[not good]
                    results.write(row.custom_id, answered.status,
                                  line_of(results.id_of(row, batch.id), row, answered))
                    batch.completed += good
                    batch.failed += not good

                patient = Patient(InProcess(self._server, bytes.fromhex(batch.owner)))
                await answer_all([row for row in rows.all if row.custom_id not in done], rows.body, patient,
                                 self._at_once(), write)
            batch.move("finalizing")

    def _leave_out_empty(self, batch: Batch) -> None:
        """Delete the files to which nothing was written."""
        for name in OUTPUTS:
            file = getattr(batch, name)
            if file is not None and not self._path(file).exists():
                with contextlib.suppress(ApiError):
                    self.store.delete(self.store.find(file, batch.owner))
                setattr(batch, name, None)

    def _at_once(self) -> int:
        """Return how many rows run together: half of the sequences, so that other requests find room."""
        first = self._server.models.first
        return max(1, int(first.model.runner.config.max_sequences) // 2) if first.llm else 1

    def _path(self, file: str | None) -> Path:
        return self.store.path(f"{file}.jsonl")

    def _keep(self, batch: Batch) -> None:
        self.store.write(batch.id, batch)


class CreateBody(msgspec.Struct, forbid_unknown_fields=True):
    """A request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = WINDOW
    metadata: dict[str, str] | None = None


async def create(call: Call) -> Reply:
    """Answer a file of requests."""
    body, batches, owner = call.read(CreateBody), call.server.batches, call.salt.hex()
    if body.endpoint not in URLS:
        raise ApiError(400, f"endpoint is {body.endpoint[:60]!r}; it is one of {', '.join(URLS)}.", param="endpoint")
    if body.completion_window != WINDOW:
        raise ApiError(400, f"completion_window is {body.completion_window[:20]!r}; it is {WINDOW}.",
                       param="completion_window")
    if body.metadata and (len(body.metadata) > MAX_METADATA or max(map(len, body.metadata.values())) > 512):
        raise ApiError(400, f"metadata has up to {MAX_METADATA} texts of up to 512 characters.", param="metadata")
    batches.claim()
    batches.store.find(body.input_file_id, owner)
    await in_thread(lambda: batches.make_room(owner))
    batch = Batch(new_id("batch_"), owner, body.endpoint, body.input_file_id, int(time.time()), metadata=body.metadata)
    batches.store.write(batch.id, batch)
    batches.add(batch)
    return Reply(batch.shown())


async def batches(call: Call) -> Reply:
    """List the batches of a key."""
    owner, held = call.salt.hex(), call.server.batches
    found = await in_thread(lambda: held.store.all("batch_", Batch, owner))
    return Reply(page(call, [held.find(one.id, owner).shown() for one in found]))


async def batch(call: Call) -> Reply:
    """Describe a batch."""
    return Reply(call.server.batches.find(call.params["name"], call.salt.hex()).shown())


async def cancel(call: Call) -> Reply:
    """End a batch; the answers that it has stay."""
    held = call.server.batches
    held.find(call.params["name"], call.salt.hex())
    held.claim()  # or the server that has the folder is answering it
    found = held.find(call.params["name"], call.salt.hex())
    if found.status in OVER:
        raise ApiError(409, f"The batch {found.id} is over ({found.status}).", code="over")
    held.cancel(found)
    return Reply(found.shown())
