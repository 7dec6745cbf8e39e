"""Predicted against measured on this machine: a probe, then decoding and prompts of known shapes, in one run.

    python benchmarks/estimator_here.py [--shape NAME ...] [--kinds q4,q4_k_m,int8] [--depths 0,4096] [--no-probe]
                                        [--keep FILE] [--output docs/measurements/estimator.md]

The probe saves this machine's profile; then `edgeinfer bench` measures each shape in each kind of weights, without
letting the profile learn from it. Every test is predicted twice: from the profile alone, and with the bandwidth (or the
int8 peak) that was read beside its repetitions, which tells a wrong model from a machine that has changed since the
probe. With --keep the tests of several calls, each of a few minutes, make one table. The section of the document is
replaced, the rest of it stays. The exit code is 1 if a prediction from the profile is over its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import describe, replace_section, row, table

SECTION = "here"
SHAPES = ("smollm2-135m", "tinyllama-1.1b", "llama-2-7b")
KINDS, DEPTHS = "q4,q4_k_m,int8", "0,4096"
PROMPT = 512
GENERATED = {"llama-2-7b": 16}
"""Tokens of a test that generates, where 64 take long."""
BOUND = 0.10
"""Largest miss from the profile that passes."""


@dataclass(frozen=True)
class Test:
    """One test of one shape."""

    shape: str
    kind: str
    """Type of the weights."""
    name: str
    measured: float
    """Median tokens per second."""
    before: float
    """Predicted from the profile."""
    moment: float
    """Predicted with the readings beside the test."""
    lowest: float
    highest: float
    """Bandwidth during the tests of the same call, in GB/s."""

    __test__ = False  # pytest: this is not a test

    @property
    def miss_before(self) -> float:
        """Predicted over measured, less one."""
        return self.before / self.measured - 1

    @property
    def miss(self) -> float:
        """The same with the readings beside the test."""
        return self.moment / self.measured - 1


class NoPredictionError(Exception):
    """A command failed, or had no prediction; carries its message."""


def command(*arguments: str) -> dict[str, Any]:
    """Run a command of this checkout with --json, and return its object.

    Raises
    ------
    NoPredictionError
        It failed.
    """
    environment = {**os.environ, "EDGEINFER_LEARN": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "edgeinfer", *arguments, "--json"], stdout=subprocess.PIPE, text=True,
                          env=environment, check=False)
    if done.returncode:
        raise NoPredictionError(f"edgeinfer {' '.join(arguments)} failed: {done.stdout.strip()}")
    return dict(json.loads(done.stdout))


def bench(shape: str, kind: str, depths: str, repetitions: int) -> list[Test]:
    """Measure one shape in one kind of weights.

    Raises
    ------
    NoPredictionError
        The measurement failed, or this machine has no profile with its number of threads.
    """
    report = command("bench", "--shape", shape, "--weights", kind, "-p", str(PROMPT), "-n",
                     str(GENERATED.get(shape, 64)), "-d", depths, "-r", str(repetitions), "--no-startup")
    if report["estimate"] is None:
        raise NoPredictionError("This machine has no profile, or one of other threads; leave --no-probe out.")
    readings = report["bandwidth_low_gbs"], report["bandwidth_high_gbs"]
    return [Test(shape, kind, row["test"], row["measured"], row["t_per_s"], row["at_the_moment"], *readings)
            for row in report["estimate"]["rows"]]


def markdown(tests: Sequence[Test], profile: dict[str, Any]) -> str:
    """The section of the document."""
    machine = ", ".join(describe().values())
    constants = ", ".join(f"{key} {value:.3g}" for key, value in profile["constants"].items())
    lines = [
        "## On one machine, after a probe", "",
        "`python benchmarks/estimator_here.py` probes the machine, then measures; the profile does not learn by it.",
        f"{machine}; {date.today().isoformat()}.",
        f"Probe: {profile['bandwidth_gbs']:.1f} GB/s, {profile['int8_peak_gops']:.0f} int8 GOPS; {constants}.",
        f"Bandwidth during the tests: {min(test.lowest for test in tests):.1f} to "
        f"{max(test.highest for test in tests):.1f} GB/s.", "",
        table("shape | weights | test | measured, t/s (median) | from the probe | miss | with the readings beside the "
              "test | miss", (row(test.shape, test.kind, test.name, f"{test.measured:.2f}", f"{test.before:.2f}",
                                  f"{test.miss_before:+.1%}", f"{test.moment:.2f}", f"{test.miss:+.1%}")
                              for test in tests)),
    ]
    before, moment = [abs(test.miss_before) for test in tests], [abs(test.miss) for test in tests]
    lines += ["", f"Median absolute miss: {statistics.median(before):.1%} from the probe, "
              f"{statistics.median(moment):.1%} with the readings beside the tests; worst {max(before):.1%} and "
              f"{max(moment):.1%}. Within {BOUND:.0%}: {sum(miss <= BOUND for miss in before)} of {len(tests)} from "
              f"the probe, {sum(miss <= BOUND for miss in moment)} with the readings."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe, measure, write the section, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append", help="only this one; may be repeated")
    parser.add_argument("--kinds", default=KINDS, help="types of weights")
    parser.add_argument("--depths", default=DEPTHS, help="tokens before each test")
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="runs whose median counts")
    parser.add_argument("--no-probe", action="store_true", help="use the profile that is there")
    parser.add_argument("--keep", type=Path, help="add the tests to this file, and report all that it holds")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "measurements" / "estimator.md")
    given = parser.parse_args(arguments)
    try:
        if not given.no_probe:
            command("devices", "--probe")
        profile = command("devices", "local")
        tests = kept(given.keep)
        for shape in given.shape or SHAPES:
            for kind in given.kinds.split(","):
                found = bench(shape, kind, given.depths, given.repetitions)
                tests += found
                for test in found:
                    print(f"{shape} {kind} {test.name}: {test.measured:.2f}, from the probe {test.miss_before:+.1%}, "
                          f"with the readings {test.miss:+.1%}", flush=True)
    except NoPredictionError as error:
        print(error, file=sys.stderr)
        return 2
    if given.keep:
        given.keep.write_text(json.dumps([asdict(test) for test in tests]), encoding="utf-8")
    replace_section(given.output, SECTION, markdown(tests, profile))
    return int(max(abs(test.miss_before) for test in tests) > BOUND)


def kept(path: Path | None) -> list[Test]:
    """Return the tests of earlier calls."""
    return [Test(**one) for one in json.loads(path.read_text(encoding="utf-8"))] if path and path.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
