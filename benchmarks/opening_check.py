"""What the check of checksums on opening costs: first and second start of a model, beside a version without it.

    python benchmarks/opening_check.py [--shape tinyllama-1.1b] [--rounds 9] [--before CHECKOUT] [--bundle NEW]

Each start is a process of its own that opens the model and generates one token; the kinds take turns. "First" compares
all checksums, as after a conversion; "second" finds that the files passed. CHECKOUT is a checkout of another version,
such as one made by `git worktree add`. NEW is where the bundle is made and stays, and one that is there is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edgeinfer.converters import SHAPES, write_random_bundle

ROOT = Path(__file__).resolve().parents[1]
WORKER = """
import json, sys, time
from edgeinfer import LLM
import edgeinfer.runtime, edgeinfer.engine, edgeinfer.text
if sys.argv[2] == "first":
    from edgeinfer.bundle import checksums
    checksums.Passed.__bool__ = lambda self: False
began = time.perf_counter()
llm = LLM(sys.argv[1], ctx=512, threads=2)
opened = time.perf_counter()
llm.complete([1, 2, 3, 4], max_tokens=1, temperature=0)
from edgeinfer.process import peak_rss_bytes
print(json.dumps([1000 * (opened - began), llm.plan.total_bytes - peak_rss_bytes()]))
"""


def start(bundle: Path, kind: str, checkout: Path) -> tuple[float, float, int]:
    """Milliseconds to open the model and of the whole process, and bytes that it stayed under its plan."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", WORKER, str(bundle), kind], env=environment, cwd=checkout,
                          capture_output=True, text=True, check=True)
    whole_ms = 1000 * (time.perf_counter() - began)
    open_ms, under = json.loads(done.stdout)
    return open_ms, whole_ms, under


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="tinyllama-1.1b", choices=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--bundle", type=Path)
    given = parser.parse_args()
    kinds = {"first": ROOT, "second": ROOT, **({"before": given.before.resolve()} if given.before else {})}
    with tempfile.TemporaryDirectory() as folder:
        bundle = given.bundle or Path(folder) / "bundle"
        if not bundle.exists():
            write_random_bundle(SHAPES[given.shape], bundle, "q4", 32)
        size = (bundle / "weights.bin").stat().st_size
        for kind, checkout in kinds.items():  # kernels, the page cache, and the memory of what passed
            start(bundle, kind, checkout)
        found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in kinds}
        for _ in range(given.rounds):
            for kind, checkout in kinds.items():
                found[kind].append(start(bundle, kind, checkout))
    print(f"{given.shape}, {size / 1e6:.0f} MB, {given.rounds} rounds, {platform.machine()}, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    print(f"{'start':8}{'open, ms: median (range)':>28}{'process, ms: median':>22}{'least under the plan, MB':>26}")
    for kind, rows in found.items():
        opens, wholes, under = zip(*rows, strict=True)
        spread = f"{statistics.median(opens):.1f} ({min(opens):.1f} to {max(opens):.1f})"
        print(f"{kind:8}{spread:>28}{statistics.median(wholes):>22.0f}{min(under) / 1e6:>26.1f}")
    for one, other in (("first", "second"), ("second", "before")) if given.before else (("first", "second"),):
        gaps = [a[0] - b[0] for a, b in zip(found[one], found[other], strict=True)]
        print(f"open, {one} - {other}, paired: median {statistics.median(gaps):+.1f} ms "
              f"({min(gaps):+.1f} to {max(gaps):+.1f})")


if __name__ == "__main__":
    main()
