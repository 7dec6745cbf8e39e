"""`edgeinfer warmup`: compile this machine's kernels now instead of at the first run."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from .options import Json
from .output import print_json
from .progress import ProgressLine

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
        str | None, typer.Option(metavar="NAME", help="Instruction set.  [default: the best of this machine]")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also those of mixtures of experts and of types that only other formats have.")
    ] = False,
    json: Json = False,
) -> None:
    """Compile the kernels of this machine now.

    They go into the cache; what is there already is kept. Without this a run compiles those that its model needs, and
    without --all it does so for types that only other formats have, and for mixtures of experts. A release brings all
    in its package, and there is nothing to do.

    \b
    Example:
      edgeinfer warmup
    """
    from ..kernels import choose, find_set, package_directory

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
