"""The kernels' compiler: Python functions to object files, once per instruction set, never in the process that runs
them.

``python -m edgeinfer.kernels.toolchain.build`` compiles this machine's set into the user's cache, with progress;
``--all`` compiles every rung of the ladder (x86-64 and, cross-compiled, aarch64) into the package, for a release wheel
(`.ci/release`). The parent only starts processes: each compiles its share of one set with an explicit CPU, so that
nothing depends on the machine that builds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from edgeinfer.errors import DestinationError, KernelError

from ..catalogue import Extension
from ..isa import LADDER, Isa, choose
from .objects import MANIFEST, cache_directory, fault, package_directory, read_set, set_directory, write_manifest
from .tidy import scratch_prefix, tidy

Progress = Callable[[int, int, str], None]
TICK_SECONDS = 0.5
PATIENCE_SECONDS = 180.0
"""Longest wait for another process that builds the same set: it may have been stopped."""


def build(
    isa: Isa, directory: Path, progress: Progress | None = None, extension: Extension | None = None
) -> None:
    """Compile all kernels of a rung into `directory` (``NAME.o`` each and a manifest), replacing it whole.

    With an `extension` these are its kernels and no others.

    `progress` is called with (done, total, name) at once, after each kernel, and with an empty name twice a second: the
    first kernel takes seconds, in which the total is not known and 0.

    Raises `KernelError` if a kernel does not compile or needs a symbol other than memset, memcpy and memmove.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    tidy(directory)
    prefix = scratch_prefix("build")
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=prefix) as scratch, ExitStack() as running:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        shares = min(4, cores, len(extension.twins) if extension else 4)
        workers = []
        for share in range(shares):
            more = (extension,) if extension else ()
            workers.append(running.enter_context(_start(isa, Path(scratch), share, shares, *more)))
            running.callback(workers[-1].kill)  # nobody compiles on after an error or Ctrl-C
        done = total = 0
        message = "no message"
        for line in _lines(workers):
            name, _, count = line.strip().partition(" ")
            if count.isdigit():
                done, total = done + 1, int(count)
            else:
                name, message = "", line.strip() or message  # the last line of a traceback says what is wrong
            if progress:
                progress(done, total, name)
        if any([worker.wait() for worker in workers]):
            of = f" of {extension.module}" if extension else ""
            raise KernelError(f"Compiling the {isa.name} kernels{of} failed: {message}.")
        write_manifest(Path(scratch), isa, extension)
        _replace(Path(scratch), directory, isa, extension)


def build_once(
    isa: Isa, directory: Path, progress: Progress | None = None, extension: Extension | None = None
) -> None:
    """As `build`, but where another process is at the same set, wait for that one: both would take twice as long."""
    from edgeinfer.lock import DestinationLock

    directory.parent.mkdir(parents=True, exist_ok=True)
    lock, deadline = DestinationLock(directory), time.monotonic() + PATIENCE_SECONDS
    while not lock.held and time.monotonic() < deadline:
        try:
            lock.acquire()
        except DestinationError:
            if not fault(directory, isa, extension):
                return
            if progress:
                progress(0, 0, "")
            time.sleep(TICK_SECONDS)
    try:
        if fault(directory, isa, extension):  # nobody has finished it since
            build(isa, directory, progress, extension)
    finally:
        lock.release()


def _start(
    isa: Isa, out: Path, share: int, shares: int, extension: Extension | None = None
) -> subprocess.Popen[str]:
    """A process that compiles every `shares`-th kernel. Numba reads the CPU from its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    environment |= {"NUMBA_CPU_NAME": isa.cpu, "NUMBA_CPU_FEATURES": isa.features}
    path = [_import_root(), environment.get("PYTHONPATH", ""), *(sys.path if extension else ())]
    environment["PYTHONPATH"] = os.pathsep.join(path).rstrip(os.pathsep)
    command = [sys.executable, "-m", "edgeinfer.kernels.toolchain.compile", isa.machine, isa.name]
    command += [str(out), str(share), str(shares)]
    command += [f"{extension.module}:", *extension.twins] if extension else []
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _import_root() -> str:
    """Where the children find edgeinfer: the same place as this process."""
    import edgeinfer

    return str(Path(edgeinfer.__file__).resolve().parent.parent)


def _lines(workers: list[subprocess.Popen[str]]) -> Iterator[str]:
    """Lines of all workers as they come; empty ones at once and while none comes."""
    import queue
    import threading

    lines: queue.Queue[str | None] = queue.Queue()

    def pump(worker: subprocess.Popen[str]) -> None:
        for line in worker.stdout or ():
            lines.put(line)
        lines.put(None)

    threads = [threading.Thread(target=pump, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    open_pipes = len(workers)
    try:
        yield ""
        while open_pipes:
            try:
                line = lines.get(timeout=TICK_SECONDS)
            except queue.Empty:
                line = ""
            if line is None:
                open_pipes -= 1
            else:
                yield line
    except BaseException:  # Ctrl-C, or the reader gave up
        for worker in workers:
            worker.kill()
        raise
    finally:
        for thread in threads:
            thread.join()


def _replace(scratch: Path, directory: Path, isa: Isa, extension: Extension | None) -> None:
    """Move a finished set into place; one that somebody else has finished meanwhile stays, for it may be in use."""
    import shutil

    staged = Path(tempfile.mkdtemp(dir=directory.parent, prefix=scratch_prefix("staged")))
    try:
        for file in (*scratch.glob("*.o"), scratch / MANIFEST):
            os.replace(file, staged / file.name)
        staged.chmod(0o755)  # mkdtemp's is for this user alone
        if fault(directory, isa, extension):
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(staged, directory)
    except OSError:
        if fault(directory, isa, extension):
            raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _show(done: int, total: int, name: str) -> None:
    if sys.stdout.isatty():
        print(f"\r{done}/{total} {name:<24}", end="", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Compile kernels ahead of time. Without options: the best set of this machine, into the user's cache."""
    parser = argparse.ArgumentParser(prog="python -m edgeinfer.kernels.toolchain.build", description=main.__doc__)
    parser.add_argument("--all", action="store_true", help="every instruction set, into the package (for a wheel)")
    parser.add_argument("--isa", help="one instruction set of this machine; default: the best")
    parser.add_argument("--into", type=Path, metavar="DIRECTORY", help="into this directory, as for a wheel")
    chosen = parser.parse_args(arguments)
    root: Path | None = chosen.into or (package_directory() if chosen.all else None)
    for isa in LADDER if chosen.all else [choose(chosen.isa)]:
        start = time.perf_counter()
        directory = set_directory(root or cache_directory(), isa, released=root is not None)
        build(isa, directory, _show)
        seconds, n_kernels = time.perf_counter() - start, len(read_set(directory) or ())
        line = f"{isa.machine} {isa.name}: {n_kernels} kernels, {seconds:.1f} s"
        print(f"\r{line:<40}" if sys.stdout.isatty() else line, flush=True)


if __name__ == "__main__":
    main()
