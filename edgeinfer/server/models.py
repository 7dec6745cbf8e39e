"""The models of a server: opened when a request names them, within one budget, and closed when they were not used."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.units import format_size
from ..errors import BudgetError, EdgeInferError
from .errors import FAILED, NOT_FOUND, ApiError, unavailable
from .tools import AnswerFormat, format_of

if TYPE_CHECKING:
    from ..llm import LLM

T = TypeVar("T")
Opener = Callable[[str, "int | None"], "LLM"]
"""Opens a model, by the user's name for it, within a budget in bytes, or the available memory."""
SERVER_BYTES = 40_000_000
"""Memory of the server itself: its libraries, connections and compiled forms."""
CONNECTION_BYTES = 50_000_000
"""Memory of the connection to processes that run a model elsewhere."""
PROCESS = "python"
"""Region of a plan that all models of a process share."""
LATEST = ":latest"
"""Tag that ollama's clients add to names."""
LINGER_SECONDS = 10.0
"""Time after its last work until a thread ends."""
SHORT = 1024
"""Characters or tokens of prompts that are read in less time than another thread takes to wake up."""
_idle: list[SimpleQueue[Callable[[], None]]] = []
"""Queues of the threads that wait for work."""


@dataclass(eq=False)
class Served:
    """A model of the server."""

    name: str
    source: str
    """Path, known name or id of the model."""
    llm: LLM | None = None
    opening: asyncio.Task[None] | None = None
    users: int = 0
    """Requests that use it now."""
    last_used: float = 0.0
    opened: int = field(default_factory=lambda: int(time.time()))
    format: AnswerFormat | None = None
    """Format of tool calls and reasoning, by its chat template."""
    special: dict[str, int] = field(default_factory=dict)
    """Special tokens of the model by their text."""

    @property
    def model(self) -> LLM:
        """The open model."""
        assert self.llm is not None
        return self.llm

    @property
    def room(self) -> int:
        """Tokens that the prompt and the answer of one request may have together."""
        return min(int(self.model.runner.config.ctx or 0), self.pool)

    @property
    def pool(self) -> int:
        """Tokens that all requests may have together."""
        runner = self.model.runner
        return runner.plan.kv_blocks * runner.block_tokens


class Models:
    """The models that a server offers.

    Parameters
    ----------
    sources : dict of str
        Path, known name or id of each model by the name that requests use; the first is the default.
    opener : callable
    budget : bytes that all of them may have together; None is the available memory
    keep_alive : seconds after its last request until a model other than the first is closed
    """

    def __init__(self, sources: dict[str, str], opener: Opener, budget: int | None, keep_alive: float):
        self.all = {name: Served(name, source) for name, source in sources.items()}
        self.first = next(iter(self.all.values()))
        self._opener, self._budget, self._keep_alive = opener, budget, keep_alive
        self._opening = asyncio.Lock()

    def find(self, name: str | None) -> Served:
        """Return the model of a name; without one, the default. Raises `ApiError` for one that is not served."""
        name = name or ""
        for one in (name, name.removesuffix(LATEST)):
            if one in self.all:
                return self.all[one]
        if not name:
            return self.first
        known = ", ".join(self.all)
        raise ApiError(404, f"The model {name[:100]!r} is not served here; choose one of {known}.", NOT_FOUND, "model",
                       "model_not_found")

    @contextlib.asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Served]:
        """Hold a model open while a request uses it."""
        one = self.find(name)
        one.users += 1
        try:
            if one.llm is None or one.llm.lost:
                await self._opened(one)
            yield one
        finally:
            one.users -= 1
            one.last_used = time.monotonic()

    async def _opened(self, one: Served) -> None:
        """Open a model, once for all requests that wait for it, and to the end even if all of them leave."""
        if one.opening is None:
            one.opening = asyncio.ensure_future(self._open_next(one))
            one.opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # they may have left
        await asyncio.shield(one.opening)

    async def _open_next(self, one: Served) -> None:
        try:
            async with self._opening:
                if one.llm is not None:  # a part of it has ended, and with it all of its requests
                    await self._close(one)
                await self.open(one)
        except BudgetError as error:
            if self.open_models():
                raise  # there may be room later
            raise ApiError(400, f"The model {one.name!r} cannot be opened: {error}", param="model",
                           code=error.code) from None
        except EdgeInferError as error:
            raise ApiError(500, f"The model {one.name!r} cannot be opened; the server's log says why.", FAILED,
                           "model", error.code, logged=f"The model {one.name!r} cannot be opened: {error}") from None
        finally:
            one.opening = None

    async def open(self, one: Served) -> None:
        """Open a model, closing those that were not used for longest as far as it needs their memory."""
        while True:
            try:
                one.llm = await in_thread(lambda: self._opener(one.source, self._left()))
                break
            except BudgetError as error:
                if (idle := self._idle()) is None:
                    raise BudgetError(f"{error} Of the budget, {format_size(SERVER_BYTES)} are the server's own.",
                                      error.plan, error.budget_bytes, error.alternatives) from None
                await self._close(idle)
        one.opened, one.last_used = int(time.time()), time.monotonic()
        template = one.llm.chat_template
        one.format = format_of(template.source_text) if template else None
        if template:
            tokenizer = one.llm.tokenizer
            one.special = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.special_ids}

    def _left(self) -> int | None:
        """Return the rest of the budget for one more model."""
        if self._budget is None:
            return None
        return max(1, self._budget - SERVER_BYTES - sum(map(_own_bytes, self.open_models())))

    @property
    def planned_bytes(self) -> int:
        """Memory of the process by the plans of the open models."""
        plans = [one.model.plan for one in self.open_models()]
        process = max((plan.region(PROCESS).nbytes for plan in plans), default=0)
        return SERVER_BYTES + process + sum(map(_own_bytes, self.open_models()))

    def _idle(self) -> Served | None:
        """Return the open model without a request that was not used for longest."""
        idle = [one for one in self.all.values() if one.llm and not one.users]
        return min(idle, key=lambda one: one.last_used, default=None)

    async def _close(self, one: Served) -> None:
        llm, one.llm = one.llm, None
        if llm is not None:
            await in_thread(llm.close)

    async def close_unused(self) -> None:
        """Close models, for ever and one after the other, whose time is over."""
        while True:
            await asyncio.sleep(min(self._keep_alive / 4, 10.0))
            for one in self.all.values():
                if one is not self.first and one.llm and not one.users \
                        and time.monotonic() - one.last_used > self._keep_alive:
                    async with self._opening:  # so that no request opens it meanwhile
                        if not one.users:
                            await self._close(one)

    async def close(self) -> None:
        """Close all models."""
        for one in self.all.values():
            await self._close(one)

    def open_models(self) -> list[Served]:
        """Return the models that are open."""
        return [one for one in self.all.values() if one.llm]


def _own_bytes(one: Served) -> int:
    """Return the memory that a model's plan adds in this process, without the parts that all models of a process
    share."""
    if one.model.elsewhere:
        return CONNECTION_BYTES
    plan = one.model.plan
    return plan.total_bytes - plan.region(PROCESS).nbytes


async def in_thread(work: Callable[[], T], short: bool = False) -> T:
    """Run some work in a thread, for which the end of the program does not wait; `short` work runs here, and sooner."""
    if short:
        return work()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            done: tuple[Callable[[Any], None], Any] = (future.set_result, work())
        except BaseException as error:
            done = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *done)

    _hand_over(run)
    return await asyncio.shield(future)


def _hand_over(run: Callable[[], None]) -> None:
    """Let a thread that waits, or a new one, do some work: to start a thread takes longer than most of it."""
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), name="edgeinfer server", daemon=True).start()
    inbox.put(run)


def _serve(inbox: SimpleQueue[Callable[[], None]]) -> None:
    """Run submitted calls until none has come for a while."""
    while True:
        try:
            run = inbox.get(timeout=LINGER_SECONDS)
        except Empty:
            with contextlib.suppress(ValueError):  # it has just been handed some more
                _idle.remove(inbox)
                return
            continue
        run()
        del run
        _idle.append(inbox)


def loading() -> ApiError:
    """Return the answer while the first model is being opened."""
    return unavailable("The model is being loaded; ask again in a moment.", "loading")
