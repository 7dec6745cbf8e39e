"""`edgeinfer warmup`: compile this machine's kernels now instead of at the first run."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from ..options import Json
from ..output import print_json
from ..progress import ProgressLine

JSON_FIELDS = {
    "warmup": {
        "isa": "instruction set",
        "directory": "where its kernels are",
        "source": "package (a release brought them) or cache",
        "compiled": "kernels compiled now",
        "seconds": "duration",
    },
}
"""Fields of the JSON object, by command."""


def warmup(
    isa: Annotated[
        str | None, typer.Option(metavar="NAME", help="Instruction set.  [default: the best one of this machine]")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also compile kernels of MoE models and of weight types of other formats.")
    ] = False,
    json: Json = False,
) -> None:
    """Compile the kernels for this machine.

    They are written to the cache; existing kernels are kept. Without warmup, a run compiles the kernels that its model
    needs. Releases contain all kernels, and there is nothing to compile.

    \b
    Example:
      edgeinfer warmup
    """
    from edgeinfer.kernels import choose, find_set, package_directory

    chosen = choose(isa)
    compiled = 0
    began = time.perf_counter()
    with ProgressLine() as progress:
        tell = partial(progress, "compile")

        def count(done: int, total: int, name: str) -> None:
            nonlocal compiled
            compiled = done
            tell(done, total, name)

        directory = find_set(chosen, count, foreign=everything)
    seconds = time.perf_counter() - began
    released = directory.is_relative_to(package_directory())
    if json:
        print_json({"isa": chosen.name, "directory": str(directory), "source": "package" if released else "cache",
                    "compiled": compiled, "seconds": seconds})
    elif compiled:
        print(f"{compiled} kernels for {chosen.name} compiled in {seconds:.1f} s into {directory}.")
    elif released:
        print(f"The kernels for {chosen.name} come with the package, in {directory}.")
    else:
        print(f"The kernels for {chosen.name} are in {directory}.")
