"""Requests of all kinds while replicas are killed, compared with one process; and conversations on three replicas.

    python benchmarks/cluster_kills.py --model MODEL --document docs/measurements/several-machines.md

`one`, `two`, `three` and `prefill` kill nothing. `replicas` and `apart` kill a replica every two seconds, where two
answer: each request must have the text and log-probabilities of one process. `split` kills a stage of a divided model:
a request has the same text or an error. `conversations` compares the cached tokens of three replicas with those of one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import Row, engines, served, states
from benchmarks.harness import machine, publish, row, table
from benchmarks.peers.http_server import HOST, HttpServer, running

KILL_SECONDS, SPLIT_KILL_SECONDS, AT_ONCE = 2.0, 10.0, 8
TOKENS = 1, 16, 60, 200, 1000
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 0.9, "top_p": 0.8}, {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "min_p": 0.02}, {"temperature": 1.2, "top_k": 0}, {"n": 2, "temperature": 0.8},
    {"regex": "[a-z ]{30,90}"}, {"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}},
                                                 "required": ["n"], "additionalProperties": False}})
TURNS, TURN_TOKENS, PROMPT_ROOM = 10, 24, 400


def requests(n: int, ctx: int) -> list[dict[str, Any]]:
    """Return requests of all kinds, half of them streams, whose prompts and answers are within a context."""
    found = []
    for i in range(n):
        given = dict(SAMPLED[i % len(SAMPLED)])
        form = given.pop("json_schema", None)
        if form is not None:
            given["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": form}}
        found.append({"prompt": f"Once upon a time there was fox {i % 13}" + " and a crow" * (i % 40), "seed": i,
                      "max_tokens": min(TOKENS[i // len(SAMPLED) % len(TOKENS)], ctx - PROMPT_ROOM),
                      "ignore_eos": i % 3 > 0, "logprobs": 1, "stream": i % 2 > 0, **given})
    return found


def post(port: int, body: dict[str, Any]) -> Any:
    """Return the texts, log-probabilities and ends of a completion by choice, or its error."""
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        return f"error {answer.status}: {data[:200]!r}"
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")] if body["stream"] else [data]
    found: dict[int, list[Any]] = {}
    for event in map(json.loads, lines):
        if "error" in event:
            return f"error: {event['error']}"
        for one in event["choices"]:
            texts = found.setdefault(one["index"], ["", [], ""])
            texts[0] += one["text"]
            texts[1] += (one.get("logprobs") or {}).get("token_logprobs", [])
            texts[2] = one["finish_reason"] or texts[2]
    return found


def answers(port: int, asked: list[dict[str, Any]], seconds: float) -> list[Any]:
    """Return the outcome of each request; they begin spread over a time."""
    began = time.monotonic()

    def one(number: int) -> Any:
        time.sleep(max(0.0, began + number * seconds / len(asked) - time.monotonic()))
        found = post(port, asked[number])
        if number % 50 == 49:
            print(f"{number + 1} requests, {time.monotonic() - began:.0f} s", file=sys.stderr)
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(len(asked))))


@contextmanager
def killing(server: HttpServer, pause: float, split: bool) -> Iterator[list[float]]:
    """Kill a process of the model again and again, unless it is the last one that answers; yields the times."""
    ended, killed, draw = threading.Event(), list[float](), random.Random(1)

    def pool() -> list[psutil.Process]:
        return [one for one in server.process.children() if "spawn" in " ".join(one.cmdline())
                or "pipeline" in " ".join(one.cmdline())] if split else engines(server)

    def kill() -> None:
        while not ended.wait(pause):
            try:
                there = sum(one["there"] for one in states(server.port)) if not split else 2
                if there > 1 and (found := pool()):
                    draw.choice(found).kill()
                    killed.append(time.monotonic())
            except (psutil.Error, OSError):  # it has ended by itself
                continue

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def killed(name: str, model: str, asked: list[dict[str, Any]], right: list[Any], seconds: float, ctx: int,
           *options: str) -> Row:
    """Send requests to a server whose processes are killed, and count differences."""
    command, port = served(model, "-t", "1", "--ctx", str(ctx), *options)
    split = name.startswith("split")
    with running(command, port) as server:
        if name in WHOLE:
            found = answers(port, asked, 0)
            same = sum(one == other for one, other in zip(found, right, strict=True))
            return (f"{len(asked)} requests with `{' '.join(options)}`", f"{same} as one process", "all", "")
        if split:
            assert answers(port, asked, 0) == right, "without kills"
        with killing(server, SPLIT_KILL_SECONDS if split else KILL_SECONDS, split) as kills:
            found = answers(port, asked, seconds)
        received = 0 if split else sum(one["received_bytes"] for one in states(port))
    errors = [one for one in found if isinstance(one, str)]
    same = sum(one == other for one, other in zip(found, right, strict=True))
    for one in errors[:3]:
        print(f"{name}: {one}", file=sys.stderr)
    return (f"{len(asked)} requests in {seconds:.0f} s with `{' '.join(options)}`, {len(kills)} processes killed",
            f"{same} as one process, {len(errors)} errors, {len(asked) - same - len(errors)} others",
            "as one process or an error" if split else "all as one process",
            f"{Path(model).name}{f', {received / 1e6:.1f} MB of prompts computed apart' if name == 'apart' else ''}")


def conversations(model: str, n: int, ctx: int) -> Row:
    """Compare the cached tokens of three replicas with those of one process."""
    cached = []
    for options in ((), ("--replicas", "3")):
        command, port = served(model, "-t", "1", "--ctx", str(ctx), *options)
        with running(command, port), ThreadPoolExecutor(AT_ONCE) as pool:
            cached.append(sum(pool.map(lambda number: _conversation(port, number), range(n))))  # noqa: B023
    return (f"{n} conversations of {TURNS} turns on three replicas: cached tokens relative to one process",
            f"{cached[1] / cached[0]:.3f}", "at least 0.95", f"{Path(model).name}, {cached[1]:,} tokens")


def _conversation(port: int, number: int) -> int:
    """Return how many tokens of the prompts of a conversation were cached."""
    text, cached = f"{number} foxes and {number * 7} crows met by the river. ", 0
    for turn in range(TURNS):
        text += f"In turn {turn} of tale {number} they said: "
        connection = http.client.HTTPConnection(HOST, port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(
            {"prompt": text, "max_tokens": TURN_TOKENS, "seed": number, "ignore_eos": True}))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        text += answer["choices"][0]["text"]
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


WHOLE = {"one": ("--replicas", "1"), "two": ("--replicas", "2"), "three": ("--replicas", "3"),
         "prefill": ("--prefill", "1", "--decode", "2")}
"""Servers of which nothing is killed; of `split`, some requests come before the kills."""
MODES = {**WHOLE, "replicas": ("--replicas", "3"), "apart": ("--prefill", "1", "--decode", "2"),
         "split": ("--split", "auto")}


def main() -> None:
    """Run the requested kills, and print or publish a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--parts", default=",".join((*MODES, "conversations")))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--document", type=Path)
    options = parser.parse_args()
    parts, asked, rows = options.parts.split(","), requests(options.requests, options.ctx), list[Row]()
    if set(parts) & set(MODES):
        command, port = served(options.model, "-t", "1", "--ctx", str(options.ctx))
        with running(command, port):
            right = answers(port, asked, 0)
        print("one process has answered", file=sys.stderr)
        assert not any(isinstance(one, str) for one in right), [one for one in right if isinstance(one, str)][:3]
    for part in parts:
        rows.append(conversations(options.model, options.conversations, options.ctx) if part == "conversations" else
                    killed(part, options.model, asked, right, options.seconds, options.ctx, *MODES[part]))
        print(rows[-1], file=sys.stderr)
    where = fill(f"{machine()}; load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}:", 120)
    command_line = (f"`python benchmarks/cluster_kills.py --model {Path(options.model).name} --requests "
                    f"{options.requests} --seconds {options.seconds:.0f} --conversations {options.conversations}`")
    publish(f"## Kills\n\n{where}\n{command_line}\n\n" + table("what | measured | asked for | remark",
                                                           (row(*one) for one in rows)), options.document, "kills")


if __name__ == "__main__":
    main()
