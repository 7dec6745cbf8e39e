"""A server in a process of its own, and clients that cost the same for every server."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import psutil

from benchmarks.peers.worker import WorkerError

HOST = "127.0.0.1"
READY_SECONDS = 300.0
ANSWER_SECONDS = 1800.0
EVENT = re.compile(rb"^data: (\{[^\n]*\})\r?$", re.MULTILINE)


class HttpServer:
    """A server that runs.

    Parameters
    ----------
    command : list of str
        Starts it on `port`.
    port : int
    prepare : called in the new process before the command begins

    Attributes
    ----------
    process : psutil.Process
    ready_seconds : float
        From the start of the process until /health answers with 200.
    """

    def __init__(self, command: list[str], port: int, prepare: Callable[[], object] | None = None):
        self.port, self._log = port, tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        began = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL,
                                         preexec_fn=prepare)
        self.process = psutil.Process(self._process.pid)
        try:
            while not self._healthy():
                if self._process.poll() is not None or time.perf_counter() - began > READY_SECONDS:
                    raise WorkerError(f"{command[0]} does not serve: {self._last_line()}")
                time.sleep(0.005)
        except BaseException:
            self.stop()
            raise
        self.ready_seconds = time.perf_counter() - began

    def _healthy(self) -> bool:
        try:
            return self.get("/health") == 200
        except OSError:
            return False

    def _last_line(self) -> str:
        self._log.seek(0)
        return (self._log.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]

    def get(self, path: str) -> int:
        """Ask for a path in a connection of its own; returns the status."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def pause(self) -> None:
        """Stop it while it is another server's turn: threads that wait may spin."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def peak_rss(self) -> int:
        """Return the most physical memory that it had so far, in bytes."""
        with open(f"/proc/{self._process.pid}/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))

    def cpu_seconds(self) -> float:
        """Return the processor time that it has taken."""
        times = self.process.cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self.go_on()
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


@contextmanager
def running(command: list[str], port: int, prepare: Callable[[], object] | None = None) -> Iterator[HttpServer]:
    """Run a server while the context lasts."""
    server = HttpServer(command, port, prepare)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@dataclass
class Streamed:
    """Times of one streamed answer, in seconds since it was asked for."""

    began: float
    """When it was asked for, by time.perf_counter()."""
    arrivals: list[float]
    """When each event with text arrived."""
    end: float
    tokens: int
    """Tokens of the answer, as the server counts them."""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0]

    @property
    def itl(self) -> float:
        """Mean time between two tokens."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Times between two events."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Receiver(asyncio.Protocol):
    """Notes when parts of an answer arrive and leaves all else for later, so that clients take hardly any time."""

    def __init__(self, request: bytes):
        self._request, self.parts, self.times = request, list[bytes](), list[float]()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.began = time.perf_counter()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def streamed(self) -> Streamed:
        """Read the arrived data; raises `WorkerError` unless it is a whole stream."""
        data, ends = b"".join(self.parts), list(accumulate(map(len, self.parts)))
        if b" 200 " not in data[:20] or b"data: [DONE]" not in data:
            raise WorkerError(f"The server answered {data[:200]!r}.")
        arrivals, tokens = [], 0
        for found in EVENT.finditer(data):
            event = json.loads(found[1])
            if any(choice.get("text") for choice in event["choices"]):
                arrivals.append(self.times[bisect_left(ends, found.end())] - self.began)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        return Streamed(self.began, arrivals, self.times[-1] - self.began, tokens)


async def _ask(port: int, body: dict[str, Any]) -> Streamed:
    data = json.dumps(body).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n")
    _, receiver = await asyncio.get_running_loop().create_connection(
        lambda: _Receiver(head.encode() + data), HOST, port)
    await asyncio.wait_for(receiver.ended, ANSWER_SECONDS)
    return receiver.streamed()


def ask_all(port: int, bodies: list[dict[str, Any]], clients: int) -> tuple[list[Streamed], float]:
    """Stream the answers to all requests, so many at once, and return them and the seconds of all together."""
    async def run() -> list[Streamed]:
        waiting, found = iter(bodies), list[Streamed]()

        async def client() -> None:
            for body in waiting:
                found.append(await _ask(port, body))

        await asyncio.gather(*(client() for _ in range(clients)))
        return found

    began = time.perf_counter()
    answers = asyncio.run(run())
    return answers, time.perf_counter() - began


def streamed_request(prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the body of a request that streams so many tokens, whatever they are."""
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
