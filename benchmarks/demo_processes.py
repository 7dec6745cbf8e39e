"""The demo in many processes, as a user starts it, each beside one that has one thread on one core.

    python benchmarks/demo_processes.py [--processes 20] [--tokens 400] [--output FILE]

The one takes the defaults; the other is pinned to a core with `--threads 1`, and has no barrier and nobody to wait for.
Which one goes first alternates. The ratio of a pair is what counts on shared machines: speeds move within seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.peers.machine import describe  # noqa: E402

PROMPT = "Once upon a time"


def tokens_per_second(python: str, tokens: int, options: tuple[str, ...], core: int | None) -> float:
    """Run one process; returns the speed that it reports."""
    command = [python, "-m", "edgeinfer", "run", "demo", PROMPT, "-n", str(tokens), "--temp", "0", "--json", *options]
    pin: Callable[[], None] | None = None if core is None else lambda: os.sched_setaffinity(0, {core})
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True, preexec_fn=pin)
    return float(json.loads(done.stdout)["tok_per_s"])


def pairs(python: str, processes: int, tokens: int) -> list[tuple[float, float]]:
    """Tokens per second by default and of one pinned thread, process by process."""
    core, out = max(os.sched_getaffinity(0)), []
    for turn in range(processes):
        sides = [lambda: tokens_per_second(python, tokens, (), None),
                 lambda: tokens_per_second(python, tokens, ("-t", "1"), core)]
        values = [side() for side in (sides if turn % 2 else sides[::-1])]
        out.append((values[0], values[1]) if turn % 2 else (values[1], values[0]))
        print(f"{turn + 1}: {out[-1][0]:.0f} and {out[-1][1]:.0f} tokens/s, ratio {out[-1][0] / out[-1][1]:.2f}",
              file=sys.stderr, flush=True)
    return out


def report(measured: list[tuple[float, float]], tokens: int) -> str:
    """The table."""
    machine, ratios = describe(), [default / pinned for default, pinned in measured]
    rows = [("default", [default for default, _ in measured], "{:.0f}"),
            ("one pinned thread", [pinned for _, pinned in measured], "{:.0f}"), ("ratio of a pair", ratios, "{:.2f}")]
    lines = [f"{machine['processor']}, {machine['cores']}, {machine['system']}, {machine['python']}; "
             f"{len(measured)} pairs of processes, {tokens} tokens each.", "",
             "| demo, tokens/s | least | median | most |", "|---|---|---|---|"]
    lines += [f"| {name} | {form.format(min(values))} | {form.format(statistics.median(values))} | "
              f"{form.format(max(values))} |" for name, values, form in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--python", default=sys.executable, help="of another version's environment")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    text = report(pairs(given.python, given.processes, given.tokens), given.tokens)
    print(text, end="")
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
