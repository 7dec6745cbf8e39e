"""Weights mapped from their file, and a last sentence for when they change or vanish from under a run.

A mapped page that cannot be had (another program cut the file short, a disk failed) ends a process by SIGBUS, without a
word. Python's own signal handlers cannot help: they run after the instruction, which faults again and again. Ours is
called by the system in the thread that faulted, says one sentence and ends the process with exit code 1. Running Python
there is sound because the signal belongs to a load from weights: their readers (kernels, NumPy) hold no lock that
Python needs, nor the GIL or by right, and nothing returns to it. Other faults are left to the previous handler.

Linux on 64 bits; elsewhere a fault ends the process as it would anyway. Copying the weights (``--no-mmap``) has no such
fault, but takes the memory from the system for good, so it is not the default.

A file that is overwritten in place faults nowhere: kernels continue with other numbers. So the file stays open, and the
executor asks for its size and the time of its last change after each forward pass (`watch`), which takes 2 us.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from edgeinfer.base import process
from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.errors import BundleError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SA_SIGINFO, _SI_CODE, _SI_ADDR = 4, 8, 16  # a flag, and offsets in siginfo_t


class _Action(ctypes.Structure):
    """struct sigaction of glibc and musl on x86-64 and aarch64."""

    _fields_ = (("handler", ctypes.c_void_p), ("mask", ctypes.c_byte * 128), ("flags", ctypes.c_int),
                ("restorer", ctypes.c_void_p))


class _Mapped(NamedTuple):
    """A mapping: its end, and its open file with the status when it was mapped."""

    end: int
    path: Path
    handle: int
    state: os.stat_result


_mapped: dict[int, _Mapped] = {}
"""Mappings by their start."""
_before = _Action()
_installed: list[Any] = []
_speaks = threading.Lock()


class MappedFile:
    """A file mapped read-only, which makes its array when that is first asked for.

    Attributes
    ----------
    status : os.stat_result
        Of the file when it was mapped.

    Raises
    ------
    BundleError
        The file has not the length that the header says.
    OSError
    """

    def __init__(self, path: Path, nbytes: int):
        with open_plain(path) as file:
            self.status = os.fstat(file.fileno())
            check_length(path.name, self.status.st_size, nbytes)
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            check_length(path.name, len(self._mapping), nbytes)  # it may have been cut in between
            self._path, self._handle = path, os.dup(file.fileno())
        weakref.finalize(self._mapping, os.close, self._handle).atexit = False

    @cached_property
    def array(self) -> NDArray[np.uint8]:
        """Bytes of the file; the mapping lives as long as any view of them."""
        import numpy as np

        view = np.frombuffer(self._mapping, np.uint8)
        start = view.ctypes.data
        _mapped[start] = _Mapped(start + len(view), self._path, self._handle, self.status)
        weakref.finalize(self._mapping, _mapped.pop, start).atexit = False
        _install()
        return view


def watch(weights: NDArray[np.uint8]) -> Callable[[], None]:
    """Return a check that raises `BundleError` once the file of mapped weights was written to, while they are mapped.

    Parameters
    ----------
    weights : uint8 array
        Of a `MappedFile`.
    """
    mapped = _mapped[weights.ctypes.data]
    return partial(check_state, mapped.path, mapped.handle, mapped.state)


def check_state(path: Path, handle: int, state: os.stat_result) -> None:
    """Raise `BundleError` if the open file was written to since it had this status, or is another one."""
    with os_errors(BundleError, f"{path} can no longer be read"):
        now = os.fstat(handle)
    if _identity(now) != _identity(state):
        raise BundleError(f"{path} was changed while it was in use; convert or copy the model again, and leave its "
                          "files alone while it runs.")


def _identity(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def check_length(name: str, size: int, nbytes: int) -> None:
    """Refuse a file of another length than the header's."""
    if size != nbytes:
        how = "truncated" if size < nbytes else "too long"
        raise BundleError(f"{name} is {how}: {size} bytes instead of {nbytes}.")


def _install() -> None:
    """Handle SIGBUS from now on, once per process."""
    if _installed or not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_fault)
    _installed.append(handler)  # kept as long as the system may call it
    action = _Action(ctypes.cast(handler, ctypes.c_void_p).value, flags=_SA_SIGINFO)
    ctypes.CDLL(None).sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_before))


def _on_fault(number: int, info: int, context: int) -> None:
    address = ctypes.c_void_p.from_address(info + _SI_ADDR).value or 0
    sent = ctypes.c_int.from_address(info + _SI_CODE).value <= 0  # by kill: no address
    for start, mapped in () if sent else tuple(_mapped.items()):
        if start <= address < mapped.end:
            _give_up(f"{mapped.path} can no longer be read at byte {address - start}: another program cut it short, or "
                     "its disk failed; convert or copy the model again.")
    ctypes.CDLL(None).sigaction(number, ctypes.byref(_before), None)  # not ours: the instruction is tried again
    if sent:
        os.kill(os.getpid(), number)


def _give_up(sentence: str) -> NoReturn:
    """Print the message without Python's streams, whose locks another thread may hold; once, even if several threads
    fault.
    """
    if not _speaks.acquire(blocking=False):
        time.sleep(60)  # the thread that speaks ends the process meanwhile
    with suppress(OSError):
        os.write(2, f"edgeinfer: {sentence}\n".encode())
    if process.reports_json:
        with suppress(OSError):
            os.write(1, json.dumps({"error": {"code": BundleError.code, "message": sentence}}).encode() + b"\n")
    os._exit(BundleError.exit_code)
