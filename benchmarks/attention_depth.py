"""Keys and values at depth: the share of the read bandwidth that attention draws while one token is decoded.

    python benchmarks/attention_depth.py --output docs/attention.md

One layer of a known shape (one layer's worth is enough: all are alike) with random keys and values of the context's
whole length; attention and the memory bandwidth are read in turns, in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.peers.machine import describe  # noqa: E402
from edgeinfer.bench import MachineProbe  # noqa: E402
from edgeinfer.bundle import Bundle  # noqa: E402
from edgeinfer.config import KV_TYPES, RuntimeConfig  # noqa: E402
from edgeinfer.converters import SHAPES, write_random_bundle  # noqa: E402
from edgeinfer.errors import EdgeInferError  # noqa: E402
from edgeinfer.memory_planner import default_threads  # noqa: E402
from edgeinfer.runtime import Session  # noqa: E402

READ_BYTES = 1 << 30
TOKENS = 16
"""Tokens of one measurement."""


def one_layer(shape: str, directory: Path) -> Path:
    """A bundle with one layer of a shape and a small vocabulary."""
    path = directory / shape
    whole = SHAPES[shape]
    layer = replace(whole, num_hidden_layers=1, windows=whole.windows[:1], vocab_size=512,
                    max_position_embeddings=1 << 20)
    write_random_bundle(layer, path)
    return path


class Depth:
    """A session whose keys and values are random numbers, as if so many tokens had been processed."""

    def __init__(self, bundle: Path, depth: int, kv: str, threads: int):
        ctx = depth + 64
        self.session = Session(Bundle.open(bundle), RuntimeConfig(threads=threads, ctx=ctx, kv=kv))
        self.sequence = self.session.new_sequence()
        self.depth, self.kv = depth, kv
        self._fill()

    def _fill(self) -> None:
        """Write random K and V of standard deviation 1 into every block that the sequence then holds."""
        self.session.kv.extend(self.sequence, self.depth)
        self.sequence.tokens.extend([5] * self.depth)
        rng = np.random.default_rng(0)
        k, v, *scales = self.session.kv.planes[0].arrays
        for head in (head for plane in (k, v) for head in plane[0]):
            if self.kv == "int8":
                head[:] = rng.integers(-100, 100, head.shape, np.int8).view(np.uint8)
            else:
                kind = np.float16 if self.kv == "f16" else np.float32
                values = rng.standard_normal(head.size // np.dtype(kind).itemsize, np.float32)
                head[:] = values.astype(kind).view(np.uint8).reshape(head.shape)
        for plane in scales:
            plane[:] = np.full(32, 0.017, np.float16).view(np.uint8)

    def seconds(self) -> float:
        """Time of attention (with the merge of its splits) for one token at this depth."""
        self.session.executor.start_profile()
        for _ in range(TOKENS):
            self.session.decode([self.sequence], [5])
        spent = self.session.executor.stop_profile()
        self.session.rewind(self.sequence, self.depth)
        return float(sum(ns for ns, record in zip(spent, self.session.program.records, strict=True)
                         if record.kernel.startswith("attention"))) / TOKENS / 1e9

    def bytes(self) -> int:
        """Bytes of keys and values that one token reads."""
        reads = (op.kv for op in self.session.graph.ops if op.kv and not op.kv.stores)
        return next(reads).read_bytes(self.kv, self.depth)


def measure(path: Path, depth: int, kv: str, probe: MachineProbe, repetitions: int) -> dict[str, float]:
    """Median bandwidth of attention and of plain reads, and the median of their paired ratios."""
    run = Depth(path, depth, kv, probe.threads)
    try:
        run.seconds()
        gbs, read = [], [probe.read_gbs()]
        for _ in range(repetitions):
            gbs.append(run.bytes() / run.seconds() / 1e9)
            read.append(probe.read_gbs())
    finally:
        run.session.close()
    shares = [2 * g / (a + b) for g, a, b in zip(gbs, read, read[1:], strict=False)]
    return {"depth": depth, "gbs": statistics.median(gbs), "read_gbs": statistics.median(read),
            "share": statistics.median(shares), "least": min(shares), "greatest": max(shares)}


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="may be repeated; default: all")
    parser.add_argument("-d", default="4096,32768", help="depths (default 4096,32768)")
    parser.add_argument("--kv", choices=KV_TYPES, default="int8")
    parser.add_argument("-r", type=int, default=7, help="repetitions (default 7)")
    parser.add_argument("-t", type=int, default=default_threads())
    parser.add_argument("--output", type=Path, help="the table, Markdown")
    given = parser.parse_args(arguments)
    rows = []
    try:
        with tempfile.TemporaryDirectory() as directory, MachineProbe(given.t, READ_BYTES) as probe:
            for shape in given.shape or sorted(SHAPES):
                path = one_layer(shape, Path(directory))
                for depth in map(int, given.d.split(",")):
                    rows.append({"shape": shape, **measure(path, depth, given.kv, probe, given.r)})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            isa = probe.isa
    except EdgeInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if given.output:
        old = given.output.read_text(encoding="utf-8") if given.output.exists() else ""
        written = old[old.find("\n## ") :] if "\n## " in old else ""  # by hand, behind the table
        given.output.write_text(table(rows, given.kv, given.t, isa) + written, encoding="utf-8")
    return 0


def table(rows: list[dict[str, float]], kv: str, threads: int, isa: str) -> str:
    """The report."""
    machine = ", ".join(describe().values())
    lines = ["# Attention at depth", "", "Made by `benchmarks/attention_depth.py`: one token, one layer, medians of "
             "interleaved readings.", "", f"{machine}; {isa}, {threads} threads, KV {kv}.", "",
             "| shape | depth | KV read, GB/s | read bandwidth, GB/s | share (least to greatest) |",
             "|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['shape']} | {row['depth']} | {row['gbs']:.1f} | {row['read_gbs']:.1f} | "
                     f"{row['share']:.0%} ({row['least']:.0%} to {row['greatest']:.0%}) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
