"""Instructions that wait for data, passes of a range of instructions, and programs that take turns on one pool of
threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import CancelledError, ClosedError, EdgeInferError, KernelError
from edgeinfer.kernels import abi
from edgeinfer.runner import Cancellation
from edgeinfer.runtime import Instruction, Program
from edgeinfer.runtime.execution.executor import Executor
from tests.helpers.python_kernels import COUNT_FREE, Make, PythonKernels, executors
from tests.helpers.sessions import own_threads


@pytest.fixture
def make() -> Iterator[Make]:
    with executors() as build:
        yield build


def with_event(executor: Executor, instruction: int, event: int = 3) -> Executor:
    executor.program.words.view(np.int32)[instruction, abi.INST_EVENT // 4] = 1 + event
    executor.joins = False  # as for a program that has completion events from the beginning
    return executor


@contextmanager
def soon(call: Callable[..., object], *arguments: object, after: float = 0.05) -> Iterator[None]:
    """Call something from another thread in a moment."""
    timer = threading.Timer(after, call, arguments)
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("instruction", [0, 1])
def test_a_event_is_waited_for(make: Make, instruction: int) -> None:
    ran: list[int] = []
    executor = with_event(make(["work"] * 2, 2, work=lambda instruction, tid: ran.append(instruction)), instruction)
    begin = time.perf_counter()
    with soon(executor.redeem, 3):
        executor.run()
    assert time.perf_counter() - begin > 0.04
    assert ran == [0, 0, 1, 1]
    executor.run()  # it stays redeemed
    executor.events[3] = 0
    ran.clear()
    cancellation = Cancellation()
    with soon(cancellation.cancel), pytest.raises(CancelledError):
        executor.run(cancel=cancellation)
    assert ran == [0, 0][: 2 * instruction]


@pytest.mark.parametrize("instruction", [0, 1])
def test_a_event_whose_data_does_not_come(make: Make, instruction: int) -> None:
    """The forward pass ends, the instruction is named and does not run; the data may come for the next forward pass."""
    ran: list[int] = []
    executor = with_event(make(["work"] * 2, 2, work=lambda instruction, tid: ran.append(instruction)), instruction)
    with soon(executor.redeem, 3, False), pytest.raises(EdgeInferError) as caught:
        executor.run()
    assert str(caught.value) == f"Data that instruction {instruction} (work, test) needs could not be read."
    assert ran == [0, 0][: 2 * instruction]
    ran.clear()
    executor.redeem(3)
    executor.run()
    assert ran == [0, 0, 1, 1]


@pytest.mark.parametrize("word", [abi.CTX_ERROR, abi.CTX_STOP])
def test_a_wait_for_an_event_ends_with_an_error_and_with_stop(make: Make, word: int) -> None:
    """Even if the completion event is set in the same moment: the instruction does not run."""
    ran: list[int] = []
    begun = threading.Event()

    def work(instruction: int, tid: int) -> None:
        ran.append(instruction)
        begun.set()

    executor = with_event(make(["work"] * 2, 2, work=work), 1)

    def end() -> None:
        begun.wait(60)  # a forward pass begins with both words at 0
        executor.set(word, 5)
        executor.redeem(3)

    with soon(end), pytest.raises((KernelError, CancelledError)):
        executor.run()
    assert ran == [0, 0]
    executor.set(abi.CTX_STOP, 0)
    executor.run()
    assert ran == [0, 0, 0, 0, 1, 1]


def test_closing_ends_a_wait_for_an_event(make: Make) -> None:
    executor = with_event(make(["work"], 2, work=lambda instruction, tid: 0), 0)
    with soon(executor.close), pytest.raises(ClosedError):
        executor.run()


# -- ranges and several programs ---------------------------------------------------------------------------------------


def test_a_range_of_instructions(make: Make) -> None:
    ran: list[int] = []
    executor = make(["work", ("work", COUNT_FREE), "work", "work"], 2,
                    work=lambda instruction, tid: ran.append(instruction) if tid else None)  # fmt: skip
    for first, stop, expected in ((0, None, [0, 2, 3]), (0, 2, [0]), (1, 3, [2]), (3, None, [3]), (2, 2, []),
                                  (1, 2, []), (0, None, [0, 2, 3])):
        ran.clear()
        executor.start_profile()
        executor.run(first, stop)
        assert ran == expected
        assert np.flatnonzero(executor.stop_profile()).tolist() == expected


def test_programs_take_turns_on_one_pool(make: Make) -> None:
    """Each has its own instructions, counts and completion events, and the pool lives until the last one is closed."""
    ran: list[tuple[str, int]] = []
    before = own_threads()
    first = make([("work", COUNT_FREE), "work"], 2, work=lambda instruction, tid: ran.append(("first", instruction)))
    kernels: Any = PythonKernels(work=lambda instruction, tid: ran.append(("second", instruction)))
    program = Program(tuple(Instruction("work", "test", predicates=p) for p in ((), (COUNT_FREE,), ())))
    second = Executor(program, kernels, 2, {}, first.pool)
    kernels.base = program.words.ctypes.data
    assert own_threads() == before + 2
    first.set_count(COUNT_FREE, 1)
    for _ in range(20):
        for executor, name, instructions in ((first, "first", (0, 1)), (second, "second", (0, 2))):
            ran.clear()
            executor.run()
            assert ran == [(name, i) for i in instructions for _ in range(2)]
    with_event(first, 1)
    first.run(0, 1)
    second.run()
    first.redeem(3)  # while ctx is the other's
    assert second.events[3] == 0
    first.run()
    first.close()
    with pytest.raises(ClosedError):
        first.run()
    second.run()
    second.close(), second.close()
    assert own_threads() == before
