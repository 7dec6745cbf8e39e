"""FFNs in the layout neuron: dense against tile16, and random rows against streaming reads, interleaved.

Run ``python benchmarks/neuron_rows.py --output docs/neuron.md``. Weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.neuron_report import Reading, write_report
from benchmarks.peers.machine import Others
from edgeinfer.bench import FfnBench, FfnShape, MachineProbe, seconds
from edgeinfer.kernels import abi
from edgeinfer.runtime import Executor

SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
"""Parts of the neurons that a mask chooses."""
LIVE = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
"""Parts of the neurons that are alive where all gates are computed."""


def measure(bench: FfnBench, threads: int, rounds: int) -> dict[str, list[Reading]]:
    """Readings by name; those of one round stand beside each other, each with its useful bytes and the bandwidth."""
    s = bench.shape
    whole = s.layers * s.neurons * 3 * s.part_bytes
    out: dict[str, list[Reading]] = {}
    dense = bench.executor(bench.neuron_records(threads, "silu"), bench.neuron, threads)
    masked = bench.executor(bench.neuron_records(threads, "silu", abi.FLAG_MASK), bench.neuron, threads)
    exact = bench.executor(bench.neuron_records(threads, "relu", abi.FLAG_BIAS), bench.neuron, threads)
    tiles = bench.executor(bench.tile16_records(threads), bench.tile16, threads)
    with MachineProbe(threads, 1 << 30) as probe, dense, masked, exact, tiles:

        def read(name: str, executor: Executor, nbytes: float, prepare: Callable[[], object] = int) -> None:
            """One reading: as many runs as make up half of all bytes, each with neurons of its own."""
            before, taken, runs = probe.read_gbs(), 0.0, max(1, round(whole / nbytes / 2))
            for _ in range(runs):
                bench.set_input()
                prepare()
                taken += seconds(executor)
            bandwidth = (before + probe.read_gbs()) / 2
            out.setdefault(name, []).append(Reading(runs * nbytes / taken / 1e9, bandwidth, taken / runs))

        for number in range(rounds + 1):
            read("tile16", tiles, len(bench.tile16))
            read("neuron", dense, whole)
            for share in SHARES:
                n = round(share * s.neurons)
                read(f"mask {share}", masked, whole * n / s.neurons, lambda n=n: bench.set_mask(n))
            for share in LIVE:
                n = round(share * s.neurons)
                read(f"live {share}", exact, whole * (1 + 2 * n / s.neurons) / 3, lambda n=n: bench.set_live(n))
            if number == 0:
                out.clear()  # threads and caches have warmed up
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--weights", choices=("q4", "int8"), default="q4")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=32)
    parser.add_argument("--layers", type=int, default=6, help="FFNs in memory, more than the caches hold")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, help="write the report there; default: standard output")
    chosen = parser.parse_args()
    shape = FfnShape(chosen.hidden, chosen.neurons, chosen.weights, chosen.group_size, chosen.layers)
    bench = FfnBench(shape)
    others = Others(os.getpid())
    results = {threads: measure(bench, threads, chosen.rounds) for threads in chosen.threads}
    head = (f"{shape.layers} FFNs of {shape.hidden} x {shape.neurons} in {shape.dtype}, groups of {shape.group}, "
            f"random weights: {len(bench.tile16) / 1e6:.0f} MB in tile16, {len(bench.neuron) / 1e6:.0f} MB by neuron; "
            f"{chosen.rounds} rounds. Meanwhile other programs kept {others.cores():.1f} cores busy.")
    text = write_report(head, bench.kernels.isa.name, results)
    if chosen.output:
        chosen.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
