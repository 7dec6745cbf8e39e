"""An MoE model that does not fit, beside llama.cpp with mmap: in control groups of one limit, which counts the page
cache.

    python benchmarks/experts_beyond_memory.py BUNDLE [--limit 2GB] [--llama-python PYTHON --gguf FILE]

BUNDLE is an MoE model's shape with random weights and a routing of stated skew (converters/synthetic/random_bundle.py,
--routing); FILE the same shape, bits and skew for llama.cpp (benchmarks/peers/gguf_models.py, --spread). The limit is
also the budget that edgeinfer is given. Tokens are in no order and others in each round, so that only the skew repeats
experts. They take turns; the waiting one is stopped. Bytes are those that each process has read from the disk, by the
system's count.

Predicted is the time of a token in memory, as measured here without a limit, and the bytes of the experts that a cache
of those chosen most does not hold, at the speed of scattered reads as the runtime has them, the median of readings
before the rounds and after each. docs/explanation/experts.md has the outcome.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.beyond_memory import CTX, Side, read_bytes
from benchmarks.harness import describe
from benchmarks.outside import evict
from benchmarks.readers import python_threads
from edgeinfer.base.units import parse_size, round_up
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters.synthetic.random_experts import rates_of
from edgeinfer.memory_planner import READERS, MemoryPlan
from edgeinfer.offload import FromFlash, expected
from edgeinfer.registry import placer
from edgeinfer.runtime import plan_run

SECONDS = 1.0
OURS, IN_MEMORY, PEER = "edgeinfer, experts when wanted", "edgeinfer, all in memory", "llama.cpp with mmap"


def storage_gbs(path: Path, nbytes: float) -> float:
    """GB/s of scattered reads of so many bytes past the page cache, into such memory as the runtime has."""
    size, handle, length = path.stat().st_size, os.open(path, os.O_RDONLY | os.O_DIRECT), round_up(round(nbytes), 4096)
    offsets = np.random.default_rng(int(time.time())).permutation(size // length) * length
    found = python_threads(handle, READERS, offsets, length, SECONDS)
    os.close(handle)
    return found


def sides(asked: argparse.Namespace, limit: int, stack: ExitStack) -> dict[str, Side]:
    """Open all sides."""
    found = {}
    for name, budget in ((OURS, limit), (IN_MEMORY, None)):
        if budget is None and not asked.memory:
            continue
        side = found[name] = Side(name, sys.executable, "edgeinfer_worker.py", budget or 1 << 40, stack)
        side.ask("load", path=str(asked.bundle), threads=asked.threads)
        side.ask("context", ctx=CTX, budget=budget, sparse="")
    if asked.llama_python:
        evict(asked.gguf)  # else its pages belong to no group
        side = found[PEER] = Side(PEER, asked.llama_python, "llama_cpp_worker.py", limit, stack)
        about = side.ask("load", path=str(asked.gguf), threads=asked.threads, mapped=True)
        side.ask("context", ctx=CTX, kv="q8_0")
        print(f"llama.cpp {about['version']}, {asked.gguf.stat().st_size / 1e6:.0f} MB; {about['features']}")
    return found


def measure(side: Side, tokens: int, prompt: int, seed: int) -> tuple[float, float, float | None, float]:
    """Seconds and bytes read of a token, hit rate; and seconds of a prompt, in front of it."""
    took = side.ask("prompt", tokens=prompt, seed=1000 + seed)["seconds"][0] if prompt else 0.0
    before = read_bytes(side.pid)
    found = side.ask("decode", tokens=tokens, seed=seed)
    return sum(found["seconds"]) / tokens, (read_bytes(side.pid) - before) / (tokens + 1), found.get("hit_rate"), took


def reading(path: Path, limit: int, threads: int, half: float) -> tuple[MemoryPlan, FromFlash]:
    """The plan, and the predicted reads of tokens that go through experts as the bundle's routers say."""
    with Bundle.open(path) as bundle:
        config = RuntimeConfig(ctx=CTX, threads=threads, budget_bytes=limit)
        plan = plan_run(bundle, config, placer(bundle.config, bundle)).plan
    assert plan.experts
    own = plan.experts
    return plan, expected(own, rates_of(own.experts, own.active, half).tolist() * len(own.layers))


def predicted(plan: MemoryPlan, found: FromFlash, seconds: float, gbs: float) -> str:
    """Print their predictions."""
    assert plan.experts
    own = plan.experts
    return (f"{own.slots} of {own.total} experts ({own.slots / own.total:.0%}) of {own.expert_bytes / 1e6:.2f} MB in a "
            f"plan of {plan.total_bytes / 1e6:.0f} MB; predicted: hit rate {found.hit_rate:.0%}, "
            f"{found.nbytes / 1e6:.0f} MB a token, {1 / (seconds + found.nbytes / gbs / 1e9):.2f} tokens/s at "
            f"{gbs:.2f} GB/s and {1000 * seconds:.0f} ms in memory")


def options_of() -> argparse.Namespace:
    """Read the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("bundle", type=Path)
    options.add_argument("--limit", type=parse_size, default=2 * 10**9)
    options.add_argument("--half", type=float, default=0.75, help="the bundle's --routing")
    options.add_argument("--tokens", type=int, default=24, help="of a round")
    options.add_argument("--slow-tokens", type=int, default=2, help="of a round, for llama.cpp")
    options.add_argument("--warm-up", type=int, default=64, help="tokens in front of the rounds")
    options.add_argument("--prompt", type=int, default=0, help="tokens of a prompt in front of each round")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the side that has room")
    options.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python")
    options.add_argument("--gguf", type=Path)
    return options.parse_args()


def main() -> None:
    """Print a table."""
    asked = options_of()
    print("; ".join(describe().values()))
    rounds: dict[str, list[tuple[float, float, float | None, float]]] = {}
    with ExitStack() as stack:
        found = sides(asked, asked.limit, stack)
        if not all(side.limited for side in found.values()):
            print("No control group could be made here (that takes root and a memory controller).")
        for name, side in found.items():
            side.ask("decode", tokens=asked.warm_up if name != PEER else max(1, asked.warm_up // 16), seed=0)
        plan, read = reading(asked.bundle, asked.limit, asked.threads, asked.half)
        speeds = [storage_gbs(asked.bundle / "weights.bin", read.read_bytes)]
        for number in range(asked.rounds):
            for name, side in found.items():
                tokens = asked.slow_tokens if name == PEER else asked.tokens
                row = measure(side, tokens, asked.prompt, number + 1)
                rounds.setdefault(name, []).append(row)
                print(f"{name}: {1000 * row[0]:.0f} ms, {row[1] / 1e6:.0f} MB a token, hits {row[2]}, prompt "
                      f"{row[3]:.2f} s", flush=True)
            speeds.append(storage_gbs(asked.bundle / "weights.bin", read.read_bytes))
        peaks = {name: side.ask("memory")["peak_rss_bytes"] for name, side in found.items()}
    middle = {name: [median(row[i] or 0 for row in rows) for i in range(4)] for name, rows in rounds.items()}
    print("storage, GB/s: " + ", ".join(f"{gbs:.2f}" for gbs in speeds))
    if IN_MEMORY in middle:
        print(predicted(plan, read, middle[IN_MEMORY][0], median(speeds)))
    print(f"limit {asked.limit / 1e6:.0f} MB\n| side | tokens/s | rounds, ms a token | MB read a token | hits | "
          "prompt, s | peak, MB | times the tokens/s of llama.cpp |\n|---|---|---|---|---|---|---|---|")
    for name, (took, nbytes, hits, prompt) in middle.items():
        ms = ", ".join(f"{1000 * row[0]:.0f}" for row in rounds[name])
        ratio = f"{middle[PEER][0] / took:.2f}" if PEER in middle else ""
        print(f"| {name} | {1 / took:.3g} | {ms} | {nbytes / 1e6:.0f} | {hits:.0%} | {prompt:.2f} | "
              f"{peaks[name] / 1e6:.0f} | {ratio} |")


if __name__ == "__main__":
    main()
