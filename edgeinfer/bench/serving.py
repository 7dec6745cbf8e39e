"""Many requests at once, as a server gets them: latencies and throughput in the terms of vLLM's benchmark."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.files import os_errors
from ..base.progress import OnStageProgress
from ..config import GenerationConfig
from ..engine import Engine, Generation, Request
from ..errors import UsageError
from .repetitions import token_ids

if TYPE_CHECKING:
    from ..engine import Completion
    from ..runner import Runner

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token without the first, inter-token latency, end-to-end latency."""
PERCENTILES = (95, 99)
MAX_LENGTHS_BYTES = 16 << 20


class RequestLength(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


class Load(NamedTuple):
    """Requests that arrive, and how many of them may run."""

    lengths: Items[RequestLength]
    """Length of each request."""
    concurrency: int
    """Requests that are sent and not yet answered, at most."""
    rate: float = math.inf
    """Requests that arrive each second on the average, as a Poisson process; infinite: whenever one is answered."""
    seed: int = 0
    goodput: tuple[tuple[str, float], ...] = ()
    """Metrics and the most milliseconds with which a request counts as good."""


class ServingRow(NamedTuple):
    """Figures of one load."""

    load: Load
    seconds: float
    """Seconds from the first request to the last answer."""
    milliseconds: dict[str, list[float]]
    """Times by metric: ITL of all tokens, the others of each request."""
    output_tokens: int
    good: int
    """Requests within all bounds of the goodput."""
    preemptions: int
    passes: int

    def report(self) -> dict[str, Any]:
        """Return the JSON object."""
        prompts = sum(one.prompt for one in self.load.lengths)
        out: dict[str, Any] = {
            "concurrency": self.load.concurrency, "requests": len(self.load.lengths),
            "rate": None if math.isinf(self.load.rate) else self.load.rate, "duration_s": self.seconds,
            "total_input_tokens": prompts, "total_output_tokens": self.output_tokens,
            "request_throughput": len(self.load.lengths) / self.seconds,
            "output_throughput": self.output_tokens / self.seconds,
            "total_token_throughput": (prompts + self.output_tokens) / self.seconds,
            "request_goodput": self.good / self.seconds if self.load.goodput else None,
            "preemptions": self.preemptions, "forward_passes": self.passes,
        }
        return out | {f"{metric}_ms": summary(self.milliseconds[metric]) for metric in METRICS}


def summary(values: list[float]) -> dict[str, float] | None:
    """Return mean, median and percentiles; None of nothing."""
    if not values:
        return None
    import numpy as np

    return {"mean": float(np.mean(values)), "median": float(np.median(values)),
            **{f"p{which}": float(np.percentile(values, which)) for which in PERCENTILES}}


def make_lengths(prompt: int, output: int, n: int, ratio: float = 0.0, seed: int = 0) -> list[RequestLength]:
    """Return the lengths of n requests, uniform within a share of their means (vLLM's ``--random-range-ratio``)."""
    chance = random.Random(seed)

    def around(mean: int) -> int:
        return max(1, chance.randint(round(mean * (1 - ratio)), round(mean * (1 + ratio))))

    return [RequestLength(around(prompt), around(output)) for _ in range(n)]


def read_lengths(path: Path) -> list[RequestLength]:
    """Read a file with one JSON object a line: ``{"prompt": 256, "output": 128}``, in tokens.

    Raises `UsageError` for a file that cannot be read or that has something else.
    """
    with os_errors(UsageError, f"Cannot read the lengths {path}"), open(path, "rb") as file:
        data = file.read(MAX_LENGTHS_BYTES + 1)
    if len(data) > MAX_LENGTHS_BYTES:
        raise UsageError(f"The lengths {path} have more than {MAX_LENGTHS_BYTES} bytes; give fewer requests.")
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            one = json.loads(line)
            lengths = RequestLength(one["prompt"], one["output"])
        except (ValueError, KeyError, TypeError, RecursionError):
            lengths = RequestLength(0, 0)
        if any(type(n) is not int or not 1 <= n < 1 << 24 for n in lengths):
            raise UsageError(f'Line {number} of {path} is not of the form {{"prompt": 256, "output": 128}}; lengths '
                             "are tokens, 1 or more.")
        found.append(lengths)
    if not found:
        raise UsageError(f"The lengths {path} name no request; write one a line.")
    return found


def parse_goodput(text: str) -> tuple[tuple[str, float], ...]:
    """Return the bounds of a text such as ``ttft:500,tpot:100``, in milliseconds; raises `UsageError`."""
    found: list[tuple[str, float]] = []
    for part in text.split(","):
        metric, _, bound = part.partition(":")
        try:
            value = float(bound)
        except ValueError:
            value = math.nan
        if metric not in METRICS or metric == "itl" or not 0 < value < math.inf or metric in dict(found):
            raise UsageError(f"--goodput {text!r} cannot be read; write metrics (ttft, tpot, e2el), each once, with "
                             "milliseconds, as in ttft:500,tpot:100.")
        found.append((metric, value))
    return tuple(found)


def measure_serving(runner: Runner, loads: Iterable[Load], max_itl: float, progress: OnStageProgress | None = None
                    ) -> Iterator[ServingRow]:
    """Send the requests of each load to an engine, and yield their outcomes.

    Prompts are made of token ids without order, and no answer ends before its length.
    """
    engine = Engine(runner, max_itl)
    for load in loads:
        if progress:
            progress(0, len(load.lengths), f"{load.concurrency} at once")
        passes, preemptions, began = engine.passes, engine.preemptions, time.perf_counter()
        outcomes = _send(engine, load, progress)
        seconds = time.perf_counter() - began
        yield _row(load, seconds, outcomes, engine.preemptions - preemptions, engine.passes - passes)


def _send(engine: Engine, load: Load, progress: OnStageProgress | None) -> list[tuple[Completion, list[float]]]:
    """Run a load; returns the outcome of each request with the times of its tokens."""
    ids, chance = token_ids(engine.runner.model.vocab_size), random.Random(load.seed)
    ended: SimpleQueue[Request[Completion]] = SimpleQueue()
    outcomes, left, running, due = [], list(reversed(load.lengths)), 0, time.perf_counter()
    while left or running:
        now = time.perf_counter()
        if left and running < load.concurrency and now >= due:
            prompt, output = left.pop()
            config = GenerationConfig(max_tokens=output, seed=len(left), ignore_eos=True)
            task = Generation(engine.runner, None, [next(ids) for _ in range(prompt)], config)
            request = Request(engine, task)
            request.on_event = partial(ended.put, request)
            request.start_whole()
            running, due = running + 1, due + chance.expovariate(load.rate) if load.rate < math.inf else due
            continue
        waiting = left and running < load.concurrency
        try:
            done = ended.get(timeout=max(0.0, due - now) if waiting else None)
        except Empty:
            continue
        outcomes.append((done.finish(), done.task.token_times))  # type: ignore[attr-defined]
        running -= 1
        if progress:
            progress(len(outcomes), len(load.lengths), f"{load.concurrency} at once")
    return outcomes


def _row(load: Load, seconds: float, outcomes: list[tuple[Completion, list[float]]], preemptions: int,
         passes: int) -> ServingRow:
    times: dict[str, list[float]] = {metric: [] for metric in METRICS}
    good = output = 0
    for completion, at in outcomes:
        own = {"ttft": completion.ttft_ms, "tpot": completion.tpot_ms, "e2el": 1000 * (at[-1] - at[0])}
        good += all((own[metric] or 0.0) <= bound for metric, bound in load.goodput)
        output += completion.completion_tokens
        times["itl"] += [1000 * (after - before) for before, after in pairwise(at[1:])]
        for metric, value in own.items():
            times[metric] += [value] if value is not None else []
    return ServingRow(load, seconds, times, output, good, preemptions, passes)
