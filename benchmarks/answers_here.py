"""Answers of `estimate` beside measurements on this machine: several users, and weights that are read from storage.

    python benchmarks/answers_here.py [--shape tinyllama-1.1b] [--parts users,storage,experts] [--no-probe]
                                      [--users 1,4,8] [--keep FILE] [--output FILE]

The probe saves this machine's profile, storage included. `users` compares `estimate --users` with `bench
--concurrency` at the same lengths, for 1, 4 and 8 requests at a time. `storage` compares `estimate --budget` with
`bench --budget` where about half, and most, of the layers are streamed; the cache of EDGEINFER_CACHE says which disk.
`experts` compares a mixture of experts in memory and in 2 GB. Each is predicted from the probe, and with the bandwidth
that was read beside the measurement. With --keep the answers of several calls, each of a few minutes, make one table.
Layers in two processes are compared by benchmarks/pipeline.py. The profile learns nothing from it. The exit code is 1
if an answer from the probe misses by more than its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.estimator_here import NoPredictionError, command
from benchmarks.harness import describe, publish, row, table
from edgeinfer.bench import MachineProbe
from edgeinfer.devices import load_profile, save_profile

USERS, PROMPT, ANSWER = (1, 4, 8), 256, 64
LOADS = 3
"""Loads of each number of users, whose median counts: TTFT of 8 differs by a factor of 1.7 from load to load."""
DECODED, REPETITIONS = 16, 3
READ_BYTES, READINGS = 1 << 29, 5
"""Memory that a reading of the bandwidth takes, and readings before and after a load."""
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
    """From the probe."""
    moment: float
    """With the bandwidth beside the measurement."""

    @property
    def miss(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def miss_now(self) -> float:
        """The same with the bandwidth beside the measurement."""
        return self.moment / self.measured - 1


def bandwidth() -> float:
    """Read the bandwidth of all threads, in GB/s."""
    with MachineProbe(load_profile("local").cores, READ_BYTES) as probe:
        return median(probe.read_gbs() for _ in range(READINGS))


def told(*question: str, gbs: float | None = None) -> dict[str, Any]:
    """Return the answer of `estimate` from the probe, or with another bandwidth."""
    if gbs is None:
        return command("estimate", *question, "--machine", "local")
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now.toml"
        save_profile(replace(load_profile("local"), bandwidth_gbs=gbs, effective_gbs=None), now)
        return command("estimate", *question, "--machine", str(now))


def users(shape: str, numbers: Sequence[int] = USERS) -> Iterator[Answer]:
    """Yield tokens per second of all, and times of a request, of several at a time."""
    for n in numbers:
        lengths = ("-p", str(PROMPT), "-n", str(ANSWER))
        question, loads = (shape, "--users", str(n), *lengths), ",".join([str(n)] * LOADS)
        plain, before = told(*question), bandwidth()
        found = command("bench", "--shape", shape, "--concurrency", loads, *lengths)["serving"]
        both = [one["users"] for one in (plain, told(*question, gbs=(before + bandwidth()) / 2))]
        yield Answer(f"{n} users", "tokens/s of all", median(one["output_throughput"] for one in found),
                     *(one["output_throughput"] for one in both))
        for metric in ("ttft", "tpot", "e2el"):
            if found[0][f"{metric}_ms"]:
                yield Answer(f"{n} users", f"{metric.upper()}, ms",
                             median(one[f"{metric}_ms"]["median"] for one in found),
                             *(one[f"{metric}_ms"] for one in both))


def storage(shape: str) -> Iterator[Answer]:
    """Yield decoding and prompts with layers in storage."""
    whole = command("plan", shape, "--machine", "local", "--ctx", str(PROMPT + DECODED))
    layers = whole["regions"][0]["bytes"]
    for share in SHARES:
        budget = str(int(whole["unstreamed_bytes"] - (1 - share) * layers))
        question = (shape, "--budget", budget, "--ctx", str(PROMPT + DECODED), "-p", str(PROMPT))
        plain = told(*question)
        stored = plain["storage"]
        if not plain["fits"] or not stored["read_bytes"]:
            raise NoPredictionError(f"{shape} has no layers to stream within {budget} bytes; take a larger shape.")
        report = command("bench", "--shape", shape, "--budget", budget, "-p", str(PROMPT), "-n", str(DECODED),
                         "-r", str(REPETITIONS), "--no-startup")
        yield from _tests(f"{stored['streamed_layers']} of {stored['layers']} layers streamed", report["rows"],
                          (plain, told(*question, gbs=report["bandwidth_gbs"])))


def experts(_: str) -> Iterator[Answer]:
    """Yield decoding and prompts of a mixture of experts, in memory and with most of its experts in storage."""
    lengths = ("-p", str(PROMPT), "-n", str(DECODED))
    for budget in ((), ("--budget", EXPERTS_BUDGET)):
        question = (EXPERTS, "--ctx", str(PROMPT + DECODED), "-p", str(PROMPT), *budget)
        plain = told(*question)
        report = command("bench", "--shape", EXPERTS, *budget, *lengths, "-r", str(REPETITIONS), "--no-startup")
        yield from _tests(f"{EXPERTS} in {budget[1] if budget else 'memory'}", report["rows"],
                          (plain, told(*question, gbs=report["bandwidth_gbs"])))


def _tests(question: str, tests: Sequence[dict[str, Any]], both: Sequence[dict[str, Any]]) -> Iterator[Answer]:
    """Yield the tests of a report beside both predictions of decoding and prompts."""
    fields = {"tg": "decode_empty_tok_per_s", "pp": "prefill_tok_per_s"}
    for test in tests:
        yield Answer(question, test["test"], test["t_per_s"], *(one[fields[test["test"][:2]]] for one in both))


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
        table("question | figure | measured | from the probe | miss | with the bandwidth beside it | miss", (
            row(one.question, one.figure, f"{one.measured:.3g}", f"{one.predicted:.3g}", f"{one.miss:+.0%}",
                f"{one.moment:.3g}", f"{one.miss_now:+.0%}") for one in answers)), "",
        f"The largest miss from the probe is {worst.miss:+.0%}: {worst.figure} with {worst.question}."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe, measure, publish, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--users", default=",".join(map(str, USERS)), help="numbers of users")
    parser.add_argument("--keep", type=Path, help="add the answers to this file, and report all that it holds")
    parser.add_argument("--no-probe", action="store_true", help="use the profile that is there")
    parser.add_argument("--output", type=Path, help="document whose section is replaced; by default it is printed")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts.split(",")) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)[0]!r}; choose of {', '.join(PARTS)}")
    try:
        if not given.no_probe:
            command("devices", "--probe")
        profile, answers = command("devices", "local"), kept(given.keep)
        parts = {**PARTS, "users": partial(users, numbers=[int(n) for n in given.users.split(",")])}
        for name in given.parts.split(","):
            for one in parts[name](given.shape):
                answers.append(one)
                print(f"{one.question}, {one.figure}: {one.measured:.3g} measured, from the probe {one.miss:+.0%}, "
                      f"with the bandwidth {one.miss_now:+.0%}", file=sys.stderr, flush=True)
    except NoPredictionError as error:
        print(error, file=sys.stderr)
        return 2
    if given.keep:
        given.keep.write_text(json.dumps(answers), encoding="utf-8")
    publish(markdown(given.shape, answers, profile), given.output, SECTION)
    return int(max(abs(one.miss) for one in answers) > BOUND)


def kept(path: Path | None) -> list[Answer]:
    """Return the answers of earlier calls."""
    return [Answer(*one) for one in json.loads(path.read_text(encoding="utf-8"))] if path and path.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
