"""Losses other than a killed replica: a node that ends or falls silent while it answers, and a killed front end.

    python benchmarks/cluster_losses.py --document docs/measurements/several-machines.md

The nodes are processes of this machine. `node` takes one of three away while all stream, and compares each text with
that of one process. `silent` stops its processes instead, as a cable that is pulled out does, with the health checks of
a cluster over a network. `front` kills the server while it streams and starts another one at the same port.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import fill
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import Row, engines, served
from benchmarks.harness import machine, publish, row, table
from benchmarks.peers.http_server import HOST, running
from edgeinfer import LLM
from edgeinfer.cluster import RemoteModel, connected
from edgeinfer.cluster.connection import LOCAL, ON_NETWORK, environment
from tests.helpers.ray_nodes import three_nodes
from tests.helpers.serving import serving

CLIENTS, STREAMS, TOKENS, CTX = 9, 72, 900, 1024
OPTIONS: dict[str, Any] = dict(ctx=CTX, threads=1, budget=400 << 20, max_sequences=8, max_queue=256, fill_budget=None,
                               speculate="off")


def stream(host: str, port: int, number: int, tokens: int) -> tuple[str, list[float], str]:
    """Return the text of a stream, when its events came, and the reason that it ended with, or its error."""
    connection, times, text, end = http.client.HTTPConnection(host, port, timeout=300), list[float](), "", "cut"
    try:
        connection.request("POST", "/v1/completions", json.dumps(
            {"prompt": f"Once there was fox {number}", "seed": number, "max_tokens": tokens, "ignore_eos": True,
             "stream": True}), {"content-type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return text, times, str(event["error"])
                times.append(time.perf_counter())
                text += event["choices"][0]["text"]
                end = event["choices"][0]["finish_reason"] or end
    except (OSError, http.client.HTTPException) as error:
        end = type(error).__name__
    finally:
        connection.close()
    return text, times, end


def streams(port: int, n: int = STREAMS, tokens: int = TOKENS) -> list[tuple[str, list[float], str]]:
    """Return the streams of several clients, each of which has one at a time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda number: stream(HOST, port, number, tokens), range(n)))


def taken_away(cluster: Any) -> None:
    """End the processes of a node at once."""
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)


def silenced(cluster: Any) -> None:
    """Stop the processes of a node: its connections stay open."""
    import psutil

    raylet = psutil.Process(cluster.worker_nodes.copy().pop().all_processes["raylet"][0].process.pid)
    for one in (raylet, *raylet.children(recursive=True)):
        one.send_signal(signal.SIGSTOP)


def node(lose: Callable[[Any], None] = taken_away, what: str = "is taken away") -> list[Row]:
    """Lose a node while all three stream."""
    said, removed = list[str](), list[float]()
    with environment(LOCAL), three_nodes() as cluster, connected(cluster.address) as ray:
        found = asyncio.run(ray.replicas(None, "demo", "demo", OPTIONS))

        def opened(source: str, left: int | None) -> Any:
            return RemoteModel(source, list(found), 256, said.append, lambda: ray.end(found))

        with serving({"demo": "demo"}, lambda source, left: LLM(source, **OPTIONS)) as one:
            right = streams(one.port)
        assert all(end == "length" for _, _, end in right), right[0]
        with serving({"demo": "demo"}, opened) as server:
            def remove() -> None:
                time.sleep(1.0)
                removed.append(time.perf_counter())
                lose(cluster)

            remover = threading.Thread(target=remove)
            remover.start()
            answers = streams(server.port)
            remover.join()
    assert any("is lost (" in one for one in said), said
    waits = [after - before for _, times, _ in answers for before, after in itertools.pairwise(times)
             if after > removed[0]]
    same = sum(text == other for (text, _, _), (other, _, _) in zip(answers, right, strict=True))
    return [(f"{STREAMS} streams of {TOKENS} tokens, {CLIENTS} at once, on three nodes, one of which {what}",
             f"{same} as one process", "all", "demo"),
            ("longest time from then on between two events of a stream", f"{max(waits):.2f} s", "10 s", "")]


def silent() -> list[Row]:
    """Stop a node's processes while all three nodes stream."""
    os.environ.update(ON_NETWORK)
    return node(silenced, "falls silent")


def front() -> list[Row]:
    """Kill the server's own process while it streams, and start another one."""
    command, port = served("demo", "--replicas", "2", "-t", "1", "--ctx", str(CTX))
    with running(command, port) as server:
        left, killed = engines(server), list[float]()

        def kill() -> None:
            time.sleep(1.0)
            killed.append(time.perf_counter())
            server.process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        answers = streams(port)
        ended = time.perf_counter() - killed[0]
        killer.join()
    errors = [end for _, times, end in answers if end != "length" and times]
    refused = [end for _, times, end in answers if end != "length" and not times]
    began = time.perf_counter()
    while any(one.is_running() for one in left) and time.perf_counter() - began < 60:
        time.sleep(0.1)
    gone = time.perf_counter() - began
    with running(command, port):
        again = [end for _, _, end in streams(port, tokens=16)]
    return [(f"{STREAMS} streams, {CLIENTS} at once, whose server is killed", f"{len(errors)} end with an error, "
             f"{len(refused)} are refused, all within {ended:.1f} s", "an error at once",
             f"demo, two replicas, which end within {gone:.1f} s"),
            ("the same command again at the same port", f"{again.count('length')} of {STREAMS} answered", "all", "")]


PARTS = {"node": node, "silent": silent, "front": front}


def main() -> None:
    """Run the requested losses, and print or publish a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--document", type=Path)
    options = parser.parse_args()
    rows = [one for part in options.parts.split(",") for one in PARTS[part]()]
    where = fill(f"{machine()}; load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}:", 120)
    publish(f"## Losses\n\n{where}\n`python benchmarks/cluster_losses.py --parts {options.parts}`\n\n" + table(
        "what | measured | asked for | remark", (row(*one) for one in rows)), options.document, "losses")


if __name__ == "__main__":
    main()
