"""Compile kernels ahead of time: ``python -m edgeinfer.kernels.toolchain``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from edgeinfer.base.cache_dir import make_directories

from ..isa import ISA_LEVELS, choose
from .build import build
from .objects import KernelSet, cache_directory, package_directory
from .provide import find_objects


def _show(done: int, total: int, name: str) -> None:
    if sys.stdout.isatty():
        print(f"\r{done}/{total} {name:<24}", end="", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Compile kernels ahead of time. Without options: the best set of this machine, into the user's cache."""
    parser = argparse.ArgumentParser(prog="python -m edgeinfer.kernels.toolchain", description=main.__doc__)
    parser.add_argument("--all", action="store_true", help="every instruction set, into the package (for a wheel)")
    parser.add_argument("--isa", help="one instruction set of this machine; default: the best")
    parser.add_argument("--into", type=Path, metavar="DIRECTORY", help="into this directory, as for a wheel")
    parser.add_argument("--cached", action="store_true", help="compile only kernels that the user's cache lacks")
    chosen = parser.parse_args(arguments)
    root: Path | None = chosen.into or (package_directory() if chosen.all else None)
    for isa in ISA_LEVELS if chosen.all else [choose(chosen.isa)]:
        start = time.perf_counter()
        wanted = KernelSet(isa)
        directory = wanted.directory(root or cache_directory(), released=root is not None)
        made = (find_objects if chosen.cached else build)(wanted, wanted.names, _show)
        if root:
            directory.mkdir(parents=True, exist_ok=True)
        else:
            make_directories(directory)
        for name, code in made.items():
            wanted.write(directory, name, code)
            if root:
                (directory / f"{name}.o").chmod(0o644)  # readable by all users of the installation
        seconds = time.perf_counter() - start
        line = f"{isa.machine} {isa.name}: {len(wanted.names)} kernels, {seconds:.1f} s"
        print(f"\r{line:<40}" if sys.stdout.isatty() else line, flush=True)


if __name__ == "__main__":
    main()
