"""Time of a forward pass in which decoded tokens and a prompt's chunk share the weights, beside that of its parts.

    python benchmarks/mixed_steps.py --threads 2

Sequences at a depth decode a token each while a chunk of another prompt runs. The pass is measured as it is and with
no attention split along the context, in turns, beside passes over the decoded tokens and over the chunk alone. Keys and
values of the depth are zeros: what attention does does not depend on them. Medians count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence as Items
from contextlib import closing
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import in_turns, machine, row, spread, table
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import builtin_shapes, read_config
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runtime import Session


class Steps:
    """Forward passes over decoding sequences at a depth, and over a chunk of a new one."""

    def __init__(self, session: Session, sequences: int, depth: int, chunk: int):
        self._session, self._split = session, session._split
        self._held = [session.new_sequence() for _ in range(sequences)]
        for sequence in self._held:
            session.reserve(sequence, depth)
            session.append(sequence, [1] * depth)
        self._decoding = [Segment(sequence, (2,), (0,), DECODE) for sequence in self._held]
        self._chunk = Segment(session.new_sequence(), list(range(3, 3 + chunk)), (chunk - 1,))

    def seconds(self, segments: Items[Segment], split: bool = True) -> float:
        """Return the time of one pass, after which the sequences are as before."""
        lengths = [len(segment.sequence) for segment in segments]
        self._session._split = self._split if split else lambda *given: 0  # type: ignore[method-assign]
        start = time.perf_counter()
        self._session.forward(segments)
        passed = time.perf_counter() - start
        for segment, length in zip(segments, lengths, strict=True):
            self._session.truncate(segment.sequence, length)
        return passed

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Milliseconds of each kind of pass, round by round."""
        mixed = [self._chunk, *self._decoding]
        sides = {"decoded alone": partial(self.seconds, self._decoding), "chunk alone": partial(
            self.seconds, [self._chunk]), "mixed": partial(self.seconds, mixed),
            "mixed, nothing split": partial(self.seconds, mixed, split=False)}
        found: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(rounds + 2):
            for side, seconds in in_turns(sides, turn).items():
                found[side] += [1e3 * seconds] if turn > 1 else []  # the first two warm up
        return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8])
    parser.add_argument("--depths", type=int, nargs="+", default=[4096])
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    ctx, rows = max(arguments.depths) + arguments.chunk, []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_random_bundle(read_config({**builtin_shapes()[arguments.shape].config, "max_position_embeddings": ctx}),
                            path)
        for sequences in arguments.sequences:
            for depth in arguments.depths:
                config = RuntimeConfig(threads=arguments.threads, ctx=ctx, max_sequences=sequences + 1)
                with closing(Session(Bundle.open(path), config)) as session:
                    session.settle()
                    times = Steps(session, sequences, depth, arguments.chunk).measure(arguments.rounds)
                pairs = zip(times["mixed, nothing split"], times["mixed"], strict=True)
                gained = [before / after for before, after in pairs]
                rows.append(row(sequences, depth, *(f"{statistics.median(each):.1f}" for each in times.values()),
                                spread(gained)))
                print(rows[-1], flush=True)
    head = f"{machine()}; {arguments.shape}, {arguments.threads} threads, chunk of {arguments.chunk} tokens"
    found = table("sequences | depth | decoded alone, ms | chunk alone, ms | mixed, ms | mixed without splits, ms | "
                  "speed gained by splits", rows, right=True)
    print(f"\n{head}\n\n{found}")


if __name__ == "__main__":
    main()
