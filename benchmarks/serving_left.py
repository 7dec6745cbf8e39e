"""The time from the end of a client's connection until its KV blocks are free.

    python benchmarks/serving_left.py --model smollm2-135m-q4_0.gguf --document docs/measurements/serving.md

Clients leave at random moments while their prompt is computed, or after the first event of their answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, row, table, wait_for_calm
from benchmarks.peers.http_server import HOST, ask_all, free_port, running, streamed_request

CTX, PROMPT, MOST = 2048, 1500, 400
"""Tokens of the context, of prompts, and of answers."""
IDS = 4000
"""Token ids are drawn below this one."""
BOUND_MS = 300


class Clients:
    """Clients of one server, none of which waits for its answer."""

    def __init__(self, port: int):
        self._port, self._random = port, Random(1)
        self._status = http.client.HTTPConnection(HOST, port, timeout=60)
        ((first,), _) = ask_all(port, [self.body()], 1)
        self.prefill = first.ttft

    def body(self) -> dict[str, Any]:
        """Return a request; no two prompts have a beginning in common."""
        return streamed_request([self._random.randrange(3, IDS) for _ in range(PROMPT)], MOST)

    def model(self) -> dict[str, Any]:
        """Return the memory that the model holds."""
        self._status.request("GET", "/status")
        (found,) = json.load(self._status.getresponse())["models"]
        return found  # type: ignore[no-any-return]

    def leave(self, stream: bool, decoding: bool) -> float:
        """Ask, leave, and return the milliseconds until all blocks are free."""
        data = json.dumps({**self.body(), "stream": stream, "stream_options": None}).encode()
        with socket.create_connection((HOST, self._port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            while not self.model()["kv_usage"]:
                pass
            if decoding:
                client.recv(1)
                while b"data: " not in client.recv(4096):
                    pass
            else:
                time.sleep(0.8 * self._random.random() * self.prefill)
        began = time.perf_counter()
        while (model := self.model())["kv_usage"] or model["running"] or model["waiting"]:
            pass
        return 1e3 * (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a calm machine (default 60)")
    parser.add_argument("--document", type=Path)
    given = parser.parse_args()
    wait_for_calm(given.patience, 0.3)
    port, rows, worst = free_port(), list[str](), 0.0
    command = [sys.executable, "-m", "edgeinfer", "serve", given.model, "--port", str(port), "--ctx", str(CTX),
               "--threads", given.threads]
    with running(command, port):
        clients = Clients(port)
        for where, stream, decoding in ("prefill, whole answer", False, False), ("prefill, stream", True, False), \
                ("decode, stream", True, True):
            times = sorted(clients.leave(stream, decoding) for _ in range(given.rounds))
            worst = max(worst, times[-1])
            rows.append(row(where, given.rounds, f"{statistics.median(times):.1f} ms",
                            f"{times[int(0.95 * len(times))]:.1f} ms", f"{times[-1]:.1f} ms", f"{BOUND_MS} ms"))
    head = "left in | clients | median until blocks are free | P95 | longest | bound"
    about = f"{Path(given.model).stem}, {given.threads} threads; {PROMPT} tokens take {clients.prefill:.2f} s"
    publish(f"{machine()}; {about}.\n\n{table(head, rows)}", given.document, "left")
    return int(worst > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main())
