"""More work than cores: two processes at once, and twice as many threads as cores, beside llama.cpp.

    python benchmarks/oversubscription.py --llama-cpp-python PEER_ENV/bin/python --workdir DIR [--output FILE]

Each program is compared with itself: the tokens per second of two processes together over those of one alone, and of
twice the threads over those of one thread per core. All turns of a round lie within seconds, and the ratios are those
of one round; medians of the rounds are shown, with their range.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.peers.machine import describe, wait_for_calm  # noqa: E402
from benchmarks.peers.sides import LLAMA, OURS, Models, start  # noqa: E402
from benchmarks.peers.worker import Worker, WorkerError  # noqa: E402
from edgeinfer.memory_planner import default_threads  # noqa: E402

SHAPES = ("smollm2-135m", "tinyllama-1.1b")
TOKENS = {"tg": 64, "pp": 128}
CTX = 512
START_SECONDS = 0.1
"""Time for two workers to hear that they begin together."""
MOST_OTHERS = 0.15


@dataclass
class Rounds:
    """What one program did, round by round, in tokens per second."""

    alone: list[float] = field(default_factory=list)
    """One process, one thread per core."""
    together: list[float] = field(default_factory=list)
    """Two such processes at once, their sum."""
    crowded: list[float] = field(default_factory=list)
    """One process, two threads per core."""

    def ratios(self, name: str) -> list[float]:
        """Each round's figure over that of one process alone."""
        return [value / alone for value, alone in zip(getattr(self, name), self.alone, strict=True)]


@dataclass(frozen=True)
class Crew:
    """The three processes of one program."""

    first: Worker
    second: Worker
    crowded: Worker

    def round(self, kind: str, seconds: float, rounds: Rounds) -> None:
        """One turn of each arrangement."""
        rounds.alone.append(sum(together([self.first], kind, seconds)))
        rounds.together.append(sum(together([self.first, self.second], kind, seconds)))
        rounds.crowded.append(sum(together([self.crowded], kind, seconds)))


def together(workers: list[Worker], kind: str, seconds: float) -> list[float]:
    """Tokens per second of each of some workers that work at the same time."""
    request: dict[str, Any] = {"kind": kind, "tokens": TOKENS[kind], "at": time.time() + START_SECONDS}
    with ThreadPoolExecutor(len(workers)) as pool:
        answers = [pool.submit(worker.ask, "run_for", seconds=seconds, **request) for worker in workers]
        return [float(answer.result()["tok_per_s"]) for answer in answers]


def hire(stack: ExitStack, side: str, python: str, path: Path, threads: int) -> tuple[Crew, str]:
    """Start one program's processes; returns its version, too."""
    workers, version = [], ""
    for count in (threads, threads, 2 * threads):
        worker = stack.enter_context(start(side, python))
        version = worker.ask("load", path=str(path), threads=count)["version"]
        worker.ask("context", ctx=CTX)
        for kind, tokens in TOKENS.items():
            worker.ask("run", kind=kind, tokens=min(tokens, 16), depth=0)
        workers.append(worker)
    return Crew(*workers), version


def measure(crews: dict[str, Crew], kind: str, rounds: int, seconds: float, patience: float) -> dict[str, Rounds]:
    """Rounds of all programs, which take turns."""
    out = {side: Rounds() for side in crews}
    for number in range(rounds):
        for side in list(crews)[:: 1 if number % 2 else -1]:
            wait_for_calm(patience, MOST_OTHERS)
            crews[side].round(kind, seconds, out[side])
    return out


def row(shape: str, kind: str, side: str, rounds: Rounds) -> str:
    """A line of the table."""
    def spread(name: str) -> str:
        ratios = rounds.ratios(name)
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    test = f"{kind}{TOKENS[kind]}"
    return f"| {shape} | {test} | {side} | {statistics.median(rounds.alone):.1f} | {spread('together')} | " \
        f"{spread('crowded')} |"


def report(rows: list[str], versions: dict[str, str], threads: int, rounds: int) -> str:
    """The page."""
    machine = describe()
    head = (f"Measured on {machine['processor']}, {machine['cores']}, {machine['memory']}, {machine['system']}, "
            f"{machine['python']}, {time.strftime('%Y-%m-%d')}; "
            + ", ".join(f"{side} {version}" for side, version in versions.items())
            + f". {threads} threads are one per core; medians of {rounds} rounds and their range.")
    table = [f"| shape | test | program | tokens/s alone | two processes at once | {2 * threads} threads |",
             "|---|---|---|---|---|---|", *rows]
    return "\n".join([head, "", *table]) + "\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--llama-cpp-python", metavar="PYTHON", required=True,
        help="Python of an environment with llama-cpp-python, gguf and numpy")
    add("--shape", action="append", choices=SHAPES, help="may be repeated; default: both")
    add("-r", type=int, default=5, help="rounds (default 5)")
    add("--seconds", type=float, default=1.5, help="length of each turn (default 1.5)")
    add("-t", type=int, default=default_threads(), help="threads of one process (default: physical cores)")
    add("--patience", type=float, default=20.0, help="seconds to wait for a calm machine before each turn (default 20)")
    add("--workdir", type=Path, required=True, help="models are written here and kept")
    add("--output", type=Path, help="write the table to this file instead of printing it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; returns the exit code."""
    given = parse(arguments)
    given.workdir.mkdir(parents=True, exist_ok=True)
    models = Models(given.workdir, lambda text: print(text, file=sys.stderr, flush=True))
    rows, versions = [], {}
    try:
        for shape in given.shape or SHAPES:
            with ExitStack() as stack:
                crews = {}
                for side, python, path in (
                    (OURS, sys.executable, models.bundle(shape, 32)),
                    (LLAMA, given.llama_cpp_python, models.gguf(given.llama_cpp_python, shape, "q4_0")),
                ):
                    crews[side], versions[side] = hire(stack, side, python, path, given.t)
                for kind in TOKENS:
                    measured = measure(crews, kind, given.r, given.seconds, given.patience)
                    rows += [row(shape, kind, side, rounds) for side, rounds in measured.items()]
                    print(*rows[-2:], sep="\n", file=sys.stderr, flush=True)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    table = report(rows, versions, given.t, given.r)
    if given.output:
        given.output.write_text(table, encoding="utf-8")
    else:
        print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
