"""Beyond memory, beside llama.cpp with mmap: all sides in control groups of one limit, which counts the page cache.

    python benchmarks/beyond_memory.py BUNDLE [--share 0.5] [--llama-python PYTHON --models DIRECTORY]

BUNDLE is llama-2-7b's shape with a predictor (converters/synthetic/random_bundle.py, --density, --skew and
--predictor). The limit allows a share of the FFNs' bytes beside everything else, and is also the budget that edgeinfer
is given. Sides: hot and cold neurons with a warm cache, where half of the tokens are the one before again and where
none is, and with a cache that is emptied before each token; layers streamed by an exact run; and llama.cpp with a GGUF
of the same shape and bits, which is written into DIRECTORY once. They take turns; the waiting one is stopped.
Bytes are those that each process has read from the disk, by the system's count. Results: docs/explanation/offload.md.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import describe
from benchmarks.outside import control_group, evict
from benchmarks.peers.sides import HERE, Models
from benchmarks.peers.worker import Worker
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.registry import recipe_with
from edgeinfer.runtime import plan_run

CTX, WARM_UP = 512, 16
SHAPE = "llama-2-7b"
Row = tuple[float, float]
"""Seconds and bytes read from the disk, of a token."""


def limit_of(path: Path, threads: int, share: float) -> int:
    """Return the bytes that a run with all in memory needs, less those of the FFNs that are to lie outside."""
    with Bundle.open(path) as bundle:
        config = RuntimeConfig(ctx=CTX, threads=threads, recipe=recipe_with(sparse="predict"), budget_bytes=1 << 50)
        ffn = sum(entry.nbytes for entry in bundle.tensors.values() if entry.type.layout == "neuron")
        return plan_run(bundle, config).plan.total_bytes - round((1 - share) * ffn)


def read_bytes(pid: int) -> int:
    """Return the bytes that a process has read from the disk so far, page faults and direct I/O included."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class Side:
    """A worker in a control group of its own."""

    def __init__(self, name: str, python: str, script: str, limit: int, stack: ExitStack):
        group = stack.enter_context(control_group(limit))
        self.name, self.limited = name, group is not None
        self._worker = stack.enter_context(Worker(name, [python, str(HERE / script)], join=group and group.join))

    @property
    def pid(self) -> int:
        """The process."""
        return self._worker.pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        return self._worker.ask(do, **arguments)

    def tokens(self, n: int, **how: float) -> Row:
        """Decode n tokens."""
        before = read_bytes(self._worker.pid)
        seconds = self.ask("decode", tokens=n, **how)["seconds"]
        return median(seconds), (read_bytes(self._worker.pid) - before) / (n + 1)


def sides(asked: argparse.Namespace, limit: int, stack: ExitStack) -> dict[str, tuple[Side, int, dict[str, float]]]:
    """Open all sides; each with the tokens of a round and how they are decoded."""
    found, ours = {}, (("hot and cold", "predict"), ("streamed", "exact"))
    for name, sparse in ours:
        side = Side(name, sys.executable, "edgeinfer_worker.py", limit, stack)
        version = side.ask("load", path=str(asked.bundle), threads=asked.threads)["version"]
        side.ask("context", ctx=CTX, budget=limit, sparse=sparse)
        found[name] = (side, asked.tokens if sparse == "predict" else asked.slow_tokens, {})
    hot = found["hot and cold"][0]
    found = {"hot and cold, half repeated": (hot, asked.tokens, {"repeats": 0.5}),
             "hot and cold": (hot, asked.tokens, {}),
             "hot and cold, cache emptied": (hot, asked.tokens, {"empty": True}), "streamed": found["streamed"]}
    hot.ask("decode", tokens=WARM_UP)
    print(f"edgeinfer {version}")
    if asked.llama_python is None:
        print("llama.cpp is left out: --llama-python names an environment with llama-cpp-python and gguf.")
        return found
    path = Models(asked.models, print).gguf(asked.llama_python, SHAPE, "q4_0")
    evict(path)  # else its pages belong to no group
    side = Side("llama.cpp with mmap", asked.llama_python, "llama_cpp_worker.py", limit, stack)
    about = side.ask("load", path=str(path), threads=asked.threads, mapped=True)
    side.ask("context", ctx=CTX, kv="q8_0")
    print(f"llama.cpp {about['version']}, {path.stat().st_size / 1e6:.0f} MB, opened in {about['load_ms'] / 1000:.1f} "
          f"s; {about['features']}")
    return found | {side.name: (side, asked.slow_tokens, {})}


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("bundle", type=Path)
    options.add_argument("--share", type=float, default=0.5, help="of the FFNs' bytes that fit")
    options.add_argument("--tokens", type=int, default=24, help="of a round, for hot and cold neurons")
    options.add_argument("--slow-tokens", type=int, default=2, help="of a round, for the others")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python and gguf")
    options.add_argument("--models", type=Path, default=Path(), help="where the GGUF is, or will be")
    asked = options.parse_args()
    limit, rounds = limit_of(asked.bundle, asked.threads, asked.share), {}
    print("; ".join(describe().values()))
    with ExitStack() as stack:
        found = sides(asked, limit, stack)
        if not all(side.limited for side, _, _ in found.values()):
            print("No control group could be made here (that takes root and a memory controller): nothing limits the "
                  "page cache, so that llama.cpp's figures are those of a model that fits.")
        for _ in range(asked.rounds):
            for name, (side, tokens, how) in found.items():
                rounds.setdefault(name, []).append(side.tokens(tokens, **how))
                took, nbytes = rounds[name][-1]
                print(f"{name}: {1000 * took:.0f} ms, {nbytes / 1e6:.1f} MB a token", flush=True)
        peaks = {name: side.ask("memory")["peak_rss_bytes"] for name, (side, _, _) in found.items()}
    ways = list(found)[:3]
    print(f"limit and budget {limit / 1e6:.0f} MB\n| side | tokens/s | rounds, ms a token | MB read a token | peak, MB "
          "| " + " | ".join(f"{name}: ratio" for name in ways) + " |\n" + "|---" * (5 + len(ways)) + "|")
    seconds = {name: median(took for took, _ in rows) for name, rows in rounds.items()}
    for name, rows in rounds.items():
        ms = ", ".join(f"{1000 * took:.0f}" for took, _ in rows)
        print(f"| {name} | {1 / seconds[name]:.3g} | {ms} | {median(nbytes for _, nbytes in rows) / 1e6:.1f} | "
              f"{peaks[name] / 1e6:.0f} | {' | '.join(f'{seconds[name] / seconds[way]:.1f}' for way in ways)} |")


if __name__ == "__main__":
    main()
