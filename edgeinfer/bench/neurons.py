"""FFNs on random weights in both layouts, as programs of the kernels alone, for the probe and benchmarks."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.progress import OnStageProgress

from ..base.units import round_up
from ..devices import PER_MILLE
from ..kernels import ACTIVATIONS, LINEAR, NEURON_DOWN, NEURON_GATED, Kernels, abi, choose, fill
from ..quant import TYPES, WeightType
from ..runtime import Executor, Instruction, Program, allocate

Operands = tuple[tuple[str, int], ...]
"""Operands of an instruction."""


@dataclass(frozen=True)
class FfnShape:
    """An FFN and how often it is in memory."""

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
    table[:] = np.tile(np.array([0.002, -0.002], np.float16).view(np.uint8), table.shape[1] // 4 + 1)[: table.shape[1]]
    return memory


class FfnBench:
    """Both layouts of the same number of FFNs in memory, and programs over them."""

    def __init__(self, shape: FfnShape, seed: int = 0, progress: OnStageProgress | None = None):
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.kernels = Kernels(choose(), progress)
        s = shape
        n_records = s.layers * (2 * -(-s.neurons // 16) * -(-s.hidden // (2 * s.group))
                                + -(-s.hidden // 16) * -(-s.neurons // (2 * s.group)))
        record = WeightType(s.dtype, s.group).record_bytes
        self.tile16 = random_memory(self.rng, n_records * record, n_records, slice(record - 64, record))
        groups = -(-s.hidden // s.group)
        codes = groups * s.group * TYPES[s.dtype].bits // 8
        rows = s.layers * s.neurons * 3
        self.neuron = random_memory(self.rng, rows * s.part_bytes, rows, slice(codes, codes + 2 * groups))
        self.q8 = abi.q8_row_bytes(s.hidden, s.group)
        self.f_q8 = abi.q8_row_bytes(s.neurons, s.group)
        self.width, self.f_width = 4 * round_up(s.hidden, 16), 4 * round_up(s.neurons, 16)
        operands = {"x": self.width, "q": self.q8[0], "f": self.f_width, "fq": self.f_q8[0],
                  "mask": abi.neuron_mask_bytes(s.neurons), "bias": 2 * self.f_width, "norm": self.width,
                  "sums": abi.neuron_sums_bytes(s.neurons, s.hidden, s.group, s.dtype)}
        self.at: dict[str, tuple[str, int]] = {}
        total = 0
        for name, nbytes in operands.items():
            self.at[name] = ("activations", total)
            total += round_up(nbytes, 64) + 64
        self.activations = allocate(total)
        floats(self.activations, self.at["norm"], s.hidden)[:] = 1
        self.token = np.zeros(abi.TOKEN_BYTES // 8, np.int64)
        self.scratch = round_up(max(abi.neuron_gated_scratch_bytes(s.hidden, s.group, s.dtype),
                                    abi.neuron_down_scratch_bytes(),
                                    abi.GATED_SCRATCH_BYTES + self.f_q8[0] + self.width) + 64, 64)

    def executor(self, instructions: list[Instruction], weights: NDArray[np.uint8], threads: int) -> Executor:
        """Threads over a program; one token."""
        regions = {"weights": weights, "activations": self.activations, "scratch": allocate(threads * self.scratch)}
        executor = Executor(Program(tuple(instructions)), self.kernels, threads, regions)
        executor.set_count(abi.COUNT_TOKENS, 1)
        self.token[abi.TOKEN_ROLE // 8] = abi.ROLE_DECODE
        executor.set(abi.CTX_TOKENS, self.token.ctypes.data)
        return executor

    def _fused(self, kind: int, width: int, row: tuple[int, int, int]) -> dict[str, int | float]:
        """Parameters of a product that quantises (and normalises) its one token itself."""
        return {"fused": kind, "width": width, "eps": 1e-5, "group": self.shape.group, "x_stride": row[0],
                "x_scales": row[1], "x_offsets": row[2]}

    def tile16_instructions(self, threads: int) -> list[Instruction]:
        """All FFNs in tile16, dense, as a session runs them."""
        s, instructions = self.shape, []
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
            operands: Operands = (("weights", offset), self.at["q"], self.at["f"], self.at["bias"], ("scratch", 0),
                              self.at["x"], self.at["norm"])
            instructions.append(Instruction(f"gated_{kernel}", "gated", operands, tuple(parameters)))
            offset += 2 * gate_tiles * gate_up
            chunk = max(2, min(chunk_bytes // down, tiles // (4 * threads)) // 2 * 2)
            parameters = fill(LINEAR, tiles=tiles, tile_bytes=down, records=-(-s.neurons // (2 * s.group)),
                              out_stride=self.width, chunk=chunk,
                              **self._fused(abi.FUSED_QUANTISE, s.neurons, self.f_q8), **common)
            operands = (("weights", offset), self.at["fq"], self.at["x"], self.at["bias"], ("scratch", 0), self.at["f"])
            instructions.append(Instruction(f"linear_{kernel}", "down", operands, tuple(parameters), abi.FLAG_RESIDUAL))
            offset += tiles * down
        return instructions

    def neuron_instructions(self, threads: int, activation: str, flags: int = 0) -> list[Instruction]:
        """All FFNs in layout neuron."""
        s, instructions = self.shape, []
        groups = -(-s.hidden // s.group)
        lines = abi.neuron_lines(s.hidden, s.group, s.dtype)
        rows, lines = abi.neuron_chunks(s.neurons, s.part_bytes, lines, threads, s.dtype)
        common = {"neurons": s.neurons, "part_bytes": s.part_bytes, "groups": groups,
                  "rows": abi.COUNT_TOKENS, "scratch": self.scratch, "block": abi.neuron_block(s.neurons)}
        for layer in range(s.layers):
            weights = ("weights", layer * s.neurons * 3 * s.part_bytes)
            parameters = fill(NEURON_GATED, **common, out_stride=self.f_width, chunk=rows,
                              activation=ACTIVATIONS[activation], **self._fused(abi.FUSED_NORM, s.hidden, self.q8))
            operands: Operands = (weights, self.at["q"], self.at["f"], self.at["mask"], ("scratch", 0), self.at["bias"],
                              self.at["sums"], self.at["x"], self.at["norm"])
            instructions.append(Instruction(f"neuron_gated_{s.dtype}", "gated", operands, tuple(parameters), flags))
            parameters = fill(NEURON_DOWN, **common, group=s.group, x_stride=self.f_width, out_stride=self.width,
                              width=s.hidden, chunk=lines)
            operands = (weights, self.at["f"], self.at["x"], ("scratch", 0), self.at["norm"], self.at["sums"])
            instructions.append(Instruction(f"neuron_down_{s.dtype}", "down", operands, tuple(parameters),
                                  abi.FLAG_RESIDUAL | (flags & abi.FLAG_DENSE)))
        return instructions

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


def floats(memory: NDArray[np.uint8], operand: tuple[str, int], n: int) -> NDArray[np.float32]:
    """Floats at an offset of the activations."""
    return memory[operand[1] : operand[1] + 4 * n].view(np.float32)


def seconds(executor: Executor) -> float:
    """Duration of a run."""
    began = time.perf_counter()
    executor.run()
    return time.perf_counter() - began


HIDDEN, NEURONS, MAX_LAYERS = 4096, 11008, 3
"""Sizes of the FFN that the probe times, Llama-2-7B's in q4 with groups of 32; the layers exceed the caches."""
ROUNDS = 4


@dataclass(frozen=True)
class NeuronSpeed:
    """Speed of reading neurons, as a share of the speed of tiles."""

    masked: list[tuple[int, float]]
    """Times by chosen neurons in a thousand."""
    gates: list[tuple[int, float]]
    """Times by live neurons in a thousand, if all gates are computed."""
    dense: float


def neuron_speed(threads: int, nbytes: int, tell: OnStageProgress, rounds: int = ROUNDS) -> NeuronSpeed:
    """Time FFNs by neuron at several densities, each between two of the same FFNs in tiles; medians over the rounds.

    `nbytes` is the memory to take; with few bytes the caches are measured.
    """
    part = FfnShape(HIDDEN, NEURONS, "q4", 32, 1).part_bytes
    most = nbytes // 2 // (3 * part)
    layers = max(1, min(MAX_LAYERS, most // NEURONS))
    shape = FfnShape(HIDDEN, max(64, min(NEURONS, most // layers) // 64 * 64), "q4", 32, layers)
    bench = FfnBench(shape, progress=tell)
    programs = {name: bench.executor(instructions, memory, threads) for name, instructions, memory in (
        ("tiles", bench.tile16_instructions(threads), bench.tile16),
        ("off", bench.neuron_instructions(threads, "relu", abi.FLAG_DENSE), bench.neuron),
        ("predict", bench.neuron_instructions(threads, "relu", abi.FLAG_MASK | abi.FLAG_DENSE), bench.neuron),
        ("exact", bench.neuron_instructions(threads, "relu", abi.FLAG_BIAS), bench.neuron))}
    points = [("off", 1000), *((mode, density) for mode in ("predict", "exact") for density in PER_MILLE)]
    found: dict[tuple[str, int], list[float]] = {point: [] for point in points}
    try:
        for number in range(rounds + 1):  # the first warms up threads and caches
            tell(number, rounds + 1, f"{layers} FFNs by neuron, {len(points)} densities")
            for mode, density in points:
                n = round(density / 1000 * shape.neurons)
                if mode != "off":
                    (bench.set_mask if mode == "predict" else bench.set_live)(n)
                useful = (1 + 2 * density / 1000) / 3 if mode == "exact" else density / 1000
                before, own, after = (_reading(bench, programs[name]) for name in ("tiles", mode, "tiles"))
                found[mode, density] += [useful * (before + after) / 2 / own] if number else []
    finally:
        for executor in programs.values():
            executor.close()
    curves = {mode: [(density, statistics.median(found[mode, density])) for density in PER_MILLE]
              for mode in ("predict", "exact")}
    return NeuronSpeed(curves["predict"], curves["exact"], statistics.median(found["off", 1000]))


def _reading(bench: FfnBench, executor: Executor) -> float:
    bench.set_input()
    return seconds(executor)
