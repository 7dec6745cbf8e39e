"""Speed of FFNs by neuron in several types: dense, and with dead neurons left out, each beside the same FFN in tiles.

    python benchmarks/neuron_types.py --hidden 2560 --neurons 6912 --types q4:32,q2:128 --live 0.5,0.3,0.1

The sizes above are those of BitNet b1.58 2B4T. Weights are random, and the biases of gates choose which neurons live.
Each reading is one token through all layers, tiles and neurons by turns; ratios are medians of pairs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import machine, row, table
from edgeinfer.bench import FfnBench, FfnShape, seconds
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import default_threads

WARM_UP = 2
HEADINGS = "type | live | tiles, ms | by neuron, ms | tiles / by neuron | MB of all FFNs"


def rows_of(dtype: str, group: int, given: argparse.Namespace) -> list[str]:
    """Time one type; a row for each share of live neurons, the first of all neurons computed."""
    shape = FfnShape(given.hidden, given.neurons, dtype, group, given.layers)
    bench = FfnBench(shape)
    tiles = bench.executor(bench.tile16_instructions(given.threads), bench.tile16, given.threads)
    found = []
    for live in (None, *given.live):
        flags = abi.FLAG_BIAS | (abi.FLAG_DENSE if live is None else 0)
        program = bench.executor(bench.neuron_instructions(given.threads, "relu2", flags), bench.neuron, given.threads)
        bench.set_live(round((live or 1) * given.neurons))
        readings = []
        for _ in range(given.rounds + WARM_UP):
            pair = []
            for executor in (tiles, program):
                bench.set_input()
                pair.append(seconds(executor))
            readings.append(pair)
        program.close()
        times = [1e3 * median(pair[i] for pair in readings[WARM_UP:]) for i in range(2)]
        ratio = median(pair[0] / pair[1] for pair in readings[WARM_UP:])
        found.append(row(f"{dtype} in groups of {group}", "all, dense" if live is None else f"{live:.0%}",
                         *(f"{time:.2f}" for time in times), f"{ratio:.2f}", f"{bench.neuron.nbytes / 1e6:.0f}"))
        print(found[-1], file=sys.stderr, flush=True)
    tiles.close()
    return found


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hidden", type=int, default=2560)
    add("--neurons", type=int, default=6912)
    add("--layers", type=int, default=12, help="FFNs in memory, more than the caches hold (default 12)")
    add("--types", default="q4:32,q2:64,q2:128", help="with groups (q4:32,q2:64,q2:128)")
    add("--live", default="0.5,0.3,0.2,0.1", help="shares of neurons that live")
    add("--rounds", type=int, default=25)
    add("-t", "--threads", type=int, default=default_threads())
    given = parser.parse_args()
    given.live = [float(share) for share in given.live.split(",")]
    types = [(name, int(group)) for name, _, group in (one.partition(":") for one in given.types.split(","))]
    rows = [line for dtype, group in types for line in rows_of(dtype, group, given)]
    print(f"{machine()}; {given.threads} threads; hidden size {given.hidden}, {given.neurons} neurons, "
          f"{given.layers} layers, one token:\n\n{table(HEADINGS, rows)}")


if __name__ == "__main__":
    main()
