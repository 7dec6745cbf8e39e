"""Waiting times of a user: compiling on the first run, then process start to first text of the demo.

    python benchmarks/startup.py [--runs N] [--out FILE]

The first part compiles into an empty cache. The second starts `edgeinfer run demo` again and again, each in a process
of its own, and takes the time from the call that starts the process to the first byte of the story on its output.
two_versions.py compares the start of two versions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import machine, row, table

PROMPT = "Once upon a time"
LIMIT_COMPILE_S, LIMIT_FIRST_TOKEN_S = 30.0, 0.5


@dataclass(frozen=True)
class Startup:
    """Measured times."""

    kernels: int
    """Kernels compiled on the first run."""
    compile_s: float
    """Compiling them into an empty cache."""
    first_run_s: float
    """First run on a machine: process start to first text, compiling included."""
    first_text_s: tuple[float, ...]
    """Process start to first text, of each later run."""
    bare_python_s: tuple[float, ...]
    """Start and end of an interpreter that does nothing: the floor of any program in Python."""
    load_ms: float
    """Median time to open the model, as the program reports it."""
    ttft_ms: float
    """Median time from the request to its first token, likewise."""
    numba: bool
    """True if a run that found its kernels imported Numba."""
    load_average: float
    """Processes that wanted to run while this was measured; nan where the system does not say."""


def command(*arguments: str) -> list[str]:
    """The command line of this checkout."""
    return [sys.executable, "-m", "edgeinfer", *arguments]


def first_text_s(environment: Mapping[str, str]) -> float:
    """Seconds from starting the process to the first byte of the story."""
    run = command("run", "demo", PROMPT, "-n", "2", "--temp", "0", "--no-stats")
    start = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(run, cwd=ROOT, env=dict(environment), **pipes) as process:
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 1)
        first = time.perf_counter()
        process.stdout.read()
    if process.returncode or not text:
        raise SystemExit(f"edgeinfer run failed with exit code {process.returncode}.")
    return first - start


def reported(environment: Mapping[str, str]) -> dict[str, float]:
    """The program's own report of a run."""
    run = command("run", "demo", PROMPT, "-n", "2", "--temp", "0", "--json")
    done = subprocess.run(run, cwd=ROOT, env=dict(environment), capture_output=True, text=True, check=True)
    report: dict[str, float] = json.loads(done.stdout)
    return report


def imports_numba(environment: Mapping[str, str]) -> bool:
    """Return whether a run imports Numba."""
    code = (
        "import contextlib, io, sys\n"
        "from edgeinfer.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main(['run', 'demo', {PROMPT!r}, '-n', '1', '--temp', '0', '--json'])\n"
        "print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(environment), capture_output=True, text=True)
    return done.stdout.split()[-1:] != ["False"]


def measure(runs: int = 15) -> Startup:
    """Measure in temporary caches; this user's stay as they are."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGEINFER_")}
    with tempfile.TemporaryDirectory() as folder:
        warm = {**environment, "EDGEINFER_CACHE": f"{folder}/warmed"}
        done = subprocess.run(command("warmup", "--json"), cwd=ROOT, env=warm, stdout=subprocess.PIPE, check=True)
        compiled = json.loads(done.stdout)
        fresh = {**environment, "EDGEINFER_CACHE": f"{folder}/fresh"}
        first_run = first_text_s(fresh)
        times, bare, reports = [], [], []
        for _ in range(runs):
            times.append(first_text_s(fresh))
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], cwd=ROOT, env=fresh, check=True)
            bare.append(time.perf_counter() - start)
            reports.append(reported(fresh))
        return Startup(
            compiled["compiled"], compiled["seconds"], first_run, tuple(times), tuple(bare),
            statistics.median(r["load_ms"] for r in reports), statistics.median(r["ttft_ms"] for r in reports),
            imports_numba(fresh), os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan"),
        )


def report(startup: Startup) -> str:
    """A table in Markdown."""
    def spread(seconds: tuple[float, ...]) -> str:
        return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"

    rows = (
        (f"compile {startup.kernels} kernels into an empty cache (`edgeinfer warmup`)", f"{startup.compile_s:.1f} s"),
        ("first run on a machine: process start to first text", f"{startup.first_run_s:.1f} s"),
        (f"every later run: process start to first text, median of {len(startup.first_text_s)} (range)",
         spread(startup.first_text_s)),
        ("of which opening the model", f"{startup.load_ms / 1000:.2f} s"),
        ("of which prompt and first token", f"{startup.ttft_ms:.1f} ms"),
        ("for comparison: an interpreter that does nothing", spread(startup.bare_python_s)),
        ("Numba imported in a later run", "yes" if startup.numba else "no"),
    )
    head = f"Measured on {machine()}, load average {startup.load_average:.1f}."
    return f"{head}\n\n{table('what | time', (row(*each) for each in rows))}\n"


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit code is 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description="Compile time of the first run, and time to the first token.")
    parser.add_argument("--runs", type=int, default=15, help="later runs to measure")
    parser.add_argument("--out", type=Path, help="write the table to this file instead of printing it")
    given = parser.parse_args(arguments)
    startup = measure(given.runs)
    table = report(startup)
    if given.out:
        given.out.write_text(table, encoding="utf-8")
    else:
        print(table, end="")
    slow = startup.compile_s > LIMIT_COMPILE_S or statistics.median(startup.first_text_s) > LIMIT_FIRST_TOKEN_S
    return 1 if slow or startup.numba else 0


if __name__ == "__main__":
    sys.exit(main())
