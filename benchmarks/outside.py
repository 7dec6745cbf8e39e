"""A process seen from outside: its peak memory, and that of a control group made for it, with or without a limit."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
POLL_S = 0.01
_numbers = itertools.count()


@dataclass(frozen=True)
class Watched:
    """Observations of a process."""

    code: int
    """Exit code; negative is the signal that ended it, -9 where the kernel killed it for memory."""
    out: str
    err: str
    vm_hwm_bytes: int
    """Its most resident memory: VmHWM of /proc/PID/status, read by another process until the end."""


class ControlGroup:
    """A control group for one process, version 2 or 1; use `control_group`."""

    def __init__(self, path: Path, version: int):
        self.path = path
        self.version = version

    def limit(self, nbytes: int) -> None:
        """Allow no more memory, and no swap beside it."""
        if self.version == 2:
            self._write("memory.max", nbytes)
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                self._write("memory.swap.max", 0)
            return
        self._write("memory.limit_in_bytes", nbytes)
        with contextlib.suppress(OSError):
            self._write("memory.memsw.limit_in_bytes", nbytes)

    def peak_bytes(self) -> int | None:
        """Most memory that the group held, page cache and the kernel's share included; None on kernels before 5.19."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / name).read_text())
        return None

    def join(self) -> None:
        """Put the calling process into the group."""
        self._write("cgroup.procs", os.getpid())

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))


@contextlib.contextmanager
def control_group(limit_bytes: int | None = None) -> Iterator[ControlGroup | None]:
    """Make a control group with a memory controller; None if this process may not."""
    group = next(filter(None, map(_try, _places())), None)
    try:
        if group and limit_bytes is not None:
            group.limit(limit_bytes)
        yield group
    finally:
        if group:
            for _ in range(100):  # the kernel needs a moment to forget a process
                try:
                    group.path.rmdir()
                    break
                except OSError:
                    time.sleep(0.02)


def _places() -> Iterator[tuple[Path, int]]:
    """Yield the places at which a group could be made, the nearest to this process first."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, own in lines:
        if "memory" in controllers.split(","):
            yield ROOT / "memory" / own.strip("/"), 1
            yield ROOT / "memory", 1
        elif not controllers and (ROOT / "cgroup.controllers").is_file():
            here = ROOT / own.strip("/")
            yield from ((place, 2) for place in (here, *here.parents) if place.is_relative_to(ROOT))


def _try(place: tuple[Path, int]) -> ControlGroup | None:
    parent, version = place
    path = parent / f"edgeinfer-{os.getpid()}-{next(_numbers)}"
    try:
        path.mkdir()
    except OSError:
        return None
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    if (path / name).is_file() and os.access(path / name, os.W_OK):
        return ControlGroup(path, version)
    path.rmdir()
    return None


def watch(
    command: Sequence[str], environment: Mapping[str, str], group: ControlGroup | None = None, stdin: bytes = b"",
    timeout_s: float = 600, cwd: Path | None = None,
) -> Watched:
    """Run a command to its end and note its peak memory all the while."""
    join: Callable[[], None] | None = group.join if group else None
    process = subprocess.Popen(command, env=dict(environment), cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, preexec_fn=join)
    assert process.stdin and process.stdout and process.stderr
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(stdin)
    with contextlib.suppress(BrokenPipeError):  # a process that reads no further leaves something to be flushed
        process.stdin.close()
    parts: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
    waiting, peak, end = set(parts), 0, time.monotonic() + timeout_s
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], POLL_S)
        for handle in ready:
            data = os.read(handle, 1 << 16)
            parts[handle].append(data)
            if not data:
                waiting.discard(handle)
        peak = max(peak, vm_hwm_bytes(process.pid))
        if time.monotonic() > end:
            process.kill()
            end = float("inf")
    out, err = (b"".join(chunks).decode(errors="replace") for chunks in parts.values())
    process.stdout.close()
    process.stderr.close()
    return Watched(process.wait(), out, err, peak)


def vm_hwm_bytes(pid: int) -> int:
    """VmHWM of a process, 0 once it has no memory any more."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def evict(path: Path) -> None:
    """Let the page cache forget a file, so that who reads it next pays for its pages."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
