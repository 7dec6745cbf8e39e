"""Decoding with chosen rows of V beside decoding with all, at depth, on scores of a stated skew.

    python benchmarks/topn_speed.py --shape llama-2-7b -d 4096,16384 --attention eps:0.01 [-r 7] [-t 2]

One layer of a known shape with keys and values of the context's whole length, in two sessions that take turns: tokens
with `--attention` and without. Keys are normal, with a part that the 16 of a block have in common, and scaled until
scores have the standard deviation that is asked for (`--skew`): as many rows then matter as in a trained model. Times
are those of the instructions: attention, and the rest of a layer; a token of the whole model is as many layers.
Figures are medians over rounds and, where other work takes time away from the machine, of the calmest ones. The last
line has the depth from which on choosing pays: measured, between the depths where the ratio of attention's times passes
1, beside the estimator's prediction for scores of this skew, with the profile of this machine (or of `--device`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.devices import crossover, load_profile, local_profile
from edgeinfer.errors import EdgeInferError
from edgeinfer.graph.topn_cost import SHARED, SKEW
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import default_threads
from edgeinfer.models.describe import describe
from edgeinfer.registry import recipe_with
from edgeinfer.runtime import Session

TOKENS = 4
"""Decoded in a round."""


def one_layer(shape: str, directory: Path) -> Path:
    """A bundle with one layer of a shape and a small vocabulary."""
    path = directory / shape
    whole = SHAPES[shape]
    layer = replace(whole, num_hidden_layers=1, windows=whole.windows[:1], vocab_size=512,
                    max_position_embeddings=1 << 20)
    write_random_bundle(layer, path)
    return path


class Times(NamedTuple):
    """Milliseconds of a token in one layer."""

    attention: float
    rest: float


class Run:
    """A session at depth.

    Parameters
    ----------
    bundle : Path
    depth, threads : int
    attention : str
    """

    def __init__(self, bundle: Path, depth: int, attention: str, threads: int):
        self.depth = depth
        self.session = Session(Bundle.open(bundle), RuntimeConfig(
            threads=threads, ctx=depth + 16, kv="int8", prefill_chunk=16, recipe=recipe_with(attention=attention)))
        self.sequence = self.session.new_sequence()
        self.session.kv.extend(self.sequence, depth)
        self.sequence.tokens.extend([5] * depth)
        model = self.session.model
        self.heads, self.padded = model.num_key_value_heads, abi.padded_head_dim(model.head_dim)
        self.planes = [plane[0] for plane in self.session.kv.planes[0].arrays]

    def fill(self, scale: float) -> None:
        """Write keys and values of every block."""
        rng, half = np.random.default_rng(0), 16 * self.padded
        some = rng.standard_normal(1 << 22).astype(np.float32)
        k, v, scales = self.planes
        for block in range(k.shape[1]):
            start = rng.integers(0, len(some) - 2 * self.heads * half)
            own = some[start : start + self.heads * half].reshape(self.heads, self.padded // 4, 16, 4)
            start += self.heads * half
            same = some[start : start + self.heads * self.padded].reshape(self.heads, self.padded // 4, 1, 4)
            keys = np.sqrt(SHARED) * same + np.sqrt(1 - SHARED) * own
            k[:, block] = np.clip(keys * 30, -127, 127).astype(np.int8).reshape(self.heads, half).view(np.uint8)
            v[:, block] = rng.integers(-100, 100, (self.heads, half), np.int8).view(np.uint8)
        scales[:] = np.repeat(np.array([[scale / 30], [0.017]], np.float16), 16).view(np.uint8)

    def scores(self) -> np.ndarray:
        """Scores that the last token left: (heads, places)."""
        instruction = next(r for r in self.session.program.instructions if r.kernel.startswith("attention_scores"))
        region, offset = instruction.operands[5]
        heads, row = self.session.model.num_attention_heads, abi.score_row_bytes(self.session.plan.splits)
        data = self.session.executor.regions[region][offset : offset + heads * row].reshape(heads, row)
        return data[:, : 4 * (self.depth + 1)].view(np.float32)

    def decode(self) -> None:
        """One token, and forget it."""
        self.session.decode([self.sequence], [5])
        self.session.rollback(self.sequence, self.depth)

    def times(self) -> Times:
        """Return the times of a token, over a few."""
        self.session.executor.start_profile()
        for _ in range(TOKENS):
            self.decode()
        spent = self.session.executor.stop_profile()
        sums = {True: 0.0, False: 0.0}
        for ns, instruction in zip(spent, self.session.program.instructions, strict=True):
            if instruction.op is not None and instruction.op.layer is not None:
                sums[instruction.kernel.startswith("attention")] += ns / TOKENS / 1e6
        return Times(sums[True], sums[False])

    def blocks_read(self) -> float:
        """Blocks of V that a token reads of a KV head."""
        before = self.session.value_blocks
        self.decode()
        return (self.session.value_blocks - before) / self.heads


def calibrated(bundle: Path, skew: float, threads: int) -> float:
    """Return the scale of keys whose scores have a standard deviation of `skew`."""
    run, scale = Run(bundle, 1024, "eps:0.1", threads), 1.0
    for _ in range(3):
        run.fill(scale)
        run.decode()
        scale *= skew / float(np.median(run.scores()[:, :-1].std(axis=1)))
    run.session.close()
    return scale


def measure(path: Path, layers: int, depth: int, given: argparse.Namespace) -> dict[str, Any]:
    """Compare at one depth."""
    chosen, plain = (Run(path, depth, attention, given.t) for attention in (given.attention, "exact"))
    try:
        for run in (chosen, plain):
            run.fill(given.scale)
        rounds = []
        for run in (chosen, plain):
            run.decode()
        for _ in range(given.r):
            rounds.append((chosen.times(), plain.times()))
        rounds.sort(key=lambda pair: sum(map(sum, pair)))
        rows = [(sum(b) / sum(a), b.attention / a.attention, *a, *b) for a, b in rounds]
        calm = np.median(rows[: max(1, len(rows) // 2)], axis=0)
        read = chosen.blocks_read()
    finally:
        chosen.session.close()
        plain.session.close()
    return {"shape": path.name, "depth": depth, "attention": given.attention, "blocks": read,
            "share": read / -(-(depth + 1) // 16), "token": calm[0], "attention_ratio": calm[1],
            "all_rounds": float(np.median([row[0] for row in rows])), "attention_ms": calm[2], "rest_ms": calm[3],
            "plain_attention_ms": calm[4], "layers": layers}


def measured_crossover(found: list[tuple[int, float]]) -> float | None:
    """Return the depth at which the ratio passes 1, between (depth, ratio) in order; None if it does not."""
    for (before, less), (after, more) in itertools.pairwise(found):
        if less < 1 <= more:
            return float(before * (after / before) ** ((1 - less) / (more - less)))
    return None


def predicted_crossover(given: argparse.Namespace, longest: int) -> int | None:
    """Return the estimator's prediction, up to a depth; None without a profile, or where choosing does not pay."""
    profile = load_profile(given.device) if given.device else local_profile()
    traffic = describe(given.shape, recipe=recipe_with(attention=given.attention)).traffic("int8")
    if profile is None or traffic.topn is None:
        return None
    return crossover(profile, replace(traffic, topn=traffic.topn._replace(skew=given.skew)), longest)


def main(arguments: list[str] | None = None) -> int:
    """Measure the cases of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-2-7b", choices=sorted(SHAPES))
    parser.add_argument("-d", default="4096,16384", help="depths (default 4096,16384)")
    parser.add_argument("--attention", default="eps:0.01")
    parser.add_argument("--skew", type=float, default=SKEW, help=f"standard deviation of scores (default {SKEW:g})")
    parser.add_argument("--device", help="whose crossover is predicted (default: this machine, where it was probed)")
    parser.add_argument("-r", type=int, default=7, help="rounds (default 7)")
    parser.add_argument("-t", type=int, default=default_threads())
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as directory:
            path = one_layer(given.shape, Path(directory))
            given.scale = calibrated(path, given.skew, given.t)
            depths, ratios = sorted(map(int, given.d.split(","))), []
            for depth in depths:
                found = measure(path, SHAPES[given.shape].num_hidden_layers, depth, given)
                ratios.append(found["attention_ratio"])  # passes 1 if that of a token does, and is surer
                print(json.dumps({key: round(value, 4) if isinstance(value, float) else value
                                  for key, value in found.items()}), flush=True)
            print(json.dumps({"crossover": measured_crossover(list(zip(depths, ratios, strict=True))),
                              "predicted": predicted_crossover(given, depths[-1])}))
    except EdgeInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
