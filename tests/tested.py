"""Which kernels are tested on which instruction sets; `python -m tests.tested` compiles them and says what is left out.

The best rung of the machine has all kernels. Of the others the lowest (`generic`) and the one above it are tested: what
an instruction set changes (the products of integers, widening, rounding) meets every type of weights in the plain
product, and every loop around it (gates, experts, embedding, screened heads) with a few types; another type in such a
loop would show nothing there that neither the type nor the loop has shown. EDGEINFER_TEST_ALL=1 tests every kernel on
every rung, EDGEINFER_ISA one rung with all kernels, EDGEINFER_TEST_RUNGS these rungs.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from edgeinfer.kernels import Isa, available, choose
from edgeinfer.kernels.catalogue import WEIGHTS, is_foreign
from edgeinfer.kernels.toolchain import objects, provide

_ONE_GROUP = tuple(end for end in WEIGHTS if end not in ("q4_g64", "q4m_g64", "q4m_g128", "int8_g64"))
LOWER = {
    "linear": _ONE_GROUP,
    "embed": _ONE_GROUP,
    "gated": ("q4_g32", "q4_g128", "int8_g32", "q4k_g32", "q6_g16", "mxfp4_g32", "f16", "f32"),
    "experts_gated": ("q4_g32", "int8_g32", "mxfp4_g32", "f32"),
    "experts_down": ("q4_g32", "int8_g32", "mxfp4_g32", "f32"),
    "screen_least": ("q4_g64", "int8_g32"),
    "head": ("q4_g64", "int8_g32"),
}
"""Ends of the names of kernels that rungs below the best are tested with, by loop; of other loops all kernels are."""


def rungs() -> list[str]:
    """Names of the rungs under test, the best first."""
    if "EDGEINFER_ISA" in os.environ:
        return [choose().name]
    there = [isa.name for isa in available()]
    if asked := os.environ.get("EDGEINFER_TEST_RUNGS", "").split():
        return [name for name in there if name in asked]
    return there if everything() else list(dict.fromkeys([there[0], *there[-2:]]))


def everything() -> bool:
    """Whether nothing is to be left out."""
    return os.environ.get("EDGEINFER_TEST_ALL", "0") not in ("", "0")


def takes(isa: str, kernel: str) -> bool:
    """Whether a kernel is tested on a rung."""
    if everything() or isa == rungs()[0]:
        return True
    loops = {f"{loop}_{end}": end in ends for loop, ends in LOWER.items() for end in WEIGHTS}
    return loops.get(kernel, True)


def kernels_of(isa: Isa) -> list[str]:
    """Names of the kernels that a rung is tested with."""
    return [name for name in objects.KernelSet(isa).names if takes(isa.name, name)]


def compile_kernels(isa: Isa, foreign: bool = True) -> None:
    """Compile those that a rung is tested with, unless they are there."""
    provide.find_objects(objects.KernelSet(isa), [name for name in kernels_of(isa) if foreign or not is_foreign(name)])


def main() -> None:
    """Compile for the rungs under test, the best first, as long as there is time; say what is left out."""
    parser = argparse.ArgumentParser(prog="python -m tests.tested", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave a rung out that would end later")
    parser.add_argument("--taken", type=Path, default=Path(os.devnull), help="write the names of the rungs here")
    parser.add_argument("--left", type=Path, default=Path(os.devnull), help="add what is left out to this file")
    chosen = parser.parse_args()
    wanted, taken, began, each = rungs(), list[str](), time.monotonic(), 0.0
    for isa in available():
        names, start = kernels_of(isa), time.monotonic()
        more, left = len(objects.KernelSet(isa).names) - len(names), ""
        if isa.name not in wanted:
            left = f"kernels for {isa.name}: the rungs around it are tested"
        elif start - began + each * len(names) > chosen.seconds:
            left = f"kernels for {isa.name}: they would take about {each * len(names):.0f} s"
        else:
            compile_kernels(isa)
            taken.append(isa.name)
            each = (time.monotonic() - start) / len(names)
            print(f"{isa.name}: {len(names)} kernels, {time.monotonic() - start:.0f} s", flush=True)
            left = f"{more} kernels for {isa.name} whose loops are tested with other types" if more else ""
        if left:
            print(f"left out: {left}", flush=True)
            with chosen.left.open("a") as file:
                file.write(f"{left}\n")
    chosen.taken.write_text(" ".join(taken))


if __name__ == "__main__":
    main()
