"""The program as a process: as a module, with errors of the system, readers that leave, and without a compiler."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

import pytest

from tests.helpers.command_line import PYTHON, ROOT, Outcome, edgeinfer, environment, process, without_stages

PROMPT = "Once upon a time"
pytestmark = pytest.mark.usefixtures("no_variables")


def test_the_program_runs_as_a_module() -> None:
    from edgeinfer import __version__

    assert process("--version") == Outcome(0, f"edgeinfer {__version__}\n", "")
    assert "Exit codes: 0 done" in process("--help").out
    assert process() == process("--help")


def test_an_unexpected_error_is_one_line_and_a_traceback_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a\nbug")

    monkeypatch.setattr("edgeinfer.cli.commands.run.check_request", broken)
    done = edgeinfer("run", "demo", "x")
    assert done.code == 1 and done.sentence == (
        "An unexpected error, which is a bug: ZeroDivisionError: a bug (EDGEINFER_DEBUG=1 shows where)."
    )
    assert edgeinfer("run", "demo", "x", "--json").json["error"]["code"] == "internal"
    monkeypatch.setenv("EDGEINFER_DEBUG", "1")
    assert "Traceback" in edgeinfer("run", "demo", "x").err


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyboardInterrupt(), "Interrupted."),
        (MemoryError(), "Out of memory; lower --ctx or --budget."),
        (PermissionError(13, "Permission denied", "file"), "file: Permission denied."),
    ],
)
def test_what_the_system_says_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, sentence: str
) -> None:
    def broken(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("edgeinfer.cli.commands.run.check_request", broken)
    done = edgeinfer("run", "demo", "x")
    assert done.code == 1 and done.err.splitlines()[-1] == f"edgeinfer: {sentence}"


def test_an_output_that_cannot_show_a_character_shows_another() -> None:
    """Token 198 is the byte 0xC3, half a character."""
    arguments = ("run", "demo", "x", "-n", 2, "--temp", 0, "--no-stats", "--logit-bias", "198=1e9")
    assert process(*arguments, PYTHONIOENCODING="utf-8").out == "\ufffd\ufffd\n"
    assert process(*arguments, PYTHONIOENCODING="ascii") == Outcome(0, "??\n", "")


@pytest.mark.skipif(os.name != "posix", reason="pipes that do not block are POSIX")
def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    command = [*PYTHON, "run", "demo", PROMPT, "-n", "900", "--no-stats", "-t", "1"]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):  # full: nothing that the program writes is taken before
        while os.write(writing, bytes(4096)):
            pass
    os.set_blocking(writing, True)
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=environment()) as child:
        assert child.stderr
        os.close(writing)
        os.close(reading)
        assert without_stages(child.stderr.read().decode()) == ""
        assert child.wait(600) == 1


def test_the_first_token_needs_neither_numba_nor_a_compiler() -> None:
    edgeinfer("run", "demo", "Once", "-n", 2)  # which compiles what lacks
    code = (
        "import sys\nfrom edgeinfer.cli import main\n"
        "try:\n    main(['run', 'demo', 'Once', '-n', '2', '--json'])\n"
        "except SystemExit:\n    print(*[m for m in ('numba', 'torch', 'huggingface_hub', 'rich', 'jinja2') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [*PYTHON[:1], "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    report, modules = done.stdout.splitlines()
    assert modules == "" and json.loads(report)["completion_tokens"] == 2
