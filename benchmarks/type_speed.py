"""Decoding and prompts with matrices of several types, in pairs with the first one, interleaved in one process.

    python benchmarks/type_speed.py --types q4,q2:128 --shape llama-2-7b --layers 4 --bundles FOLDER
    python benchmarks/type_speed.py --types q4,q4+0.5%,q4+2% --shape tinyllama-1.1b --layers 22 --bundles FOLDER

A type may have a group size, and a share of the columns of each matrix that are stored apart as outliers. Models are
random; a bundle that lies in the folder already is taken as it is. --layers takes so many of the shape's layers, and of
its words the same share, so that the head weighs as much as in the whole model.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import in_turns, machine, row, spread, table
from edgeinfer.bench.repetitions import token_ids
from edgeinfer.bench.results import GENERATE, Case
from edgeinfer.bench.traffic import bytes_per_token
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.graph import TypeOf, Weight, requested_types
from edgeinfer.memory_planner import default_threads
from edgeinfer.quant import WeightType
from edgeinfer.runner import Segment
from edgeinfer.runtime import Session

DEPTH = 32
"""Tokens of context before the first one that is timed."""


def bundle_of(folder: Path, shape: str, layers: int, kind: str) -> Path:
    """Return the path of a bundle of a type, which is written if it is not there."""
    stored, _, outliers = kind.partition("+")
    config, (weights, _, group) = SHAPES[shape], stored.partition(":")
    path = folder / f"{shape}-{layers}-{kind.replace(':', 'g').rstrip('%')}"
    if not path.exists():
        words = config.vocab_size * layers // config.num_hidden_layers
        config = replace(config, num_hidden_layers=layers, vocab_size=words)
        types = with_outliers(requested_types(weights, int(group or 32)), float(outliers.rstrip("%") or 0) / 100)
        write_random_bundle(config, path, weights, int(group or 32), types=types)
    return path


def with_outliers(type_of: TypeOf, share: float) -> TypeOf:
    """Return the types of weights with this share of the columns of each matrix apart, as `convert --outliers` does."""
    def typed(weight: Weight) -> WeightType:
        if weight.kind == "outliers":
            return WeightType("f16")
        stored = type_of(weight)
        return replace(stored, outliers=round(share * weight.shape[-1])) if weight.kind == "matrix" else stored

    return typed


def seconds(session: Session, prompt: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of a prompt's token, and of a generated one."""
    ids, sequence = token_ids(session.model.vocab_size), session.new_sequence()

    def run(n: int) -> float:
        session.reserve(sequence, n)
        began = time.perf_counter()
        session.forward([Segment(sequence, [next(ids) for _ in range(n)])])
        return time.perf_counter() - began

    try:
        for _ in range(DEPTH // 16):
            run(16)
        return run(prompt) / prompt, sum(run(1) for _ in range(tokens)) / tokens
    finally:
        session.truncate(sequence, 0)


def main() -> None:
    """Open all types in the threads of the first, and time them in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="q4,q2:128")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-2-7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bundles", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=24)
    asked = parser.parse_args()
    names = asked.types.split(",")
    paths = {name: bundle_of(asked.bundles, asked.shape, asked.layers, name) for name in names}
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name, path in paths.items():
            config = RuntimeConfig(ctx=512, threads=asked.threads, prefill_chunk=asked.prompt)
            sessions[name] = Session(Bundle.open(path), config, host=sessions.get(names[0]))
            stack.callback(sessions[name].close)
        sides = {name: lambda one=one: seconds(one, asked.prompt, asked.tokens) for name, one in sessions.items()}
        in_turns(sides, 0)  # pages are read, the number of threads is found
        found = [in_turns(sides, turn) for turn in range(asked.turns)]
        lines = []
        for name, session in sessions.items():
            nbytes = bytes_per_token(session, Case(GENERATE, 1, DEPTH))
            pp, tg = ([each[names[0]][i] / each[name][i] for each in found] for i in (0, 1))
            lines.append(row(name, f"{nbytes / 1e6:.0f}", f"{nbytes / min(each[name][1] for each in found) / 1e9:.1f}",
                             spread(tg), spread(pp)))
    print(f"{machine()}; {asked.shape}, {asked.layers} layers, {asked.threads} threads\n")
    head = f"type | MB a token | best GB/s | decode, times {names[0]} | prompt of {asked.prompt}, times {names[0]}"
    print(table(head, lines, right=True))


if __name__ == "__main__":
    main()
