"""An exception of a signal handler, such as Ctrl-C, at any moment of a request that its client's thread runs: it ends
this request alone, and the model stays usable.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from edgeinfer import LLM
from edgeinfer.engine import Request
from tests.kernel_selection import everything

CTX = 64
OPTIONS: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
FULL: dict[str, Any] = {"max_tokens": CTX - 20, "ignore_eos": True, "seed": 1}
STEP_US = 17
OFFSETS = range(1, STEP_US) if everything() else range(4, STEP_US, 4)
"""Microseconds; EDGEINFER_TEST_ALL=1 takes all, others a share of the moments, which are chance in any case."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs setitimer")


def finished(request: Request[Any], seconds: float) -> bool:
    """Run a request, in which KeyboardInterrupt comes after so many seconds; returns whether it ended before."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        request.finish()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return False
    return True


@pytest.fixture
def alarm() -> Iterator[None]:
    def ring(*given: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("company", [False, True])
@pytest.mark.parametrize("offset", [0, *[pytest.param(us, marks=pytest.mark.slow) for us in OFFSETS]])
@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops it in weak references
def test_at_any_moment(reuse: bool, company: bool, offset: int) -> None:
    """With company, another request comes after the prompt, and the engine's thread continues with both."""
    with LLM("demo", ctx=CTX, threads=1, max_sequences=2, kv_tokens=CTX) as llm:
        want, whole = llm.generate("Once upon a time", **OPTIONS), llm.generate([5] * 20, **FULL)
        beside: list[Request[Any]] = []

        def ask(*given: object) -> None:
            if other is not None:
                other.start()
                beside.append(other)

        interrupted = 0
        for us in range(1 + offset, 2000, STEP_US):
            other = llm.request("Once upon a time", OPTIONS) if company else None
            request = llm.request("Once upon a time", {**OPTIONS, "reuse": reuse, "progress": ask})
            if finished(request, 1e-6 * us):
                assert request.finish().text == want
            else:
                interrupted += 1
            assert [one.finish().text for one in beside] == [want] * len(beside), us
            beside.clear()
            assert llm.generate("Once upon a time", **OPTIONS) == want, us
            assert llm._engine.n_running == llm._engine.n_waiting == 0, us
        assert interrupted > 20
        assert llm.generate([5] * 20, **FULL) == whole, "a block was lost"
