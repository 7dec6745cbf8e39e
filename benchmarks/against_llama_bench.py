"""edgeinfer against a program that has no Python package, by its `llama-bench`: llama.cpp, ik_llama.cpp and their kin.

    python benchmarks/against_llama_bench.py --program ik_llama.cpp/build/bin/llama-bench --name ik_llama.cpp \
        --python PEER_PYTHON --models MODELS --shape llama-2-7b [--setting=-rtr,1] [--output docs/measurements/peers.md]

The same shape with random weights on both sides, q4_0 there and q4 in groups of 32 here, or
`--kind q4_k_m` on both. A pair is one measurement of
each, the order changes from pair to pair, and edgeinfer's process is stopped while it is the other's turn. `--setting`
may be repeated; each setting is reported, and the pairs count only while the host leaves the machine alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import calm_rounds, in_turns, machine, publish, row, table
from benchmarks.peers.sides import ALIKE, Models
from benchmarks.peers.worker import Worker, WorkerError

HERE = Path(__file__).parent / "peers"


def main() -> None:
    """Measure and print, or write a section of a document."""
    options = parse()
    models = Models(options.models, lambda said: print(said, file=sys.stderr, flush=True))
    gguf = models.gguf(options.python, options.shape, options.kind)
    bundle = models.mixed(options.shape, options.mixture) if options.mixture else \
        models.bundle(options.shape, 32) if options.kind in ALIKE else models.imported(gguf)
    tests = [(kind, tokens) for kind, tokens in (("tg", options.n), ("pp", options.p)) if tokens]
    rows = []
    with Worker("edgeinfer", [sys.executable, str(HERE / "edgeinfer_worker.py")]) as ours:
        ours.ask("load", path=str(bundle), threads=options.threads)
        ours.ask("context", ctx=options.d + max(tokens for _, tokens in tests) + 64)
        for setting in options.setting or [""]:
            for kind, tokens in tests:
                rows.append(pairs(ours, gguf, setting, kind, tokens, options))
                print(rows[-1], flush=True)
    found = table(f"shape | test | setting of {options.name} | edgeinfer, tokens/s | {options.name} | ratio of pairs | "
                  "lowest and highest | medians of", rows)
    head = f"{machine()}; {options.threads} threads; {options.about or options.name}:"
    publish(f"{head}\n\n{found}", options.output, f"{options.name} {options.shape}")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--program", required=True, help="the peer's llama-bench")
    add("--name", required=True, help="of the peer, in the table")
    add("--about", help="its version and how it was built, for the report")
    add("--python", default=sys.executable, help="of an environment with gguf and numpy, which writes the model")
    add("--models", type=Path, required=True, help="folder for the models, which stay there")
    add("--shape", default="tinyllama-1.1b")
    add("--kind", default="q4_0", help="type of the peer's file; of all but q4_0 ours has the same codes (q4_0)")
    add("--mixture", type=Path, help="types of our matrices, as equal_quality.py writes them")
    add("--setting", action="append", help="further options of the peer, commas for spaces; may be repeated")
    add("-n", type=int, default=32, help="tokens to decode, 0 for none (default 32)")
    add("-p", type=int, default=0, help="prompt tokens (default: no prompts)")
    add("-d", type=int, default=0, help="tokens of context before each test (default 0)")
    add("--rounds", type=int, default=5)
    add("--patience", type=float, default=120, help="seconds to wait for calm rounds (default 120)")
    add("--threads", type=int, default=2)
    add("--output", type=Path, help="a Markdown file whose section is replaced")
    return parser.parse_args()


def pairs(ours: Worker, gguf: Path, setting: str, kind: str, tokens: int, options: argparse.Namespace) -> str:
    """Both sides in turns; returns a row of the table."""
    sides = {"ours": lambda: tokens / ours.ask("run", kind=kind, tokens=tokens, depth=options.d)["seconds"],
             "theirs": lambda: theirs(options, gguf, setting, kind, tokens)}
    turns = count()
    sides["ours"]()  # warms up, as each run of the peer does by itself
    done = calm_rounds(lambda: in_turns(sides, next(turns)), options.rounds, options.patience)
    ratios = [pair["ours"] / pair["theirs"] for pair in done.results]
    speeds = [f"{statistics.median(pair[side] for pair in done.results):.2f}" for side in sides]
    depth = f" @ d{options.d}" if options.d else ""
    return row(f"{options.shape} {options.kind}", f"{kind}{tokens}{depth}",
               setting.replace(",", " ") or "as it comes", *speeds,
               f"**{statistics.median(ratios):.2f}**", f"{min(ratios):.2f} to {max(ratios):.2f}", done)


def theirs(options: argparse.Namespace, gguf: Path, setting: str, kind: str, tokens: int) -> float:
    """Tokens a second of one run of the peer, which warms up by itself."""
    n, p = (tokens, 0) if kind == "tg" else (0, tokens)
    command = [options.program, "-m", str(gguf), "-t", str(options.threads), "-n", str(n), "-p", str(p), "-r", "1",
               "-d", str(options.d), "-o", "json", *(setting.split(",") if setting else [])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        (result,) = json.loads(ran.stdout)
        return float(result["avg_ts"])
    except (ValueError, KeyError) as error:
        raise WorkerError(f"{options.name} gave no result ({error}): {ran.stderr.strip()[-200:]}") from None


if __name__ == "__main__":
    main()
