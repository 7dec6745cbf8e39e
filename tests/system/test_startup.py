"""Start-up: modules that are imported, and the time of the command line's first answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command_line import relative_cost
from tests.unit.graph.test_graph import CONFIG

ROOT = Path(__file__).resolve().parents[2]
MAX_IMPORTS = 2.0
"""`--help` takes 1.3 times."""
HEAVY = (
    "numpy",
    "numba",
    "llvmlite",
    "tokenizers",
    "sentencepiece",
    "huggingface_hub",
    "jinja2",
    "torch",
    "transformers",
)


def loaded(code: str) -> set[str]:
    """Return the heavy packages that a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rsplit("LOADED", 1)[1].split())


def test_building_a_graph_needs_no_numpy() -> None:
    code = f"from edgeinfer.graph import *; build_graph(read_config({CONFIG}), requested_types())"
    assert "numpy" not in loaded(code)


def test_importing_edgeinfer_loads_nothing_heavy() -> None:
    assert loaded("import edgeinfer") == set()


def test_naming_the_public_classes_loads_no_numba() -> None:
    assert not loaded("from edgeinfer import GenerationConfig, EdgeInferError") & {"numpy", "numba", "llvmlite"}


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "demo"]])
def test_commands_that_run_no_model_load_nothing_heavy(arguments: list[str]) -> None:
    call = f"edgeinfer.cli.main({arguments})"
    code = f"import edgeinfer.cli, contextlib\nwith contextlib.suppress(SystemExit): {call}"
    assert loaded(code) == set()


def test_a_command_inside_another_program_leaves_its_garbage_collection() -> None:
    code = ("import gc, edgeinfer.cli, contextlib\nbefore = gc.get_threshold()\n"
            "with contextlib.suppress(SystemExit): edgeinfer.cli.main(['--version'])\n"
            "assert gc.get_threshold() == before")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(("command", "kept"), [("serve", True), ("batch", True), ("run", False)])
def test_long_runs_collect_garbage_as_often_as_python_does_by_default(command: str, kept: bool) -> None:
    code = (f"import gc, sys, edgeinfer.cli\nbefore = gc.get_threshold(); sys.argv = ['edgeinfer', {command!r}, '-h']\n"
            "import edgeinfer.cli.program as program\n"
            "program.leave = lambda code: print(before == gc.get_threshold())\nedgeinfer.cli.main()")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"{kept}\n")


@pytest.mark.slow
@pytest.mark.timing
def test_help_answers_at_once() -> None:
    """In processor time beside that of the imports which it needs anyway."""

    def check(done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode == 0 and "run" in done.stdout, done.stderr

    code = "import sys; sys.argv[0] = 'edgeinfer'; from edgeinfer.cli import main; main()"
    assert relative_cost([sys.executable, "-c", code, "--help"], check, "typer, rich.console") < MAX_IMPORTS
