"""Faults that a writing process may suffer: a kill at any moment, a full disk at any write, concurrent writers.

``python -m tests.faults --count 100`` runs all of them, system/test_faults.py a few of each. No file may
be wrong or half-written afterwards, and no user may have to delete anything: the next process works as if nothing had
happened.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from edgeinfer.base import cache_dir as cache
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.devices import load_profile, profiles
from edgeinfer.devices.store import save_profile
from edgeinfer.errors import EdgeInferError
from edgeinfer.llm.api import LLM
from edgeinfer.models import resolve
from tests.fuzz.base import tokens_of
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import PYTHON, ROOT, environment

PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]
DELETE = ("delete", "remove ")
"""Requests that no message may contain."""


class Workspace:
    """A directory with a checkpoint, its bundle, and a cache that has only the kernels."""

    def __init__(self, directory: Path, **shape: Any):
        self.directory, self.cache = directory, directory / "cache"
        self.checkpoint = make_checkpoint(directory / "model", **shape)
        self.tokens = tokens_of(convert(self.checkpoint, directory / "expected") and directory / "expected")
        shutil.copytree(cache.cache_root() / "kernels", self.cache / "kernels", ignore=shutil.ignore_patterns(".*"))
        self.variables = environment(EDGEINFER_CACHE=str(self.cache), PYTHONDONTWRITEBYTECODE="")

    def start(self, *arguments: object, before: list[str] | None = None) -> subprocess.Popen[str]:
        """Start a command line of edgeinfer."""
        words = [*(before or []), *PYTHON, *map(str, arguments)]
        return subprocess.Popen(words, env=self.variables, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def check(self, bundle: Path) -> None:
        """A bundle is whole, verified, and gives its tokens."""
        with Bundle.open(bundle) as opened:
            opened.verify()
        assert (found := tokens_of(bundle)) == self.tokens, f"{found} instead of {self.tokens}"


def strays(directory: Path, *known: str) -> list[str]:
    """Return unexpected files; locks may stay, because they are empty."""
    return sorted(path.name for path in directory.iterdir() if path.name not in known and ".lock" not in path.name)


def told_well(done: subprocess.Popen[str], code: int = 0) -> None:
    """A command ended as it should and asked for nothing that a program can do itself."""
    _, err = done.communicate(timeout=300)
    assert done.returncode == code, (done.returncode, err)
    assert "Traceback" not in err and not any(word in err for word in DELETE), err


# -- killed ------------------------------------------------------------------------------------------------------------


def killed(start: Callable[[], subprocess.Popen[str]], rng: random.Random, most_seconds: float) -> None:
    """Start something and kill it at a random moment."""
    child = start()
    time.sleep(rng.random() * most_seconds)
    child.send_signal(signal.SIGKILL)
    child.communicate()


def killed_conversions(directory: Path, count: int, seed: int) -> str:
    """Kill conversions over an older bundle: the older or the newer remains, whole."""
    workspace, rng = Workspace(directory, hidden_size=256, intermediate_size=1024), random.Random(seed)
    target = directory / "out" / "b"
    target.parent.mkdir()
    began = time.monotonic()
    told_well(workspace.start("convert", workspace.checkpoint, target))
    seconds = time.monotonic() - began
    for _ in range(count):
        killed(lambda: workspace.start("convert", workspace.checkpoint, target, "--overwrite"), rng, 1.1 * seconds)
        workspace.check(target)
    told_well(workspace.start("convert", workspace.checkpoint, target, "--overwrite"))
    workspace.check(target)
    assert not (left := strays(target.parent, "b")), left
    return f"{count} conversions killed within {seconds:.1f} s: the bundle was whole each time"


def killed_first_runs(directory: Path, count: int, seed: int) -> str:
    """Kill first runs of a checkpoint, some of them with cold kernels; the run after each gives its tokens."""
    workspace, rng, cold = Workspace(directory, hidden_size=256, intermediate_size=1024), random.Random(seed), 0
    words = ("run", workspace.checkpoint, "Once", "-n", 1, "--temp", 0, "--no-stats")
    for number in range(count):
        shutil.rmtree(workspace.cache / "bundles", ignore_errors=True)
        if number % 10 == 9:  # they compile: killed in the middle of it, and all that is left is used by the next one
            shutil.rmtree(workspace.cache / "kernels")
            killed(lambda: workspace.start(*words), rng, 8.0)
            cold += 1
        else:
            killed(lambda: workspace.start(*words), rng, 1.2)
            told_well(workspace.start(*words))
            bundles = [path for path in (workspace.cache / "bundles").iterdir() if not path.name.startswith(".")]
            assert len(bundles) == 1, bundles
            workspace.check(bundles[0])
    told_well(workspace.start(*words))
    assert not (left := strays(workspace.cache / "kernels", *kernel_sets(workspace.cache))), left
    return f"{count} first runs killed, {cold} of them while compiling: each run after one gave the right tokens"


def kernel_sets(root: Path) -> list[str]:
    """Names of the sets of kernels in a cache."""
    return [path.name for path in (root / "kernels").iterdir() if path.is_dir() and not path.name.startswith(".")]


SAVER = """
import sys
from edgeinfer import LLM
with LLM("demo", ctx=256, threads=1) as llm:
    print("ready", flush=True)
    for n in range(10**6):
        with llm.stream([1, *range(10, 60 + n % 99)], max_tokens=1, temperature=0, prompt_cache=sys.argv[1]) as stream:
            for _ in stream:
                pass
"""


def killed_saves(directory: Path, count: int, seed: int) -> str:
    """Kill a process that saves prompt caches all the time; the remaining file loads, whole."""
    rng, target, loaded = random.Random(seed), directory / "saved" / "cache", 0
    target.parent.mkdir()
    with LLM("demo", ctx=256, threads=1) as llm:
        for _ in range(count):
            child = subprocess.Popen([sys.executable, "-c", SAVER, str(target)], env=environment(), cwd=ROOT, text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert child.stdout and child.stdout.readline() == "ready\n"
            while not target.exists() and child.poll() is None:  # the first one has to come so far
                time.sleep(0.001)
            time.sleep(rng.random() * 0.2)
            child.kill()
            child.communicate()
            llm.session.release(llm.session.load(target))
            loaded += 1
        prompt = [1, *range(200, 250)]  # none that was saved: it is written, and who writes tidies up
        with llm.stream(prompt, max_tokens=1, prompt_cache=target) as stream:
            list(stream)
    assert not (left := strays(target.parent, "cache")), left
    return f"{count} processes killed while they saved prompt caches: {loaded} times a file was there, each loaded"


# -- a full disk -------------------------------------------------------------------------------------------------------


class FullDisk:
    """From the n-th write to a file on, the disk is full.

    Attributes
    ----------
    writes : int
        How many were asked for.
    """

    def __init__(self, after: int):
        self.after, self.writes = after, 0

    def count(self) -> None:
        """Take note of a write; fail if it is one too many."""
        self.writes += 1
        if self.writes > self.after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_disk(after: int) -> Iterator[FullDisk]:
    """Let Python's writes to files fail, those through bare descriptors too."""
    disk, opened, written = FullDisk(after), io.open, os.write

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            disk.count()
            return super().write(data)

    def opening(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or (buffering != -1 and "b" not in mode):
            return opened(file, mode, buffering, *rest, **options)
        raw = Raw(file, mode.replace("b", "").replace("t", ""), **{k: v for k, v in options.items() if k == "opener"})
        stream: Any = raw if buffering == 0 else io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return stream
        return io.TextIOWrapper(stream, options.get("encoding"), options.get("errors"), options.get("newline"))

    def writing(descriptor: int, data: Any) -> int:
        if descriptor > 2:
            disk.count()
        return written(descriptor, data)

    with mock.patch.object(builtins, "open", opening), mock.patch.object(io, "open", opening), \
            mock.patch.object(os, "write", writing):
        yield disk


class FailingDisk(FullDisk):
    """From the n-th read of a model's file on, the disk fails."""

    reads = property(lambda self: self.writes)

    def count(self) -> None:
        """Take note of a read; fail if it is one too many."""
        self.writes += 1
        if self.writes > self.after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def failing_disk(patched: Any, after: int) -> FailingDisk:
    """Let reads through `files.open_plain` fail, in all modules that are there (`patched`: pytest's monkeypatch)."""
    from edgeinfer.base import files

    disk, plain = FailingDisk(after), files.open_plain

    class Raw(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            disk.count()
            return super().readinto(buffer)

        def readall(self) -> bytes:
            disk.count()
            return super().readall()

    def opening(path: Any) -> io.BufferedReader:
        with plain(path) as file:
            return io.BufferedReader(Raw(os.dup(file.fileno())))

    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith("edgeinfer") and vars(module).get("open_plain") is plain:
            patched.setattr(module, "open_plain", opening)
    return disk


def each_write(action: Callable[[], Any], check: Callable[[], Any]) -> int:
    """Let each write of an action fail in turn; it must say so in a sentence, and `check` holds afterwards."""
    with full_disk(10**9) as disk:
        action()
    for after in range(disk.writes):
        try:
            with full_disk(after):
                action()
        except EdgeInferError as error:
            assert "No space left" in str(error) or "disk is full" in str(error), error
            assert not any(word in str(error) for word in DELETE), error
        check()
    action()
    check()
    return disk.writes


def full_disks(directory: Path, count: int, seed: int) -> str:
    """Fail each write of a conversion, a first run, a prompt cache and a device profile once."""
    workspace, out = Workspace(directory), directory / "out"
    out.mkdir()

    def converted() -> None:
        convert(workspace.checkpoint, out / "bundle", overwrite=True)

    def checked(*known: str) -> None:
        workspace.check(out / "bundle")
        assert not (left := strays(out, *known)), left

    conversions = each_write(converted, lambda: checked("bundle"))

    def first_run() -> None:
        shutil.rmtree(workspace.cache / "bundles", ignore_errors=True)
        workspace.check(resolve(workspace.checkpoint))

    def here(source: Path, destination: Path, weights: str, group_size: int, **_: object) -> list[str]:
        convert(source, destination, weights=weights, group_size=group_size, overwrite=True)
        return []

    cache = mock.patch.dict(os.environ, EDGEINFER_CACHE=str(workspace.cache))
    with cache, mock.patch("edgeinfer.converters.convert_apart", here):  # it converts in another process, else
        runs = each_write(first_run, lambda: None)
        first_run()
    with LLM(out / "bundle", ctx=128, threads=1) as llm:
        sequence = llm.session.new_sequence()
        llm.session.prefill(sequence, list(range(40)))

        def loads() -> None:
            llm.session.release(llm.session.load(out / "cache"))
            checked("bundle", "cache")

        caches = each_write(lambda: llm.session.save(sequence, out / "cache"), loads)
        llm.session.release(sequence)
    profile = next(iter(profiles().values()))
    devices = each_write(lambda: save_profile(profile, out / "device.toml"),
                         lambda: load_profile(out / "device.toml"))
    return (f"each write failed once: {conversions} of a conversion, {runs} of a first run, {caches} of a prompt "
            f"cache, {devices} of a device profile")


# -- together ----------------------------------------------------------------------------------------------------------


def together(directory: Path, count: int, seed: int) -> str:
    """Two and five processes convert and run the same at once, in one and in two namespaces of process ids."""
    workspace, target, rounds = Workspace(directory, hidden_size=256), directory / "out" / "bundle", 0
    target.parent.mkdir()
    spaces: list[list[str]] = [[]]
    if not subprocess.run([*PID_NAMESPACE, "true"], capture_output=True).returncode:
        spaces.append(PID_NAMESPACE)
    for number in range(max(1, count // 10)):
        for n, space in ((n, space) for n in (2, 5) for space in spaces):
            shutil.rmtree(workspace.cache / "bundles", ignore_errors=True)
            runs = [workspace.start("run", workspace.checkpoint, "Once", "-n", 1, "--no-stats", before=space if i % 2
                                    else [])
                    for i in range(n)]
            writers = [workspace.start("convert", workspace.checkpoint, target, "--overwrite", before=space if i % 2
                                       else [])
                       for i in range(n)] if number % 2 == 0 else []
            for child in (*runs, *writers):
                told_well(child)
            for bundle in (path for path in (workspace.cache / "bundles").iterdir() if not path.name.startswith(".")):
                workspace.check(bundle)
            if writers:
                workspace.check(target)
            assert not (left := strays(target.parent, "bundle")), left
            rounds += 1
    return f"{rounds} rounds of two and five processes at once, in {len(spaces)} kind(s) of namespaces: all ended well"


KINDS = {"conversions": killed_conversions, "first-runs": killed_first_runs, "saves": killed_saves,
         "full-disk": full_disks, "together": together}


def main() -> int:
    """Run the requested kinds and report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of: " + ", ".join(KINDS))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory(prefix="faults-") as directory:
            print(f"{kind}: {KINDS[kind](Path(directory), options.count, options.seed)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
