"""Selection of the kernels that are tested on each instruction set.

`python -m tests.kernel_selection` compiles and lists them. README's command tests the best instruction set of the
machine with the kernels that its tests use; `--record` finds these by running the tests and writes them to RECORD. The
rest of this text is about `python -m pytest --all`.

The best instruction set of the machine has all kernels. Of the others the lowest (`generic`) and the one above it are
tested: the code that depends on an instruction set (products of integers, widening, rounding) meets every type of
weights in the plain product, and every loop around it (gates, experts, embedding, screened heads) with a few types;
another type in such a loop would show nothing that neither the type nor the loop has shown. EDGEINFER_TEST_ALL=1 tests
every kernel on every instruction set, EDGEINFER_ISA one instruction set with all kernels, EDGEINFER_TEST_ISAS these.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.kernels import Isa, available, choose
from edgeinfer.kernels.catalogue import WEIGHTS
from edgeinfer.kernels.toolchain import objects, provide

RECORD = Path(__file__).parent / "data" / "kernels.json"
"""Kernels that the tests of each file use in README's tier, and, without a file, the programs that tests start."""
_ONE_GROUP = tuple(end for end in WEIGHTS if end not in ("q4_g64", "q4m_g64", "q4m_g128", "int8_g64"))
LOWER = {
    "linear": _ONE_GROUP,
    "embed": ("q4_g32", "q4_g128", "int8_g32", "q4k_g32", "q6_g16", "mxfp4_g32", "f16", "f32"),
    "gated": ("q4_g32", "q4_g128", "int8_g32", "q4k_g32", "q6_g16", "mxfp4_g32", "f16", "f32"),
    "experts_gated": ("q4_g32", "int8_g32", "mxfp4_g32", "f32"),
    "experts_down": ("q4_g32", "int8_g32", "mxfp4_g32", "f32"),
    "screen_least": ("q4_g64", "int8_g32"),
    "head": ("q4_g64", "int8_g32"),
}
"""Ends of the names of kernels that levels below the best are tested with, by loop; of other loops all kernels are."""
TIER = {
    "linear": ("q4_g32", "q4_g128", "q4m_g32", "q4k_g32", "q6_g16", "int8_g32", "int8_g128", "f16", "f32"),
    "gated": ("q4_g32", "q4_g128", "q4m_g32", "q4k_g32", "int8_g32", "int8_g128", "f16", "f32"),
    "embed": ("q4_g32", "q4m_g32", "q4k_g32", "q6_g16", "int8_g32", "int8_g128", "f16", "f32"),
    "experts_gated": ("q4_g32", "int8_g32", "mxfp4_g32", "f16", "f32"),
    "experts_down": ("q4_g32", "int8_g32", "mxfp4_g32", "f16", "f32"),
    "screen_least": ("q4_g64", "int8_g32"),
    "head": ("q4_g64", "int8_g32"),
}
"""Ends of the names of kernels that README's tier tests, by loop: what most models want, and one of each form."""


def levels() -> list[str]:
    """Names of the ISA levels under test, the best first."""
    if "EDGEINFER_ISA" in os.environ:
        return [choose().name]
    there = [isa.name for isa in available()]
    if asked := os.environ.get("EDGEINFER_TEST_ISAS", "").split():
        return [name for name in there if name in asked]
    return there if everything() else list(dict.fromkeys([there[0], *there[-2:]]))


def isas() -> list[Isa]:
    """Those of `levels`."""
    return [isa for isa in available() if isa.name in levels()]


def other_levels() -> list[str]:
    """Names of the ISA levels of this machine that are not under test."""
    return [isa.name for isa in available() if isa.name not in levels()]


def everything() -> bool:
    """Return whether nothing is to be left out."""
    return os.environ.get("EDGEINFER_TEST_ALL", "0") not in ("", "0")


def takes(isa: str, kernel: str) -> bool:
    """Return whether a kernel is tested on an ISA level."""
    return everything() or isa == levels()[0] or _is_among(kernel, LOWER)


def in_tier(kernel: str) -> bool:
    """Return whether tests of README's tier may want a kernel."""
    return _is_among(kernel, TIER)


def _is_among(kernel: str, chosen: dict[str, tuple[str, ...]]) -> bool:
    """Return whether a kernel is one of those that were chosen, or of a loop in which nothing was chosen."""
    loops = {f"{loop}_{end}": end in ends for loop, ends in chosen.items() for end in WEIGHTS}
    return loops.get(kernel, True)


def kernels_of(isa: Isa) -> list[str]:
    """Names of the kernels that an ISA level is tested with."""
    return [name for name in objects.KernelSet(isa).names if takes(isa.name, name)]


def wanted(files: set[str] | None, all_kernels: bool = False) -> list[str]:
    """Names of the kernels that the tests of some files use, or of all files; with `all_kernels` all there are."""
    if all_kernels:
        return sorted({name for isa in isas() for name in kernels_of(isa)})
    record: dict[str, list[str]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    return sorted({name for file, names in record.items() if files is None or file in files for name in names})


def compile_named(isa: Isa, names: list[str], progress: OnStageProgress | None = None) -> None:
    """Compile those of the named kernels that an ISA level is tested with, unless they are there."""
    there = [name for name in kernels_of(isa) if name in set(names)]
    if there:
        provide.find_objects(objects.KernelSet(isa), there, progress)


def compiled() -> set[str]:
    """ISA level and name of each kernel of the ISA levels under test that the cache has."""
    found = set()
    for isa in isas():
        directory = objects.KernelSet(isa).directory(objects.cache_directory())
        found |= {f"{isa.name}/{path.stem}" for path in directory.glob("*.o")}
    return found


def record() -> None:
    """Run README's tier with no kernel there, and write down who wanted which."""
    with tempfile.TemporaryDirectory() as cache:
        noted = Path(cache) / "noted.json"
        environment = {**os.environ, "EDGEINFER_CACHE": cache}
        command = [sys.executable, "-m", "pytest", "-q", "--record-kernels", str(noted), "-o", "timeout=0"]
        subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], check=True)
        found: dict[str, list[str]] = json.loads(noted.read_text(encoding="utf-8"))
        known = set(kernels_of(isas()[0]))
        directory = next((Path(cache) / "kernels").glob(f"*-{isas()[0].name}-*"))
        noted_names = {name for names in found.values() for name in names}
        found[""] = sorted({path.stem for path in directory.glob("*.o")} - noted_names)
    lines = [f"{json.dumps(file)}: {json.dumps([name for name in names if name in known])}"
             for file, names in sorted(found.items())]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len({name for names in found.values() for name in names} & known)} of {len(known)} kernels: {RECORD}")


def main() -> None:
    """Compile for the ISA levels under test, the best first, as long as there is time; say what is left out."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernel_selection", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="leave an ISA level out that would end later")
    parser.add_argument("--taken", type=Path, default=Path(os.devnull), help="write the names of the ISA levels here")
    parser.add_argument("--left", type=Path, default=Path(os.devnull), help="add what is left out to this file")
    parser.add_argument("--record", action="store_true", help="find out which kernels README's tests use; minutes")
    chosen = parser.parse_args()
    if chosen.record:
        record()
        return
    under_test, taken, began, each = levels(), list[str](), time.monotonic(), 0.0
    for isa in available():
        names, start = kernels_of(isa), time.monotonic()
        more, left = len(objects.KernelSet(isa).names) - len(names), ""
        if isa.name not in under_test:
            left = f"kernels for {isa.name}: the ISA levels around it are tested"
        elif start - began + each * len(names) > chosen.seconds:
            left = f"kernels for {isa.name}: they would take about {each * len(names):.0f} s"
        else:
            compile_named(isa, names)
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
