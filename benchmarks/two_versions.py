"""Two versions of edgeinfer against each other on this machine, in turns: speed, start and memory.

    python benchmarks/two_versions.py --before OLD_ENV/bin/python --after NEW_ENV/bin/python --output report.md

Each version lives in an environment of its own, whose Python is named here. Both have processes that stay open and take
turns, test by test; a ratio is that of neighbouring turns, and the median of them counts, because on shared machines
speed moves within seconds. Models have random weights in the shapes of well-known ones; --bundles keeps them, so that a
later run need not write them again (--write-only writes them and measures nothing).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import describe, ratios, table

WORKER = """
import json, resource, sys, time
from pathlib import Path
from edgeinfer import LLM
from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import builtin_shapes, read_config

path, shape, threads, changes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
if shape == "demo":
    path = "demo"
elif not path.exists():
    write_random_bundle(read_config({**builtin_shapes()[shape].config, **changes}), path)
if not threads:
    sys.exit()
options = {"ctx": 512 if shape == "demo" else 1024, "threads": threads}
try:
    llm = LLM(path, **options, speculate="off")
    session = llm.runner
except TypeError:  # a version before speculative decoding
    llm = LLM(path, **options)
    session = llm.session
ids = [(37 * i) % min(1000, session.model.vocab_size - 3) + 3 for i in range(512)]
print(json.dumps({"planned_bytes": session.plan.total_bytes, "isa": session.isa}), flush=True)
begun = session.new_sequence()
session.prefill(begun, ids[:16])
for line in sys.stdin:
    kind, n = line[:2], int(line[2:])
    if kind in ("rq", "ft"):
        prompt, most = (ids[:16], n) if kind == "rq" else (ids[:n], 1)
        began = time.perf_counter()
        llm.complete(prompt, max_tokens=most, seed=1, ignore_eos=True)
        seconds = time.perf_counter() - began
    elif kind == "tg":
        began = time.perf_counter()
        for i in range(n):
            session.decode([begun], [ids[i]])
        seconds = time.perf_counter() - began
        session.truncate(begun, 16)
    else:
        sequence = session.new_sequence()
        began = time.perf_counter()
        session.prefill(sequence, ids[:n])
        seconds = time.perf_counter() - began
        session.release(sequence)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak_rss_bytes": peak}), flush=True)
"""
RUN_DEMO = ["-m", "edgeinfer", "run", "demo", "Once upon a time", "-n", "16", "--temp", "0", "--json"]


@dataclass
class Worker:
    """A process of one version with one model open."""

    python: str
    arguments: list[str]
    isa: str
    process: subprocess.Popen[str] = field(init=False)
    opened: dict[str, Any] = field(init=False)
    last: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        command = [self.python, "-c", WORKER, *self.arguments]
        variables = {**os.environ, **({"EDGEINFER_ISA": self.isa} if self.isa else {})}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
                                        env=variables)
        self.opened = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.python} ended; its message stands above.")
        return dict(json.loads(line))

    def seconds(self, test: str) -> float:
        """Run one test."""
        assert self.process.stdin is not None
        self.process.stdin.write(test + "\n")
        self.process.stdin.flush()
        self.last = self._answer()
        return float(self.last["seconds"])


def paired(before: Any, after: Any, turns: int) -> tuple[float, float, float]:
    """Time of the one over time of the other, of neighbouring turns: median, lower and upper quartile."""
    low, middle, high = statistics.quantiles(ratios(before, after, turns), n=4)
    return middle, low, high


def _name(options: argparse.Namespace, shape: str) -> str:
    """A shape with its changes, as part of a path."""
    return "-".join([shape, *(change.replace("=", "-") for change in options.set)])


def compare_shape(options: argparse.Namespace, shape: str, isa: str, threads: int) -> list[str]:
    """Rows of the report for one shape, instruction set and number of threads."""
    rows, model = [], _name(options, shape)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.bundles or temporary
        sides = [Worker(python, [f"{root}/{model}-{name}", shape, str(threads), options.changes], isa)
                 for name, python in (("before", options.before), ("after", options.after))]
        isa = sides[1].opened["isa"]
        for test in options.test:
            for side in sides:
                side.seconds(test)  # pays for one-time costs
            before, after = (partial(side.seconds, test) for side in sides)
            middle, low, high = paired(before, after, options.turns)
            rows.append(f"| {model} | {isa} | {threads} | {test} | {middle:.3f} | {low:.3f} to {high:.3f} "
                        f"| {options.turns} |")
        memory = [(side.opened["planned_bytes"], side.last["peak_rss_bytes"]) for side in sides]
        for side in sides:
            side.process.kill()
            side.process.wait()
    for name, (planned, peak) in zip(("before", "after"), memory, strict=True):
        rows.append(f"| {model} | {isa} | {threads} | memory {name} | {peak / 1e6:.1f} MB of {planned / 1e6:.1f} MB "
                    "planned | | |")
    return rows


def write_bundles(options: argparse.Namespace) -> None:
    """Write the models of all shapes that are not there, as each version writes them."""
    for shape in options.shape:
        for name, python in (("before", options.before), ("after", options.after)):
            arguments = [f"{options.bundles}/{_name(options, shape)}-{name}", shape, "0", options.changes]
            subprocess.run([python, "-c", WORKER, *arguments], cwd="/", check=True)


def compare_start(options: argparse.Namespace) -> list[str]:
    """First token of the demo, process start included."""

    def first_token(python: str) -> float:
        done = subprocess.run([python, *RUN_DEMO], capture_output=True, text=True, cwd="/", check=True)
        return float(json.loads(done.stdout)["ttft_process_ms"])

    for python in (options.before, options.after):
        first_token(python)
    middle, low, high = paired(lambda: first_token(options.before), lambda: first_token(options.after), options.starts)
    return [f"| demo | | | first token of a process | {middle:.3f} | {low:.3f} to {high:.3f} | {options.starts} |"]


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="PYTHON")
    parser.add_argument("--after", required=True, metavar="PYTHON")
    parser.add_argument("--shape", action="append",
                        help="or demo; may be repeated; default: smollm2-135m, tinyllama-1.1b")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=N",
                        help="a number of the shapes' config.json; may be repeated")
    parser.add_argument("--test", action="append", help="ppN or tgN of a runner, rqN (N tokens) or ftN (the first "
                        "token after a prompt of N) of a request; may be repeated; default: pp512, tg64")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--starts", type=int, default=20, help="process starts to compare; 0 for none")
    parser.add_argument("--threads", type=int, action="append", help="may be repeated; default: 2")
    parser.add_argument("--isa", action="append", help="instruction set; may be repeated; default: the machine's best")
    parser.add_argument("--bundles", type=Path, metavar="DIR", help="where the random models are kept")
    parser.add_argument("--write-only", action="store_true", help="write the models into --bundles and end")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.shape, options.test = options.shape or ["smollm2-135m", "tinyllama-1.1b"], options.test or ["pp512", "tg64"]
    options.changes = json.dumps({key: int(number) for key, number in (change.split("=") for change in options.set)})
    options.bundles = options.bundles and options.bundles.resolve()
    if options.write_only:
        if not options.bundles:
            parser.error("--write-only needs --bundles DIR, where the models are to be kept.")
        write_bundles(options)
        return
    lines = [f"{', '.join(describe().values())}. Ratios are time before / time after of neighbouring turns: above 1 is "
             "faster now.", "", table("model | instruction set | threads | test | ratio | quartiles | turns", ())]
    cases = [(shape, isa, threads) for shape in options.shape for isa in options.isa or [""]
             for threads in options.threads or [2]]
    if options.starts:
        lines += compare_start(options)
    for case in cases:
        lines += (rows := compare_shape(options, *case))
        print("\n".join(rows), flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
