"""Several processes on Ray: recovery, the cost of a request, files of requests, and routing.

    python benchmarks/cluster.py --model BUNDLE --parts recovery,killed --document docs/measurements/several-machines.md

Ray runs on this machine alone, so the figures do not include a network. `routing` is in cluster_routing.py. `killed`
ends `edgeinfer batch` four times and starts it again. prompts_apart.py measures prompts on another replica.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster_routing import Row, percentile, routing
from benchmarks.harness import machine, publish, row, table
from benchmarks.peers.http_server import HOST, HttpServer, ask_all, free_port, running, streamed_request

COMMAND = [sys.executable, "-m", "edgeinfer"]
KILLS, KILLED_TOKENS, ROWS, ROW_TOKENS = 10, 300, 10_000, 8
SHORT_REQUESTS, STREAMS, STREAM_TOKENS = 400, 10, 400
SPEED_ROWS, SPEED_PROMPT, SPEED_TOKENS, AT_ONCE, TURNS = 16, 32, 48, 8, 2
MIN_GAP = 0.05


def served(model: str, *more: str) -> tuple[list[str], int]:
    """Return the process of a server, and its port."""
    port = free_port()
    return [*COMMAND, "serve", model, "--port", str(port), "--speculate", "off", *more], port


def engines(server: HttpServer) -> list[psutil.Process]:
    """Return the processes of the replicas of a server."""
    found = []
    for one in server.process.children(recursive=True):
        try:
            if "ray::Engine" in " ".join(one.cmdline()):
                found.append(one)
        except psutil.Error:
            continue
    return found


def states(port: int) -> list[dict[str, Any]]:
    """Return a server's status of its replicas."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/status", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["models"][0]["replicas"]
        return found


# -- recovery --------------------------------------------------------------------------------------------------------


def recovery(model: str) -> list[Row]:
    """Kill the replica of a stream, and measure the gap until its next token."""
    command, port = served(model, "--replicas", "2", "-t", "1", "--ctx", "2048")
    gaps = []
    with running(command, port) as server:
        while len(gaps) < KILLS:
            while len(pool := engines(server)) < 2 or not all(one["there"] for one in states(port)):
                time.sleep(0.2)
            before = {one["name"]: one["requests"] for one in states(port)}
            assert not any(before.values())
            killed: list[float] = []
            killer = threading.Thread(target=_kill_busy, args=(pool, killed))
            killer.start()
            [answer], _ = ask_all(port, [streamed_request([len(gaps) + 1] * 32, KILLED_TOKENS)], 1)
            killer.join()
            times = [answer.began + one for one in answer.arrivals]
            gaps.append(min(one for one in times if one > killed[0]) - killed[0])
            assert answer.tokens == KILLED_TOKENS
            if gaps[-1] < MIN_GAP:  # the idle one was killed
                gaps.pop()
            print(f"recovery: {gaps}", file=sys.stderr)
    return [("from a kill to the next token of its stream", f"{statistics.median(gaps):.2f} s, at most "
             f"{max(gaps):.2f} s", "1 s and the prompt", f"{Path(model).name}, {len(gaps)} kills")]


def _kill_busy(pool: list[psutil.Process], killed: list[float]) -> None:
    """Kill the process that works, once it does."""
    before = [sum(one.cpu_times()[:2]) for one in pool]
    time.sleep(0.6)
    worked = [sum(one.cpu_times()[:2]) - then for one, then in zip(pool, before, strict=True)]
    pool[worked.index(max(worked))].kill()
    killed.append(time.perf_counter())


# -- requests --------------------------------------------------------------------------------------------------------


def overhead(model: str) -> list[Row]:
    """Compare requests for one token, and streams, to a replica on Ray with those to a server without Ray, in turns."""
    options = ("-t", "1", "--ctx", "1024")
    (command, port), (other, on_ray) = served(model, *options), served(model, "--replicas", "1", *options)
    short, long = ({one: list[Any]() for one in (port, on_ray)} for _ in range(2))
    with running(command, port), running(other, on_ray):
        for i in range(SHORT_REQUESTS + STREAMS):
            found, tokens = (short, 1) if i < SHORT_REQUESTS else (long, STREAM_TOKENS)
            for one in (port, on_ray):
                found[one] += ask_all(one, [streamed_request([i % 200 + 1] * 32, tokens)], 1)[0]
    ms = {one: [1000 * each.end for each in short[one]] for one in short}
    event = [statistics.median(1000 * each.end / len(each.arrivals) for each in long[one]) for one in (port, on_ray)]
    token = [statistics.median(1000 * each.end / each.tokens for each in long[one]) for one in (port, on_ray)]
    rows = []
    for name, share, most in (("median", 0.5, 8), ("95th percentile", 0.95, 15)):
        off, on = (percentile(ms[one], share) for one in (port, on_ray))
        rows.append((f"request for one token on Ray: {name}", f"{on - off:.1f} ms more", f"at most {most} ms",
                     f"{Path(model).name}, {SHORT_REQUESTS} in turns; {off:.1f} ms without Ray"))
    return [*rows, (f"stream of {STREAM_TOKENS} tokens on Ray: each token", f"{token[1] - token[0]:.2f} ms more",
                    "at most 0.3 ms", f"{STREAMS} in turns; an event takes {event[1]:.2f} ms, {event[0]:.2f} without")]


# -- files of requests -----------------------------------------------------------------------------------------------


def requests(path: Path, rows: int, prompt: int, tokens: int, first: int = 0) -> Path:
    """Write a file of requests, no two of which begin alike."""
    path.write_text("".join(json.dumps({
        "custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {
            "prompt": [i % 250 + 1, i // 250 + 1, *[5 + i % 90] * (prompt - 2)], "seed": i, "max_tokens": tokens,
            "ignore_eos": True}}) + "\n" for i in range(first, first + rows)))
    return path


def batch(given: Path, out: Path, model: str, *more: str) -> list[str]:
    """Return the command that answers a file."""
    return [*COMMAND, "batch", str(given), str(out), "--model", model, "--speculate", "off", "--json", *more]


def lines(path: Path) -> int:
    """Return the number of whole lines."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed(model: str, n: int = ROWS) -> list[Row]:
    """Kill the run of a large file four times, and start it again."""
    with TemporaryDirectory() as folder:
        given, out = requests(Path(folder) / "in.jsonl", n, 12, ROW_TOKENS), Path(folder) / "out.jsonl"
        command, began = batch(given, out, "demo", "--ray", "local", "--workers", "2", "-t", "1", "--ctx", "256"), \
            time.perf_counter()
        for part in range(1, 5):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while lines(out) < part * n // 5:
                assert process.poll() is None, "it ended too early"
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.wait()
            print(f"killed: {lines(out)} rows", file=sys.stderr)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        ids = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    once = sorted(ids) == sorted(f"r{i}" for i in range(n))
    return [(f"{n:,} rows, the command killed four times and started again",
             "each id once" if once else f"{len(ids):,} lines, {len(set(ids)):,} ids", "each id once",
             f"demo, two workers of one thread, {time.perf_counter() - began:.0f} s in all")]


def timed(command: list[str]) -> Callable[[], dict[str, Any]]:
    """Start a command, and return the function that waits for its JSON object."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def ended() -> dict[str, Any]:
        out, _ = process.communicate()
        assert process.returncode == 0, command
        found: dict[str, Any] = json.loads(out)
        return found

    return ended


def speed(model: str) -> list[Row]:
    """Compare a file on Ray with `bench`, and two workers on Ray with two processes."""
    on_ray, alone, found = [], [], []
    with TemporaryDirectory() as name:
        folder = Path(name)
        given = requests(folder / "in.jsonl", SPEED_ROWS, SPEED_PROMPT, SPEED_TOKENS)
        halves = [requests(folder / f"{i}.jsonl", SPEED_ROWS // 2, SPEED_PROMPT, SPEED_TOKENS, i * SPEED_ROWS // 2)
                  for i in range(2)]
        options = ["--ctx", "512", "--max-sequences", str(AT_ONCE), "--budget", "3GB"]
        for turn in range(TURNS):
            bench = timed([*COMMAND, "bench", model, "--concurrency", str(AT_ONCE), "-p", str(SPEED_PROMPT), "-n",
                           str(SPEED_TOKENS), "--requests", str(SPEED_ROWS), "--json", "-t", "2"])()
            one = timed(batch(given, folder / f"one{turn}", model, *options, "-t", "2", "--ray", "local"))()
            found.append(one["tok_per_s"] / bench["serving"][0]["output_throughput"])
            both = timed(batch(given, folder / f"two{turn}", model, *options, "-t", "1", "--ray", "local",
                               "--workers", "2"))()
            waits = [timed(batch(half, folder / f"{turn}{i}", model, "--ctx", "512", "--max-sequences", str(AT_ONCE),
                                 "-t", "1")) for i, half in enumerate(halves)]
            on_ray.append(both["tok_per_s"])
            alone.append(2 * min(wait()["tok_per_s"] for wait in waits))
            print(f"speed: {found[-1]:.2f} of bench, {on_ray[-1]:.1f} on Ray, {alone[-1]:.1f} alone", file=sys.stderr)
    what = f"{Path(model).name}, {SPEED_ROWS} rows of {SPEED_PROMPT} and {SPEED_TOKENS} tokens, {AT_ONCE} at once"
    ratio = [one / other for one, other in zip(on_ray, alone, strict=True)]
    return [("file on Ray, one worker of two threads: tokens/s relative to `bench --concurrency`",
             _spread(found), "0.9", what),
            ("file on Ray, two workers of one thread: tokens/s relative to two processes without Ray",
             _spread(ratio), "0.95", what)]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


PARTS = {"recovery": recovery, "overhead": overhead, "killed": killed, "speed": speed, "routing": routing}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="bundle of recovery and speed")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rows", type=int, default=ROWS, help="of killed")
    parser.add_argument("--document", type=Path)
    options = parser.parse_args()
    for part in options.parts.split(","):
        found = killed(options.model, options.rows) if part == "killed" else PARTS[part](options.model)
        where = fill(f"{machine()}; load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}:", 120)
        command = f"`python benchmarks/cluster.py --model {Path(options.model).name} --parts {part}" + \
            (f" --rows {options.rows}`" if part == "killed" else "`")
        rows = table("what | measured | asked for | remark", (row(*one) for one in found))
        publish(f"## {part.capitalize()}\n\n{where}\n{command}\n\n{rows}", options.document, part)


if __name__ == "__main__":
    main()
