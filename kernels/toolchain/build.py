"""The kernels' compiler: Python functions to object files, never in the process that runs them.

``python -m edgeinfer.kernels.toolchain`` compiles this machine's set into the user's cache, with progress; ``--all``
compiles every level of the list of levels (x86-64 and, cross-compiled, aarch64) into the package, for a release wheel
(`.ci/release`); with ``--cached`` objects of these sources in the user's cache are not compiled again. The parent hands
out names and gets code back: the processes that compile write no file, and are told the CPU, so that nothing depends on
the machine that builds.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from edgeinfer.base.process import python_command
from edgeinfer.base.progress import OnStageProgress
from edgeinfer.errors import KernelError

from ..catalogue import Extension, family_of
from ..isa import Isa
from .objects import KernelSet, compiler_versions

TICK_SECONDS = 0.5
COMPILER_BYTES = 230_000_000
"""Most memory of a compiling process (measured: 227 MB, numba 0.68 on x86-64); they have ended when a model runs."""
_LONGEST = ("attention", "screen", "linear", "experts", "gated", "neuron_gated", "neuron_down")
"""Families whose kernels take long to compile: they come first, so that no process is left with one at the end."""


def build(
    wanted: KernelSet, names: Iterable[str], progress: OnStageProgress | None = None,
    keep: Callable[[str, bytes], None] | None = None,
) -> dict[str, bytes]:
    """Compile kernels and return their code.

    `progress` is called with (done, total, name) at once, after each kernel, and with an empty name twice a second.
    `keep` is called with each kernel's name and code as it is done.

    Raises `KernelError` if a kernel does not compile or needs a symbol other than memset, memcpy and memmove.
    """
    waiting = sorted(dict.fromkeys(names), key=_rank)
    total = len(waiting)
    done: dict[str, bytes] = {}
    events: queue.Queue[tuple[_Worker, str, bytes]] = queue.Queue()
    tell = progress or (lambda *_: None)
    with ExitStack() as running:
        for _ in range(processes(total)):
            worker = _Worker(_start(wanted.isa, wanted.extension), events)
            running.callback(worker.end)  # compilation stops after an error or Ctrl-C, here too
            worker.start()
            worker.give(waiting)
        tell(0, total, "")
        while len(done) < total:
            try:
                worker, name, code = events.get(timeout=TICK_SECONDS)
            except queue.Empty:
                tell(len(done), total, "")
                continue
            if not name:  # it ended before its time
                of = f" of {wanted.extension.module}" if wanted.extension else ""
                by = ", ".join(f"{package} {version}" for package, version in compiler_versions().items())
                raise KernelError(
                    f"Compiling the {wanted.isa.name} kernels{of} with {by} failed: {worker.last_words()}.")
            done[name] = code
            worker.give(waiting)
            if keep:
                keep(name, code)
            tell(len(done), total, name)
    return done


def processes(n_kernels: int) -> int:
    """Return how many processes compile this many kernels: four at most, one a core, all within the free memory."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = psutil.virtual_memory().available // COMPILER_BYTES
    return max(1, min(4, cores, n_kernels, room))


class _Worker:
    """A compiling process: names go in, code comes out; its last message has the reason of its end."""

    def __init__(self, process: subprocess.Popen[bytes], events: queue.Queue[tuple[_Worker, str, bytes]]):
        self._process, self._events, self._said, self._last = process, events, "no message", ""
        self._threads = [threading.Thread(target=pump, daemon=True) for pump in (self._read, self._listen)]

    def start(self) -> None:
        """Listen to the process."""
        for thread in self._threads:
            thread.start()

    def give(self, waiting: list[str]) -> None:
        """Hand out the next kernel: of its last one's family, which shares helpers with it, or else the longest."""
        if not waiting:
            return
        alike = (name for name in waiting if self._last and family_of(name) is family_of(self._last))
        self._last = next(alike, waiting[0])
        waiting.remove(self._last)
        with suppress(OSError):  # it has ended, which its reader tells
            assert self._process.stdin
            self._process.stdin.write(f"{self._last}\n".encode())
            self._process.stdin.flush()

    def last_words(self) -> str:
        """The last line of its traceback."""
        self._threads[1].join(10)
        return self._said

    def end(self) -> None:
        """End the process and close its pipes."""
        self._process.kill()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()
        with suppress(OSError):  # a name that it never read
            self._process.__exit__(None, None, None)

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream
        try:
            while line := stream.readline():
                name, _, size = line.decode().partition(" ")
                code = stream.read(int(size))
                if len(code) < int(size):
                    break
                self._events.put((self, name, code))
        except Exception as error:
            self._process.kill()
            self._said = f"its output cannot be read ({error})"
        finally:  # whatever happened, stop waiting for more
            self._events.put((self, "", b""))

    def _listen(self) -> None:
        for line in self._process.stderr or ():
            self._said = line.decode(errors="replace").strip() or self._said


def _rank(name: str) -> int:
    family = family_of(name)
    return _LONGEST.index(family.name) if family and family.name in _LONGEST else len(_LONGEST)


def _start(isa: Isa, extension: Extension | None = None) -> subprocess.Popen[bytes]:
    """A process that compiles kernels by name. Numba reads the CPU from its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    environment |= {"NUMBA_CPU_NAME": isa.cpu, "NUMBA_CPU_FEATURES": isa.features}
    module = [extension.module] if extension else []
    command, path = python_command("edgeinfer.kernels.toolchain.compile", isa.machine, isa.name, *module)
    more = map(os.path.abspath, sys.path if extension else ())
    environment["PYTHONPATH"] = os.pathsep.join([path, *more])
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
