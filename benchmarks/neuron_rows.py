"""FFNs in the layout neuron: dense against tile16, and random rows against streaming reads, interleaved.

Run ``python benchmarks/neuron_rows.py --output docs/neuron.md``. Weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.neuron_report import Reading, write_report
from benchmarks.peers.machine import Others
from edgeinfer.bench import MachineProbe
from edgeinfer.kernels import ACTIVATIONS, LINEAR, NEURON_DOWN, NEURON_GATED, Kernels, abi, choose, fill
from edgeinfer.quant import WeightType
from edgeinfer.runtime import Executor, Program, Record, allocate
from edgeinfer.sizes import round_up

SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
"""Parts of the neurons that a mask chooses."""
LIVE = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
"""Parts of the neurons that are alive where all gates are computed."""


@dataclass(frozen=True)
class Shape:
    """An FFN and how often it stands in memory."""

    hidden: int
    neurons: int
    dtype: str
    group: int
    layers: int

    @property
    def part_bytes(self) -> int:
        """Bytes of a gate row, an up row or a down column."""
        return WeightType(self.dtype, self.group).part_bytes(self.hidden)

    @property
    def tile_bytes(self) -> tuple[int, int]:
        """Bytes of 16 rows of gate and up, and of down, in tile16."""
        stored = WeightType(self.dtype, self.group)
        return stored.tile_bytes(self.hidden), stored.tile_bytes(self.neurons)


def random_memory(rng: np.random.Generator, nbytes: int, rows: int, scales: slice) -> NDArray[np.uint8]:
    """Random codes; each row of the memory has fp16 scales of about 0.002 at `scales`."""
    memory = allocate(nbytes)
    block = rng.integers(0, 256, (4 << 20) // 64 * 64, np.uint8)
    for start in range(0, nbytes, block.size):
        memory[start : start + block.size] = block[: nbytes - start]
    table = memory.reshape(rows, -1)[:, scales]
    table[:] = np.tile(np.float16([0.002, -0.002]).view(np.uint8), table.shape[1] // 4 + 1)[: table.shape[1]]
    return memory


class Bench:
    """Both layouts of the same number of FFNs in memory, and programs over them."""

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.kernels = Kernels(choose())
        s = shape
        n_records = s.layers * (2 * -(-s.neurons // 16) * -(-s.hidden // (2 * s.group))
                                + -(-s.hidden // 16) * -(-s.neurons // (2 * s.group)))
        record = (16 if s.dtype == "q4" else 32) * s.group + 64
        self.tile16 = random_memory(self.rng, n_records * record, n_records, slice(record - 64, record))
        groups = -(-s.hidden // s.group)
        codes = groups * s.group // (2 if s.dtype == "q4" else 1)
        rows = s.layers * s.neurons * 3
        self.neuron = random_memory(self.rng, rows * s.part_bytes, rows, slice(codes, codes + 2 * groups))
        self.q8 = abi.q8_row_bytes(s.hidden, s.group)
        self.f_q8 = abi.q8_row_bytes(s.neurons, s.group)
        self.width, self.f_width = 4 * round_up(s.hidden, 16), 4 * round_up(s.neurons, 16)
        places = {"x": self.width, "q": self.q8[0], "f": self.f_width, "fq": self.f_q8[0],
                  "mask": abi.neuron_mask_bytes(s.neurons), "bias": 2 * self.f_width, "norm": self.width,
                  "sums": abi.neuron_sums_bytes(s.neurons, s.hidden, s.group, s.dtype)}
        self.at: dict[str, tuple[str, int]] = {}
        total = 0
        for name, nbytes in places.items():
            self.at[name] = ("activations", total)
            total += round_up(nbytes, 64) + 64
        self.activations = allocate(total)
        floats(self.activations, self.at["norm"], s.hidden)[:] = 1
        self.token = np.zeros(abi.TOKEN_BYTES // 8, np.int64)
        self.scratch = round_up(max(abi.neuron_gated_scratch_bytes(s.hidden, s.group, s.dtype),
                                    abi.neuron_down_scratch_bytes(),
                                    abi.GATED_SCRATCH_BYTES + self.f_q8[0] + self.width) + 64, 64)

    def executor(self, records: list[Record], weights: NDArray[np.uint8], threads: int) -> Executor:
        """Threads over a program; one token."""
        regions = {"weights": weights, "activations": self.activations, "scratch": allocate(threads * self.scratch)}
        executor = Executor(Program(tuple(records)), self.kernels, threads, regions)
        executor.set_count(abi.COUNT_TOKENS, 1)
        self.token[abi.TOKEN_ROLE // 8] = abi.ROLE_DECODE
        executor.set(abi.CTX_TOKENS, self.token.ctypes.data)
        return executor

    def _fused(self, kind: int, width: int, row: tuple[int, int, int]) -> dict[str, int | float]:
        """Parameters of a product that quantises (and normalises) its one token itself."""
        return {"fused": kind, "width": width, "eps": 1e-5, "group": self.shape.group, "x_stride": row[0],
                "x_scales": row[1], "x_offsets": row[2]}

    def tile16_records(self, threads: int) -> list[Record]:
        """All FFNs in tile16, dense, as a session runs them."""
        s, records = self.shape, []
        gate_up, down = s.tile_bytes
        kernel, chunk_bytes = f"{s.dtype}_g{s.group}", 64 << 10
        gate_tiles, tiles = -(-s.neurons // 16), -(-s.hidden // 16)
        common = {"rows": abi.COUNT_TOKENS, "scratch": self.scratch}
        offset = 0
        for _ in range(s.layers):
            parameters = fill(LINEAR, tiles=gate_tiles, tile_bytes=gate_up, records=-(-s.hidden // (2 * s.group)),
                              out_stride=self.f_width, chunk=max(2, chunk_bytes // (2 * gate_up) // 2 * 2),
                              activation=ACTIVATIONS["silu"], **self._fused(abi.FUSED_NORM, s.hidden, self.q8),
                              **common)
            places = (("weights", offset), self.at["q"], self.at["f"], self.at["bias"], ("scratch", 0), self.at["x"],
                      self.at["norm"])
            records.append(Record(f"gated_{kernel}", "gated", places, tuple(parameters)))
            offset += 2 * gate_tiles * gate_up
            chunk = max(2, min(chunk_bytes // down, tiles // (4 * threads)) // 2 * 2)
            parameters = fill(LINEAR, tiles=tiles, tile_bytes=down, records=-(-s.neurons // (2 * s.group)),
                              out_stride=self.width, chunk=chunk,
                              **self._fused(abi.FUSED_QUANTISE, s.neurons, self.f_q8), **common)
            places = (("weights", offset), self.at["fq"], self.at["x"], self.at["bias"], ("scratch", 0), self.at["f"])
            records.append(Record(f"linear_{kernel}", "down", places, tuple(parameters), abi.FLAG_RESIDUAL))
            offset += tiles * down
        return records

    def neuron_records(self, threads: int, activation: str, flags: int = 0) -> list[Record]:
        """All FFNs in layout neuron."""
        s, records = self.shape, []
        groups = -(-s.hidden // s.group)
        rows, lines = abi.neuron_chunks(s.neurons, s.part_bytes, abi.neuron_lines(s.hidden, s.group, s.dtype), threads)
        common = {"neurons": s.neurons, "part_bytes": s.part_bytes, "groups": groups,
                  "rows": abi.COUNT_TOKENS, "scratch": self.scratch, "block": abi.neuron_block(s.neurons)}
        for layer in range(s.layers):
            weights = ("weights", layer * s.neurons * 3 * s.part_bytes)
            parameters = fill(NEURON_GATED, **common, out_stride=self.f_width, chunk=rows,
                              activation=ACTIVATIONS[activation], **self._fused(abi.FUSED_NORM, s.hidden, self.q8))
            places = (weights, self.at["q"], self.at["f"], self.at["mask"], ("scratch", 0), self.at["bias"],
                      self.at["sums"], self.at["x"], self.at["norm"])
            records.append(Record(f"neuron_gated_{s.dtype}", "gated", places, tuple(parameters), flags))
            parameters = fill(NEURON_DOWN, **common, group=s.group, x_stride=self.f_width, out_stride=self.width,
                              width=s.hidden, chunk=lines)
            places = (weights, self.at["f"], self.at["x"], ("scratch", 0), self.at["norm"], self.at["sums"])
            records.append(Record(f"neuron_down_{s.dtype}", "down", places, tuple(parameters),
                                  abi.FLAG_RESIDUAL | (flags & abi.FLAG_DENSE)))
        return records

    def set_input(self) -> None:
        """Random x: the residual of the last run would grow."""
        floats(self.activations, self.at["x"], self.shape.hidden)[:] = self.rng.standard_normal(self.shape.hidden)

    def set_mask(self, n: int) -> None:
        """Choose n random neurons."""
        bits = np.zeros(8 * abi.neuron_mask_bytes(self.shape.neurons), bool)
        bits[self.rng.choice(self.shape.neurons, n, replace=False)] = True
        start = self.at["mask"][1]
        self.activations[start : start + bits.size // 8] = np.packbits(bits, bitorder="little")

    def set_live(self, n: int) -> None:
        """Gate biases that leave n random neurons alive."""
        gate = np.full(self.shape.neurons, -1e4, np.float32)
        gate[self.rng.choice(self.shape.neurons, n, replace=False)] = 1e4
        floats(self.activations, self.at["bias"], 2 * self.shape.neurons)[: self.shape.neurons] = gate


def floats(memory: NDArray[np.uint8], place: tuple[str, int], n: int) -> NDArray[np.float32]:
    """Floats at a place of the activations."""
    return memory[place[1] : place[1] + 4 * n].view(np.float32)


def seconds(executor: Executor) -> float:
    """Duration of a run."""
    began = time.perf_counter()
    executor.run()
    return time.perf_counter() - began


def measure(bench: Bench, threads: int, rounds: int) -> dict[str, list[Reading]]:
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
    shape = Shape(chosen.hidden, chosen.neurons, chosen.weights, chosen.group_size, chosen.layers)
    bench = Bench(shape)
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
