"""The program under system faults: streams closed or full, signals at any moment; tests/conditions.py has all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.models.names import demo_path
from tests.conditions import signalled
from tests.helpers.command_line import PYTHON, ROOT, edgeinfer, environment, listening, process

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="signals and /dev/full are POSIX"),
    pytest.mark.usefixtures("no_variables"),
]
RUN = ["run", "demo", "Once upon a time", "-n", "4", "--temp", "0"]


@pytest.mark.slow
def test_a_share_of_all_commands_under_all_conditions() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.conditions", "--quick", "--signals", "4"], cwd=ROOT, text=True,
                          capture_output=True, env=environment())
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def shell(redirections: str, *arguments: str) -> tuple[int, str, str]:
    """Run the program in a shell; return its exit code and its output."""
    words = " ".join(f"'{word}'" for word in (*PYTHON, *arguments))
    done = subprocess.run(["sh", "-c", f"{words} {redirections}"], capture_output=True, text=True, env=environment(),
                          stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_answer_that_did_not_arrive_is_a_failure() -> None:
    full = "edgeinfer: Standard output cannot be written: No space left on device.\n"
    assert shell(">/dev/full", *RUN, "--json") == (1, "", full)
    assert shell(">&-", "--version") == (1, "", "edgeinfer: Standard output cannot be written: Bad file descriptor.\n")


@pytest.mark.slow
def test_unwanted_messages_do_not_become_part_of_the_answer() -> None:
    code, out, _ = shell("2>&-", *RUN)
    assert (code, out) == (0, process(*RUN, "--no-stats").out)


IMPORTING = """
import os, signal, sys
from edgeinfer.cli import main, program

class Finder:
    left = int(sys.argv.pop(1))

    def find_spec(self, *_):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGINT)

def watch_and_count(watch=program.watch_signals):
    watch()
    sys.meta_path.insert(0, Finder())

program.watch_signals = watch_and_count
main()
"""
"""The program, which interrupts itself after so many imports."""
WAITING = """
import time
from edgeinfer.runtime.session import Session

def waits(self, *how, run=Session._run):
    while not self.executor.ended(how[4]):
        time.sleep(0.01)
    return run(self, *how)

Session._run = waits
"""
"""Forward passes that wait until they are cancelled: a signal does not come too late."""


def test_ctrl_c_while_the_program_begins() -> None:
    """While it imports: 130 as long as no command has begun, and then 1 as later."""
    codes = set()
    for imports in (1, 20, 60, 180):
        done = subprocess.run([sys.executable, "-c", IMPORTING, str(imports), "plan", "demo"], cwd=ROOT, text=True,
                              env=environment(), capture_output=True, preexec_fn=listening)
        assert (done.stdout, done.stderr) == ("", "edgeinfer: Interrupted.\n")
        codes.add(done.returncode)
    assert 130 in codes and codes <= {1, 130}


def test_sigterm_ends_a_run_with_a_sentence() -> None:
    done = signalled(["run", "demo", "Once", "-n", "9", "-t", "1"], signal.SIGTERM, 0.15, waiting=WAITING)
    assert (done.code, done.err) == (143, "edgeinfer: Terminated.\n")


def test_a_program_that_was_started_deaf_to_ctrl_c_stays_so() -> None:
    def deaf() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    done = signalled([*RUN, "--no-stats"], signal.SIGINT, 0.05, deaf)
    assert (done.code, done.err) == (0, "") and done.out


def test_ctrl_c_that_falls_into_a_callback_is_not_lost() -> None:
    code = ("import os, signal, sys, time, weakref\nfrom edgeinfer.cli import program\n"
            "class Thing: pass\nthing = Thing()\n"
            "def gone(_): os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\n"
            "kept = weakref.ref(thing, gone)\nprogram.watch_signals()\n"
            "with program.interruptible():\n    try:\n        del thing\n        time.sleep(20)\n"
            "    except KeyboardInterrupt:\n        print('raised')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True,
                          preexec_fn=listening)
    assert (done.stdout, done.stderr) == ("raised\n", "")


@pytest.mark.slow
def test_the_suite_runs_where_ctrl_c_is_ignored() -> None:
    """As in the background of a shell: children that are to be interrupted listen again."""
    chosen = ["tests/system/test_convert_interrupted.py::test_ctrl_c_leaves_nothing",
              "tests/cli/test_conditions.py::test_ctrl_c_while_the_program_begins"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ),
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="no such names there")
@pytest.mark.parametrize("command", [["plan"], ["info"], ["verify"], ["estimate", "--machine", "rpi5"],
                                     ["run", "Once", "-n", "1"]])
def test_no_name_of_a_file_commands_the_terminal(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a\033[31mb\007c"
    shutil.copytree(demo_path(), path)
    done = edgeinfer(command[0], path, *command[1:])
    assert done.code == 0 and not set("\033\007") & set(done.out + done.err)
    assert command[0] == "run" or "a\\x1b[31mb\\x07c" in "".join(done.out.split())


@pytest.mark.parametrize("name", ["-m", "/usr/bin/edgeinfer", "script.py"])
def test_an_interrupt_of_the_first_imports_is_a_sentence(name: str) -> None:
    """Of the program alone: one that imports edgeinfer keeps Python's handler."""
    code = (f"import os, signal, sys; sys.argv = [{name!r}]; sys.orig_argv = ['python', '-m', 'edgeinfer']\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "import edgeinfer; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(5)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    if name == "script.py":
        assert "KeyboardInterrupt" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (130, "edgeinfer: Interrupted.\n")
