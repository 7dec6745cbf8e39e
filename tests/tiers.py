"""The default tier: tests that `python -m pytest` runs or leaves to `--all`, and kernels that it compiles beforehand.

A test that takes long is marked `slow`, or `slow(keep=N)` where N of its cases are to stay, spread over those that are
not marked `slow` themselves; one that measures times is marked `timing`, one that needs the extra of that name
`reference`. A run without `--all` leaves all of these out, tests the best instruction set of the machine alone, and
says so at its end. Whoever names tests by their ids, or selects with `-m`, gets what was asked for.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import EdgeInferError
from tests import kernel_selection
from tests.helpers import machine_speed

LEFT_OUT = {"slow": "slow tests", "timing": "tests of times", "reference": "tests of the extra 'reference'"}
"""Marks of the tests that the default tier leaves out, and their names in its last lines."""
OUTSIDE = "outside of README's tier"
SLOW_SECONDS = 2.0
"""A test that takes longer should have the mark `slow`; the end of a run with `--all` names those that lack it."""
UNIT_SECONDS = 1.0
"""Processor time of a unit test, where a fixed loop takes as long as on the machine that machine_speed.py names."""
TELL_SECONDS = 10.0
"""Between two lines of progress off a terminal."""


def is_whole(config: pytest.Config) -> bool:
    """Return whether slow tests and several instruction sets were asked for."""
    named = bool(config.args) and all("::" in argument for argument in config.args)
    return bool(config.getoption("all_tests") or config.getoption("markexpr") or named)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> Counter[str]:
    """Take the tests out that README's command does not run; returns how many of each mark.

    If all are run, those are named to the process that reports, by a property of each.
    """
    kept, counts, left = _representatives(items), Counter[str](), []
    for item in items:
        mark = next((mark for mark in LEFT_OUT if item.get_closest_marker(mark)), "")
        if mark and item.nodeid not in kept:
            item.user_properties.append((OUTSIDE, mark))
            counts[mark] += 1
            left.append(item)
    if left and not is_whole(config):
        config.hook.pytest_deselected(items=left)
        out = {item.nodeid for item in left}
        items[:] = [item for item in items if item.nodeid not in out]
    return counts


def _representatives(items: list[pytest.Item]) -> set[str]:
    """Ids of the cases that the default tier keeps of tests marked `slow(keep=N)`: N of each test, evenly spread."""
    cases: dict[str, list[str]] = {}
    wanted: dict[str, int] = {}
    for item in items:
        marks = list(item.iter_markers("slow"))
        others = any(item.get_closest_marker(mark) for mark in LEFT_OUT if mark != "slow")
        if marks and all("keep" in mark.kwargs for mark in marks) and not others:
            name = item.nodeid.partition("[")[0]
            cases.setdefault(name, []).append(item.nodeid)
            wanted[name] = marks[0].kwargs["keep"]
    return {ids[i * len(ids) // wanted[name]] for name, ids in cases.items() for i in range(wanted[name])}


def too_long(item: pytest.Item, seconds: float) -> str:
    """Say that a unit test took longer than it may; empty if not, of marked tests, and without `--all`.

    `seconds` is the processor time of this process, so that other processes take none of it. They still slow it down
    by caches and by the other half of a core, and machines differ: so the limit is that of a loop timed just then.
    """
    marked = any(item.get_closest_marker(mark) for mark in LEFT_OUT)
    if marked or not item.config.getoption("all_tests") or seconds <= UNIT_SECONDS:
        return ""
    most = UNIT_SECONDS * machine_speed.slowness()
    return f"a unit test took {seconds:.1f} s of at most {most:.1f}: mark it slow" if seconds > most else ""


def choose_levels(config: pytest.Config) -> None:
    """Have README's command test the best level of the machine; workers and the programs of tests get it from here."""
    if not is_whole(config) and "EDGEINFER_ISA" not in os.environ:
        os.environ.setdefault("EDGEINFER_TEST_ISAS", kernel_selection.levels()[0])


def name_of(path: Path) -> str:
    """Return the path of a file of tests below tests/."""
    here = Path(__file__).parent
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name


def modules(config: pytest.Config) -> set[str] | None:
    """Names of the files of tests that were asked for, by themselves or in folders of tests/; None for all."""
    here, found = Path(__file__).parent, set()
    for argument in config.args:
        path = (config.invocation_params.dir / argument.partition("::")[0]).resolve()
        if here not in path.parents:
            return None
        found |= {name_of(file) for file in ([path] if path.suffix == ".py" else path.rglob("test_*.py"))}
    return found or None


class OnProgress:
    """Says how many kernels are compiled: in one line of a terminal, else every ten seconds."""

    def __init__(self, isa: str, config: pytest.Config):
        self._isa, self._began, self._told = isa, time.monotonic(), 0.0
        self._reporter = config.pluginmanager.get_plugin("terminalreporter")

    def tell(self, done: int, total: int, name: str) -> None:
        """Show the progress of `find_objects`; a total of 0 means that another process compiles."""
        now, on_terminal = time.monotonic(), self._reporter and self._reporter.isatty
        ended = total and done == total
        if self._reporter is None or (now - self._told < (0.5 if on_terminal else TELL_SECONDS) and not ended):
            return
        self._told = now
        what = f"compiling kernels for {self._isa}: {done} of {total}" if total else \
            f"another process compiles kernels for {self._isa}"
        text = f"{what}, {now - self._began:.0f} s"
        if on_terminal:
            self._reporter.rewrite(text, erase=True)
        else:
            self._reporter.write_line(text, flush=True)

    def end(self) -> None:
        """End the line."""
        if self._reporter and self._reporter.isatty and self._told:
            self._reporter.write_line("")


class Wanted:
    """Kernels that the tests of each file use, recorded by `python -m tests.kernel_selection --record`."""

    def __init__(self) -> None:
        self.by_file: dict[str, set[str]] = {}
        self.file = ""

    def watch(self) -> None:
        """Note every kernel that anything asks for in this process."""
        from edgeinfer.kernels.toolchain import link
        from tests.helpers import kernel_bench

        addresses, function = link.Kernels.addresses, kernel_bench.function

        def asked(this: link.Kernels, names: Iterable[str]) -> dict[str, int]:
            self._note(names := list(names))
            return addresses(this, names)

        def called(isa: str, name: str) -> Callable[..., int]:
            self._note([name])
            return function(isa, name)

        link.Kernels.addresses = asked  # type: ignore[method-assign]
        kernel_bench.function = called  # type: ignore[assignment]

    def _note(self, names: Iterable[str]) -> None:
        self.by_file.setdefault(self.file, set()).update(names)

    def merge(self, given: dict[str, list[str]]) -> None:
        """Add the notes of another process."""
        for file, names in given.items():
            self.by_file.setdefault(file, set()).update(names)

    def plain(self) -> dict[str, list[str]]:
        """Return the record for JSON."""
        return {file: sorted(names) for file, names in sorted(self.by_file.items())}


class Tier:
    """The plugin: leaves tests out, compiles kernels, watches who wants which, and says what there is to say.

    In a run with workers (pytest-xdist) it is in each of them, which select and run tests, and in the process that
    starts them, which compiles beforehand and reports.
    """

    def __init__(self, config: pytest.Config):
        self._config = config
        self._worker: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._left: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._outside: set[str] = set()
        self._before: set[str] | None = None
        self._wanted = Wanted()
        if config.getoption("record_kernels"):
            self._wanted.watch()

    def pytest_sessionstart(self) -> None:
        """Compile the kernels of the selected tests on all cores, before workers start and outside of every timeout."""
        emulated = "EDGEINFER_TEST_EMULATED" in os.environ  # where nothing can be compiled
        of_another = self._worker is not None or emulated
        if of_another or self._config.option.collectonly or self._config.getoption("record_kernels"):
            return
        files = modules(self._config)
        names = kernel_selection.wanted(files, all_kernels=is_whole(self._config) and files is None)
        for isa in kernel_selection.isas():
            progress = OnProgress(isa.name, self._config)
            try:
                kernel_selection.compile_named(isa, names, progress.tell)
            except EdgeInferError as error:
                pytest.exit(str(error), returncode=pytest.ExitCode.INTERNAL_ERROR)
            progress.end()
        self._before = kernel_selection.compiled()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Import the files of tests, each worker from another one on: who comes first writes bytecode for the others.

        Rewriting assertions takes most of a first collection. What fails here fails again when it is collected.
        """
        if self._worker is None:
            return
        worker, everywhere = self._config.workerinput, Path(__file__).parent.rglob("test_*.py")
        names = sorted(modules(self._config) or map(name_of, everywhere))
        first = len(names) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        for name in [*names[first:], *names[:first]]:
            with suppress(Exception, pytest.skip.Exception):
                import_module("tests." + name.removesuffix(".py").replace("/", "."))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out tests that are not in the default tier."""
        self._left = leave_out(config, items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Name the test that runs now."""
        self._wanted.file = name_of(item.path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count seconds, where the reports of all workers come together."""
        self._seconds[report.nodeid] += report.duration
        if any(name == OUTSIDE for name, _ in report.user_properties):
            self._outside.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Hand a worker's notes to the process that reports."""
        if self._worker is not None:
            self._worker["left out"] = dict(self._left)
            self._worker["wanted"] = self._wanted.plain()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take a worker's notes; all have selected the same tests."""
        known = getattr(node, "workeroutput", {})
        self._left = Counter(known.get("left out", self._left))
        self._wanted.merge(known.get("wanted", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Report the tests left out, and those that lack a mark or a line in the record."""
        if path := self._config.getoption("record_kernels"):
            Path(path).write_text(json.dumps(self._wanted.plain()), encoding="utf-8")
        for line in [*self._on_folders(), *self._on_marks(), *self._on_kernels()]:
            terminalreporter.write_line(line)

    def _on_folders(self) -> list[str]:
        folders: Counter[str] = Counter()
        for name, seconds in self._seconds.items():
            parts = name.partition("::")[0].split("/")
            folders["/".join(parts[:2]) if len(parts) > 2 else "tests"] += seconds
        parts = [f"{name} {seconds:.0f}" for name, seconds in folders.most_common()]
        return [f"seconds per folder, in all processes together: {', '.join(parts)}"] if parts else []

    def _on_marks(self) -> list[str]:
        if not is_whole(self._config):
            others = ", ".join(kernel_selection.other_levels())
            parts = [f"{self._left[mark]} {told}" for mark, told in LEFT_OUT.items() if self._left[mark]]
            parts += [f"instruction sets other than {kernel_selection.levels()[0]} ({others})"] if others else []
            return [f"left out: {', '.join(parts) or 'nothing'}; `python -m pytest --all` runs everything"]
        plain = {name: seconds for name, seconds in self._seconds.items() if name not in self._outside}
        over = sorted(((seconds, name) for name, seconds in plain.items() if seconds > SLOW_SECONDS), reverse=True)
        share = (f"README's tier: {len(plain)} of these {len(self._seconds)} tests, {sum(plain.values()):.0f} of "
                 f"{self._seconds.total():.0f} s in all processes together")
        return [share, *(f"takes {seconds:.1f} s and is not marked slow: {name}" for seconds, name in over)]

    def _on_kernels(self) -> list[str]:
        late = sorted(kernel_selection.compiled() - self._before) if self._before is not None else []
        note = "`python -m tests.kernel_selection --record` notes which tests want them"
        return [f"compiled within tests: {', '.join(late)}; {note}"] if late else []
