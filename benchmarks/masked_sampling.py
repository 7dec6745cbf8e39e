"""Cost of a mask in the sample kernels.

    python benchmarks/masked_sampling.py

A session of a small model with a large vocabulary runs the sample instructions alone, over rows of logits with stated
values, without and with a mask in turns. `peaked` logits are normal with a deviation of 4, as of a model that knows
what comes next; `flat` ones have a deviation of 0.5. A mask allows a share of the tokens, at random; `half` allows half
of them, `few` one in a thousand. The time of a pass over no instruction is subtracted. Medians count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import in_turns, machine, row, table
from edgeinfer.bundle import Bundle
from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.engine import Sampler
from edgeinfer.graph import builtin_shapes, read_config
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runtime import Session

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "default": {},
    "top-k 1000": {"top_k": 1000},
    "nucleus": {"top_k": 0, "min_p": 0.0, "top_p": 0.9},
    "everything": {"top_k": 0, "min_p": 0.0, "top_p": 1.0},
}
DEVIATIONS = {"peaked": 4.0, "flat": 0.5}
SHARES = {"all": 1.0, "half": 0.5, "few": 0.001}
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1}


def random_mask(vocab_size: int, share: float) -> np.ndarray:
    """Words in which this share of the tokens is allowed."""
    allowed = np.random.default_rng(1).random(-(-vocab_size // 32) * 32) < share
    return np.packbits(allowed, bitorder="little").view(np.int32)


class Sampling:
    """Times the sample instructions over one row of logits."""

    def __init__(self, session: Session, deviation: float):
        self._session, self._vocab_size = session, session.model.vocab_size
        kernels = [instruction.kernel for instruction in session.program.instructions]
        self._first, self._stop = kernels.index("sample_edit"), kernels.index("sample_choose") + 1
        logits = np.random.default_rng(0).standard_normal(self._vocab_size) * deviation
        self._sequence = session.new_sequence()
        self._logits = session.forward([Segment(self._sequence, [1], (0,))])
        self._logits[0] = logits
        session.reserve(self._sequence, 1)

    def seconds(self, options: dict[str, Any], share: float | None, repeats: int) -> float:
        """Return the median time of a sample, without a mask if no share is stated."""
        times, mask = [], None if share is None else random_mask(self._vocab_size, share)
        for seed in range(repeats):
            sampler = Sampler(GenerationConfig(**options), self._vocab_size, seed)
            if mask is not None:
                sampler.set_mask(mask)
            segment = Segment(self._sequence, [1], (0,), DECODE, None, (sampler.address,))
            spent = []
            for stop in (self._first, self._stop):
                start = time.perf_counter()
                self._session.forward_range(segment, self._first, stop)
                spent.append(time.perf_counter() - start)
            times.append(spent[1] - spent[0])
        return statistics.median(times)


def measure(session: Session, rounds: int, repeats: int) -> list[str]:
    """Rows of the table."""
    rows = []
    for kind, deviation in DEVIATIONS.items():
        sampling = Sampling(session, deviation)
        for name, options in SETTINGS.items():
            sides = {side: partial(sampling.seconds, options, share, repeats)
                     for side, share in (("plain", None), *SHARES.items())}
            found: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(rounds + 1):
                times = in_turns(sides, turn)
                for side, seconds in times.items() if turn else ():  # the first turn warms up
                    found[side].append(seconds * 1e6)
            plain = statistics.median(found["plain"])
            more = [statistics.median(found[side]) - plain for side in SHARES]
            rows.append(row(kind, name, f"{plain:.0f}", *(f"{value:+.0f}" for value in more)))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    shape = {**builtin_shapes()["smollm2-135m"].config, **SHAPE, "vocab_size": arguments.vocabulary}
    with tempfile.TemporaryDirectory() as directory:
        write_random_bundle(read_config(shape), Path(directory) / "model")
        for threads in arguments.threads:
            config = replace(RuntimeConfig(), threads=threads, ctx=64)
            with closing(Session(Bundle.open(Path(directory) / "model"), config)) as session:
                rows = measure(session, arguments.rounds, arguments.repeats)
            print(f"\n{machine()}; {arguments.vocabulary:,} tokens, {threads} threads\n\n" + table(
                "logits | setting | no mask, us | all allowed, us more | half, us more | few, us more", rows) + "\n")


if __name__ == "__main__":
    main()
