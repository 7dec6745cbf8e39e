"""Cost of a forward pass of 2 to 16 tokens beside a pass of one: tokens of one sequence, or one each of several.

    python benchmarks/several_tokens.py --model BUNDLE [--sequences] [--depth 512] [--output PAGE]
    python benchmarks/several_tokens.py --shape tinyllama-1.1b

In one process, in pairs: a pass of so many tokens beside one of a single token, with a row of logits for every token,
as a verification of draft tokens has it; then the sequences are cut back to where they were. A ratio is the median of
those of the pairs during which the host's other guests took least, so that a machine that is slower for a while does
not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import calm_rounds, describe, in_turns, publish, row, table
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.errors import EdgeInferError
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runtime import Session

COUNTS = tuple(range(1, 17))
Found = dict[int, tuple[float, list[float]]]


def tokens_of(n: int, first: int, vocab_size: int) -> list[int]:
    """Some tokens: which ones does not matter to the time."""
    return [(37 * i) % (vocab_size - 3) + 3 for i in range(first, first + n)]


class Passes:
    """A session whose sequences have come to a depth, and the time of forward passes from there."""

    def __init__(self, bundle: Path, depth: int, threads: int | None, counts: tuple[int, ...], side_by_side: bool):
        most = max(counts)
        config = RuntimeConfig(ctx=depth + most, threads=threads, outputs=most,
                               max_sequences=most if side_by_side else 1)
        self.session, self.depth = Session(Bundle.open(bundle), config), depth
        self._vocab_size = self.session.model.vocab_size
        self.sequences = [self.session.new_sequence() for _ in range(most if side_by_side else 1)]
        chunk = self.session.config.prefill_chunk
        for sequence in self.sequences:
            for start in range(0, depth, chunk):
                ids = tokens_of(min(chunk, depth - start), start, self._vocab_size)
                self.session.forward([Segment(sequence, ids)])

    def seconds(self, n: int) -> float:
        """Time of a forward pass of n tokens: of one sequence, or one of each of so many."""
        ids = tokens_of(n, self.depth, self._vocab_size)
        if len(self.sequences) == 1:
            segments = [Segment(self.sequences[0], ids, range(n), DECODE)]
        else:
            segments = [Segment(sequence, [token], [0], DECODE)
                        for sequence, token in zip(self.sequences, ids, strict=False)]
        start = time.perf_counter()
        self.session.forward(segments)
        passed = time.perf_counter() - start
        for segment in segments:
            self.session.rollback(segment.sequence, self.depth)
        return passed


def measure(timed: Passes, counts: tuple[int, ...], rounds: int, patience: float) -> tuple[Found, int, float]:
    """Median of milliseconds and quartiles of the ratio to one token, for each number of tokens; see `Rounds`."""
    found, tried, taken = Found(), 0, 0.0
    for n in counts:
        sides, turns = {each: partial(timed.seconds, each) for each in (1, n)}, count()
        once = partial(lambda sides, turns: in_turns(sides, next(turns)), sides, turns)
        once()  # warms up
        done = calm_rounds(once, rounds, patience / len(counts))
        found[n] = (statistics.median(1000 * each[n] for each in done.results),
                    statistics.quantiles([each[n] / each[1] for each in done.results], n=4))
        tried, taken = tried + done.tried, max(taken, done.taken)
    return found, tried, taken


def report(found: Found, head: str) -> str:
    """A table as Markdown."""
    rows = [row(n, f"{ms:.2f}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{n / ratio:.2f}")
            for n, (ms, (low, ratio, high)) in found.items()]
    return f"{head}\n\n" + table(
        "tokens | ms | time beside one token's | its quartiles | tokens in the time of one", rows)


def run(given: argparse.Namespace, bundle: Path, name: str) -> None:
    """Measure one bundle, print the table and put it into the document."""
    counts = tuple(sorted({1, *given.tokens}))
    timed = Passes(bundle, given.depth, given.threads, counts, given.sequences)
    found, tried, taken = measure(timed, counts, given.rounds, given.patience)
    machine, plan = describe(), timed.session.plan
    kind = "one new token of each of several sequences" if given.sequences else "new tokens of one sequence"
    weights = next(region.nbytes for region in plan.regions if region.name == "weights")
    head = (f"{name}, {weights / 1e6:.0f} MB of weights, {kind} after {given.depth} tokens: {machine['processor']}, "
            f"{machine['cores']}, {plan.request.threads} used, {timed.session.isa}, {time.strftime('%Y-%m-%d')}; "
            f"medians of {given.rounds} pairs each, the calmest of {tried / len(counts):.0f}, during which the host "
            f"took at most {100 * taken:.0f} % of the processors' time.")
    timed.session.close()
    text = report(found, head)
    publish(text, given.output,
            f"several tokens {name} {'side by side' if given.sequences else 'in a chain'} {given.depth}")


def main() -> int:
    """Measure a bundle, or a random one of a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="bundle to measure")
    source.add_argument("--shape", choices=sorted(SHAPES), help="measure a bundle of this shape with random weights")
    parser.add_argument("--name", help="name of the model in the table; by default its shape, or its directory")
    parser.add_argument("--weights", default="q4", help="of a random bundle: q4, int8, f16 or f32")
    parser.add_argument("--tokens", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--sequences", action="store_true", help="one token each of so many sequences")
    parser.add_argument("--depth", type=int, default=16, help="tokens that each sequence has before")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for calm rounds")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, help="Markdown file in which the table is replaced")
    given = parser.parse_args()
    try:
        if given.model:
            run(given, given.model, given.name or given.model.name)
        else:
            with tempfile.TemporaryDirectory() as directory:
                write_random_bundle(SHAPES[given.shape], Path(directory) / "model", weights=given.weights)
                run(given, Path(directory) / "model", given.name or given.shape)
    except EdgeInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
