"""Executors whose kernels are Python functions: the executor calls whatever an instruction points to."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edgeinfer.kernels import Kernels, abi, choose
from edgeinfer.runtime import Instruction, Program
from edgeinfer.runtime.execution.executor import Executor
from tests.helpers.linked import linked

WORD = ctypes.c_int64
COUNT_FREE = 15
"""A count that no kernel uses."""
ENTRY = ctypes.CFUNCTYPE(WORD, WORD, WORD, WORD, WORD)
Make = Callable[..., Executor]


def real() -> Kernels:
    return linked(choose())


class AnyMode:
    """Stands in for ThreadTuner: any forward pass by one thread or by all of them, with the caller or with the
    helper.
    """

    choose = False

    def __init__(self, threads: int, seed: int = 0):
        self.threads, self._random = threads, random.Random(seed)
        self.planned = (threads, False)

    def plan(self, tokens: int, first: int, stop: int, steps: int) -> tuple[int, bool]:
        self.planned = (self._random.choice((1, self.threads)), self._random.random() < 0.5)
        return self.planned

    def took(self, ns: float, tokens: int, first: int, stop: int) -> None:
        pass


class PythonKernels:
    """Stands in for Kernels: Python functions (instruction number, thread) -> status, and the real inner half."""

    def __init__(self, **functions: Callable[[int, int], int | None]):
        self.base = 0
        self._entries = {name: ENTRY(functools.partial(self._call, f)) for name, f in functions.items()}

    def _call(self, function: Callable[[int, int], int | None], inst: int, ctx: int, tid: int, n_threads: int) -> int:
        return function((inst - self.base) // abi.INSTRUCTION_BYTES, tid) or 0

    def addresses(self, names: tuple[str, ...]) -> dict[str, int]:
        return {name: ctypes.cast(self._entries[name], ctypes.c_void_p).value or 0 for name in names}

    def function(self, name: str) -> Callable[[int, int, int, int], int]:
        return real().function(name)


@contextmanager
def executors() -> Iterator[Make]:
    """Make executors of instructions given as names, or (name, predicate); they are closed at the end."""
    opened: list[Executor] = []

    def build(instructions: list[Any], threads: int, **functions: Callable[[int, int], int | None]) -> Executor:
        named = [instruction if isinstance(instruction, tuple) else (instruction, None) for instruction in instructions]
        kernels: Any = PythonKernels(**functions)
        counts = [() if predicate is None else (predicate,) for _, predicate in named]
        program = Program(tuple(Instruction(name, "test", predicates=c) for (name, _),
                                c in zip(named, counts, strict=True)))
        executor = Executor(program, kernels, threads, {})
        kernels.base = program.words.ctypes.data
        opened.append(executor)
        return executor

    yield build
    for executor in opened:
        executor.close()
