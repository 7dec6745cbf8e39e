"""The process: its memory and age as the operating system reports them, and its log."""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable

from ..errors import EdgeInferError, printable

TYPE_CHECKING = False  # mypy takes it for true; importing typing would take time
if TYPE_CHECKING:
    from types import FrameType

FORK_SECONDS = 10.0
"""Longest time that a fork waits for imports of other threads."""

reports_json = False
"""Whether the command's answer, and so its failure, is an object on standard output."""

above: Callable[[str], bool] | None = None
"""Prints a line above the progress bar, while one is shown; returns whether it did."""


def usable_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(sentence: str) -> None:
    """Print a sentence about the program's own doings on standard error, if there is one."""
    sentence = "\n".join(map(printable, sentence.split("\n")))  # it may hold a file name with control characters
    text = folded_for_terminal(f"edgeinfer: {sentence}")
    printer = above  # another thread may end the bar meanwhile
    if printer is not None and printer(text):
        return
    if sys.stderr is not None:  # print would take standard output instead
        print(text, file=sys.stderr, flush=True)


def folded_for_terminal(text: str) -> str:
    """Return a text for standard error, folded between words where that is a terminal with shorter lines."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    except (AttributeError, OSError, ValueError):  # there is no standard error, or it is no file
        columns = 0
    if not columns or max(map(len, text.split("\n"))) <= columns:
        return text
    import textwrap

    return "\n".join(textwrap.fill(line, max(columns, 20), break_long_words=False, break_on_hyphens=False,
                                   replace_whitespace=False) for line in text.split("\n"))


def check_process(opened: int) -> None:
    """Raise `EdgeInferError` in a process other than that with this id, which opened a model and was forked."""
    if opened != os.getpid():
        raise EdgeInferError("This process was forked from the one that opened the model, and threads are not "
                             "inherited; open the model again in this process.")


class ProcessLock:
    """A lock that is free in a forked child: a thread that held it in the parent does not exist in the child."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), allocate_lock()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), allocate_lock()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def wait_for_imports() -> None:
    """Return when no other thread imports a module for edgeinfer, or after `FORK_SECONDS`; to be called before a fork.

    Python holds a lock for each module that is being imported. In the child of a fork that lock is never released, and
    the module stays half made: importing it there would block for ever.
    """
    until = time.monotonic() + FORK_SECONDS
    time.sleep(0)  # a fresh time slice of the interpreter: no other thread runs between the look below and the fork
    while _others_import() and time.monotonic() < until:
        time.sleep(0.001)


def _others_import() -> bool:
    own = get_ident()
    return any(_imports(frame) for thread, frame in sys._current_frames().items() if thread != own)


def _imports(frame: FrameType | None) -> bool:
    """Return whether a thread with this frame is importing a module of edgeinfer, or any module on its behalf."""
    inside = False
    while frame is not None:
        caller = str(frame.f_globals.get("__name__"))
        if caller == "importlib._bootstrap":
            inside = True
            if str(frame.f_locals.get("name")).startswith("edgeinfer"):
                return True
        elif inside and caller.startswith("edgeinfer"):
            return True
        frame = frame.f_back
    return False


_RUN = ("import sys; sys.path[:] = filter(None, sys.path); from runpy import run_module; "
        "run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")


def python_command(module: str, *arguments: str) -> tuple[list[str], str]:
    """Return a command that runs a module of this installation, and the PYTHONPATH with which it finds it.

    The working directory is not searched, as it is with ``-m``: there may be anything, such as a model's own files.
    """
    root = os.path.abspath(os.path.join(__file__, "..", "..", ".."))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # an empty entry is the working directory
    return [sys.executable, "-c", _RUN, module, *arguments], os.pathsep.join([root, *given])


def peak_rss_bytes() -> int | None:
    """Return the most physical memory that this process has held, or None if the system does not say.

    Linux: VmHWM of /proc/self/status. It starts over with each program, unlike ru_maxrss, which a child inherits from
    its parent. Windows: the peak working set. macOS reports only the inherited figure, so there it is None.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    return None


def process_age_ms() -> float:
    """Return the milliseconds since the operating system started this process."""
    try:  # a third of psutil's import time; the clock ticks 100 times a second
        with open("/proc/self/stat", "rb") as stat, open("/proc/uptime", "rb") as uptime:
            started = int(stat.read().rsplit(b")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
            return 1000 * (float(uptime.read().split()[0]) - started)
    except (OSError, ValueError, IndexError):
        import psutil

        return 1000 * (time.time() - float(psutil.Process().create_time()))
