"""Answers of `estimate` beside measurements on this machine: several users, and weights that are read from storage.

    python benchmarks/answers_here.py [--shape tinyllama-1.1b] [--parts users,storage,experts] [--no-probe]
                                      [--output FILE]

The probe saves this machine's profile, storage included. `users` compares `estimate --users` with `bench
--concurrency` at the same lengths, for 1, 4 and 8 requests at a time. `storage` compares `estimate --budget` with
`bench --budget` where about half, and most, of the layers are streamed; the cache of EDGEINFER_CACHE says which disk.
`experts` compares a mixture of experts in memory and in 2 GB.
Layers in two processes are compared by benchmarks/pipeline.py. The profile learns nothing from it. The exit code is 1
if an answer misses by more than its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.estimator_here import NoPredictionError, command
from benchmarks.harness import describe, publish, row, table

USERS, PROMPT, ANSWER = (1, 4, 8), 256, 64
LOADS = 3
"""Loads of each number of users, whose median counts: TTFT of 8 differs by a factor of 1.7 from load to load."""
DECODED, REPETITIONS = 16, 3
SHARES = (0.6, 0.3)
"""Shares of the weights' bytes that the budget leaves in memory."""
EXPERTS, EXPERTS_BUDGET = "olmoe-1b-7b", "2GB"
BOUND = 0.20
SECTION = "answers"


class Answer(NamedTuple):
    """One answer beside its measurement."""

    question: str
    figure: str
    measured: float
    predicted: float

    @property
    def miss(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def users(shape: str) -> Iterator[Answer]:
    """Yield tokens per second of all, and times of a request, of several at a time."""
    for n in USERS:
        lengths = ("-p", str(PROMPT), "-n", str(ANSWER))
        told = command("estimate", shape, "--machine", "local", "--users", str(n), *lengths)["users"]
        loads = ",".join([str(n)] * LOADS)
        found = command("bench", "--shape", shape, "--concurrency", loads, *lengths)["serving"]
        yield Answer(f"{n} users", "tokens/s of all", median(one["output_throughput"] for one in found),
                     told["output_throughput"])
        for metric in ("ttft", "tpot", "e2el"):
            if found[0][f"{metric}_ms"]:
                yield Answer(f"{n} users", f"{metric.upper()}, ms",
                             median(one[f"{metric}_ms"]["median"] for one in found), told[f"{metric}_ms"])


def storage(shape: str) -> Iterator[Answer]:
    """Yield decoding and prompts with layers in storage."""
    whole = command("plan", shape, "--machine", "local", "--ctx", str(PROMPT + DECODED))
    layers = whole["regions"][0]["bytes"]
    for share in SHARES:
        budget = str(int(whole["unstreamed_bytes"] - (1 - share) * layers))
        told = command("estimate", shape, "--machine", "local", "--budget", budget, "--ctx", str(PROMPT + DECODED),
                       "-p", str(PROMPT))
        if not told["fits"] or not told["storage"]["read_bytes"]:
            raise NoPredictionError(f"{shape} has no layers to stream within {budget} bytes; take a larger shape.")
        tests = command("bench", "--shape", shape, "--budget", budget, "-p", str(PROMPT), "-n", str(DECODED),
                        "-r", str(REPETITIONS), "--no-startup")["rows"]
        streamed = f"{told['storage']['streamed_layers']} of {told['storage']['layers']} layers streamed"
        predicted = {"tg": told["decode_empty_tok_per_s"], "pp": told["prefill_tok_per_s"]}
        for test in tests:
            yield Answer(streamed, test["test"], test["t_per_s"], predicted[test["test"][:2]])


def experts(_: str) -> Iterator[Answer]:
    """Yield decoding and prompts of a mixture of experts, in memory and with most of its experts in storage."""
    lengths = ("-p", str(PROMPT), "-n", str(DECODED))
    for budget in ((), ("--budget", EXPERTS_BUDGET)):
        told = command("estimate", EXPERTS, "--machine", "local", "--ctx", str(PROMPT + DECODED), "-p", str(PROMPT),
                       *budget)
        tests = command("bench", "--shape", EXPERTS, *budget, *lengths, "-r", str(REPETITIONS), "--no-startup")["rows"]
        predicted = {"tg": told["decode_empty_tok_per_s"], "pp": told["prefill_tok_per_s"]}
        for test in tests:
            yield Answer(f"{EXPERTS} in {budget[1] if budget else 'memory'}", test["test"], test["t_per_s"],
                         predicted[test["test"][:2]])


PARTS: dict[str, Callable[[str], Iterator[Answer]]] = {"users": users, "storage": storage, "experts": experts}


def markdown(shape: str, answers: Sequence[Answer], profile: dict[str, Any]) -> str:
    """Return the section of a document."""
    stored = profile.get("storage_sequential_gbs")
    disk = f", {stored:.2f} GB/s of storage" if stored else ""
    worst = max(answers, key=lambda one: abs(one.miss))
    return "\n".join([
        "## Users and storage", "",
        f"`python benchmarks/answers_here.py --shape {shape}`; {', '.join(describe().values())}; "
        f"{date.today().isoformat()}. Probe: {profile['bandwidth_gbs']:.1f} GB/s{disk}.", "",
        table("question | figure | measured | predicted | miss", (
            row(one.question, one.figure, f"{one.measured:.3g}", f"{one.predicted:.3g}", f"{one.miss:+.0%}")
            for one in answers)), "",
        f"The largest miss is {worst.miss:+.0%}: {worst.figure} with {worst.question}."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe, measure, publish, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--no-probe", action="store_true", help="use the profile that is there")
    parser.add_argument("--output", type=Path, help="document whose section is replaced; by default it is printed")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts.split(",")) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)[0]!r}; choose of {', '.join(PARTS)}")
    try:
        if not given.no_probe:
            command("devices", "--probe")
        profile, answers = command("devices", "local"), list[Answer]()
        for name in given.parts.split(","):
            for one in PARTS[name](given.shape):
                answers.append(one)
                print(f"{one.question}, {one.figure}: {one.measured:.3g} measured, {one.predicted:.3g} predicted, "
                      f"{one.miss:+.0%}", file=sys.stderr, flush=True)
    except NoPredictionError as error:
        print(error, file=sys.stderr)
        return 2
    publish(markdown(given.shape, answers, profile), given.output, SECTION)
    return int(max(abs(one.miss) for one in answers) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
