"""`edgeinfer bench --concurrency`: latencies and throughput of requests that run together."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...config import CPU
from ...errors import UsageError
from ..output import print_table, show
from ..progress import ProgressLine
from .bench_run import find_bundle, numbers, open_runner

if TYPE_CHECKING:
    from ...bench import Load
    from ..options import Given

MAX_SEQUENCES = 64
MAX_REQUESTS = 100_000


class Together(NamedTuple):
    """Options that belong to ``--concurrency``."""

    concurrency: str | None
    requests: int | None
    rate: float | None
    range_ratio: float
    lengths: str | None
    goodput: str | None

    def check_unused(self) -> None:
        """Refuse options that mean nothing without a concurrency."""
        for name in ("requests", "rate", "range_ratio", "lengths", "goodput"):
            if getattr(self, name):
                raise UsageError(f"--{name.replace('_', '-')} requires --concurrency.")

    def loads(self, prompt: int, output: int) -> list[Load]:
        """Return the load of each concurrency; raises `UsageError` for values out of range."""
        from ...bench import Load, make_lengths, parse_goodput, read_lengths

        self._check()
        bounds = parse_goodput(self.goodput) if self.goodput else ()
        rate = math.inf if self.rate is None else self.rate
        given = read_lengths(Path(self.lengths)) if self.lengths else None
        loads = []
        for at_once in numbers("--concurrency", self.concurrency or ""):
            if not 1 <= at_once <= MAX_SEQUENCES:
                raise UsageError(f"--concurrency {at_once} is out of range; it must be from 1 to {MAX_SEQUENCES}.")
            n = self.requests or (len(given) if given else 4 * at_once)
            lengths = [given[i % len(given)] for i in range(n)] if given else make_lengths(prompt, output, n,
                                                                                           self.range_ratio)
            loads.append(Load(lengths, at_once, rate, goodput=bounds))
        return loads

    def _check(self) -> None:
        if self.requests is not None and not 1 <= self.requests <= MAX_REQUESTS:
            raise UsageError(f"--requests {self.requests} is out of range; it must be from 1 to {MAX_REQUESTS}.")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"--rate {self.rate} is out of range; it is requests per second, above 0.")
        if not 0 <= self.range_ratio < 1:
            raise UsageError(f"--range-ratio {self.range_ratio} is out of range; it must be from 0 to below 1.")
        if self.lengths and self.range_ratio:
            raise UsageError("--lengths and --range-ratio exclude each other; use one of them.")


def bench_together(model: str | None, shape: str | None, asked: Together, lengths: tuple[list[int], list[int]],
                   given: Given) -> None:
    """Measure requests that run together, and print the report."""
    from ...bench import measure_serving
    from ...engine import MAX_ITL
    from ...llm import open as opening

    loads = asked.loads(*_one_of_each(lengths))
    device, (weights, group_size) = given.device or CPU, given.stored(model)
    provider = opening.provider(device)
    longest = max(one.prompt + one.output for load in loads for one in load.lengths)
    config = given.runtime(ctx=longest, max_sequences=max(load.concurrency for load in loads))
    with ProgressLine() as progress:
        path = find_bundle(model, shape, weights, group_size, progress, given.budget)
        provider, config = opening.taken(device, provider, path, config, given.kv_on(device))
        runner, bundle, load_ms = open_runner(path, config, progress, provider, given.split)
        with closing(runner):
            rows = [row.report() for row in measure_serving(runner, loads, MAX_ITL, partial(progress, "measure"))]
            out = {"model": model or shape, "serving": rows, "rows": [], "load_ms": load_ms, "isa": runner.isa,
                   "threads": runner.config.threads, "kv": runner.config.kv, "ctx": runner.config.ctx,
                   "planned_bytes": runner.plan.total_bytes, "weights_bytes": bundle.weights_bytes}
    show(out, given.json, print_rows)


def bench_served(url: str, model: str, asked: Together, lengths: tuple[list[int], list[int]], as_json: bool) -> None:
    """Measure requests to a server, and print the report."""
    from ...base.api_client import ApiClient
    from ...bench import measure_served

    if asked.concurrency is None:
        raise UsageError("--serve requires --concurrency, such as --concurrency 1,4,8.")
    loads, client = asked.loads(*_one_of_each(lengths)), ApiClient(url)
    with ProgressLine() as progress:
        rows = [row.report() for row in measure_served(client, loads, model, partial(progress, "measure"))]
    show({"model": model, "serve": url, "serving": rows, "rows": []}, as_json, print_rows)


def _one_of_each(lengths: tuple[list[int], list[int]]) -> tuple[int, int]:
    """Return the only length of prompts and of answers."""
    prompts, outputs = lengths
    if len(prompts) != 1 or len(outputs) != 1 or not prompts[0] or not outputs[0]:
        raise UsageError("--concurrency takes one prompt length (-p) and one number of tokens (-n), both above 0.")
    return prompts[0], outputs[0]


def print_rows(report: dict[str, Any]) -> None:
    """Print the report for people."""
    table: list[tuple[str, ...]] = [("at once", "requests", "tokens/s", "requests/s", "goodput/s", "TTFT ms", "TPOT ms",
                                     "ITL ms", "E2EL ms")]
    for row in report["serving"]:
        good = row["request_goodput"]
        figures = (_median_and_p99(row[f"{metric}_ms"]) for metric in ("ttft", "tpot", "itl", "e2el"))
        table.append((f"{row['concurrency']}", f"{row['requests']}", f"{row['output_throughput']:.1f}",
                      f"{row['request_throughput']:.2f}", "" if good is None else f"{good:.2f}", *figures))
    print_table(table, right=range(9))
    print("\nTokens are those of the answers. Times: median and 99th percentile.")


def _median_and_p99(found: dict[str, float] | None) -> str:
    return "" if found is None else f"{found['median']:.0f}, {found['p99']:.0f}"
