"""Gain of guesses beside llama.cpp's: the same draft, the same guesses, the same share of them right, in one run.

    python benchmarks/speculation_peers.py --python PEER_PYTHON --shape llama-2-7b --draft smollm2-135m --accept 0.75

Models have random weights in the shapes of well-known ones; a text is replayed, and which guesses are right is stated
(benchmarks/peers/guessing.py), so both sides walk the same numbers of tokens with both models. They take turns: without
guesses and with them, round by round, and each gain is that of neighbouring turns. Without --draft guesses cost
nothing, as those of prompt lookup do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.machine import calm_rounds, describe
from benchmarks.peers.sides import Models
from benchmarks.peers.worker import Worker
from benchmarks.sections import replace_section
from edgeinfer import __version__

HERE = Path(__file__).parent / "peers"
OURS, THEIRS = "edgeinfer", "llama.cpp"


def main() -> None:
    """Measure and print, or write a section of a document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", required=True, help="of an environment with llama-cpp-python, gguf and numpy")
    parser.add_argument("--models", type=Path, required=True, help="folder for the models, which stay there")
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--draft", help="shape of the draft")
    parser.add_argument("--accept", type=float, nargs="+", default=[0.75])
    parser.add_argument("--guesses", type=int, nargs="+", default=[3])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for calm rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mapped", action="store_true", help="llama.cpp's weights stay as they lie in the file, not "
                        "rearranged for its fastest kernels (needed where those for AMX fail, as in some machines)")
    parser.add_argument("--output", type=Path, help="a Markdown file whose section is replaced")
    options = parser.parse_args()
    models, rows = Models(options.models, lambda said: print(said, file=sys.stderr, flush=True)), []
    paths = {side: [str(path(shape)) for shape in (options.shape, options.draft) if shape] for side, path in (
        (OURS, lambda shape: models.bundle(shape, 32)),
        (THEIRS, lambda shape: models.gguf(options.python, shape, "q4_0")))}
    ctx = options.depth + options.tokens + 64
    with Worker(OURS, [sys.executable, str(HERE / "edgeinfer_worker.py")]) as ours, \
            Worker(THEIRS, [options.python, str(HERE / "llama_cpp_worker.py")]) as theirs:
        sides = {OURS: ours, THEIRS: theirs}
        for name, worker in sides.items():
            mapped = {"mapped": True} if options.mapped and name == THEIRS else {}
            worker.ask("load", path=paths[name][0], threads=options.threads, **mapped)
            worker.ask("context", ctx=ctx, **({"outputs": 16} if name == OURS else {}))
            if options.draft:
                worker.ask("draft", path=paths[name][1], ctx=ctx, **mapped)
        for accept in options.accept:
            for guesses in options.guesses:
                row = compare(sides, options, accept, guesses)
                rows.append(f"| {options.shape} | {options.draft or 'none'} | {accept} | {guesses} | " + " | ".join(row)
                            + " |")
                print(rows[-1], flush=True)
    table = "\n".join([
        "| model | draft | right | guesses | our gain | llama.cpp's | our speed beside llama.cpp's | medians of |",
        "|---|---|---|---|---|---|---|---|", *rows])
    page = f"{describe()}, edgeinfer {__version__}, {options.threads} threads:\n\n{table}"
    if options.output:
        replace_section(options.output, "speculation-peers", page)
    else:
        print(page)


def compare(sides: dict[str, Worker], options: argparse.Namespace, accept: float, guesses: int) -> list[str]:
    """Both sides in turns; returns the cells of a row."""
    order = list(sides)

    def once() -> tuple[dict[str, float], float]:
        gains, took = {}, {}
        order.reverse()
        for name in order:
            ask = {"tokens": options.tokens, "depth": options.depth, "accept": accept}
            plain = sides[name].ask("guess", guesses=0, **ask)["seconds"]
            took[name] = sides[name].ask("guess", guesses=guesses, draft=bool(options.draft), **ask)["seconds"]
            gains[name] = plain / took[name]
        return gains, took[THEIRS] / took[OURS]

    once()  # warms up
    done = calm_rounds(once, options.rounds, options.patience)
    gains, beside = zip(*done.results, strict=True)
    return [*(f"{statistics.median(each[name] for each in gains):.2f}" for name in sides),
            f"{statistics.median(beside):.2f}", str(done)]


if __name__ == "__main__":
    main()
