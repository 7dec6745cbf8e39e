"""edgeinfer's server against llama.cpp's: throughput, time to first token and time between tokens, side by side.

    python benchmarks/serving_peers.py --llama-server PATH/llama-server --model FILE.gguf --rounds 3

Both servers read the same GGUF file, with the same threads and context and room for eight requests at once. They take
turns, stopped while it is the other's; the ratios are those of neighbouring turns. Prompts are random token ids, so no
two have a beginning in common. `benchmarks/peers/gguf_models.py` writes files with random weights.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import in_turns, machine, publish, spread, table, wait_for_calm
from benchmarks.peers.http_server import HttpServer, ask_all, free_port, running, streamed_request
from benchmarks.peers.worker import WorkerError
from edgeinfer.memory_planner import default_threads

OURS, PEER = "edgeinfer", "llama-server"
SEQUENCES = 8
SPARE = 16
"""Positions of a context after a prompt and its answer."""
WORDS = 16000
"""Token ids of prompts are below: both known shapes have more."""


@dataclass
class Served:
    """Figures of one side at one number of clients."""

    tok_per_s: float
    """Tokens of all answers over the time from the first request to the last token."""
    ttft: list[float]
    itl: list[float]
    """Mean time between two tokens of each answer."""
    gaps: list[float]
    """Times between two events of all answers."""


FIGURES: dict[str, tuple[Callable[[Served], float], bool]] = {
    "tokens/s": (lambda one: one.tok_per_s, True),
    "mean TTFT": (lambda one: 1000 * statistics.fmean(one.ttft), False),
    "median TTFT": (lambda one: 1000 * statistics.median(one.ttft), False),
    "P95 TTFT": (lambda one: 1000 * float(np.percentile(one.ttft, 95)), False),
    "mean ITL": (lambda one: 1000 * statistics.fmean(one.itl), False),
    "median ITL": (lambda one: 1000 * statistics.median(one.gaps), False),
    "P95 ITL": (lambda one: 1000 * float(np.percentile(one.gaps, 95)), False),
}
"""The figures that are reported (times in milliseconds), and whether more is better."""


class Comparison:
    """Both servers with one model.

    Parameters
    ----------
    sides : the servers that run, paused
    given : settings of the command line
    """

    def __init__(self, sides: dict[str, HttpServer], given: argparse.Namespace):
        self._sides, self._given, self._random = sides, given, Random(given.seed)

    def load(self, side: str, clients: int, seed: int) -> Served:
        """Let clients ask one server; the same seed gives the same prompts."""
        server, given, random = self._sides[side], self._given, Random(seed)
        bodies = [streamed_request([random.randrange(3, WORDS) for _ in range(given.prompt)], given.tokens)
                  for _ in range(clients * given.requests)]
        server.go_on()
        try:
            answers, _ = ask_all(server.port, bodies, clients)
        finally:
            server.pause()
        if wrong := [one.tokens for one in answers if one.tokens != given.tokens]:
            raise WorkerError(f"{side} answered with {wrong[0]} tokens instead of {given.tokens}.")
        whole = max(one.began + one.arrivals[-1] for one in answers) - min(one.began for one in answers)
        return Served(given.tokens * len(answers) / whole, [one.ttft for one in answers], [one.itl for one in answers],
                      [gap for one in answers for gap in one.gaps])

    def rounds(self, clients: int) -> list[dict[str, Served]]:
        """Run both sides in turns."""
        found = []
        for turn in range(self._given.rounds):
            seed = self._random.getrandbits(32)
            found.append(in_turns({side: partial(self.load, side, clients, seed) for side in self._sides}, turn))
        return found

    def warm_up(self) -> None:
        """Ask each side once for nothing."""
        for side in self._sides:
            self.load(side, 2, 0)


def rows_of(model: str, clients: int, rounds: list[dict[str, Served]]) -> list[str]:
    """Return a row of each figure: the medians of both sides, and the ratios of the rounds, above 1 where we win."""
    rows = []
    for name, (figure, more) in FIGURES.items():
        ours, peer = ([figure(one[side]) for one in rounds] for side in (OURS, PEER))
        ratios = [one / other if more else other / one for one, other in zip(ours, peer, strict=True)]
        unit = "" if more else " ms"
        rows.append(f"| {model} | {clients} | {name} | {statistics.median(ours):.1f}{unit} | "
                    f"{statistics.median(peer):.1f}{unit} | {spread(ratios)} |")
    return rows


def commands(given: argparse.Namespace, model: Path, setting: str, ports: dict[str, int]) -> dict[str, list[str]]:
    """Return the commands of each side."""
    ctx, threads = given.prompt + given.tokens + SPARE, str(given.threads)
    return {
        OURS: [sys.executable, "-m", "edgeinfer", "serve", str(model), "--port", str(ports[OURS]), "--ctx", str(ctx),
               "--threads", threads, "--max-sequences", str(SEQUENCES), "--speculate", "off",
               *given.edgeinfer_options.split()],
        PEER: [given.llama_server, "--model", str(model), "--port", str(ports[PEER]), "--ctx-size",
               str(ctx * SEQUENCES), "--parallel", str(SEQUENCES), "--cont-batching", "--threads", threads,
               "--threads-batch", threads, "--no-webui", *setting.split()],
    }


def measure(given: argparse.Namespace, model: Path, setting: str) -> list[str]:
    """Measure one model against one setting of llama-server."""
    ports, rows = {OURS: free_port(), PEER: free_port()}, list[str]()
    command = commands(given, model, setting, ports)
    with running(command[OURS], ports[OURS]) as ours, running(command[PEER], ports[PEER]) as peer:
        both = Comparison({OURS: ours, PEER: peer}, given)
        ours.pause()
        peer.pause()
        both.warm_up()
        for clients in map(int, given.clients.split(",")):
            found = both.rounds(clients)
            rows += rows_of(f"{model.stem}{setting and f', {setting}'}", clients, found)
            print("\n".join(rows[-len(FIGURES):]), file=sys.stderr, flush=True)
    return rows


def version_of(program: str) -> str:
    """Return llama-server's version."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.removeprefix("version:").strip() for line in lines if line.startswith("version")), "unknown")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--llama-server", required=True, metavar="PROGRAM", help="llama.cpp's server")
    add("--model", action="append", required=True, type=Path, metavar="FILE", help="GGUF file; may be repeated")
    add("--clients", default="1,4,8", help="requests at once (default 1,4,8)")
    add("--requests", type=int, default=1, help="requests of each client in a round (default 1)")
    add("--prompt", type=int, default=256, help="tokens of a prompt (default 256)")
    add("--tokens", type=int, default=128, help="tokens of an answer (default 128)")
    add("--rounds", type=int, default=3, help="pairs of each load (default 3)")
    add("--threads", type=int, default=default_threads(), help="threads of each side (default: physical cores)")
    add("--seed", type=int, default=1, help="of the prompts (default 1)")
    add("--edgeinfer-options", default="", help="more options of edgeinfer serve")
    add("--llama-options", action="append", metavar="OPTIONS", help="more options of llama-server; may "
        "be repeated: each is measured (default: none)")
    add("--patience", type=float, default=60.0, help="seconds to wait for a calm machine (default 60)")
    add("--document", type=Path, help="put the tables into the section `peers` of this file")
    given = parser.parse_args()
    wait_for_calm(given.patience, 0.3)
    try:
        rows = [row for model in given.model for setting in given.llama_options or [""]
                for row in measure(given, model, setting)]
    except (WorkerError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    head = f"{machine()}; llama-server {version_of(given.llama_server)}; {given.threads} threads of each."
    publish("\n".join([head, "", table(f"model | clients | figure | {OURS} | {PEER} | ratio", rows)]), given.document,
            "peers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
