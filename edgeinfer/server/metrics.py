"""Metrics for Prometheus, with vLLM's names under the prefix edgeinfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from ..engine import Completion, Request
    from .server import Server

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
           160.0, 640.0)
"""Upper ends of the intervals in which times are counted."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts the usage of requests, and asks the engines for their state when metrics are read."""

    def __init__(self, server: Server):
        self._server = server
        self.registry = CollectorRegistry()
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were right.")
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts that the prefix cache was asked for.")
        self._hits = self._counter("prefix_cache_hits", "Tokens of prompts that the prefix cache had.")
        self._ended = self._counter("request_success", "Requests that ended.", "finished_reason")
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Time between two tokens.")
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Mean time per token after the first.")
        self._whole = self._histogram("e2e_request_latency_seconds", "Time from arrival to end.")
        self._queued = self._histogram("request_queue_time_seconds", "Time before the first forward pass.")
        self.registry.register(_Live(server))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"edgeinfer:{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"edgeinfer:{name}", text, ["model_name"], buckets=SECONDS, registry=self.registry)

    def ended(self, model: str, request: Request[Completion]) -> None:
        """Count a generation that has ended."""
        done, times = request.task.result(), request.task.token_times  # type: ignore[attr-defined]
        self._prompt.labels(model).inc(done.prompt_tokens)
        self._generated.labels(model).inc(done.completion_tokens)
        self._queries.labels(model).inc(done.prompt_tokens)
        self._hits.labels(model).inc(done.cached_tokens)
        if done.speculation:
            self._drafted.labels(model).inc(done.speculation.drafted)
            self._accepted.labels(model).inc(done.speculation.accepted)
        for one in done.choices:
            self._ended.labels(model, one.finish_reason or "cancelled").inc()
        self._queued.labels(model).observe(done.queued_ms / 1000)
        if done.ttft_ms is None:
            return
        self._ttft.labels(model).observe(done.ttft_ms / 1000)
        self._whole.labels(model).observe(times[-1] - times[0])
        itl = self._itl.labels(model)
        for before, after in pairwise(times[1:]):
            itl.observe(after - before)
        if done.tpot_ms is not None:
            self._tpot.labels(model).observe(done.tpot_ms / 1000)

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self.registry)


class _Live:
    """Collects the present state of engines."""

    def __init__(self, server: Server):
        self._server = server

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        gauges = {name: GaugeMetricFamily(f"edgeinfer:{name}", text, labels=["model_name"]) for name, text in (
            ("num_requests_running", "Requests that run."), ("num_requests_waiting", "Requests that wait."),
            ("kv_cache_usage_perc", "Part of the KV blocks that sequences hold, from 0 to 1."))}
        preemptions = CounterMetricFamily("edgeinfer:num_preemptions", "Times that a request gave up its KV blocks.",
                                          labels=["model_name"])
        for one in self._server.models.open_models():
            state = one.model.state()
            for name, value in (("num_requests_running", state.running), ("num_requests_waiting", state.waiting),
                                ("kv_cache_usage_perc", state.kv_usage)):
                gauges[name].add_metric([one.name], value)
            preemptions.add_metric([one.name], state.preemptions)
        yield from gauges.values()
        yield preemptions
        yield from self._replicas()
        resident, planned = psutil.Process().memory_info().rss, self._server.models.planned_bytes
        yield GaugeMetricFamily("edgeinfer:resident_bytes", "Memory of the process.", resident)
        yield GaugeMetricFamily("edgeinfer:planned_bytes", "Memory of the process by its plans.", planned)

    def _replicas(self) -> Iterator[Any]:
        """Yield the state of a model's replicas; nothing if there are none."""
        gauges = [GaugeMetricFamily(f"edgeinfer:{name}", text, labels=["model_name", "replica"]) for name, text in (
            ("replica_up", "Whether a replica answers."), ("replica_requests", "Requests that a replica has."),
            ("replica_planned_bytes", "Memory of a replica by its plan."),
            ("replica_tokens_per_second", "Speed of a text that a replica has alone."),
            ("replica_prompt_tokens_per_second", "Speed of a prompt that a replica has alone."))]
        counters = [CounterMetricFamily(f"edgeinfer:{name}", text, labels=["model_name", "replica"]) for name, text in (
            ("replica_requests_sent", "Requests that a replica was given."),
            ("replica_received_bytes", "KV blocks that a replica got from others."))]
        found = [(one.name, each) for one in self._server.models.open_models() for each in one.model.replicas()]
        for model, one in found:
            values = (float(one.there), one.requests, one.planned_bytes, one.tok_per_s, one.prompt_tok_per_s, one.sent,
                      one.received_bytes)
            families: Iterable[Any] = (*gauges, *counters)
            for family, value in zip(families, values, strict=True):
                family.add_metric([model, one.name], value)
        yield from (*gauges, *counters) if found else ()
