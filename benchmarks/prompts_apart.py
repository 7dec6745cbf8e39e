"""Prompts that are computed apart: gaps of streams beside them, the first word over a slow link, and bytes.

    python benchmarks/prompts_apart.py --model BUNDLE --document docs/measurements/several-machines.md

`gaps` has a server and two replicas of one thread on Ray, each kept on a core of its own where there are several; the
streams and prompts alternate between the sides. `link` has no Ray: two processes' engines in one, and a link that lets
so many bytes through a second, once while the prompt is computed and once after it. `device` lets onnxruntime compute
prompts for our own kernels, on CUDA where that works and else on the CPU, and compares what these predict behind them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Awaitable
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import Row, engines, percentile, served, states
from benchmarks.harness import machine, publish, row, spread, table
from benchmarks.peers.http_server import HttpServer, Streamed, ask_all, running, streamed_request
from edgeinfer import LLM
from edgeinfer.backends import why_not
from edgeinfer.cluster.handing import Handing, Piece
from edgeinfer.cluster.job import TEXT, Job
from edgeinfer.cluster.serving import Serving

PROMPT, STREAMS, STREAM_TOKENS, PROMPTS = 1024, 4, 800, 3
DEVICE_PROMPT, DEVICE_TOKENS = 192, 64
DEVICE_OPTIONS: dict[str, Any] = dict(ctx=DEVICE_PROMPT + DEVICE_TOKENS, threads=1, max_sequences=1, speculate="off")
TALE = Path(__file__).resolve().parent.parent / "tests" / "data" / "box_of_robbers.txt"
LINK_PROMPT, LINK_SHARE = 1024, 0.7
"""Tokens of a prompt, and the time of its KV blocks on the link relative to its compute time."""


def keep_apart(server: HttpServer, port: int) -> str:
    """Give the replica that decodes a core, and all else, this process too, the others; returns a description."""
    cores, pool = sorted(os.sched_getaffinity(0)), engines(server)
    if len(cores) < 2:
        return "all on one core"
    before = [sum(one.cpu_times()[:2]) for one in pool]
    ask_all(port, _streams(99), STREAMS)
    worked = [sum(one.cpu_times()[:2]) - then for one, then in zip(pool, before, strict=True)]
    decoding = pool[worked.index(max(worked))]
    for one in (psutil.Process(), server.process, *server.process.children(recursive=True)):
        for thread in one.threads():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(thread.id, cores[-1:] if one == decoding else cores[:-1])
    return "the replica that decodes on a core of its own"


def gaps(model: str, rounds: int) -> list[Row]:
    """Measure the gaps of four streams alone and beside prompts that are computed apart, in turns."""
    found: dict[str, list[float]] = {"alone": [], "apart": []}
    tails: list[float] = []
    command, port = served(model, "-t", "1", "--ctx", "2048", "--budget", "4GB", "--prefill", "1", "--decode", "1")
    with running(command, port) as server:
        said = keep_apart(server, port)
        for turn in range(rounds):
            now: dict[str, list[float]] = {}
            for name in found:
                prompts = threading.Thread(target=ask_all, args=(port, _prompts(turn), 1))
                if name == "apart":
                    threading.Timer(1.0, prompts.start).start()
                now[name] = _gaps(ask_all(port, _streams(turn), STREAMS)[0])
                if name == "apart":
                    prompts.join()
                found[name] += now[name]
            tails.append(percentile(now["apart"], 0.99) / percentile(now["alone"], 0.99))
            print(f"gaps: P99 {tails[-1]:.2f}", file=sys.stderr)
        received, expected = (sum(one[name] for one in states(port)) for name in ("received_bytes", "expected_bytes"))
    what = ", ".join(f"{name} {1000 * percentile(all_, 0.5):.0f} and {1000 * percentile(all_, 0.99):.0f} ms"
                     for name, all_ in found.items())
    return [(f"{STREAMS} streams beside prompts of {PROMPT} that are computed apart: P99 ITL relative to the streams "
             "alone", f"{percentile(found['apart'], 0.99) / percentile(found['alone'], 0.99):.2f}; by round "
             f"{spread(tails)}", "at most 1.1",
             f"{Path(model).name}, {rounds} rounds, {said}; median and P99: {what}"),
            ("bytes of prompt KV transferred, relative to the plan", f"{received / max(expected, 1):.4f}",
             "within 0.01 of 1", f"{received / 1e6:.1f} MB")]


def _streams(turn: int) -> list[dict[str, Any]]:
    return [streamed_request([turn + 2, i + 3, *[9 + i] * 14], STREAM_TOKENS) for i in range(STREAMS)]


def _prompts(turn: int) -> list[dict[str, Any]]:
    return [streamed_request([turn + 2, i + 20, *[31 + i] * (PROMPT - 2)], 1) for i in range(PROMPTS)]


def _gaps(answers: list[Streamed]) -> list[float]:
    return [gap for one in answers for gap in one.gaps]


# -- a slow link -----------------------------------------------------------------------------------------------------


class Link:
    """A way that lets so many bytes through a second, from the beginning of a prompt on or from its end."""

    def __init__(self, handing: Handing, bytes_per_s: float, ready: Awaitable[Any] | None):
        self._handing, self._bytes_per_s, self._ready = handing, bytes_per_s, ready
        self.began = 0.0

    async def piece(self, offset: int) -> Piece:
        """Return a piece after the time that it takes."""
        if self._ready is not None:
            await self._ready
        found = await self._handing.piece(1, offset)
        assert found is not None
        await asyncio.sleep(len(found.data) / self._bytes_per_s)
        return found


async def _first_word(first: LLM, second: LLM, ids: list[int], bytes_per_s: float, after: bool) -> tuple[float, Any]:
    """Return the seconds from the beginning of a prompt to its first token elsewhere, and the tokens."""
    sender, receiver = Serving(first), Serving(second)
    job, began = Job(1, TEXT, ids, dict(max_tokens=4, temperature=0, ignore_eos=True)), time.perf_counter()
    assert sender.prefill(job)
    computed = asyncio.ensure_future(sender.prefilled(1))
    seconds, tokens = 0.0, []
    async for item in receiver.run(job._replace(handed=Link(sender.handing, bytes_per_s, computed if after else None))):
        seconds = seconds or time.perf_counter() - began
        tokens += [token for part in (item if isinstance(item, list) else item.parts) for token in part.ids]
    await computed
    sender.cancel(1)
    return seconds, tokens


def link(model: str, rounds: int) -> list[Row]:
    """Compare blocks that go while a prompt is computed with those that go after it, over the same slow link."""
    options: dict[str, Any] = dict(ctx=2048, threads=1, max_sequences=2, prefill_chunk=128)
    early, late = list[float](), list[float]()
    with LLM(model, **options) as first, LLM(model, **options) as second:
        compute = min(first.complete([i + 2] * LINK_PROMPT, max_tokens=1, temperature=0).ttft_ms or 0
                      for i in range(2)) / 1000
        nbytes = first.plan.sequence_bytes(LINK_PROMPT)
        rate = nbytes / (LINK_SHARE * compute)
        for turn in range(rounds):
            ids = [turn + 5, *[turn + 7] * (LINK_PROMPT - 1)]
            (one, text), (other, same) = (asyncio.run(_first_word(first, second, ids, rate, after))
                                          for after in (False, True))
            assert text == same
            early.append(one)
            late.append(other)
            print(f"link: {one:.2f} s while it is computed, {other:.2f} s after", file=sys.stderr)
    predicted = (compute + LINK_SHARE * compute / (LINK_PROMPT / 128)) / (1 + LINK_SHARE) / compute
    return [("first token over a slow link, with KV blocks sent while the prompt is computed, relative to blocks sent "
             "after it", spread([a / b for a, b in zip(early, late, strict=True)]), f"{predicted:.2f}",
             f"{Path(model).name}, prompt of {LINK_PROMPT} in chunks of 128, {rate / 1e6:.1f} MB/s, {rounds} rounds in "
             "turns; asked for follows from the times of computing and of the link")]


# -- prompts of a device ---------------------------------------------------------------------------------------------


def device(model: str, rounds: int) -> list[Row]:
    """Compare tokens that follow a prompt of onnxruntime with those that follow one of our own kernels."""
    found, own_kv, name = list[Any](), list[Any](), "onnx-cpu" if why_not("cuda") else "cuda"
    with LLM(model, **DEVICE_OPTIONS) as own, LLM(model, **DEVICE_OPTIONS, kv="f32") as floats, \
            LLM(model, **DEVICE_OPTIONS, device=name) as other:
        ids = own.tokenizer.encode(TALE.read_text(encoding="utf-8"))
        size = DEVICE_PROMPT + DEVICE_TOKENS
        windows = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
        for one in windows:
            right = _decoded(own.runner, _prompted(own.runner, one), one)
            found.append(_divergences(right, _decoded(own.runner, _handed(other.runner, own.runner, one), one)))
            own_kv.append(_divergences(right, _decoded(floats.runner, _prompted(floats.runner, one), one)))
        isa, kv = own.runner.isa, own.runner.config.kv
    kld, same = (np.concatenate([one[i] for one in found]) for i in range(2))
    scale = np.concatenate([one[0] for one in own_kv]).mean()
    return [(f"prompts of {DEVICE_PROMPT} on {name}, then {DEVICE_TOKENS} tokens on {isa} with {kv}: mean KLD to all "
             "of it on our own kernels", f"{kld.mean():.1e}", "reported",
             f"{Path(model).name}, {kld.size} tokens of `{TALE.name}`; 99th percentile {np.percentile(kld, 99):.1e}, "
             f"same likeliest token {same.mean():.2%}; with KV in f32 instead of {kv} it is {scale:.1e}")]


def _prompted(runner: Any, ids: list[int]) -> Any:
    runner.prefill(sequence := runner.new_sequence(), ids[:DEVICE_PROMPT])
    return sequence


def _handed(other: Any, own: Any, ids: list[int]) -> Any:
    """Return a sequence whose prompt another runner has computed."""
    sequence, target = _prompted(other, ids), own.new_sequence()
    for part in other.read_blocks(sequence, 0, True, own.block_form):
        for _ in own.write_blocks(target, part, ids[:DEVICE_PROMPT]):
            pass
    other.release(sequence)
    return target


def _decoded(runner: Any, sequence: Any, ids: list[int]) -> Any:
    """Return the log-probabilities after each token that follows the prompt: (tokens, vocabulary)."""
    rows = []
    for token in ids[DEVICE_PROMPT:]:
        logits = runner.decode([sequence], [token])[0].astype(np.float64)
        rows.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    runner.release(sequence)
    return np.array(rows)


def _divergences(right: Any, found: Any) -> tuple[Any, Any]:
    """Return the KL divergence after each token, and whether the likeliest token is the same."""
    return (np.exp(right) * (right - found)).sum(axis=1), right.argmax(axis=1) == found.argmax(axis=1)


PARTS = {"gaps": gaps, "link": link, "device": device}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--document", type=Path)
    options = parser.parse_args()
    for part in options.parts.split(","):
        models = options.model.split(",")
        found = [one for model in models for one in PARTS[part](model, options.rounds)]
        where = fill(f"{machine()}; load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}:", 120)
        names = ','.join(Path(one).name for one in models)
        command = f"`python benchmarks/prompts_apart.py --model {names} --parts {part}`"
        rows = table("what | measured | asked for | remark", (row(*one) for one in found))
        publish(f"## Apart: {part}\n\n{where}\n{command}\n\n{rows}", options.document, f"apart-{part}")


if __name__ == "__main__":
    main()
