"""Helpers that every test may use."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from filelock import FileLock

from tests.helpers import machine_speed

if TYPE_CHECKING:
    from tests.helpers.streamed import Pread

os.environ["EDGEINFER_CONFIG"] = ""  # the configuration of whoever runs the tests is not theirs
if "PYTEST_XDIST_WORKER" in os.environ:  # a core for each worker: threads of BLAS would wait for it in circles
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
OWN_CACHE = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite: see tests/tiers.py."""
    group = parser.getgroup("edgeinfer")
    group.addoption("--all", action="store_true", dest="all_tests",
                    help="also tests that are slow or measure times, and several instruction sets")
    group.addoption("--record-kernels", metavar="FILE", help="write there which kernels the tests of each file use")


def pytest_configure(config: pytest.Config) -> None:
    """Give this run a cache of its own with nothing in it but the user's kernels.

    What a developer's machine has learned of itself (a profile, measured quality, converted models) would let tests
    pass that fail on a new one, and tests would leave their own there. Workers of pytest-xdist get it from here.
    """
    from edgeinfer.base.cache_dir import cache_root, make_directories
    from tests import tiers

    if "PYTEST_XDIST_WORKER" not in os.environ:
        tiers.choose_levels(config)
    config.pluginmanager.register(tiers.Tier(config))
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    users = cache_root().absolute()
    if sys.dont_write_bytecode:  # each worker and each program that a test starts would compile all that it imports
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(users / "bytecode")
        sys.dont_write_bytecode = False
    make_directories(kernels := users / "kernels")
    own = config.stash[OWN_CACHE] = Path(tempfile.mkdtemp(prefix="edgeinfer-tests-"))
    (own / "kernels").symlink_to(kernels, target_is_directory=True)
    os.environ["EDGEINFER_CACHE"] = str(own)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Delete the cache that `pytest_configure` made; the kernels behind the link stay."""
    if own := config.stash.get(OWN_CACHE, None):
        shutil.rmtree(own, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def nothing_twice() -> Iterator[None]:
    """Let sessions of this process share linked kernels, wait for no disk, and tell of no stage that takes long.

    tests/kernels/test_objects.py tests how kernels are linked, and no test cuts the power. A busy machine would add
    lines to what commands say.
    """
    from edgeinfer.bundle import reader
    from edgeinfer.runtime import session
    from tests.helpers.linked import linked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "Kernels", linked)
        patch.setattr(os, "fsync", lambda _: None)
        if importlib.util.find_spec("typer"):  # emulated ARM cores have no command line
            patch.setattr("edgeinfer.cli.progress.TOLD_SECONDS", 3600.0)
        patch.setattr(reader, "TELL_SECONDS", 3600.0)
        yield


def pytest_collection_finish() -> None:
    """Keep the modules and tests, which all stay, out of garbage collections."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Give the path of a file of the development data, which lies beside the checkout; skip the test without it."""

    def find(relative: str = "") -> Path:
        path = SHARED / relative
        if not path.exists():
            pytest.skip(f"development data not present: {relative or 'shared/data'}")
        return path

    return find


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of our variables but the cache, whatever the shell of the developer has."""
    for name in [name for name in os.environ if name.startswith("EDGEINFER_") and name != "EDGEINFER_CACHE"]:
        monkeypatch.delenv(name)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own with nothing in it but the kernels, which would be recompiled without."""
    from edgeinfer.base.cache_dir import cache_root, make_directories

    make_directories(kernels := cache_root() / "kernels")
    (own := tmp_path / "cache").mkdir()
    (own / "kernels").symlink_to(kernels, target_is_directory=True)
    monkeypatch.setenv("EDGEINFER_CACHE", str(own))
    return own


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pread], None]:
    """Make readers of weights call a function in Python in place of pread; what it leaves to `streamed.real` is read.
    """
    from edgeinfer.runtime.weights import readers

    def use(function: Pread) -> None:
        callback = readers._PREAD(function)
        monkeypatch.setattr(readers, "_host_pread", lambda: (readers._address(callback), 0, callback))

    return use


MAX_WORKERS, WORKER_BYTES = 4, 3 << 29
"""Most processes that run tests, and the memory of each."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than cores, since tests wait for processes, up to four; none, but this process, for single files.

    Memory that is free has room for all.
    """
    if all(argument.partition("::")[0].endswith(".py") for argument in config.args):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = psutil.virtual_memory().available // WORKER_BYTES
    return min(cores + 1, MAX_WORKERS, max(room, 1)) if cores > 1 else 0


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a test that measures times run alone: the other workers finish their tests and wait.

    Each worker holds a lock of its own during a test, and a test of times those of all. Whoever wants locks comes
    through one gate, so that a test of times is not overtaken for ever.
    """
    from tests import tiers

    worker = getattr(request.config, "workerinput", None)
    if worker is None or not tiers.is_whole(request.config):  # README's tier measures no time
        yield
        return
    shared = tmp_path_factory.getbasetemp().parent
    wanted = [worker["workerid"]]
    if request.node.get_closest_marker("timing"):
        wanted = [f"gw{i}" for i in range(worker["workercount"])]
    with ExitStack() as held:
        with FileLock(shared / "gate.lock", poll_interval=0.01):
            for name in wanted:
                held.enter_context(FileLock(shared / f"{name}.lock", poll_interval=0.01))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a test that fails what the machine was busy with: many faults show on a busy one alone."""
    report = yield
    if report.failed:
        report.sections.append(("the machine at that time", machine_speed.state()))
    return report


TRIES, PAUSE_S = 4, 3.0
"""Chances of a test that is marked `timing`, and the pause between them; it has twice as many on a busy machine."""
BUSY_SHARE = 0.1
"""Share of the processor time of all cores from which on other programs disturb such a test."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of times again where it fails: neighbours on the same machine disturb some of its runs, not all.

    It fails if it does so as often on a machine that had time for it. Otherwise it is skipped, which names the cause.
    """
    if pyfuncitem.get_closest_marker("timing") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    shares, failed = list[float](), 0
    while len(shares) < 2 * TRIES:
        others = machine_speed.Others()
        try:
            pyfuncitem.obj(**arguments)
            return True
        except AssertionError:
            shares.append(others.share())
            failed += shares[-1] <= BUSY_SHARE
            if failed == TRIES:
                raise
        time.sleep(PAUSE_S)
    pytest.skip(f"not measured: it failed {len(shares)} times, and other programs had up to {max(shares):.0%} of the "
                "processor time meanwhile")
