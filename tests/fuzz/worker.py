"""The process in which cases run: one after the other, each announced before it starts."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import mmap
import os
import random
import shutil
import struct
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from edgeinfer.errors import EdgeInferError

from .base import well_told
from .targets import TARGETS, Target, WrongTokensError

BEAT = struct.Struct("<qq")
"""Words that the supervisor reads of a worker: the number of the running case, and of those that ended."""
ALLOWED_BYTES = 128 << 20
"""Memory that a case may take beyond its plan and ten times its input: modules that it is the first to import."""
CANARY_EVERY = 500
REPORT_EVERY = 100


def rng_of(seed: int, target: str, number: int) -> random.Random:
    """Return the generator of one case, which makes it the same in every run."""
    return random.Random(f"{seed}/{target}/{number}")


def pick(seed: int, number: int, names: list[str]) -> str:
    """Return the target of a case: cheap ones more often than dear ones."""
    return rng_of(seed, "pick", number).choices(names, [TARGETS[name].weight for name in names])[0]


def status(field: str) -> int:
    """Return a figure of /proc/self/status in bytes; 0 if there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def reset_peak() -> None:
    """Start the peak of resident memory again (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Worker:
    """Runs cases and reports their outcomes."""

    def __init__(self, seed: int, directory: Path, names: list[str], reports: TextIO):
        self.seed, self.reports = seed, reports
        self.targets: dict[str, Target] = {}
        for name in names:
            (directory / name).mkdir()
            self.targets[name] = TARGETS[name](directory / name)
        self.counts: Counter[tuple[str, str]] = Counter()

    def run(self, name: str, number: int) -> None:
        """Run one case; findings are told at once."""
        target = self.targets[name]
        reset_peak()
        before = status("VmRSS")
        target.input_bytes = target.plan_bytes = 0
        try:
            outcome = "accepted" if target.run(rng_of(self.seed, name, number)) else "refused"
        except EdgeInferError as error:
            outcome = "refused" if well_told(str(error)) else "message"
            if outcome == "message":
                self.tell(name, number, outcome, str(error)[:600])
        except WrongTokensError as error:
            outcome = "wrong tokens"
            self.tell(name, number, outcome, str(error))
        except BaseException as error:
            outcome = "traceback"
            where = "".join(traceback.format_exception(error)[-4:])
            self.tell(name, number, outcome, f"{type(error).__name__}: {str(error)[:300]}\n{where[-1500:]}")
        grown = status("VmHWM") - before
        if grown > ALLOWED_BYTES + target.plan_bytes + 10 * target.input_bytes:
            outcome = "memory"
            self.tell(name, number, outcome, f"{grown / 1e6:.0f} MB, {target.input_bytes} bytes of input, "
                                             f"{target.plan_bytes / 1e6:.0f} MB planned")
            gc.collect()
        self.counts[name, outcome] += 1

    def tell(self, name: str, number: int, outcome: str, what: str) -> None:
        """Tell the supervisor of a finding."""
        self.say({"finding": outcome, "target": name, "number": number, "what": what})

    def report(self) -> None:
        """Send the supervisor the counts since the last report."""
        self.say({"counts": [[*key, count] for key, count in self.counts.items()]})
        self.counts.clear()

    def say(self, report: dict[str, Any]) -> None:
        """Write one line to the supervisor."""
        self.reports.write(json.dumps(report) + "\n")
        self.reports.flush()

    def canary(self, number: int) -> None:
        """Whatever the cases did, a sound model still gives its own tokens."""
        for name, target in self.targets.items():
            try:
                target.canary()
            except Exception as error:
                self.tell(name, number, "wrong tokens", f"the canary: {type(error).__name__}: {error}")


def main() -> None:
    """Run the cases first, first + step, ... below stop, and keep the supervisor informed."""
    parser = argparse.ArgumentParser()
    for name in ("seed", "first", "step", "stop"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--beat", required=True)
    parser.add_argument("--targets", required=True)
    options = parser.parse_args()
    names = options.targets.split(",")
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    reports = os.fdopen(os.dup(1), "w")
    for stream, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):  # cases may write wherever they like
        os.dup2(os.open(os.devnull, mode), stream)
    try:
        worker = Worker(options.seed, directory, names, reports)
        worker.canary(-1)
        with open(options.beat, "r+b") as file, mmap.mmap(file.fileno(), BEAT.size) as beat:
            for done, number in enumerate(range(options.first, options.stop, options.step), 1):
                BEAT.pack_into(beat, 0, number, done - 1)
                worker.run(pick(options.seed, number, names), number)
                if done % REPORT_EVERY == 0:
                    worker.report()
                if done % CANARY_EVERY == 0:
                    worker.canary(number)
            worker.canary(options.stop)
            worker.report()
            BEAT.pack_into(beat, 0, -1, 0)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
