"""Limits of the control groups that this process is in (containers, systemd slices), versions 1 and 2; Linux only.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMORY_FILES = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))


def memory_left() -> int | None:
    """Return the bytes that the tightest group still allows; None without a limit.

    A group's use contains the page cache, which the kernel gives up before it refuses memory: file pages do not count.
    Nor does the kernel's own memory (page tables of those who run there), most of which goes with them.
    """
    left = []
    for group in _groups("memory"):
        for limit_file, used_file, prefix in _MEMORY_FILES:
            limit, used = _number(group / limit_file), _number(group / used_file)
            if limit is not None and used is not None:
                spare = _statistics(group / "memory.stat", [f"{prefix}inactive_file", f"{prefix}active_file", "kernel"])
                spare += _number(group / "memory.kmem.usage_in_bytes") or 0  # version 1 has it in a file of its own
                left.append(max(0, limit - used + spare))
    return min(left, default=None)


def cpu_quota() -> float | None:
    """Return the CPUs that the tightest group allows, such as 1.5; None without a limit."""
    quotas = []
    for group in _groups("cpu"):
        words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # no limit is "max" or -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Directories of the process's groups and their ancestors, as far as they can be seen from here."""
    for line in _lines(_MEMBERSHIP):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT
        own = root / path.strip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(root) and group.is_dir())


def _statistics(path: Path, names: list[str]) -> int:
    """The sum of some entries of memory.stat."""
    pairs = [line.split() for line in _lines(path)]
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names and pair[1].isdigit())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None
