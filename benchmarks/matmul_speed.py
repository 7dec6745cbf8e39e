"""The matmul kernels of several types alone: one thread, weights of one matrix, least and median time, in turns.

    EDGEINFER_ISA=avx2 python benchmarks/matmul_speed.py --types q4k,q5,q6:16,mxfp4 --tokens 64
    python benchmarks/matmul_speed.py --types q4,q4k,q6:16 --tokens 1 --rows 49152      # weights that fit no cache

A type may have a group size. The least of many short turns says what a kernel can do even where others use the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import in_turns, machine, row, spread, table
from edgeinfer.kernels import abi, choose
from tests.helpers.kernel_bench import function
from tests.kernels.test_matmul import random_matmul


def turn_of(kind: str, asked: argparse.Namespace, isa: str) -> tuple[Callable[[], float], int]:
    """Return a function that runs a type's matmul and gives its seconds, and the bytes of the weights."""
    name, _, group = kind.partition(":")
    matmul = random_matmul(np.random.default_rng(0), name, int(group or 32), asked.rows, asked.columns, asked.tokens)
    kernel, bench = function(isa, matmul.name), matmul.bench
    bench.tokens([0] * asked.tokens)
    data = matmul.x.memory(isa, slice(0, asked.tokens))
    bench.array(matmul.operands[1], np.uint8, (data.size,))[:] = data
    instruction = bench._instruction(matmul.operands, matmul.parameters(isa, chunk=asked.chunk), 0)
    ctx = bench._ctx()

    def turn() -> float:
        ctx.view(np.int64)[abi.CTX_WORK // 8] = 0
        began = time.perf_counter()
        kernel(instruction.ctypes.data, ctx.ctypes.data, 0, 1)
        return time.perf_counter() - began

    turn()
    return turn, matmul.values["tile_bytes"] * asked.rows // 16


def main() -> None:
    """Time the types in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="q4,q4k,q6:16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=8, help="row tiles that are claimed at once")
    parser.add_argument("--turns", type=int, default=60)
    asked = parser.parse_args()
    isa, names = choose().name, asked.types.split(",")
    sides = {name: turn_of(name, asked, isa) for name in names}
    found = [in_turns({name: turn for name, (turn, _) in sides.items()}, n) for n in range(asked.turns)]
    least = {name: min(each[name] for each in found) for name in names}
    lines = [row(name, f"{1e6 * least[name]:.0f}", f"{sides[name][1] / least[name] / 1e9:.1f}",
                 f"{least[names[0]] / least[name]:.2f}", spread([each[names[0]] / each[name] for each in found]))
             for name in names]
    print(f"{machine()}; {asked.rows} x {asked.columns}, tokens: {asked.tokens}, one thread\n")
    head = f"type | least us | GB/s of weights | times {names[0]}, least | times {names[0]}, by turn"
    print(table(head, lines, right=True))


if __name__ == "__main__":
    main()
