"""Planned against measured peak memory of runs on onnxruntime's CPU provider, seen from outside.

    python benchmarks/memory_onnx.py [--shapes ...] [--weights ...] [--contexts ...] [--kv ...] [--threads ...]
                                     [--chunks ...] [--samples ...] [--out FILE]

Each run is a process with the modules of the command line that opens the demo or random weights of a shape, and answers
a prompt that fills the context with tokens from all over the vocabulary. Its peak is VmHWM of /proc/PID/status, read by
this process. Rows that say `lowers` are the first run of a bundle with a type of KV, which writes the ONNX model into
the cache as well.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import machine
from benchmarks.memory import TIMEOUT_S, bundle_of, environment, megabytes
from benchmarks.outside import watch

SHARE = 0.05
"""A plan may exceed the measured peak by this share of it, and is never below it."""
GENERATED = 64
"""Tokens after which the heap grows no more."""
DEMO = "demo"


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    weights: str
    kv: str
    ctx: int
    chunk: int
    threads: int
    samples: int


RUN = """
import sys
from itertools import islice
import edgeinfer.cli.program
from edgeinfer import LLM
from edgeinfer.bench import token_ids
path, kv, ctx, chunk, threads, samples, new = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
with LLM(path, device="onnx-cpu", kv=kv, ctx=ctx, prefill_chunk=chunk, threads=threads, max_sequences=samples,
         speculate="off") as llm:
    ids = list(islice(token_ids(llm.runner.model.vocab_size), ctx - new - 2))
    llm.complete(ids, max_tokens=new, ignore_eos=True, n=samples)
    print(llm.runner.plan.total_bytes)
"""


@dataclass(frozen=True)
class Row:
    """Result of a run."""

    case: Case
    planned: int
    measured: int
    lowers: bool
    """True if it also lowered the model."""

    @property
    def excess(self) -> float:
        """Share of the peak by which the plan exceeds it."""
        return self.planned / self.measured - 1

    @property
    def good(self) -> bool:
        return 0 <= self.excess <= SHARE


def measure(path: str, case: Case, lowers: bool) -> Row:
    """Run a case."""
    numbers = (case.ctx, case.chunk, case.threads, case.samples, GENERATED)
    done = watch([sys.executable, "-c", RUN, path, case.kv, *map(str, numbers)], environment(), None, b"", TIMEOUT_S)
    if done.code:
        raise SystemExit(f"{case}: exit code {done.code}: {done.err}")
    return Row(case, int(done.out), done.vm_hwm_bytes, lowers)


def table(rows: list[Row]) -> Iterator[str]:
    """The rows as Markdown."""
    yield "| model | weights | KV | context | chunk | threads | samples | planned MB | measured MB | excess | within |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        c = row.case
        yield (f"| {c.model}{', lowers' if row.lowers else ''} | {c.weights} | {c.kv} | {c.ctx} | {c.chunk} "
               f"| {c.threads} | {c.samples} | {megabytes(row.planned)} | {megabytes(row.measured)} "
               f"| {100 * row.excess:+.1f} % | {'yes' if row.good else '**no**'} |")


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit code is 1 if a plan was below a peak or more than 5 % above it."""
    parser = argparse.ArgumentParser(description="Planned against measured memory of onnxruntime's CPU provider.")
    parser.add_argument("--shapes", nargs="+", default=[DEMO, "smollm2-135m", "smollm2-360m", "tinyllama-1.1b"])
    parser.add_argument("--weights", nargs="+", default=["q4", "int8", "f16", "q4k"], help="of shapes, not of the demo")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--kv", nargs="+", default=["f32", "f16"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[256])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--samples", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path, help="write the table to this file instead of printing it")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for model, weights, kv in itertools.product(given.shapes, given.weights, given.kv):
        if model == DEMO and weights != given.weights[0]:
            continue
        path = DEMO if model == DEMO else str(bundle_of(model, weights)[0])
        every = itertools.product(given.contexts, given.chunks, given.threads, given.samples)
        for number, (ctx, chunk, threads, samples) in enumerate(every):
            ctx = min(ctx, 1024) if model == DEMO else ctx
            case = Case(model, "q4" if model == DEMO else weights, kv, ctx, chunk, threads, samples)
            lowers = [True, False] if number == 0 else [False]
            for first in lowers:
                rows.append(measure(path, case, first))
                print(list(table(rows[-1:]))[-1], file=sys.stderr, flush=True)
    good = sum(row.good for row in rows)
    head = f"Measured on {machine()}: {good} of {len(rows)} runs within {SHARE:.0%}.\n"
    text = "\n".join([head, *table(rows)]) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
