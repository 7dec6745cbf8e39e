"""Tasks of the engine, run forward pass by forward pass in the test's own thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from edgeinfer.engine import Engine, Request, Task
from edgeinfer.engine.scheduler import Scheduler
from edgeinfer.engine.step import Steps
from edgeinfer.runner import Runner

if TYPE_CHECKING:
    from edgeinfer import LLM

Result = TypeVar("Result")


class Stepped(Generic[Result]):
    """A task that runs alone, one forward pass at a time; what it holds can be looked at between them."""

    def __init__(self, task: Task[Result], runner: Runner):
        self.task, self.request = task, Request[Result](None, task)
        self._steps = Steps(Scheduler(runner, math.inf))
        task.arrive()
        self._steps.scheduler.add(self.request)

    @property
    def ended(self) -> bool:
        """True if the task is over and its sequences are given back."""
        return self.request.ended

    def step(self) -> None:
        """Run one forward pass."""
        self._steps.run()

    def read(self) -> None:
        """Run the prompt, up to the first token."""
        while not self.ended and len(self.task.sequence or ()) < len(self.task.prompt_ids):
            self.step()

    def finish(self) -> Result:
        """Run to the end and return the outcome; raises what the task ended with."""
        while not self.ended:
            self.step()
        return self.request.finish()

    def cancel(self) -> Result:
        """Cancel it where it is, and return the outcome."""
        self.request.cancel()
        return self.finish()


class Hold:
    """Forward passes that wait.

    Attributes
    ----------
    entered : threading.Event
        Set once a pass waits.
    go_on : threading.Event
        Lets it run, and all that follow.
    """

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()


@contextmanager
def held(llm: LLM | Engine, after: int = 0) -> Iterator[Hold]:
    """Let forward passes but the first ones wait until the block is left.

    What runs then has not ended, however fast the machine is, and however late another thread.
    """
    hold, passes, runner = Hold(), count(), cast(Any, llm.runner)
    run = runner._run

    def waits(*how: Any) -> Any:
        if next(passes) >= after:
            hold.entered.set()
            end = time.monotonic() + 600
            while not hold.go_on.wait(0.05) and time.monotonic() < end:
                pass  # a signal that comes just before a wait is only handled after it
        return run(*how)

    runner._run = waits
    try:
        yield hold
    finally:
        hold.go_on.set()
        del runner._run


def within(limit_s: float, condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds, and return whether it came to that in time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False
