"""Speed of sparse FFNs in memory: exact and predicted against both dense layouts, interleaved in one process.

    python benchmarks/sparse_speed.py --shape tinyllama-1.1b --rank 128 --bundles FOLDER [--make-only]

Models are random (converters/synthetic/random_neurons.py), all with a ReLU and biases in their FFN; a bundle that lies
in the folder already is taken as it is. Masks choose as many neurons as fire, and nearly those, so that a predicted
token reads all three parts of the chosen neurons. --layers takes so many of the shape's layers, and of its words the
same share, so that the head weighs as much as in the whole model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Others, machine, row, table
from edgeinfer.bench.repetitions import token_ids
from edgeinfer.bench.results import GENERATE, Case
from edgeinfer.bench.traffic import bytes_per_token
from edgeinfer.bundle import Bundle, read_predictor
from edgeinfer.calibration.hooks import View
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import SHAPES, Sparsity, write_random_bundle
from edgeinfer.graph import ModelConfig, NeuronGated
from edgeinfer.memory_planner import default_threads
from edgeinfer.registry import recipe_with
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runtime import Session, everywhere

DENSITIES = (0.1, 0.2)
DEPTH, WARM_UP = 32, 2
"""Tokens of context before each reading, and tokens generated before its clock runs."""
WATCHED = 128
"""Tokens over which densities are counted."""


@dataclass
class Program:
    """One way to run one bundle, and its readings."""

    name: str
    session: Session
    mode: str
    chosen: float = 1.0
    """Share of the neurons whose gates are computed."""
    fired: float = 1.0
    """Share of the neurons that are read and computed whole."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a token, by round."""

    def gigabytes(self) -> float:
        """Return the reads of a token: of FFNs the part that `chosen` and `fired` leave, and all other weights."""
        session, bundle = self.session, self.session.bundle
        ffn = sum(entry.nbytes for entry in bundle.tensors.values() if entry.type.layout == "neuron")
        return (bytes_per_token(session, Case(GENERATE, 1, DEPTH))
                - ffn * (1 - self.chosen / 3 - 2 * self.fired / 3)) / 1e9

    def predictor_megabytes(self) -> float:
        """Bytes of it that a token reads."""
        predictor = read_predictor(self.session.bundle) if self.mode == "predict" else None
        return predictor.nbytes / 1e6 if predictor else 0.0


def make_bundles(folder: Path, shape: str, layers: int | None, rank: int) -> dict[str, Path]:
    """Return the bundles' paths, and write those that are not there."""
    config = SHAPES[shape]
    if layers:
        words = config.vocab_size * layers // config.num_hidden_layers
        config = replace(config, num_hidden_layers=layers, vocab_size=words)
    paths = {"tile16": folder / f"{shape}-{config.num_hidden_layers}-tile16"}
    if not paths["tile16"].exists():
        write_random_bundle(replace(config, hidden_act="relu", mlp_bias=True), paths["tile16"])
    for density in DENSITIES:
        path = paths[f"{density:.0%}"] = folder / f"{shape}-{config.num_hidden_layers}-{density * 100:.0f}"
        if not path.exists():
            write_random_bundle(config, path, ffn_layout="neuron",
                                sparsity=Sparsity(density, predictor="lowrank", rank=rank))
    return paths


def watch(session: Session, tokens: int = WATCHED) -> tuple[np.ndarray, np.ndarray]:
    """Decode tokens; by layer and neuron, return for how many it fires and how many masks choose it (none: all)."""
    sequence, sampled = session.new_sequence(), token_ids(session.model.vocab_size)
    segment = Segment(sequence, [next(sampled) for _ in range(tokens)], role=DECODE)
    session.reserve(sequence, tokens)
    view, start, fired, chosen = View(session, tokens), 0, [], []
    for i, instruction in enumerate(session.program.instructions):
        op = instruction.op
        if isinstance(op, NeuronGated):
            session.forward_range(segment, start, i + 1)
            start = i + 1
            fired.append((view.floats(op.out) != 0).sum(axis=0))
            bits = np.unpackbits(np.ascontiguousarray(view.floats(op.mask)).view(np.uint8), axis=1, bitorder="little") \
                if op.mask else np.ones((tokens, op.out.width), np.uint8)
            chosen.append(bits[:, : op.out.width].sum(axis=0, dtype=np.int64))
    session.truncate(sequence, 0)
    return np.array(fired), np.array(chosen)


def open_programs(paths: dict[str, Path], threads: int, stack: ExitStack) -> list[Program]:
    """Open every program in the threads of the first, and count the choices of each."""
    wanted = [("dense, tile16", "tile16", "off"), ("dense, by neuron", f"{DENSITIES[0]:.0%}", "off")]
    wanted += [(f"{mode}, {density:.0%}", f"{density:.0%}", mode) for density in DENSITIES
               for mode in ("exact", "predict")]
    programs: list[Program] = []
    for name, bundle, mode in wanted:
        recipe = everywhere(recipe_with(sparse=mode))
        config = RuntimeConfig(ctx=512, threads=threads, prefill_chunk=WATCHED, recipe=recipe)
        host = programs[0].session if programs else None
        session = Session(Bundle.open(paths[bundle]), config, host=host)
        stack.callback(session.close)
        programs.append(Program(name, session, mode))
        if mode != "off":
            fired, chosen = watch(session)
            programs[-1].fired, programs[-1].chosen = fired.mean() / WATCHED, chosen.mean() / WATCHED
    return programs


def measure(programs: list[Program], rounds: int, tokens: int, seconds: float) -> None:
    """Take a reading of every program in each round, beginning with another one each time, until time is up."""
    deadline = time.perf_counter() + seconds
    ids = token_ids(programs[0].session.model.vocab_size)
    sequences = [program.session.new_sequence() for program in programs]
    for program, sequence in zip(programs, sequences, strict=True):
        program.session.prefill(sequence, [next(ids) for _ in range(DEPTH)])
    for i in range(rounds):
        for j in range(len(programs)):
            program, sequence = programs[(i + j) % len(programs)], sequences[(i + j) % len(programs)]
            for _ in range(WARM_UP):
                program.session.decode([sequence], [next(ids)])
            began = time.perf_counter()
            for _ in range(tokens):
                program.session.decode([sequence], [next(ids)])
            program.seconds.append((time.perf_counter() - began) / tokens)
            program.session.rollback(sequence, DEPTH)
        if time.perf_counter() > deadline:
            return


def report(programs: list[Program], head: str) -> str:
    """The table, in Markdown, against the dense layout that is faster: medians over the rounds, and best readings."""
    dense = min(programs[:2], key=lambda program: median(program.seconds))
    quickest = min(min(program.seconds) for program in programs[:2])
    rows = []
    for program in programs:
        ratios = [a / b for a, b in zip(dense.seconds, program.seconds, strict=True)]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(row(program.name, f"{1 / median(program.seconds):.1f}", f"{1 / min(program.seconds):.1f}",
                        f"{middle:.2f} (half of them {low:.2f} to {high:.2f})",
                        f"{quickest / min(program.seconds):.2f}", f"{program.chosen:.1%}", f"{program.fired:.1%}",
                        f"{program.gigabytes():.3f}", f"{program.predictor_megabytes():.1f}"))
    columns = ("program | tokens/s | best | against the faster dense, by rounds | best against best | gates computed | "
               "neurons computed | GB a token | of it predictor, MB")
    return f"{head}\n\n{table(columns, rows, right=True)}"


def head_of(config: ModelConfig, shape: str, session: Session, rank: int, rounds: int, tokens: int) -> str:
    """Describe the measurement and its machine."""
    whole = SHAPES[shape]
    part = "" if config.num_hidden_layers == whole.num_hidden_layers else \
        f", {config.num_hidden_layers} of its {whole.num_hidden_layers} layers and {config.vocab_size} of its words"
    return (f"{shape}{part}, ReLU, q4 in groups of 32, predictor of rank {rank} "
            f"({rank / config.hidden_size:.1%} of hidden_size), {session.config.threads} threads; {rounds} rounds of "
            f"{tokens} tokens. {machine()}.")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Speed of sparse FFNs in memory.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--layers", type=int, help="so many of the shape's layers")
    parser.add_argument("--rank", type=int, default=128, help="of the predictor")
    parser.add_argument("--bundles", type=Path, default=Path("sparse-speed"),
                        help="folder of the bundles, made where they lack")
    parser.add_argument("--make-only", action="store_true", help="make the bundles and measure nothing")
    parser.add_argument("--rounds", type=int, default=25, help="at most")
    parser.add_argument("--seconds", type=float, default=60, help="time after which no round begins")
    parser.add_argument("--tokens", type=int, default=8, help="of a reading")
    parser.add_argument("-t", "--threads", type=int, default=default_threads())
    given = parser.parse_args(arguments)
    paths = make_bundles(given.bundles, given.shape, given.layers, given.rank)
    if given.make_only:
        return 0
    with ExitStack() as stack:
        programs = open_programs(paths, given.threads, stack)
        others = Others(os.getpid())
        measure(programs, given.rounds, given.tokens, given.seconds)
        first = programs[0].session
        head = head_of(first.model, given.shape, first, given.rank, len(programs[0].seconds), given.tokens)
        print(report(programs, f"{head} Meanwhile other programs kept {others.cores():.1f} cores busy."), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
