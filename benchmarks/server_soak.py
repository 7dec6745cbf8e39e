"""Clients that connect, leave, break off and send garbage at random moments, while others must get their texts.

    python benchmarks/server_soak.py [--minutes 20] [--events 2000] [--memory-max] [--document FILE]

`edgeinfer serve` runs as a program of its own, with keys and a KV pool that is too small for all requests. Each event
disturbs it once and sends up to four requests beside it: these survive, and must get the texts that they got alone.
In the end no request may be left, no KV block may be held, the resident memory must have stayed within 8 MB of what it
was after the first fifth of the time, and within the plan that the server has printed. With ``--memory-max`` the server
runs in a control group that allows it no more than its plan (needs the right to make one). The exit code is 1 if any of
this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, row, table
from benchmarks.outside import control_group
from benchmarks.peers.http_server import HOST, free_port, running
from benchmarks.soaking import LIMIT, STORY, Soak
from edgeinfer.base.api_client import ApiClient
from edgeinfer.errors import EdgeInferError

KEY = "a-key-of-the-soak"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"],
          "additionalProperties": False}


def bodies(n: int) -> list[dict[str, Any]]:
    """Return requests of all kinds."""
    chance = random.Random(1)
    found = []
    for number in range(n):
        body: dict[str, Any] = {
            "prompt": STORY * chance.choice((0, 1, 3, 5)) + f"Tale {chance.randrange(9)}:", "seed": number,
            "max_tokens": chance.choice((1, 10, 60, 120)), "temperature": chance.choice((0, 0.9)),
            "stream": chance.random() < 0.5, "frequency_penalty": chance.choice((0, 0.5)),
            "logprobs": chance.choice((None, None, 2))}
        found.append({**body, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
                     if number % 8 == 5 else body)
    return found


class ServerSoak(Soak):
    """One server and its disturbances."""

    def __init__(self, port: int, process: psutil.Process):
        super().__init__(process, 4)
        self.port, self.client = port, ApiClient(f"http://{HOST}:{port}", KEY)
        self.known = [(body, self.text(body)) for body in bodies(40)]

    def disturbances(self) -> Sequence[Callable[[], None]]:
        """Return the kinds of events."""
        return self._leave, self._half, self._garbage, self._idle, self._wrong_key, self._slow_reader

    def compare(self) -> str:
        """Run a request; returns the difference of its text from that of an undisturbed run."""
        body, want = self.draw(self.known)
        try:
            found = self.text(body)
        except EdgeInferError as error:
            return f"{body}: {error}"
        return "" if found == want else f"{body}: {found!r}, not {want!r}"

    def text(self, body: dict[str, Any]) -> str:
        """Return the text of a request."""
        body = {name: value for name, value in body.items() if value is not None}
        if not body["stream"]:
            return str(self.client.ask("/v1/completions", body)["choices"][0]["text"])
        return "".join(one["choices"][0]["text"] for one in self.client.events("/v1/completions", body))

    def left(self) -> list[str]:
        """Return the differences from the state before the first request."""
        for _ in range(100):
            (model,) = self.client.ask("/status")["models"]
            if not (model["running"] or model["waiting"] or model["kv_usage"]):
                return []
            time.sleep(0.1)
        return [f"{model['running']} requests run, {model['waiting']} wait, KV usage {model['kv_usage']}"]

    @contextlib.contextmanager
    def _connection(self, kind: str) -> Iterator[tuple[socket.socket, bytes, float]]:
        """Give a connection, a whole request and a random number, and count the event."""
        body, _ = self.draw(self.known)
        data = json.dumps({**body, "max_tokens": 300, "ignore_eos": True, "response_format": None}).encode()
        head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
                f"Content-Length: {len(data)}\r\n\r\n").encode()
        self.note(kind)
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=30) as opened:
            yield opened, head + data, self.chance()

    def _leave(self) -> None:
        with self._connection("left") as (opened, data, chance):
            opened.sendall(data)
            time.sleep(chance * 0.3)

    def _half(self) -> None:
        with self._connection("half of a request, or half-closed") as (opened, data, chance):
            opened.sendall(data[: int(chance * len(data))])
            opened.shutdown(socket.SHUT_WR)
            time.sleep(chance * 0.1)

    def _garbage(self) -> None:
        with self._connection("garbage") as (opened, data, chance):
            broken = bytearray(data)
            for place in random.Random(chance).sample(range(len(broken)), 8):
                broken[place] ^= 1 << int(8 * chance)
            opened.sendall(broken)
            opened.settimeout(0.3)
            opened.recv(4096)

    def _idle(self) -> None:
        with self._connection("silent") as (opened, _, chance):
            time.sleep(chance * 0.3)
            opened.sendall(b"GET ")

    def _wrong_key(self) -> None:
        with self._connection("wrong key") as (opened, data, _):
            opened.sendall(data.replace(KEY.encode(), b"another-key-of-19"))
            opened.recv(4096)

    def _slow_reader(self) -> None:
        with self._connection("slow reader that leaves") as (opened, data, chance):
            opened.sendall(data.replace(b'"stream": false', b'"stream": true '))
            for _ in range(int(10 * chance)):
                time.sleep(0.05)
                opened.recv(64)


@contextlib.contextmanager
def serving(model: str, port: int, limit: int | None) -> Iterator[psutil.Process]:
    """Run the server, in a control group of so many bytes."""
    command = [sys.executable, "-m", "edgeinfer", "serve", model, "--port", str(port), "--ctx", "512", "--kv-memory",
               "2MB", "--api-key", KEY, "--threads", "1", "--read-timeout", "5"]
    with contextlib.ExitStack() as held:
        group = held.enter_context(control_group()) if limit is not None else None
        if limit is not None:
            if group is None:
                raise SystemExit("A control group cannot be made here; leave --memory-max out, or run as root.")
            group.limit(limit)
        yield held.enter_context(running(command, port, group.join if group else None)).process


def main() -> int:
    """Run it, and print the outcome."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--memory-max", action="store_true", help="run the server in a control group of its plan")
    parser.add_argument("--document", type=Path, help="write the table there")
    asked = parser.parse_args()
    limit = None
    if asked.memory_max:
        with serving(asked.model, port := free_port(), None):
            limit = int(ApiClient(f"http://{HOST}:{port}", KEY).ask("/status")["planned_bytes"])
    with serving(asked.model, port := free_port(), limit) as process:
        soak = ServerSoak(port, process)
        soak.run(asked.events, 60 * asked.minutes)
        left, status = soak.left(), soak.client.ask("/status")
        connections = len([one for one in process.net_connections() if one.status == psutil.CONN_ESTABLISHED])
    faults = soak.wrong[:3] + left
    faults += [f"memory grew by {soak.growth[1] / 1e6:.1f} MB"] * (soak.growth[1] > LIMIT)
    faults += [f"{max(soak.rss)} bytes are over the plan of {status['planned_bytes']}"] * (
        max(soak.rss) > status["planned_bytes"])
    head = ("minutes | events | survivors | other texts than alone | memory after warm-up | growth at most | plan | "
            "limit | connections left")
    found = row(f"{asked.minutes:g}", sum(soak.events.values()), *soak.row(), f"{status['planned_bytes'] / 1e6:.0f} MB",
                "control group of the plan" if limit else "none", connections)
    publish(f"{machine()}.\n\n" + table(head, [found]), asked.document, "server-soak")
    print(dict(soak.events), *faults, sep="\n", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
