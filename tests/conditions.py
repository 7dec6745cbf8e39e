"""Every command under every condition in which a system may start or end it: ``python -m tests.conditions``.

Standard streams that are closed, full, or whose reader has left; a disk that takes nothing more; Ctrl-C and SIGTERM at
random moments from the first line of ours on. What must hold: no traceback and nothing called a bug, one sentence where
it can be said, an exit code other than 0 if the answer did not arrive whole.

A case is a fork of this process, which has imported the commands; ``--signals N`` starts processes of their own. The
suite runs a share of both (``--quick``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.cli.app import COMMANDS
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import ROOT, environment, listening, without_stages

FULL, CLOSED, LEFT, KEPT, NULL = "full", "closed", "left", "kept", "null"
"""Kinds of a standard stream: /dev/full, closed, a pipe without a reader, a pipe that is read, /dev/null."""
STREAMS = {
    "output full": (NULL, FULL, KEPT), "output closed": (NULL, CLOSED, KEPT), "output left": (NULL, LEFT, KEPT),
    "error full": (NULL, KEPT, FULL), "error closed": (NULL, KEPT, CLOSED), "error left": (NULL, KEPT, LEFT),
    "input closed": (CLOSED, KEPT, KEPT), "both closed": (NULL, CLOSED, CLOSED), "all closed": (CLOSED,) * 3,
    "both full": (NULL, FULL, FULL), "both left": (NULL, LEFT, LEFT),
}
DISK_BYTES = (0, 100, 5000, 40_000)
"""Sizes that no file may exceed, in place of a disk with so much room."""
FORBIDDEN = ("Traceback", "which is a bug", "Exception ignored", "Fatal Python error")
LIMIT_S = 600
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Outcome:
    """Result of a command; streams that were not kept are empty."""

    code: int
    out: str
    err: str


def commands(folder: Path) -> dict[str, list[str]]:
    """A command line of each command, as JSON and for people; those that write files first."""
    checkpoint = make_checkpoint(folder / "checkpoint")
    (folder / "text.txt").write_text("Once upon a time there was a little girl. " * 3, encoding="utf-8")
    demo = str(ROOT / "edgeinfer" / "demo" / "bundle")
    greedy = ["Once upon", "-n", "4", "--temp", "0", "-t", "1"]
    lines = {
        "convert": ["convert", str(checkpoint), str(folder / "bundle"), "--overwrite"],
        "run saved": ["run", "demo", *greedy, "--prompt-cache", str(folder / "prompt.cache")],
        "run checkpoint": ["run", str(checkpoint), *greedy, "--raw"],
        "estimate plot": ["estimate", "llama-2-7b", "--machine", "m4", "--plot", str(folder / "plot.svg")],
        "run": ["run", "demo", *greedy], "plan": ["plan", "demo", "--budget", "1GiB"],
        "estimate": ["estimate", "llama-2-7b", "--machine", "m4"], "devices": ["devices"],
        "device": ["devices", "rpi5"], "info": ["info", "demo"], "verify": ["verify", demo],
        "bench": ["bench", "demo", "-p", "4", "-n", "2", "-r", "1", "-t", "1", "--no-startup"],
        "eval": ["eval", "demo", "--text", str(folder / "text.txt"), "--tokens", "16", "-t", "1"],
        "warmup": ["warmup"], "cache list": ["cache", "list"], "cache clear": ["cache", "clear", "bundles", "--yes"],
        "help": ["--help"], "version": ["--version"], "wrong": ["run", "demo", "x", "--temp", "-1"],
        "unknown": ["plan", "no-such-model"], "too large": ["run", "demo", "x", "--budget", "1MB"],
    }
    plain = ("help", "version")
    return lines | {f"{name} --json": [*line, "--json"] for name, line in lines.items() if name not in plain}


def forked(arguments: list[str], streams: tuple[str, str, str] = (NULL, KEPT, KEPT), file_bytes: int | None = None,
           variables: dict[str, str] | None = None) -> Outcome:
    """Run a command in a fork of this process as the system would start it."""
    pipes = {number: os.pipe() for number in (1, 2) if streams[number] in (KEPT, LEFT)}
    child = os.fork()
    if not child:
        try:
            _become(streams, pipes, file_bytes, variables or {})
            sys.argv = ["edgeinfer", *arguments]
            from edgeinfer.cli import main

            main()
        finally:
            os._exit(99)
    for number, (reader, writer) in pipes.items():
        os.close(writer)
        if streams[number] == LEFT:
            os.close(reader)
    texts = _read({number: pipe[0] for number, pipe in pipes.items() if streams[number] == KEPT}, child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Outcome(code, texts.get(1, ""), texts.get(2, ""))


def _become(streams: tuple[str, ...], pipes: dict[int, tuple[int, int]], file_bytes: int | None,
            variables: dict[str, str]) -> None:
    """Give this process the streams, as Python finds them at its start."""
    for number, kind in enumerate(streams):
        if kind in (FULL, NULL):
            file = os.open("/dev/full" if kind == FULL else os.devnull, os.O_RDWR)
            os.dup2(file, number)
            os.close(file)
        elif kind in (KEPT, LEFT):
            os.dup2(pipes[number][1], number)
    for pipe in pipes.values():
        for end in pipe:
            os.close(end)
    for number, kind in enumerate(streams):
        if kind == CLOSED:
            os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (
        None if kind == CLOSED else os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False)
        for number, kind in enumerate(streams))
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    os.environ.update(variables)


def _read(readers: dict[int, int], child: int) -> dict[int, str]:
    """Read until all writers have left; a child that takes too long is ended."""
    parts: dict[int, bytes] = dict.fromkeys(readers, b"")
    open_ones, end = dict(readers), time.monotonic() + LIMIT_S
    while open_ones:
        ready, _, _ = select.select(list(open_ones.values()), [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
        for number, reader in list(open_ones.items()):
            if reader in ready or not ready:
                data = os.read(reader, 65536)
                parts[number] += data
                if not data:
                    os.close(reader)
                    del open_ones[number]
    return {number: data.decode() for number, data in parts.items()}


def faults(streams: tuple[str, ...], usual: Outcome, done: Outcome, as_json: bool) -> Iterator[str]:
    """Yield the faults of an outcome; `usual` is the outcome of the same command without the condition."""
    yield from clean(done)
    sentences = [line for line in done.err.splitlines() if line.startswith("edgeinfer: ")]
    if streams[1] != KEPT and usual.out:  # the answer, or what JSON says of a failure, did not arrive
        if done.code == 0:
            yield "exit code 0 without an answer"
        if streams[2] == KEPT and streams[1] != LEFT and usual.code == 0 and not any(
                "Standard output cannot be written: " in sentence for sentence in sentences):
            yield "standard output is not named"
    elif done.code != usual.code:
        yield f"exit code {done.code} instead of {usual.code}"
    if streams[1] == KEPT:
        if bool(done.out) != bool(usual.out):
            yield f"standard output has {done.out[:60]!r} instead of {usual.out[:60]!r}"
        if as_json:
            json.loads(done.out)


def clean(done: Outcome) -> Iterator[str]:
    """Yield forbidden text in an outcome."""
    for text in FORBIDDEN:
        if text in done.out + done.err:
            yield f"{text}: {(done.err or done.out)[-400:]}"
    if done.code in (99, 120) or done.code < 0:
        yield f"exit code {done.code}"


def stream_cases(folder: Path, quick: bool) -> Iterator[tuple[str, str]]:
    """Run every command with every state of its streams; yield the command and its faults."""
    for name, line in commands(folder).items():
        if quick and name.startswith(("bench", "warmup", "run checkpoint", "estimate plot")):
            continue
        prepared(folder)
        usual = forked(line)
        yield name, "; ".join(clean(usual))
        as_json = name.endswith("--json")
        for condition in ["output full" if as_json else "error closed"] if quick else STREAMS:
            streams = STREAMS[condition]
            prepared(folder)
            done = forked(line, streams)
            yield f"{name}, {condition}", "; ".join(faults(streams, usual, done, as_json))


def disk_cases(folder: Path, quick: bool) -> Iterator[tuple[str, str]]:
    """Every command where files cannot grow: a sentence and no remains, or an answer that needed none."""
    for name, line in list(commands(folder).items())[: 4 if quick else None]:
        for size in DISK_BYTES[2:3] if quick else DISK_BYTES:
            prepared(folder)
            before = sorted(path.name for path in folder.iterdir())
            done = forked(line, file_bytes=size)
            found = list(clean(done))
            if done.code == 1 and "edgeinfer: " not in done.err:
                found.append("no sentence")
            if done.code and sorted(path.name for path in folder.iterdir()) != before:
                found.append(f"remains: {sorted(path.name for path in folder.iterdir())}")
            yield f"{name}, {size} bytes of disk", "; ".join(found)


def prepared(folder: Path) -> None:
    """Remove the files of the last case."""
    for name in ("prompt.cache", "plot.svg"):
        (folder / name).unlink(missing_ok=True)


STARTED = """
import os
from edgeinfer.cli import main, program
watch = program.watch_signals
def watch_and_tell():
    watch()
    os.write(9, b".")
    os.close(9)
program.watch_signals = watch_and_tell
main()
"""
"""The program, which tells when it listens: what comes before is Python's own start, and a few milliseconds of ours."""


def signal_cases(n: int, seed: int, longest_s: float = 0.8) -> Iterator[tuple[str, str]]:
    """Signals at random moments, to processes of their own that listen."""
    chance = random.Random(seed)
    lines = (["run", "demo", "Once", "-n", "400", "-t", "1"], ["run", "demo", "Once", "-n", "400", "--json"],
             ["plan", "demo"], ["--help"], ["info", "demo", "--json"])
    for _ in range(n):
        line, number, after = chance.choice(lines), chance.choice(SIGNALS), chance.uniform(0, longest_s)
        done = signalled(line, number, after)
        found = list(clean(done))
        if done.code == 0 and without_stages(done.err).startswith("edgeinfer: "):
            found.append("the signal was lost")
        if done.code not in (0, 1, 128 + number):
            found.append(f"exit code {done.code}: {done.err}")
        if done.code and not done.err and "cancelled" not in done.out:
            found.append("nothing was said")
        yield f"{' '.join(line)}, {number.name} after {after:.3f} s", "; ".join(found)


def signalled(line: list[str], number: int, after_s: float, before: Callable[[], None] | None = None,
              waiting: str = "") -> Outcome:
    """Send a signal to a process so many seconds after it began to listen; code that runs first may let it wait."""
    reader, writer = os.pipe()

    def prepare() -> None:
        os.dup2(writer, 9)
        (before or listening)()

    with subprocess.Popen([sys.executable, "-c", waiting + STARTED, *line], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
                          preexec_fn=prepare, pass_fds=(9,)) as child:
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(after_s)
        child.send_signal(number)
        out, err = child.communicate(timeout=LIMIT_S)
    return Outcome(child.returncode, out, err)


def main(arguments: list[str] | None = None) -> int:
    """Run the family and print its faults; the exit code is 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the share that the suite runs")
    parser.add_argument("--signals", type=int, default=300, metavar="N", help="processes to be ended by a signal")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    os.environ.update(environment())
    for name in (*(f"edgeinfer.cli.commands.{name}" for name in COMMANDS), "numpy", "tokenizers", "llvmlite.binding",
                 "edgeinfer.llm", "edgeinfer.runtime.session", "edgeinfer.models.describe", "matplotlib.figure",
                 "edgeinfer.devices.learning", "edgeinfer.converters"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    counts, wrong = {"streams": 0, "disk": 0, "signals": 0}, 0
    place = tempfile.mkdtemp()  # TemporaryDirectory would be cleared at the end of each fork as well
    try:
        os.environ["EDGEINFER_CACHE"] = str(_cache(Path(place)))
        for kind, cases in (("streams", stream_cases(Path(place), given.quick)),
                            ("disk", disk_cases(Path(place), given.quick)),
                            ("signals", signal_cases(given.signals, given.seed))):
            for name, fault in cases:
                counts[kind] += 1
                if fault:
                    wrong += 1
                    print(f"{name}: {fault}", flush=True)
    finally:
        shutil.rmtree(place)
    print(f"{sum(counts.values())} cases ({', '.join(f'{n} {kind}' for kind, n in counts.items())}), {wrong} wrong")
    return 1 if wrong else 0


def _cache(place: Path) -> Path:
    """A cache of its own, with this machine's kernels."""
    from edgeinfer.base.cache_dir import cache_root

    cache = place / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(cache_root() / "kernels")
    return cache


if __name__ == "__main__":
    sys.exit(main())
