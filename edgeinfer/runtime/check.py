"""EDGEINFER_CHECK=1: walk the program in Python and compare every record with its NumPy twin."""

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
    """Walk the records first .. stop - 1 on this thread; each runs after its twin has said what memory must hold.

    Raises `KernelError`, naming the first record that disagrees, with the largest deviation.
    """
    from edgeinfer.kernels import reference, twin_of

    word = ctypes.c_int64
    signature = ctypes.CFUNCTYPE(word, word, word, word, word)
    ctx = executor.pool.ctx
    for i in range(first, stop):
        record = executor.program.records[i]
        if not all(executor.get(abi.CTX_COUNTS + 8 * count) for count in record.predicates):
            continue
        if not _may_start(executor, i, cancel):
            return
        address = executor.program.words[i].ctypes.data
        twin = twin_of(record.kernel)
        if twin is None:
            raise KernelError(f"Record {i} ({record.kernel}, {record.label}) has no NumPy twin to compare with.")
        expected = twin(reference.RecordView(address, ctx))
        executor.set(abi.CTX_WORK, 0)
        status = signature(int(executor.program.words[i, 0]))(address, ctx, 0, 1)
        if status:
            executor.set(abi.CTX_ERROR, status)
        if status or executor.get(abi.CTX_ERROR):  # a cancelled record is half done: there is nothing to compare
            return
        if difference := reference.compare(expected):
            raise KernelError(f"Record {i} ({record.kernel}, {record.label}) disagrees with its twin: {difference}")


def _may_start(executor: Executor, i: int, cancel: Cancellation | None) -> bool:
    """Wait for the record's ticket, if it has one; False where the walk ends instead, as ctx then says."""
    ticket = int(executor.program.words.view("int32")[i, abi.REC_TICKET // 4])
    while not executor.ended(cancel):
        came = int(executor.tickets[ticket - 1]) if ticket else 1
        if came:
            executor.set(abi.CTX_ERROR, 0 if came > 0 else abi.TICKET_FAILED - i)
            if ticket and came > 0 and executor.stream:
                executor.stream.came(ticket - 1)
            return came > 0
        time.sleep(1e-3)
    executor.set(abi.CTX_CANCEL, 1)
    return False
