"""Parts that benchmarks share: the machine and its load, sides in turns, tables, parts of documents."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

import edgeinfer

T = TypeVar("T")
CALM = 0.03
"""Share of the processors' time that the host may give to its other guests in a round that counts."""


def describe() -> dict[str, str]:
    """Processor, cores, memory, system, for comparing figures."""
    return {
        "processor": _processor(), "cores": f"{psutil.cpu_count(logical=False)} cores, {os.cpu_count()} threads",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory",
        "system": f"{platform.system()} on {platform.machine()}", "python": f"Python {platform.python_version()}",
    }


def _processor() -> str:
    fields = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # not Linux
    name = fields.get("model name") or platform.processor() or platform.machine()
    if {"cpu family", "model"} <= fields.keys():
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def machine() -> str:
    """Name the machine as `describe` does, the instruction set, and the versions that matter, in one line."""
    from edgeinfer.kernels import choose

    versions = ", ".join(f"{package} {version(package)}" for package in ("numba", "llvmlite", "numpy"))
    return f"{', '.join(describe().values())}; {choose().name}; edgeinfer {edgeinfer.__version__}, {versions}"


def measured(what: str) -> str:
    """Return the lines over a table: subject, date and machine, and this program's command without folders."""
    command = " ".join(Path(one).name if os.sep in one else one for one in sys.argv)
    head = textwrap.fill(f"{what}, {date.today()}, {machine()}:", 120, break_on_hyphens=False)
    return f"{head}\n\n```sh\npython benchmarks/{command}\n```\n"


class Others:
    """Number of cores used by other processes while one worked, other guests of the host included.

    Parameters
    ----------
    pid : int
        The process whose own time does not count.
    """

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), self._own_seconds()

    def cores(self) -> float:
        """Mean number of cores since this object was made."""
        elapsed = time.perf_counter() - self._began
        return max(0.0, _busy_seconds() - self._busy - (self._own_seconds() - self._own)) / elapsed

    def _own_seconds(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def _busy_seconds(nice: bool = True) -> float:
    """Seconds that all cores have worked, without or with work of a lower priority."""
    times = psutil.cpu_times()
    left_out = ["idle", "iowait", "guest", "guest_nice"] + ([] if nice else ["nice"])  # guests are in user and nice
    return sum(times) - sum(getattr(times, name, 0.0) for name in left_out)


def wait_for_calm(patience: float, most_cores: float) -> bool:
    """Wait until others use little of the machine, at most `patience` seconds; returns whether they do.

    Work at a lower priority does not count: it gives way.
    """
    deadline = time.perf_counter() + patience
    while True:
        before = _busy_seconds(nice=False)
        time.sleep(0.3)
        if (_busy_seconds(nice=False) - before) / 0.3 <= most_cores:
            return True
        if time.perf_counter() >= deadline:
            return False


@dataclass
class Rounds(Generic[T]):
    """Rounds of a measurement: results, the number tried, and the largest share that others had of a counted one."""

    results: list[T]
    tried: int
    taken: float

    def __str__(self) -> str:
        return (f"{len(self.results)} of {self.tried} rounds, during which the host took at most "
                f"{100 * self.taken:.0f} % of the processors' time")


def calm_rounds(once: Callable[[], T], rounds: int, patience: float) -> Rounds[T]:
    """Repeat a measurement until so many rounds were left alone by the host's other guests.

    After `patience` seconds the least disturbed of the others make up the number.
    """
    found: list[tuple[float, int, T]] = []
    deadline = time.perf_counter() + patience
    while sum(taken <= CALM for taken, *_ in found) < rounds:
        if len(found) >= rounds and time.perf_counter() > deadline:
            break
        began, taken = time.perf_counter(), _taken_seconds()
        result = once()
        elapsed = time.perf_counter() - began
        found.append(((_taken_seconds() - taken) / elapsed / (os.cpu_count() or 1), len(found), result))
    best = sorted(found, key=lambda each: each[:2])[:rounds]
    in_order = sorted(best, key=lambda each: each[1])
    return Rounds([result for *_, result in in_order], len(found), best[-1][0])


def _taken_seconds() -> float:
    """Seconds that the host kept for itself and other guests."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


# -- sides in turns ----------------------------------------------------------------------------------------------------


def in_turns(sides: Mapping[str, Callable[[], T]], turn: int) -> dict[str, T]:
    """Run each side once, in the order given or, in odd turns, the other way round."""
    names = list(sides)
    return {name: sides[name]() for name in (names[::-1] if turn % 2 else names)}


def ratios(one: Callable[[], float], other: Callable[[], float], turns: int) -> list[float]:
    """Return the ratio of two sides, pair by pair; which goes first alternates."""
    found = (in_turns({"one": one, "other": other}, turn) for turn in range(turns))
    return [pair["one"] / pair["other"] for pair in found]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, then the least and the greatest value in brackets."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# -- output ----------------------------------------------------------------------------------------------------------


def row(*cells: Any) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(head: str, rows: Iterable[str], right: bool = False) -> str:
    """Return a Markdown table; `head` has the columns, separated by bars, of which all but the first stand `right`."""
    columns = [column.strip() for column in head.split("|")]
    line = "|---|" + ("---:|" if right else "---|") * (len(columns) - 1)
    return "\n".join([row(*columns), line, *rows])


def publish(text: str, path: Path | None, section: str) -> None:
    """Print a text, or put it into a section of a document."""
    if path:
        replace_section(path, section, text)
    else:
        print(text)


def replace_section(path: Path, name: str, text: str) -> None:
    """Put `text` between the marks of a section of a Markdown file; a section that is not there yet goes to the end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in old and end in old:
        head, rest = old.split(begin, 1)
        new = head + section + rest.split(end, 1)[1]
    else:
        new = f"{old.rstrip()}\n\n{section}\n".lstrip()
    path.write_text(new, encoding="utf-8")
