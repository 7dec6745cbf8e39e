"""A stage as a runner sees it, and one in the runner's own process."""

from __future__ import annotations

import abc
from typing import Any

from edgeinfer.runner import Cancellation
from edgeinfer.runtime import Rows, StageSession

from .calls import Part, StageCalls, StageInfo


class Stage(abc.ABC):
    """Transport of calls to a stage (`StageCalls`), which it carries out in the order in which they are made."""

    info: StageInfo
    where: str = "this process"
    """Process or machine of the stage, for people."""
    samples: bool = False
    """True if the stage can read samples of this process, and choose tokens itself."""
    apart: bool = True
    """True if it computes while other stages do."""

    @property
    def lost(self) -> bool:
        """True if its process has ended."""
        return False

    def wait(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Return when the stage is open and `info` is there; raises the error of opening it."""

    @abc.abstractmethod
    def ask(self, name: str, *arguments: Any) -> Any:
        """Make a call and return its answer; raises its error, or that of an earlier `post`."""

    @abc.abstractmethod
    def post(self, name: str, *arguments: Any) -> None:
        """Make a call without an answer."""

    @abc.abstractmethod
    def start(self, part: Part, given: Rows | None) -> None:
        """Send a part of a forward pass, of which one at a time is under way, with the rows of the stage before."""

    @abc.abstractmethod
    def finish(self, cancel: Cancellation | None) -> Rows:
        """Return the rows of the part that was started; they are valid until the next part is."""

    @abc.abstractmethod
    def give_up(self) -> None:
        """End the part that was started, if one was: nobody finishes it."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the stage and free its memory; callable twice, and from any thread."""


class LocalStage(Stage):
    """A stage in this process; its parts run when they are finished, while other processes run theirs."""

    samples, apart = True, False

    def __init__(self, session: StageSession):
        self.session, self._calls = session, StageCalls(session)
        self.info = self._calls.info()
        self._part: tuple[Part, Rows | None] | None = None

    def ask(self, name: str, *arguments: Any) -> Any:
        """Make a call."""
        return getattr(self._calls, name)(*arguments)

    def post(self, name: str, *arguments: Any) -> None:
        """Make a call."""
        self.ask(name, *arguments)

    def start(self, part: Part, given: Rows | None) -> None:
        """Keep a part until it is finished."""
        self._part = part, given

    def finish(self, cancel: Cancellation | None) -> Rows:
        """Run the part."""
        assert self._part
        (part, given), self._part = self._part, None
        return self._calls.run(part, given, cancel)

    def give_up(self) -> None:
        """Forget the part."""
        self._part = None

    def close(self) -> None:
        """Close the session."""
        self.session.close()
