"""EDGEINFER_CHECK=1: run the program in Python and compare every instruction with its NumPy reference."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from edgeinfer.errors import KernelError
from edgeinfer.kernels import abi

if TYPE_CHECKING:
    from edgeinfer.runner import Cancellation

    from .executor import Executor


def run_checked(executor: Executor, first: int, stop: int, cancel: Cancellation | None) -> None:
    """Run the instructions first .. stop - 1 on this thread, each after its reference has computed the expected memory.

    Raises `KernelError`, naming the first instruction that disagrees, with the largest deviation.
    """
    from edgeinfer.kernels import reference, reference_of

    word = ctypes.c_int64
    signature = ctypes.CFUNCTYPE(word, word, word, word, word)
    ctx = executor.pool.ctx
    for i in range(first, stop):
        instruction = executor.program.instructions[i]
        if not all(executor.get(abi.CTX_COUNTS + 8 * count) for count in instruction.predicates):
            continue
        if not _may_start(executor, i, cancel):
            return
        address = executor.program.words[i].ctypes.data
        function = reference_of(instruction.kernel)
        if function is None:
            raise KernelError(f"Instruction {i} ({instruction.kernel}, {instruction.label}) has no NumPy reference to "
                              "compare with.")
        expected = function(reference.InstructionView(address, ctx))
        executor.set(abi.CTX_WORK, 0)
        status = signature(int(executor.program.words[i, 0]))(address, ctx, 0, 1)
        if status:
            executor.set(abi.CTX_ERROR, status)
        if status or executor.get(abi.CTX_ERROR):  # a cancelled instruction is half done: there is nothing to compare
            return
        if difference := reference.compare(expected):
            raise KernelError(f"Instruction {i} ({instruction.kernel}, {instruction.label}) disagrees with its "
                              "reference: "
                              f"{difference}")


def _may_start(executor: Executor, i: int, cancel: Cancellation | None) -> bool:
    """Wait for the instruction's event, if it has one; False if the forward pass ends instead, as ctx then says."""
    event = int(executor.program.words.view("int32")[i, abi.INST_EVENT // 4])
    while not executor.ended(cancel):
        came = int(executor.events[event - 1]) if event else 1
        if came:
            executor.set(abi.CTX_ERROR, 0 if came > 0 else abi.EVENT_FAILED - i)
            if event and came > 0 and executor.stream:
                executor.stream.came(event - 1)
            return came > 0
        time.sleep(1e-3)
    executor.set(abi.CTX_CANCEL, 1)
    return False
