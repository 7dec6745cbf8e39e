"""The load of `bench --concurrency` on a server with OpenAI's API, whichever program that is."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any, NamedTuple

from ..base.api_client import ApiClient
from ..base.progress import OnStageProgress
from ..errors import EdgeInferError, RequestError
from .serving import METRICS, Load, RequestLength, ServingRow

WORDS = "the of and a to in he was it his that with as for had on at but by they which you not be were all we when"


class Timed(NamedTuple):
    """Times of one request, by time.perf_counter()."""

    sent: float
    texts: list[float]
    """When each piece of text came."""
    prompt_tokens: int
    completion_tokens: int


class Prompts:
    """Makes prompts of a number of tokens, without order.

    Where the server has ``/tokenize``, as edgeinfer, vLLM and llama.cpp have, prompts are token ids; otherwise they are
    words, of which most have one token.
    """

    def __init__(self, client: ApiClient, model: str, seed: int):
        self._chance, self._words = random.Random(seed), WORDS.split()
        self._ids: list[int] = []
        try:
            found = client.ask("/tokenize", {"content": WORDS, "prompt": WORDS, "model": model})["tokens"]
            self._ids = [one for one in found if isinstance(one, int)]
        except (EdgeInferError, KeyError, TypeError):  # it has none
            pass

    def make(self, n: int) -> list[int] | str:
        """Return a prompt of n tokens."""
        if self._ids:
            return self._chance.choices(self._ids, k=n)
        return " ".join(self._chance.choices(self._words, k=n))


def measure_served(client: ApiClient, loads: Iterable[Load], model: str, progress: OnStageProgress | None = None
                   ) -> Iterator[ServingRow]:
    """Send the requests of each load to a server, and yield their outcomes.

    Answers are as long as was asked for where the server knows ``ignore_eos``.
    """
    for load in loads:
        prompts, began = Prompts(client, model, load.seed), time.perf_counter()
        outcomes = _send(client, load, model, prompts, progress)
        yield _row(load, time.perf_counter() - began, outcomes)


def _send(client: ApiClient, load: Load, model: str, prompts: Prompts, progress: OnStageProgress | None
          ) -> list[Timed]:
    chance, due, outcomes = random.Random(load.seed), time.perf_counter(), list[Timed]()
    left, running = list(reversed(load.lengths)), set[Future[Timed]]()
    with ThreadPoolExecutor(load.concurrency) as pool:
        while left or running:
            now = time.perf_counter()
            if left and len(running) < load.concurrency and now >= due:
                one = left.pop()
                running.add(pool.submit(_timed, client, model, prompts.make(one.prompt), one))
                due += chance.expovariate(load.rate) if load.rate < float("inf") else 0.0
                continue
            waiting = left and len(running) < load.concurrency
            done, running = wait(running, max(0.0, due - now) if waiting else None, FIRST_COMPLETED)
            outcomes += [one.result() for one in done]
            if waiting and not done and not running:
                time.sleep(max(0.0, due - now))
            if progress and done:
                progress(len(outcomes), len(load.lengths), f"{load.concurrency} at once")
    return outcomes


def _timed(client: ApiClient, model: str, prompt: list[int] | str, length: RequestLength) -> Timed:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": length.output, "stream": True,
                            "stream_options": {"include_usage": True}, "ignore_eos": True}
    sent, texts, usage = time.perf_counter(), list[float](), dict[str, int]()
    for event in client.events("/v1/completions", body):
        if event.get("choices") and event["choices"][0].get("text"):
            texts.append(time.perf_counter())
        usage = event.get("usage") or usage
    if not texts:
        raise RequestError(f"{client.url} answered a request of {length.prompt} tokens without any text.")
    return Timed(sent, texts, usage.get("prompt_tokens", length.prompt), usage.get("completion_tokens", len(texts)))


def _row(load: Load, seconds: float, outcomes: list[Timed]) -> ServingRow:
    times: dict[str, list[float]] = {metric: [] for metric in METRICS}
    good = 0
    for one in outcomes:
        first, last, n = one.texts[0], one.texts[-1], one.completion_tokens
        own = {"ttft": 1000 * (first - one.sent), "e2el": 1000 * (last - one.sent),
               "tpot": 1000 * (last - first) / (n - 1) if n > 1 else None}
        good += all((own[metric] or 0.0) <= bound for metric, bound in load.goodput)
        for metric, value in own.items():
            if value is not None:
                times[metric].append(value)
        times["itl"] += [1000 * (after - before) for before, after in pairwise(one.texts)]
    lengths = [RequestLength(one.prompt_tokens, one.completion_tokens) for one in outcomes]
    return ServingRow(load._replace(lengths=lengths), seconds, times, sum(one.output for one in lengths), good, 0, 0)
