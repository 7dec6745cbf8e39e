"""edgeinfer against the programs that people would use instead, side by side on this machine.

    python benchmarks/against_peers.py --llama-cpp-python PEER_ENV/bin/python --output report.md

A peer lives in an environment of its own, whose Python is named here; for llama.cpp it needs the packages
llama-cpp-python, gguf and numpy. Models have random weights in the shapes of well-known ones. The sides take turns,
stopped while it is the other's; the ratios are those of neighbouring turns. See docs/performance.md.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.peers.machine import describe  # noqa: E402
from benchmarks.peers.pairs import Bench, Comparison  # noqa: E402
from benchmarks.peers.report import markdown  # noqa: E402
from benchmarks.peers.worker import Worker, WorkerError  # noqa: E402
from edgeinfer.converters import SHAPES, write_random_bundle  # noqa: E402
from edgeinfer.errors import EdgeInferError  # noqa: E402
from edgeinfer.memory_planner import default_threads  # noqa: E402

PEERS = ROOT / "benchmarks" / "peers"
FORMATS = ("q4_0", "q4_k_m")
CTX_LIMIT = 1 << 17
READ_BYTES = 1 << 30
LLAMA = "llama.cpp"
SHALLOW = ({"kv": "f16", "flash": True}, {"kv": "f16", "flash": False})
DEEP = (*SHALLOW, {"kv": "q8_0", "flash": True})
"""llama.cpp's settings: all are measured and the best counts. Keys and values of 8 bits need flash attention."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--llama-cpp-python", metavar="PYTHON", required=True, help="Python of an environment with llama-cpp-python")
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
    return parser.parse_args(arguments)


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

    def __init__(self, given: argparse.Namespace, workdir: Path):
        self.given, self.workdir = given, workdir
        self.comparisons: list[Comparison] = []
        self.extras: list[dict[str, Any]] = []
        self.versions: dict[str, str] = {}
        self.ctx = max(given.d) + max(given.p, given.n)

    def shape(self, name: str) -> None:
        """Measure one shape against each format."""
        bundle = self.bundle(name)
        for number, kind in enumerate(self.given.format or FORMATS[:1]):
            gguf = self.gguf(name, kind)
            with ExitStack() as stack:
                ours, probe = (stack.enter_context(self.worker(side)) for side in ("edgeinfer", "probe"))
                peer = stack.enter_context(self.worker(LLAMA))
                self.versions["edgeinfer"] = ours.ask("load", path=str(bundle), threads=self.given.t)["version"]
                isa = ours.ask("context", ctx=self.ctx)["isa"]
                self.versions["instruction set"] = isa
                self.versions["llama-cpp-python"] = peer.ask("load", path=str(gguf), threads=self.given.t)["version"]
                self.tests(name, kind, ours, peer, probe)
            if number == 0:
                self.extras += self.first_tokens(name, bundle, gguf)

    def tests(self, shape: str, kind: str, ours: Worker, peer: Worker, probe: Worker) -> None:
        """All tests and settings of one file."""
        given = self.given
        bench = Bench(ours, peer, probe, {"threads": given.t, "read_bytes": READ_BYTES}, given.r, given.patience)
        for depth in given.d:
            for setting in DEEP if depth else SHALLOW:
                peer.ask("context", ctx=self.ctx, **setting)
                words = f"{kind}, KV {setting['kv']}, flash attention {'on' if setting['flash'] else 'off'}"
                for test, tokens in (("pp", given.p), ("tg", given.n)):
                    if test == "tg" or not depth or given.pp_depth:
                        result = bench.compare(shape, test, tokens, depth, LLAMA, words)
                        self.comparisons.append(result)
                        tell(f"{shape} {result.test} {words}: {result.median('ours'):.1f} against "
                             f"{result.median('peer'):.1f} t/s, ratio {statistics.median(result.ratios):.2f}")

    def first_tokens(self, shape: str, bundle: Path, gguf: Path) -> list[dict[str, Any]]:
        """Time from the start of a process to the logits after 8 tokens, three times each in turns; and peak memory."""
        times: dict[str, list[float | None]] = {"edgeinfer": [], LLAMA: []}
        memory: dict[str, dict[str, Any]] = {}
        for _ in range(3):
            for side, path in (("edgeinfer", bundle), (LLAMA, gguf)):
                with self.worker(side) as worker:
                    answer = worker.ask("first_token", path=str(path), threads=self.given.t, ctx=self.ctx)
                    times[side].append(answer["ms"])
                    worker.ask("run", kind="pp", tokens=self.given.p, depth=0)
                    memory[side] = worker.ask("memory")
        return [{"shape": shape, "side": side, **memory[side],
                 "first_token_ms": None if None in times[side] else statistics.median(times[side])} for side in times]

    def worker(self, side: str) -> Worker:
        """Start one side."""
        if side == LLAMA:
            return Worker(side, [self.given.llama_cpp_python, str(PEERS / "llama_cpp_worker.py")])
        return Worker(side, [sys.executable, str(PEERS / "edgeinfer_worker.py")])

    def bundle(self, shape: str) -> Path:
        """The shape as a bundle: q4 in groups of 32, embedding and head int8."""
        path = self.workdir / f"{shape}-q4-g32"
        if not path.exists():
            tell(f"writing {path.name}")
            write_random_bundle(replace(SHAPES[shape], max_position_embeddings=CTX_LIMIT), path)
        return path

    def gguf(self, shape: str, kind: str) -> Path:
        """The shape as a GGUF file, written by the peer's own package."""
        path = self.workdir / f"{shape}-{kind}.gguf"
        if not path.exists():
            tell(f"writing {path.name}")
            fields = {**asdict(SHAPES[shape]), "rope_theta": SHAPES[shape].rope.theta}
            partial = path.with_suffix(".partial")
            done = subprocess.run(
                [self.given.llama_cpp_python, str(PEERS / "gguf_models.py"), "--shape", json.dumps(fields), "--format",
                 kind, "--output", str(partial)], capture_output=True, text=True, timeout=3600)
            if done.returncode:
                partial.unlink(missing_ok=True)
                raise WorkerError(f"The GGUF file cannot be written: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
            partial.rename(path)
        return path

    def save(self) -> None:
        """Write what there is so far: a long run that is interrupted leaves its finished rows."""
        run = {"machine": describe(), "versions": self.versions, "date": time.strftime("%Y-%m-%d"),
               "threads": self.given.t, "repetitions": self.given.r}
        self.given.output.write_text(markdown(run, self.comparisons, self.extras), encoding="utf-8")
        if self.given.raw:
            rows = [item.as_json() for item in self.comparisons]
            self.given.raw.write_text(json.dumps({**run, "rows": rows, "extras": self.extras}, indent=1) + "\n")


def tell(text: str) -> None:
    """Say what happens on standard error."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run everything; returns the exit code."""
    given = parse(arguments)
    workdir = given.workdir or Path(tempfile.mkdtemp(prefix="against-peers-"))
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        run = Run(given, workdir)
        for shape in given.shape or sorted(SHAPES):
            run.shape(shape)
            run.save()
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
