"""The costs of HTTP: time of a request and of a streamed token, memory, start, and idle connections.

    python benchmarks/serving_overhead.py --rounds 30 --document docs/measurements/serving.md

Requests alternate between `edgeinfer serve` and the same model in this process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import in_turns, machine, publish, spread, table, wait_for_calm
from benchmarks.peers.http_server import HOST, HttpServer, ask_all, free_port, running, streamed_request
from benchmarks.soaking import STORY
from edgeinfer import LLM
from tests.helpers.serving import chat_model

CTX, PROMPT, SHORT, LONG = 512, 64, 16, 256
"""Tokens: of the context, of prompts, of whole answers, and of streamed ones."""
IDLE, BLOCK = 500, 20
"""Connections without a request, and requests of a turn."""
CHAT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"temperature": 0, "max_tokens": SHORT},
    "/v1/responses": {"temperature": 0, "max_output_tokens": SHORT},
    "/v1/messages": {"model": "", "temperature": 0, "max_tokens": SHORT},
    "/api/chat": {"model": "", "stream": False, "options": {"temperature": 0, "num_predict": SHORT}},
}
"""Bodies of requests without their messages."""
RUN = ("-m", "edgeinfer")


def command(model: str, port: int, *more: str) -> list[str]:
    """Return the command of the server."""
    return [sys.executable, *RUN, "serve", model, "--port", str(port), "--ctx", str(CTX), "--threads", "1",
            "--speculate", "off", *more]


class Requests:
    """The same requests over HTTP and in this process; no two prompts have a beginning in common."""

    def __init__(self, server: HttpServer, llm: LLM):
        self.server, self.llm, self._random = server, llm, Random(1)
        self._connection = http.client.HTTPConnection(HOST, server.port, timeout=60)

    def prompt(self) -> list[int]:
        """Return new ids."""
        return [self._random.randrange(3, self.llm.runner.model.vocab_size) for _ in range(PROMPT)]

    def over_http(self) -> float:
        """Return the seconds of a whole answer in a connection that stays open."""
        return self._posted("/v1/completions", {**streamed_request(self.prompt(), SHORT), "stream": False,
                                                "stream_options": None})

    def _posted(self, path: str, body: dict[str, Any]) -> float:
        data = json.dumps(body)
        began = time.perf_counter()
        self._connection.request("POST", path, data)
        answer = self._connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
        return time.perf_counter() - began

    def messages(self) -> list[dict[str, str]]:
        """Return a new conversation."""
        return [{"role": "user", "content": f"{self._random.random()} {STORY}"}]

    def chat_over_http(self, path: str) -> float:
        """Return the seconds of an answer to a conversation, in the API of a path."""
        field = "input" if path == "/v1/responses" else "messages"
        return self._posted(path, {**CHAT[path], field: self.messages()})

    def chat_in_process(self) -> float:
        """Return the seconds of such an answer."""
        messages = self.messages()
        began = time.perf_counter()
        self.llm.chat(messages, max_tokens=SHORT, temperature=0, reuse=True)
        return time.perf_counter() - began

    def in_process(self) -> float:
        """Return the seconds of a whole answer."""
        prompt = self.prompt()
        began = time.perf_counter()
        self.llm.complete(prompt, max_tokens=SHORT, temperature=0, ignore_eos=True, reuse=True)
        return time.perf_counter() - began

    def streamed(self, **more: Any) -> tuple[float, float]:
        """Return wall and processor time of the server for a streamed token after the first one, in seconds."""
        began = self.server.cpu_seconds()
        ((one,), _) = ask_all(self.server.port, [{**streamed_request(self.prompt(), LONG), **more}], 1)
        return (one.end - one.ttft) / LONG, (self.server.cpu_seconds() - began) / LONG

    def streamed_in_process(self, **more: Any) -> tuple[float, float]:
        """Return the same of this process."""
        prompt, began, times = self.prompt(), time.process_time(), list[float]()
        for _ in self.llm.stream(prompt, max_tokens=LONG, temperature=0, ignore_eos=True, reuse=True, **more):
            times.append(time.perf_counter())
        return (times[-1] - times[0]) / LONG, (time.process_time() - began) / LONG


def block(once: Callable[[], float]) -> float:
    """Return the median of a few requests one after the other."""
    return statistics.median(once() for _ in range(BLOCK))


def pairs(http_side: Any, own_side: Any, rounds: int) -> tuple[list[Any], list[Any]]:
    """Run both sides in turns, once for warming up and so many times, and return the results of each."""
    found = [in_turns({"http": http_side, "own": own_side}, turn) for turn in range(rounds + 1)][1:]
    return [one["http"] for one in found], [one["own"] for one in found]


def times(model: str, rounds: int) -> list[str]:
    """Measure requests and streamed tokens."""
    port, rows = free_port(), []
    with running(command(model, port), port) as server, \
            LLM(model, ctx=CTX, threads=1, max_sequences=16, speculate="off") as llm:
        both = Requests(server, llm)
        http_side, own = pairs(partial(block, both.over_http), partial(block, both.in_process), rounds)
        rows.append(compared(f"a request of {SHORT} tokens, wall time", http_side, own, "2 ms", 1e3, "ms"))
        for more, kind in ({}, "text alone"), ({"logprobs": 0}, "with log-probabilities"):
            http_streams, own_streams = pairs(partial(both.streamed, **more), partial(both.streamed_in_process, **more),
                                              rounds)
            for i, what in enumerate(("wall time", "processor time")):
                rows.append(compared(f"a streamed token, {kind}, {what}", [one[i] for one in http_streams],
                                     [one[i] for one in own_streams], "100 us", 1e6, "us"))
        quiet, crowded = list[float](), list[float]()
        for turn in range(max(rounds // 2, 3)):
            def with_idle() -> float:
                with idle_connections(port):
                    return block(both.over_http)

            found = in_turns({"quiet": lambda: block(both.over_http), "crowded": with_idle}, turn)
            quiet.append(found["quiet"])
            crowded.append(found["crowded"])
        ratios = [one / other for one, other in zip(crowded, quiet, strict=True)]
        rows.append(f"| a request beside {IDLE} idle connections | {1e3 * statistics.median(crowded):.2f} ms | "
                    f"{1e3 * statistics.median(quiet):.2f} ms | {spread(ratios)} times | 1.05 |")
    return rows


def chats(rounds: int) -> list[str]:
    """Measure requests to all APIs that answer conversations, with a chat template for the demo model."""
    port = free_port()
    with TemporaryDirectory() as folder:
        model = chat_model(Path(folder))
        with running(command(model, port), port) as server, \
                LLM(model, ctx=CTX, threads=1, max_sequences=16, speculate="off") as llm:
            both = Requests(server, llm)
            return [compared(f"{path}, wall time", *pairs(
                partial(block, partial(both.chat_over_http, path)), partial(block, both.chat_in_process), rounds),
                "2 ms", 1e3, "ms") for path in CHAT]


def compared(what: str, http_side: list[float], own: list[float], most: str, scale: float, unit: str) -> str:
    """Return a row: medians of both sides, and the median of the differences."""
    differences = [one - other for one, other in zip(http_side, own, strict=True)]
    cells = " | ".join(f"{scale * statistics.median(values):.2f} {unit}" for values in (http_side, own, differences))
    return f"| {what} | {cells} | {most} |"


@contextmanager
def idle_connections(port: int) -> Iterator[None]:
    """Hold connections that have asked once and are silent now."""
    held = []
    try:
        for _ in range(IDLE):
            connection = http.client.HTTPConnection(HOST, port, timeout=10)
            held.append(connection)
            connection.request("GET", "/health")
            connection.getresponse().read()
        yield
    finally:
        for connection in held:
            connection.close()


def ready(model: str, rounds: int) -> str:
    """Measure the start, with the model and its kernels in their caches."""
    port, found = free_port(), []
    for _ in range(rounds + 1):
        with running(command(model, port), port) as server:
            found.append(server.ready_seconds)
    return f"| start until /health answers 200 | {spread(found[1:])} s | | | 2 s |"


def memory(model: str, rounds: int) -> str:
    """Measure the peak memory of `edgeinfer serve`, after a few requests, and of `edgeinfer run`."""
    port, ours, others = free_port(), list[int](), list[int]()
    text = "Once upon a time"
    for _ in range(rounds):
        with running(command(model, port), port) as server:
            for _ in range(8):
                body = {"prompt": text, "max_tokens": 128, "temperature": 0, "ignore_eos": True, "stream": True}
                ask_all(port, [body], 1)
            ours.append(server.peak_rss())
        others.append(peak_of([sys.executable, *RUN, "run", model, "--ctx", str(CTX), "--threads", "1", "--speculate",
                               "off", "-n", "128", "--temp", "0", text]))
    more = [(one - other) / 1e6 for one, other in zip(ours, others, strict=True)]
    return (f"| most memory of the process, over `edgeinfer run` | {statistics.median(ours) / 1e6:.0f} MB | "
            f"{statistics.median(others) / 1e6:.0f} MB | {spread(more, '.1f')} MB | 40 MB |")


def peak_of(arguments: list[str]) -> int:
    """Run a program and return the most physical memory that it had, in bytes."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arguments[1:]} failed")
    return used.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", choices=("times", "chats", "start", "memory"), help="measure one of the parts")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a calm machine (default 60)")
    parser.add_argument("--document", type=Path)
    given = parser.parse_args()
    wait_for_calm(given.patience, 0.3)
    rows, few = [], max(given.rounds // 6, 3)
    if given.only in (None, "times"):
        rows += times(given.model, given.rounds)
    if given.only in (None, "chats"):
        rows += chats(given.rounds)
    if given.only in (None, "start"):
        rows.append(ready(given.model, few))
    if given.only in (None, "memory"):
        rows.append(memory(given.model, few))
    publish("\n".join([f"{machine()}.", "", table(
        f"{given.model} | over HTTP | in process | difference | bound", rows, right=True)]), given.document, "overhead")


if __name__ == "__main__":
    main()
