"""edgeinfer against the programs that people would use instead, side by side on this machine.

    python benchmarks/against_peers.py --llama-cpp-python PEER_ENV/bin/python --output report.md

A peer lives in an environment of its own, whose Python is named here: for llama.cpp with the packages llama-cpp-python,
gguf and numpy, for OpenVINO with openvino-genai. Models have random weights in the shapes of well-known ones. The sides
take turns, stopped while it is the other's; the ratios are those of neighbouring turns. See docs/measurements/speed.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import describe
from benchmarks.peers.pairs import Bench, Comparison
from benchmarks.peers.report import markdown
from benchmarks.peers.sides import OURS, Match, Models, llama_matches, openvino_matches, start
from benchmarks.peers.worker import WorkerError
from edgeinfer.converters import SHAPES
from edgeinfer.errors import EdgeInferError
from edgeinfer.memory_planner import default_threads

FORMATS = ("q4_0", "q4_k_m")
READ_BYTES = 1 << 30
SPARE = 64
"""Positions of a context after the longest test, for warming up."""
STARTS = 3
"""Processes of each side whose first token is timed."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--llama-cpp-python", metavar="PYTHON", help="Python of an environment with llama-cpp-python, gguf and numpy")
    add("--openvino", metavar="PYTHON", help="Python of an environment with openvino-genai")
    add("--shape", action="append", choices=sorted(SHAPES), help="may be repeated; default: all")
    add("--format", action="append", choices=FORMATS, help="of the GGUF files; may be repeated; default: q4_0")
    add("-p", type=natural, default=512, help="prompt tokens (default 512)")
    add("-n", type=natural, default=128, help="tokens to generate (default 128)")
    add("-d", type=depths, default=[0, 4096], help="depths, as in 0,4096 (the default)")
    add("-r", type=natural, default=5, help="pairs of each test (default 5)")
    add("-t", type=natural, default=default_threads(), help="threads of each side (default: physical cores)")
    add("--pp-depth", action="store_true", help="also process prompts at depths above 0")
    add("--patience", type=float, default=60.0, help="seconds to wait for a calm machine before each pair (default 60)")
    add("--workdir", type=Path, help="models are written here and kept (default: a temporary directory)")
    add("--output", type=Path, required=True, help="the report, Markdown")
    add("--raw", type=Path, help="all figures as JSON")
    add("--append", action="store_true", help="keep the rows of --raw of other shapes and peers")
    given = parser.parse_args(arguments)
    if given.append and not given.raw:
        parser.error("--append needs --raw, the file that has the earlier figures")
    if not (given.llama_cpp_python or given.openvino):
        parser.error("there is nobody to compare with; name a peer by --llama-cpp-python or --openvino")
    return given


def natural(text: str) -> int:
    """A number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range; it must be 1 or more")
    return number


def depths(text: str) -> list[int]:
    """Numbers of a list, from 0 on."""
    numbers = [int(number) for number in text.split(",")]
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text} has a negative number")
    return numbers


class Run:
    """One run over all shapes."""

    def __init__(self, given: argparse.Namespace, models: Models):
        self.given, self.models = given, models
        self.comparisons: list[Comparison] = []
        self.extras: list[dict[str, Any]] = []
        self.versions: dict[str, str] = {}
        self.ctx = max(given.d) + max(given.p, given.n) + SPARE
        self.matches: list[Match] = []
        self.earlier: dict[str, Any] = {"versions": {}, "rows": [], "extras": []}
        if given.append and given.raw.exists():
            self.earlier = json.loads(given.raw.read_text(encoding="utf-8"))
        if given.llama_cpp_python:
            self.matches += llama_matches(given.llama_cpp_python, models, given.format or [FORMATS[0]])
        if given.openvino:
            self.matches += openvino_matches(given.openvino, models)

    def shape(self, name: str) -> None:
        """Measure one shape against everything."""
        started: set[str] = set()
        for match in self.matches:
            self.match(name, match)
            for side in (OURS, match.peer):
                if side not in started:
                    started.add(side)
                    self.extras.append(self.first_tokens(name, side, match))
            self.save()

    def match(self, shape: str, match: Match) -> None:
        """All tests and settings of one model against another."""
        given, bundle, model = self.given, self.models.ours(match, shape), match.model(shape)
        with ExitStack() as stack:
            ours, probe, peer = (stack.enter_context(worker) for worker in
                                 (start(OURS), start("probe"), start(match.peer, match.python)))
            self.versions[OURS] = ours.ask("load", path=str(bundle), threads=given.t)["version"]
            self.versions["instruction set"] = ours.ask("context", ctx=self.ctx)["isa"]
            answer = peer.ask("load", path=str(model), threads=given.t, **match.load)
            self.versions[match.peer] = answer["version"]
            bench = Bench(ours, peer, probe, {"threads": given.t, "read_bytes": READ_BYTES}, given.r, given.patience)
            for depth in given.d:
                for setting, words in match.settings(depth):
                    peer.ask("context", ctx=self.ctx, **setting)
                    self.tests(bench, shape, depth, match.peer, words)

    def tests(self, bench: Bench, shape: str, depth: int, peer: str, words: str) -> None:
        """The tests of one setting at one depth."""
        for kind, tokens in (("pp", self.given.p), ("tg", self.given.n)):
            if kind == "tg" or not depth or self.given.pp_depth:
                result = bench.compare(shape, kind, tokens, depth, peer, words)
                self.comparisons.append(result)
                tell(f"{shape} {result.test} {peer} {words}: {result.median('ours'):.1f} against "
                     f"{result.median('peer'):.1f} t/s, ratio {statistics.median(result.ratios):.2f}")

    def first_tokens(self, shape: str, side: str, match: Match) -> dict[str, Any]:
        """Time from the start of a process to the logits after 8 tokens, median of three; and its peak memory.

        Memory is that of a process that then processes one prompt.
        """
        path = self.models.ours(match, shape) if side == OURS else match.model(shape)
        times: list[float | None] = []
        for _ in range(STARTS):
            with start(side) if side == OURS else start(side, match.python) as worker:
                times.append(worker.ask("first_token", path=str(path), threads=self.given.t, ctx=self.ctx)["ms"])
                worker.ask("run", kind="pp", tokens=self.given.p, depth=0)
                memory = worker.ask("memory")
        known = [ms for ms in times if ms is not None]
        return {"shape": shape, "side": side, **memory, "first_token_ms": statistics.median(known) if known else None}

    def save(self) -> None:
        """Write the rows so far: a long run that is interrupted leaves its finished rows."""
        run = {"machine": describe(), "versions": {**self.earlier["versions"], **self.versions},
               "date": time.strftime("%Y-%m-%d"), "threads": self.given.t}
        again = {(item.shape, item.peer) for item in self.comparisons}
        kept = [Comparison.from_json(row) for row in self.earlier["rows"] if (row["shape"], row["peer"]) not in again]
        known = {(extra["shape"], extra["side"]) for extra in self.extras}
        extras = [extra for extra in self.earlier["extras"] if (extra["shape"], extra["side"]) not in known]
        comparisons, extras = kept + self.comparisons, extras + self.extras
        self.given.output.write_text(markdown(run, comparisons, extras), encoding="utf-8")
        if self.given.raw:
            rows = [item.as_json() for item in comparisons]
            self.given.raw.write_text(json.dumps({**run, "rows": rows, "extras": extras}, indent=1) + "\n")


def tell(text: str) -> None:
    """Report progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run everything; returns the exit code."""
    given = parse(arguments)
    workdir = given.workdir or Path(tempfile.mkdtemp(prefix="against-peers-"))
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        run = Run(given, Models(workdir, tell))
        for shape in given.shape or sorted(SHAPES):
            run.shape(shape)
    except (WorkerError, EdgeInferError, OSError, subprocess.TimeoutExpired) as error:
        tell(f"{error}")
        return 1
    finally:
        if not given.workdir:
            shutil.rmtree(workdir, ignore_errors=True)
    tell(f"The report is in {given.output}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
