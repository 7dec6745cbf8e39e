"""`edgeinfer serve` as a process: start, signals, draining, and refusals."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("starlette")
from tests.helpers.command_line import ROOT, edgeinfer, environment
from tests.helpers.serving import Running, until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
HOLDING = """
import os, sys, time
from edgeinfer.cli import main
from edgeinfer.runtime.session import Session

def waits(*how, run=Session._run, hold=sys.argv.pop(1)):
    while os.path.exists(hold):
        time.sleep(0.01)
    return run(*how)

Session._run = waits
main()
"""


class Program:
    """`edgeinfer serve` in a process of its own, whose forward passes wait while a file exists: `hold`."""

    def __init__(self, folder: Path, *arguments: str):
        self.hold, self.log = folder / "hold", folder / "log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, "-c", HOLDING, self.hold, "serve", "demo", "--port", "0",
                                             *arguments], stderr=file, env=environment(), cwd=ROOT)

    def ready(self) -> bool:
        """Return whether it answers; `running` asks it then."""
        assert self.process.poll() is None, self.log.read_text()
        found = re.search(r"Serving demo.* at http://\S+:(\d+)", self.log.read_text())
        if found:
            self.running = Running(None, int(found[1]), [])
        return found is not None

    def holds(self) -> bool:
        """Return whether a request runs."""
        return bool(self.running.ask("/status").json["models"][0]["running"])

    def ending(self) -> bool:
        """Return whether it has noticed a signal."""
        return self.running.ask("/health").status == 503

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> tuple[int, str]:
        return self.process.wait(timeout=600), self.log.read_text()


def test_it_starts_answers_and_drains(tmp_path: Path) -> None:
    program = Program(tmp_path, "--drain", "600")
    try:
        assert until(program.ready)
        program.hold.touch()
        with ThreadPoolExecutor(2) as pool:
            last = pool.submit(program.running.ask, COMPLETIONS, {**LONG, "n": 8, "max_tokens": 300, "temperature": 1})
            assert until(program.holds)
            program.process.send_signal(signal.SIGTERM)
            drained = until(program.ending)
            program.hold.unlink()
            assert drained and last.result().json["usage"]["completion_tokens"] == 8 * 300
        code, errors = program.end()
    finally:
        program.kill()
    assert code == 0 and errors.count("edgeinfer: ") == 5 and "Traceback" not in errors


@pytest.mark.slow
def test_what_does_not_end_in_time_is_told_so(tmp_path: Path) -> None:
    program = Program(tmp_path, "--drain", "0.1")
    try:
        assert until(program.ready)
        program.hold.touch()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(program.running.ask, "/v1/embeddings", {"input": ["word " * 100] * 900})
            assert until(program.holds)
            program.process.send_signal(signal.SIGTERM)
            assert asked.result().status == 503 and "about to end" in asked.result().error
            program.hold.unlink()
        code, errors = program.end()
    finally:
        program.kill()
    assert code == 0 and "Traceback" not in errors


def ask_in_vain(running: Running) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        running.ask(COMPLETIONS, {**LONG, "n": 16, "max_tokens": 900})


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    program = Program(tmp_path)
    try:
        assert until(program.ready)
        program.hold.touch()
        asking = threading.Thread(target=ask_in_vain, args=(program.running,))
        asking.start()
        assert until(program.holds)
        program.process.send_signal(signal.SIGINT)
        assert until(program.ending)  # two that come together are one
        program.process.send_signal(signal.SIGINT)
        assert program.end()[0] == 1
        asking.join()
    finally:
        program.kill()


def test_what_cannot_be_served_ends_with_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = edgeinfer("serve", "demo", "--port", str(taken.getsockname()[1]))
    assert found.code == 2 and "Cannot listen on 127.0.0.1 port" in found.err
    assert edgeinfer("serve", "demo", "--lazy", "keep=0.5", "--port", "0").code == 2
    small = edgeinfer("serve", "demo", "--budget", "40MB", "--port", "0")
    assert small.code == 3 and "edgeinfer: " in small.err
    assert edgeinfer("serve", "no-such-model", "--port", "0").code == 1
    assert "--max-sequences is 0" in edgeinfer("serve", "demo", "--max-sequences", "0", "--port", "0").err
    for flag, value in ("--port", "99999"), ("--drain", "-1"), ("--max-queue", "0"), ("--read-timeout", "inf"):
        found = edgeinfer("serve", "demo", flag, value)
        assert found.code == 2 and f"edgeinfer: {flag} is " in found.err
