"""Ten turns of a conversation, here and on llama.cpp's server: tokens computed, and time until the answer begins.

    python benchmarks/conversations.py --llama-server PATH/llama-server --model FILE.gguf

Both sides read the same GGUF file and take turns. Each prompt is the history and new tokens; in half of the
conversations the history has only the last tokens of each answer, as chat templates leave it that strip the reasoning.
Token ids are random. `benchmarks/peers/gguf_models.py` writes files with random weights.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, row, table
from benchmarks.peers.http_server import HOST, HttpServer, free_port, running
from edgeinfer import LLM
from edgeinfer.memory_planner import default_threads

CTX, IDS, FIRST, USER, ANSWER, KEPT, TURNS = 4096, 16000, 400, 60, 120, 40, 10
"""Tokens of the context; ids are below; tokens of the first prompt, of a message, an answer, and the kept part of
it."""


class Turn(NamedTuple):
    """Its answer, tokens of the prompt that were computed, and milliseconds until the answer began."""

    answer: list[int]
    computed: int
    ttft: float


Ask = Callable[[list[int]], Turn]


def peer(server: HttpServer) -> Ask:
    """Return the client of llama.cpp's server."""
    def ask(ids: list[int]) -> Turn:
        client = http.client.HTTPConnection(HOST, server.port, timeout=1800)
        client.request("POST", "/completion", json.dumps({
            "prompt": ids, "n_predict": ANSWER, "temperature": 0, "ignore_eos": True, "cache_prompt": True,
            "return_tokens": True}), {"Content-Type": "application/json"})
        found = json.load(client.getresponse())
        return Turn(found["tokens"], found["timings"]["prompt_n"], found["timings"]["prompt_ms"])

    return ask


def ours(llm: LLM) -> Ask:
    """Return the client of edgeinfer."""
    def ask(ids: list[int]) -> Turn:
        done = llm.complete(ids, max_tokens=ANSWER, temperature=0, ignore_eos=True, reuse=True)
        return Turn(list(done.token_ids), len(ids) - done.cached_tokens, done.ttft_ms)

    return ask


def converse(ask: Ask, strip: bool, seed: int) -> tuple[int, int, float]:
    """Return new and computed tokens of all turns but the first, and the median milliseconds until answers began."""
    random = Random(seed)
    ids = [random.randrange(3, IDS) for _ in range(FIRST)]
    turn, new, computed, times = ask(ids), 0, 0, list[float]()
    for _ in range(TURNS - 1):
        more = [*turn.answer[-KEPT if strip else 0 :], *(random.randrange(3, IDS) for _ in range(USER))]
        ids, new = [*ids, *more], new + USER + (KEPT if strip else 1)
        turn = ask(ids)
        computed, times = computed + turn.computed, [*times, turn.ttft]
    return new, computed, statistics.median(times)


def main() -> None:
    """Measure and print, or write a section of a document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--llama-server", required=True, metavar="PROGRAM")
    parser.add_argument("--model", required=True, type=Path, metavar="FILE.gguf")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--document", type=Path)
    given, rows, port = parser.parse_args(), list[str](), free_port()
    command = [given.llama_server, "--model", str(given.model), "--port", str(port), "--ctx-size", str(CTX),
               "--threads", str(given.threads), "--parallel", "1", "--no-webui"]
    with running(command, port) as server, LLM(given.model, ctx=CTX, threads=given.threads, speculate="off") as llm:
        for strip, kind in ((False, "whole"), (True, "reasoning stripped")):
            rounds = []
            for seed in range(given.rounds):
                server.pause()
                mine = converse(ours(llm), strip, seed)
                server.go_on()
                rounds.append((mine, converse(peer(server), strip, seed)))
            new = rounds[0][0][0]
            mine, other = (statistics.median(one[side][1] for one in rounds) for side in (0, 1))
            times = statistics.median(one[1][2] / one[0][2] for one in rounds)
            rows.append(row(given.model.stem, kind, new, f"{mine:.0f}", f"{other:.0f}", f"{times:.2f}"))
    found = table("model | history | new tokens | computed by edgeinfer | by llama-server | its TTFT / ours", rows)
    publish(f"{machine()}; {given.threads} threads; {TURNS} turns, {given.rounds} conversations each:\n\n{found}",
            given.document, "conversations")


if __name__ == "__main__":
    main()
