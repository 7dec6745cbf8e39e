"""The supervisor: starts workers, watches their time and memory, replaces those that hang or die, counts outcomes."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from .worker import BEAT, pick

CPU_SECONDS, WALL_SECONDS = 10.0, 120.0
"""A case that takes more of the processor than this hangs; of the wall's time, since the machine may be shared."""
RESIDENT_BYTES = 4 << 30
"""A worker that holds more is ended before the system suffers; workers judge single cases themselves."""
OUTCOMES = ("accepted", "refused", "traceback", "hang", "memory", "crash", "wrong tokens", "message")
LAST = 2**62


class Lane:
    """One worker after another over the cases first, first + step, ..."""

    def __init__(self, options: argparse.Namespace, directory: Path, first: int, report: Any):
        self.options, self.report, self.next, self.done = options, report, first, False
        self.beat = directory / f"beat-{first}"
        self.beat.write_bytes(bytes(BEAT.size))
        self.errors = directory / f"errors-{first}"
        self.start()

    def start(self) -> None:
        """Start a worker at the next case."""
        self.beat.write_bytes(BEAT.pack(self.next, 0))
        stop = self.options.cases or LAST
        words = [sys.executable, "-m", "tests.fuzz.worker", "--beat", self.beat, "--targets", self.options.targets]
        words += ["--seed", self.options.seed, "--first", self.next, "--step", self.options.jobs, "--stop", stop]
        with open(self.errors, "wb") as errors:
            self.worker = psutil.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=errors, text=True)
        self.case, self.cpu, self.since = -2, 0.0, time.monotonic()
        self.listener = threading.Thread(target=self.listen, args=(self.worker.stdout,), daemon=True)
        self.listener.start()

    def listen(self, lines: Any) -> None:
        """Record a worker's report."""
        for line in lines:
            self.report(json.loads(line))

    def look(self) -> None:
        """End a worker that hangs or grows, and continue after the case at which one died."""
        with open(self.beat, "rb") as file, mmap.mmap(file.fileno(), BEAT.size, access=mmap.ACCESS_READ) as beat:
            case, ended = BEAT.unpack(beat[:])
        code = self.worker.poll()
        if code is not None:
            self.listener.join()
            self.done = case == -1
            if not self.done:
                why = self.errors.read_text(errors="replace")[-1500:]
                self.failed(case, "crash", f"the worker ended with {code}: {why}")
            return
        try:
            times = self.worker.cpu_times()
            cpu, resident = times.user + times.system, self.worker.memory_info().rss
        except psutil.Error:
            return
        if (case, ended) != self.case:
            self.case, self.cpu, self.since = (case, ended), cpu, time.monotonic()
        slow = ended > 0 and (cpu - self.cpu > CPU_SECONDS or time.monotonic() - self.since > WALL_SECONDS)
        if slow or resident > RESIDENT_BYTES:
            self.worker.kill()
            self.worker.wait()
            self.listener.join()
            figures = f"{cpu - self.cpu:.0f} s of the processor, {resident / 1e6:.0f} MB"
            self.failed(case, "hang" if slow else "memory", figures)

    def failed(self, case: int, outcome: str, what: str) -> None:
        """Count a case that its worker could not, and start another worker after it."""
        target = pick(self.options.seed, case, self.options.targets.split(","))
        self.report({"finding": outcome, "target": target, "number": case, "what": what})
        self.report({"counts": [[target, outcome, 1]]})
        self.next = case + self.options.jobs
        self.done = self.next >= (self.options.cases or LAST)
        if not self.done:
            self.start()


class Tally:
    """Counts and findings of all lanes."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.findings = 0
        self.lock = threading.Lock()

    def take(self, report: dict[str, Any]) -> None:
        """Take in one report of a worker."""
        with self.lock:
            for target, outcome, count in report.get("counts", ()):
                self.counts[target, outcome] += count
            if "finding" in report:
                self.findings += 1
                text = "{finding}: {target}:{number}: {what}".format(**report)
                print(text.encode("ascii", "backslashreplace").decode(), flush=True)

    def table(self) -> str:
        """Return the counts by target as a table for people."""
        targets = sorted({target for target, _ in self.counts})
        rows = [["target", "cases", *OUTCOMES]]
        for target in (*targets, "all"):
            found = [sum(n for (t, o), n in self.counts.items() if o == outcome and target in (t, "all"))
                     for outcome in OUTCOMES]
            rows.append([target, str(sum(found)), *map(str, found)])
        rule = ["---", *["---:"] * (len(OUTCOMES) + 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    from .targets import LEFT_OUT, TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Run edgeinfer on damaged input.")
    parser.add_argument("--seconds", type=float, default=0, help="end after so many (default: when all cases have run)")
    parser.add_argument("--cases", type=int, default=0, help="end after so many (default: 20000 without --seconds)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="workers at a time")
    parser.add_argument("--targets", default=",".join(TARGETS), help="some of: " + ", ".join(TARGETS))
    parser.add_argument("--replay", metavar="TARGET:NUMBER", help="run this case in the foreground")
    options = parser.parse_args()
    if unknown := set(options.targets.split(",")) - set(TARGETS):
        reasons = "".join(f"; {name}: {LEFT_OUT[name]}" for name in sorted(unknown & set(LEFT_OUT)))
        parser.error(f"no target is named {', '.join(sorted(unknown))}{reasons}")
    for name, why in LEFT_OUT.items():
        print(f"{name} was left out: {why}")
    options.cases = options.cases or (0 if options.seconds else 20_000)
    return options


def replay(options: argparse.Namespace) -> int:
    """Run one case where a debugger can reach it."""
    from .targets import TARGETS
    from .worker import rng_of

    name, number = options.replay.split(":")
    with tempfile.TemporaryDirectory() as directory:
        print("accepted" if TARGETS[name](Path(directory)).run(rng_of(options.seed, name, int(number))) else "refused")
    return 0


def main() -> int:
    """Run the fuzzer; 1 if anything was found."""
    options = arguments()
    if options.replay:
        return replay(options)
    tally, start = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        os.environ["TMPDIR"] = directory  # of the workers, so that those that are killed leave nothing behind
        os.environ["HF_HUB_OFFLINE"] = "1"
        lanes = [Lane(options, Path(directory), first, tally.take) for first in range(options.jobs)]
        while not all(lane.done for lane in lanes):
            time.sleep(0.1)
            for lane in lanes:
                if not lane.done:
                    lane.look()
            if options.seconds and time.monotonic() - start > options.seconds:
                break
        for lane in lanes:
            if lane.worker.poll() is None:
                lane.worker.kill()
                lane.worker.wait()
            lane.listener.join()
    print(tally.table())
    print(f"seed {options.seed}, {options.jobs} workers, {time.monotonic() - start:.0f} s, {tally.findings} findings")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
