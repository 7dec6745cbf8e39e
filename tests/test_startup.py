"""Start-up: what importing loads, and how long the first answer of the command line takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HELP_LIMIT_S = 0.4
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
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rsplit("LOADED", 1)[1].split())


def test_importing_edgeinfer_loads_nothing_heavy() -> None:
    assert loaded("import edgeinfer") == set()


def test_naming_the_public_classes_loads_no_numba() -> None:
    assert not loaded("from edgeinfer import GenerationConfig, EdgeInferError") & {"numpy", "numba", "llvmlite"}


def has_command_line() -> bool:
    """Whether the command line stands; a folder without main is no command line."""
    face = ROOT / "edgeinfer" / "cli" / "__init__.py"
    return face.is_file() and "main" in face.read_text(encoding="utf-8")


needs_command_line = pytest.mark.skipif(not has_command_line(), reason="edgeinfer.cli has no main yet")


@needs_command_line
def test_help_loads_nothing_heavy() -> None:
    assert (
        loaded(
            "import edgeinfer.cli, contextlib\nwith contextlib.suppress(SystemExit):\n"
            "    edgeinfer.cli.main(['--help'])"
        )
        == set()
    )


@needs_command_line
@pytest.mark.slow
@pytest.mark.timing
def test_help_answers_at_once() -> None:
    """The median of 5 runs; another load on the machine may spoil a round, so the best of three rounds counts."""
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'edgeinfer'; from edgeinfer.cli import main; main()",
        "--help",
    ]
    rounds = []
    for _ in range(3):
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            seconds.append(time.perf_counter() - start)
            assert done.returncode == 0, done.stderr
            assert "run" in done.stdout
        rounds.append(statistics.median(seconds))
        if rounds[-1] < HELP_LIMIT_S:
            return
    raise AssertionError(
        f"edgeinfer --help took {min(rounds):.2f} s (median of 5, best of 3 rounds); the limit is {HELP_LIMIT_S} s"
    )
