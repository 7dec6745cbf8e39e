"""Speed of sparse bundles with layers in tiles: what a model costs in which too many neurons of some layers fire.

    python benchmarks/dense_layers.py --shape llama-2-7b --layers 8 --rank 320 --bundles FOLDER

The bundles are those of sparse_speed.py; of the sparse one of 10 %, the first layers are replaced by those of the one
in tiles, as `sparsify` leaves layers whose neurons fire too often, and have no predictor. Without it all layers, by
neuron, run dense.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/dense_layers.py` in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.sparse_speed import Program, make_bundles, measure  # noqa: E402
from edgeinfer.bundle import PREDICTOR_FILE, Bundle, BundleWriter, read_predictor, weights_identity  # noqa: E402
from edgeinfer.config import RuntimeConfig  # noqa: E402
from edgeinfer.graph import build_graph, expected_types  # noqa: E402
from edgeinfer.memory_planner import default_threads  # noqa: E402
from edgeinfer.runtime import Session, everywhere  # noqa: E402
from edgeinfer.technique import recipe_with  # noqa: E402


def write_mixed(tiles: Path, sparse: Path, dense: int, destination: Path) -> None:
    """Write a sparse bundle with the first layers of one in tiles."""
    first = tuple(f"layers.{i}." for i in range(dense))
    with Bundle.open(tiles) as a, Bundle.open(sparse) as b:
        def home(name: str) -> Bundle:
            return a if name.startswith(first) else b

        types = {name: kind for one in (a, b) for name, kind in one.types.items() if home(name) is one}
        graph, predictor = build_graph(b.config, expected_types(types)), read_predictor(b)
        assert predictor is not None
        with BundleWriter(destination, b.config, b.quantisation) as writer:
            entries = [writer.add(weight.name, graph.types[weight.name], weight.shape,
                                  stored(home(weight.name), weight.name)) for weight in graph.weights]
            none = (np.zeros(0, np.uint8),) * dense
            arrays = {name: none + getattr(predictor, name)[dense:] for name in ("inner", "outer", "thresholds")}
            content = b"".join(replace(predictor, **arrays).pack(weights_identity(entries)))
            writer.add_file(PREDICTOR_FILE, content, "predictor")


def stored(bundle: Bundle, name: str) -> np.ndarray:
    """A tensor's bytes."""
    entry = bundle.tensors[name]
    return bundle.weights[entry.offset :][: entry.nbytes]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Speed of sparse bundles with layers in tiles.")
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--layers", type=int, help="so many of the shape's layers")
    parser.add_argument("--rank", type=int, default=320)
    parser.add_argument("--bundles", type=Path, default=Path("sparse-speed"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--make-only", action="store_true")
    parser.add_argument("-t", "--threads", type=int, default=default_threads())
    given = parser.parse_args(arguments)
    paths = make_bundles(given.bundles, given.shape, given.layers, given.rank, (0.1,))
    with Bundle.open(paths["10%"]) as bundle:
        n = bundle.config.num_hidden_layers
    wanted = [("dense, tile16", paths["tile16"], "off"), ("dense, by neuron", paths["10%"], "off")]
    for dense in (n - 1, n // 2):
        path = given.bundles / f"{paths['10%'].name}-{dense}-in-tiles"
        if not path.exists():
            write_mixed(paths["tile16"], paths["10%"], dense, path)
        wanted += [(f"{dense} of {n} layers in tiles, others {mode}", path, mode) for mode in ("exact", "predict")]
    if given.make_only:
        return 0
    with ExitStack() as stack:
        programs: list[Program] = []
        for name, path, mode in wanted:
            config = RuntimeConfig(ctx=512, threads=given.threads, mmap=False,
                                   recipe=everywhere(recipe_with(sparse=mode)))
            session = Session(Bundle.open(path), config, host=programs[0].session if programs else None)
            stack.callback(session.close)
            programs.append(Program(name, session, mode))
        measure(programs, 1000, 8, given.seconds)
        print("| program | tokens/s | against tile16, by rounds |\n|---|---:|---:|")
        for program in programs:
            ratios = [a / b for a, b in zip(programs[0].seconds, program.seconds, strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            print(f"| {program.name} | {1 / median(program.seconds):.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
