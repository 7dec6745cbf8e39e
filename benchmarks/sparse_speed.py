"""Speed of sparse FFNs in memory: exact and predicted against both dense layouts, interleaved in one process.

    python benchmarks/sparse_speed.py --shape tinyllama-1.1b --rank 128 --bundles FOLDER [--make-only] [--profile]

Models are random (converters/random_neurons.py), all with a ReLU and biases in their FFN; a bundle that lies in the
folder already is taken as it is. Masks choose as many neurons as fire, and nearly those, so that a predicted token
reads all three parts of what its masks choose. --layers takes so many of the shape's layers, and of its words the same
share, so that the head weighs as much as in the whole model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/sparse_speed.py` in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.peers.machine import Others, describe  # noqa: E402
from edgeinfer import __version__  # noqa: E402
from edgeinfer.bench import neuron_speed  # noqa: E402
from edgeinfer.bench.profile import make_profile  # noqa: E402
from edgeinfer.bench.repetitions import token_ids  # noqa: E402
from edgeinfer.bench.results import GENERATE, Case  # noqa: E402
from edgeinfer.bench.traffic import bytes_per_token  # noqa: E402
from edgeinfer.bundle import Bundle, read_predictor  # noqa: E402
from edgeinfer.config import RuntimeConfig  # noqa: E402
from edgeinfer.converters import SHAPES, Sparsity, write_random_bundle  # noqa: E402
from edgeinfer.devices import DENSE_SHARE, GATES_SHARE, MASKED_SHARE, break_even_density, parse_profile  # noqa: E402
from edgeinfer.graph import ModelConfig, NeuronGated  # noqa: E402
from edgeinfer.memory_planner import default_threads  # noqa: E402
from edgeinfer.runner import DECODE, Segment  # noqa: E402
from edgeinfer.runtime import Session, everywhere  # noqa: E402
from edgeinfer.runtime.taps import View  # noqa: E402
from edgeinfer.technique import recipe_with  # noqa: E402
from edgeinfer.text import Tokenizer  # noqa: E402

DENSITIES = (0.1, 0.2)
SWEPT = (0.3, 0.5, 0.7, 0.9)
"""Densities of the search for the break-even."""
TOGETHER = (1, 2, 4, 8)
"""Tokens of a walk."""
DEPTH, WARM_UP = 32, 2
"""Tokens of context before each reading, and tokens generated before its clock runs."""
WATCHED, TEXT_TOKENS = 128, 512
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
    """Of a token, by round."""

    def gigabytes(self) -> float:
        """What a token reads: of the FFNs what `chosen` and `fired` leave, of everything else all."""
        session, bundle = self.session, self.session.bundle
        ffn = sum(entry.nbytes for entry in bundle.tensors.values() if entry.type.layout == "neuron")
        return (bytes_per_token(session, Case(GENERATE, 1, DEPTH))
                - ffn * (1 - self.chosen / 3 - 2 * self.fired / 3)) / 1e9

    def predictor_megabytes(self) -> float:
        """Bytes of it that a token reads."""
        predictor = read_predictor(self.session.bundle) if self.mode == "predict" else None
        return predictor.nbytes / 1e6 if predictor else 0.0


def make_bundles(folder: Path, shape: str, layers: int | None, rank: int,
                 densities: tuple[float, ...] = DENSITIES) -> dict[str, Path]:
    """Return the bundles' paths, and write those that are not there."""
    config = SHAPES[shape]
    if layers:
        words = config.vocab_size * layers // config.num_hidden_layers
        config = replace(config, num_hidden_layers=layers, vocab_size=words)
    paths = {"tile16": folder / f"{shape}-{config.num_hidden_layers}-tile16"}
    if not paths["tile16"].exists():
        write_random_bundle(replace(config, hidden_act="relu", mlp_bias=True), paths["tile16"])
    for density in densities:
        path = paths[f"{density:.0%}"] = folder / f"{shape}-{config.num_hidden_layers}-{density * 100:.0f}"
        if not path.exists():
            write_random_bundle(config, path, ffn_layout="neuron",
                                sparsity=Sparsity(density, predictor="lowrank", rank=rank))
    return paths


def watch(session: Session, tokens: int = WATCHED, together: int = 1,
          ids: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Walk tokens in decode role; by layer and neuron, for how many it fires, and how many masks choose it (none: all).

    Of several `together` one is enough. Tokens are random unless `ids` has them.
    """
    sequence, drawn = session.new_sequence(), token_ids(session.model.vocab_size)
    segment = Segment(sequence, ids or [next(drawn) for _ in range(tokens)], role=DECODE)
    session.reserve(sequence, tokens)
    view, start, fired, chosen = View(session, tokens), 0, [], []
    for i, record in enumerate(session.program.records):
        op = record.op
        if isinstance(op, NeuronGated):
            session.walk_range(segment, start, i + 1)
            start = i + 1
            fired.append(counted(view.floats(op.out) != 0, together))
            bits = np.unpackbits(np.ascontiguousarray(view.floats(op.mask)).view(np.uint8), axis=1, bitorder="little") \
                if op.mask else np.ones((tokens, op.out.width), np.uint8)
            chosen.append(counted(bits[:, : op.out.width] != 0, together))
    session.truncate(sequence, 0)
    return np.array(fired), np.array(chosen)


def counted(found: np.ndarray, together: int) -> np.ndarray:
    """Of (tokens, neurons), by neuron, the groups of so many tokens in which one has it."""
    return found.reshape(-1, together, found.shape[1]).any(axis=1).sum(axis=0, dtype=np.int64)


def open_programs(paths: dict[str, Path], threads: int, stack: ExitStack) -> list[Program]:
    """Open every program in the threads of the first, and count what each chooses."""
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
            program.session.rewind(sequence, DEPTH)
        if time.perf_counter() > deadline:
            return


def measure_together(programs: list[Program], seconds: float) -> str:
    """Walks of several decoded tokens, a table in Markdown: neurons of their union, and time against one token's."""
    times: dict[tuple[str, int], list[float]] = {(p.name, n): [] for p in programs for n in TOGETHER}
    ids, deadline = token_ids(programs[0].session.model.vocab_size), time.perf_counter() + seconds
    sequences = [program.session.new_sequence() for program in programs]
    while time.perf_counter() < deadline:
        for program, sequence in zip(programs, sequences, strict=True):
            for n in TOGETHER:
                program.session.truncate(sequence, 0)
                segment = Segment(sequence, [next(ids) for _ in range(n)], (n - 1,), DECODE)
                began = time.perf_counter()
                program.session.walk([segment])
                times[program.name, n].append(time.perf_counter() - began)
    lines = ["| program | tokens together | neurons of their union | time of one token |", "|---|---:|---:|---:|"]
    for program, sequence in zip(programs, sequences, strict=True):
        program.session.release(sequence)
        for n in TOGETHER:
            fired, chosen = watch(program.session, together=n)
            share = (chosen if program.mode == "predict" else fired).mean() / (WATCHED // n)
            ratios = [a / b for a, b in zip(times[program.name, n][1:], times[program.name, 1][1:], strict=True)]
            lines.append(f"| {program.name} | {n} | {1 if program.mode == 'off' else share:.0%} "
                         f"| {median(ratios):.2f} |")
    return "\n".join(lines)


def unions_of_text(path: Path, text: Path, threads: int) -> str:
    """Neurons that fire in some of several neighbouring tokens of a text, by layer, a table in Markdown."""
    words = text.read_text(encoding="utf-8")[: 16 * TEXT_TOKENS]
    ids = Tokenizer.open(path, {}).encode(words)[:TEXT_TOKENS]
    ids = ids[: len(ids) // TOGETHER[-1] * TOGETHER[-1]]
    session = Session(Bundle.open(path), RuntimeConfig(ctx=len(ids), threads=threads, prefill_chunk=len(ids)))
    lines = ["| tokens together | by layer |", "|---:|---|"]
    for n in TOGETHER:
        fired = watch(session, len(ids), n, ids)[0].mean(axis=1) / (len(ids) // n)
        lines.append(f"| {n} | {', '.join(f'{share:.0%}' for share in fired)} |")
    session.close()
    return "\n".join(lines)


def measure_break_even(paths: dict[str, Path], threads: int, seconds: float, stack: ExitStack) -> str:
    """Each mode against dense by density, a table in Markdown, and where they cross: as measured, and as predicted."""
    sessions: dict[tuple[str, str], Program] = {}
    for density in SWEPT:
        for mode in ("off", "exact", "predict"):
            config = RuntimeConfig(ctx=256, threads=threads, prefill_chunk=WATCHED,
                                   recipe=everywhere(recipe_with(sparse=mode)))
            host = next(iter(sessions.values())).session if sessions else None
            session = Session(Bundle.open(paths[f"{density:.0%}"]), config, host=host)
            stack.callback(session.close)
            program = sessions[f"{density:.0%}", mode] = Program(f"{mode}, {density:.0%}", session, mode)
            fired, chosen = watch(session)
            program.fired, program.chosen = fired.mean() / WATCHED, chosen.mean() / WATCHED
    measure(list(sessions.values()), 1000, 4, seconds)
    speed = neuron_speed(threads, 1 << 30, lambda *_: None)
    device = parse_profile("here", {
        "title": "here", "device_class": "local", "memory_bytes": 1 << 30, "bandwidth_gbs": 1.0, "cores": threads,
        "isa": "generic", "figures": {DENSE_SHARE: speed.dense},
        "curves": {MASKED_SHARE: [list(x) for x in speed.masked], GATES_SHARE: [list(x) for x in speed.gates]},
    }, "the probe")
    lines = ["| mode | " + " | ".join(f"{d:.0%}" for d in SWEPT) + " | break-even measured | predicted |",
             "|---|" + "---:|" * (len(SWEPT) + 2)]
    for mode in ("exact", "predict"):
        points = []
        for density in SWEPT:
            own, dense = sessions[f"{density:.0%}", mode], sessions[f"{density:.0%}", "off"]
            ratio = median(b / a for a, b in zip(own.seconds, dense.seconds, strict=True))
            points.append((own.chosen if mode == "predict" else own.fired, ratio))
        sparse = sessions[f"{SWEPT[0]:.0%}", mode].session.sparse
        predicted = break_even_density(device, mode, sparse.predictor if sparse else 0.0)
        lines.append(f"| {mode} | " + " | ".join(f"{ratio:.2f}" for _, ratio in points)
                     + f" | {crossing(points)} | {predicted:.0%} |")
    return "\n".join(lines)


def crossing(points: list[tuple[float, float]]) -> str:
    """Density at which the ratio falls below 1, on the straight line between the two points around it."""
    for (low, a), (high, b) in pairwise(points):
        if a > 1 >= b:
            return f"{low + (high - low) * (a - 1) / (a - b):.0%}"
    return f"above {points[-1][0]:.0%}" if points[-1][1] > 1 else f"below {points[0][0]:.0%}"


def profile(program: Program, tokens: int) -> str:
    """Milliseconds of a token by operation, the longest first."""
    session, ids = program.session, token_ids(program.session.model.vocab_size)
    sequence = session.new_sequence()
    session.prefill(sequence, [next(ids) for _ in range(DEPTH)])
    session.executor.start_profile()
    for _ in range(tokens):
        session.decode([sequence], [next(ids)])
    nanoseconds = [int(ns) for ns in session.executor.stop_profile()]
    session.release(sequence)
    made = make_profile(session, Case(GENERATE, tokens, DEPTH), nanoseconds)
    return ", ".join(f"{item.operation} {1e3 * item.seconds:.2f}" for item in made.operations[:12])


def report(programs: list[Program], head: str) -> str:
    """The table, in Markdown, against the dense layout that is faster: medians over the rounds, and best readings."""
    dense = min(programs[:2], key=lambda program: median(program.seconds))
    quickest = min(min(program.seconds) for program in programs[:2])
    lines = [head, "", "| program | tokens/s | best | against the faster dense, by rounds | best against best "
             "| gates computed | neurons computed | GB a token | of it predictor, MB |",
             "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for program in programs:
        ratios = [a / b for a, b in zip(dense.seconds, program.seconds, strict=True)]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        lines.append(f"| {program.name} | {1 / median(program.seconds):.1f} | {1 / min(program.seconds):.1f} "
                     f"| {middle:.2f} (half of them {low:.2f} to {high:.2f}) "
                     f"| {quickest / min(program.seconds):.2f} | {program.chosen:.1%} | {program.fired:.1%} "
                     f"| {program.gigabytes():.3f} | {program.predictor_megabytes():.1f} |")
    return "\n".join(lines)


def head_of(config: ModelConfig, shape: str, session: Session, rank: int, rounds: int, tokens: int) -> str:
    """What was measured, and on what."""
    whole = SHAPES[shape]
    part = "" if config.num_hidden_layers == whole.num_hidden_layers else \
        f", {config.num_hidden_layers} of its {whole.num_hidden_layers} layers and {config.vocab_size} of its words"
    return (f"{shape}{part}, ReLU, q4 in groups of 32, predictor of rank {rank} "
            f"({rank / config.hidden_size:.1%} of hidden_size), {session.config.threads} threads; {rounds} rounds of "
            f"{tokens} tokens. {', '.join(describe().values())}; {session.isa}; edgeinfer {__version__}, numba "
            f"{version('numba')}.")


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
    parser.add_argument("--together", action="store_true", help="walk 1, 2, 4 and 8 tokens together instead")
    parser.add_argument("--model", type=Path, help="with --together: a bundle by neuron whose union is counted instead")
    parser.add_argument("--text", type=Path, help="with --model: over this text")
    parser.add_argument("--break-even", action="store_true", help="sweep the density instead, against dense")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    given = parser.parse_args(arguments)
    if given.model:
        print(unions_of_text(given.model, given.text, given.threads))
        return 0
    paths = make_bundles(given.bundles, given.shape, given.layers, given.rank,
                         SWEPT if given.break_even else DENSITIES)
    if given.make_only:
        return 0
    with ExitStack() as stack:
        if given.break_even:
            print(measure_break_even(paths, given.threads, given.seconds, stack))
            return 0
        programs = open_programs(paths, given.threads, stack)
        if given.together:
            print(measure_together(programs[1:], given.seconds))
            return 0
        others = Others(os.getpid())
        measure(programs, given.rounds, given.tokens, given.seconds)
        first = programs[0].session
        head = head_of(first.model, given.shape, first, given.rank, len(programs[0].seconds), given.tokens)
        print(report(programs, f"{head} Meanwhile other programs kept {others.cores():.1f} cores busy."), flush=True)
        for program in programs if given.profile else []:
            print(f"{program.name}, ms: {profile(program, given.tokens)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
