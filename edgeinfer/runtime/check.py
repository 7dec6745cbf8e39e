"""EDGEINFER_CHECK=1: walk the program in Python and compare every record with its NumPy twin."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from edgeinfer.errors import KernelError
from edgeinfer.kernels import abi

if TYPE_CHECKING:
    from .executor import Executor


def run_checked(executor: Executor) -> None:
    """One walk on this thread; each record runs after its twin has said what memory must hold.

    Raises
    ------
    KernelError
        Naming the first record that disagrees, with the largest deviation.
    """
    from edgeinfer.kernels import reference

    word = ctypes.c_int64
    signature = ctypes.CFUNCTYPE(word, word, word, word, word)
    for i, record in enumerate(executor.program.records):
        if executor.get(abi.CTX_CANCEL):
            return
        if record.predicate is not None and not executor.get(abi.CTX_COUNTS + 8 * record.predicate):
            continue
        address = executor.program.words[i].ctypes.data
        expected = reference.TWINS[record.kernel](reference.RecordView(address, executor.ctx))
        executor.set(abi.CTX_WORK, 0)
        status = signature(int(executor.program.words[i, 0]))(address, executor.ctx, 0, 1)
        if status:
            executor.set(abi.CTX_ERROR, status)
        if status or executor.get(abi.CTX_ERROR):  # a cancelled record is half done: there is nothing to compare
            return
        if difference := reference.compare(expected):
            raise KernelError(f"Record {i} ({record.kernel}, {record.op}) disagrees with its twin: {difference}")
