"""`edgeinfer batch`: the answers to a file of requests."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ... import registry
from ...base.validation import checked
from ...config import CPU
from ...errors import RequestError, UsageError
from ...registry import RULES
from .. import options
from ..output import print_json, say, speed
from ..progress import ProgressLine
from ..served import open_served, opening, short_name
from .plan import SERVED_SEQUENCES
from .serve import check_packages

if TYPE_CHECKING:
    from ...server import Answered, Answerer, Models, Results, Row, Rows

JSON_FIELDS = {"batch": {
    "requests": "of the input", "before": "answered by former runs", "failed": "with another status than 200, of all",
    "seconds": "of this run, without opening the model", "prompt_tokens": "of this run",
    "cached_tokens": "of these prompts, from the prefix cache", "completion_tokens": "of this run",
    "requests_per_s": "of this run", "tok_per_s": "generated tokens per second, of this run",
}}
"""Fields of the JSON object, by command."""
TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
WAITING = 2
"""Requests handed to the engine for each sequence that runs, so that none waits for the next request to be read."""
MAX_WAITING = 1 << 20
"""Requests that the engine takes; one line may have thousands of texts."""
MAX_WORKERS = 1024
FOR_EVER = 1e9
"""Seconds."""


@options.takes("batch")
def batch(
    requests: Annotated[str, typer.Argument(metavar="IN.jsonl", show_default=False,
                                            help="Requests in OpenAI's batch format, one on each line.")],
    answers: Annotated[str, typer.Argument(metavar="OUT.jsonl", show_default=False,
                                           help="File that gets the answers; one that has some is continued.")],
    model: Annotated[str | None, options.option(
        "--model", metavar="MODEL", help="GGUF file, checkpoint directory, bundle, ollama:NAME, known name, or id on "
        "the hub.  [default: the model that the lines name, or demo]", show_default=False)] = None,
    name: Annotated[str | None, options.option(
        "--name", metavar="NAME", help="Name of MODEL in the lines.  [default: MODEL, or its end]",
        show_default=False)] = None,
    max_sequences: Annotated[int, options.option(
        "--max-sequences", metavar="N", help="Maximum number of sequences that run at once, 1 to 64.")
    ] = SERVED_SEQUENCES,
    ray: Annotated[str | None, options.option(
        "--ray", metavar="ADDRESS|local", help="Answer on the nodes of a Ray cluster, one worker on each; local starts "
        "a cluster of this machine and ends it.", show_default=False)] = None,
    workers: Annotated[int | None, options.option(
        "--workers", metavar="N", help="With --ray: number of workers, on the nodes in turns.",
        show_default=False)] = None,
    given: options.Given = options.NOTHING,
) -> int:
    """Answer a file of requests.

    Each line of IN.jsonl is a JSON object with custom_id, method (POST), url (/v1/chat/completions, /v1/completions or
    /v1/embeddings) and body, the request as the server takes it. OUT.jsonl gets a line for each, in the order in which
    they finish: id, custom_id, response (status_code, request_id, body) and error. A request that is refused gets a
    line with its status, and the others continue. Requests run together, as many as the KV pool has room for, and those
    whose prompts begin alike follow each other, so that the prefix cache has their common beginning. The same command
    continues a run that was stopped or killed.

    \b
    Examples:
      edgeinfer batch requests.jsonl answers.jsonl
      edgeinfer batch requests.jsonl answers.jsonl --model model-Q4_K_M.gguf --name gpt-4o-mini
      edgeinfer batch requests.jsonl answers.jsonl --model ./my-bundle --ray 192.168.1.10:6379
    """
    check_packages()
    if workers is not None and (ray is None or not 1 <= workers <= MAX_WORKERS):
        raise UsageError(f"--workers is {workers}; it needs --ray, and is from 1 to {MAX_WORKERS}.")
    if ray is not None and given.device not in (None, CPU):
        raise UsageError(f"--ray runs edgeinfer's own kernels, and --device is {given.device}; use one or the other.")
    if ray is not None and given.by_flag("split"):
        raise UsageError("--split cannot be combined with --ray, whose workers hold whole models; use one of them.")
    if ray is not None:
        given.split = None
    registry.check_served(given.techniques)
    import asyncio

    from ...server import Models, Results, Rows

    sequences = int(checked("--max-sequences", max_sequences, RULES["max_sequences"]))
    with ExitStack() as held:
        rows = held.enter_context(Rows(requests))
        _refuse_itself(rows.path, Path(answers))
        source, served = _model(rows, model, name)
        results = held.enter_context(Results(answers, rows.all, served))
        work = _Work(rows, results, bool(given.json))
        opens: dict[str, Any] = dict(given=given, sequences=sequences, queue=MAX_WAITING, alone=True,
                                     techniques=registry.agreed(given.techniques, given.flags, 1))
        if work.left:
            try:
                if ray is None:
                    models = Models({served: source}, partial(open_served, **opens), given.budget, FOR_EVER)
                    asyncio.run(_answer(work, models, WAITING * sequences))
                else:
                    source = os.path.abspath(source) if os.path.exists(source) else source
                    _answer_on_ray(work, ray, workers, (served, source, opening(source, given.budget, **opens)),
                                   WAITING * sequences)
            except BaseException:
                if 0 < len(results.done) < len(rows.all):
                    say(f"{len(results.done):,} of {len(rows.all):,} requests are in {answers}.")
                raise
    work.report()
    return 0


def _refuse_itself(requests: Path, answers: Path) -> None:
    if answers.exists() and requests.samefile(answers):
        raise UsageError(f"{answers} is the input; name another file for the answers.")


def _model(rows: Rows, model: str | None, name: str | None) -> tuple[str, str]:
    """Return the model to open, and its name in requests."""
    first = {row.model: row for row in sorted(rows.all, key=lambda row: -row.number) if row.model is not None}
    if len(first) > 1:
        one, other = sorted(first.values(), key=lambda row: row.number)[:2]
        raise RequestError(f"Line {other.number} of {rows.path} names the model {other.model!r}, and line {one.number} "
                           f"{one.model!r}; give each model a file of its own.")
    named = next(iter(first), None)
    source = model or named or "demo"
    known = (name,) if name else (source, short_name(source))
    if named is not None and named not in known:
        raise UsageError(f"Line {first[named].number} of {rows.path} names the model {str(named)!r}, and this one is "
                         f"{known[-1]!r}; if it is to answer, add --name {named}.")
    return source, named or known[-1]


class _Work:
    """The requests that have no answer yet, and figures of those that this run answers."""

    def __init__(self, rows: Rows, results: Results, as_json: bool):
        self.rows, self.results, self._json = rows, results, as_json
        self.left = [row for row in rows.all if row.custom_id not in results.done]
        self._before, self._began, self._seconds = len(results.done), time.monotonic(), 0.0
        self._tokens: Counter[str] = Counter()

    async def run(self, answerer: Answerer, at_once: int) -> None:
        """Answer the remaining requests."""
        from ...server import answer_all

        self._began = time.monotonic()
        with ProgressLine() as self._progress:
            await answer_all(self.left, self.rows.body, answerer, at_once, self._write)
        self._seconds = time.monotonic() - self._began

    def _write(self, row: Row, answered: Answered) -> None:
        from ...server import line_of

        results = self.results
        results.write(row.custom_id, answered.status, line_of(results.id_of(row, results.model), row, answered))
        self._tokens.update({one: answered.note.get(one, 0) for one in TOKENS})
        self._progress("answer", len(results.done), len(self.rows.all), row.custom_id)

    def report(self) -> None:
        """Report the outcome."""
        results, n = self.results, len(self.left)
        rate = {"requests_per_s": n / self._seconds if n else None,
                "tok_per_s": self._tokens["completion_tokens"] / self._seconds if n else None}
        if self._json:
            print_json({"requests": len(self.rows.all), "before": self._before, "failed": results.failed,
                        "seconds": self._seconds, **{one: self._tokens[one] for one in TOKENS}, **rate})
        failed = f", of which {results.failed:,} have another status than 200" if results.failed else ""
        before = f" ({self._before:,} from former runs)" if self._before else ""
        said = f"{results.path} has {len(results.done):,} answers{before}{failed}"
        if n:
            said += (f"; {n:,} in {self._seconds:.1f} s: {speed(rate['requests_per_s'] or 0)} requests/s, "
                     f"{speed(rate['tok_per_s'] or 0)} tok/s, {self._tokens['cached_tokens']:,} of "
                     f"{self._tokens['prompt_tokens']:,} prompt tokens from the prefix cache")
        say(f"{said}.")


async def _answer(work: _Work, models: Models, at_once: int) -> None:
    """Open the model, answer the remaining requests, and close it."""
    from ...server import InProcess, private_server

    server = private_server(models)
    try:
        await models.open(models.first)
        server.ready = True
        await work.run(InProcess(server), at_once)
    finally:
        await models.close()


def _answer_on_ray(work: _Work, address: str, n: int | None, asked: tuple[str, str, dict[str, Any]],
                   at_once: int) -> None:
    """Open the model on the nodes of a cluster, and answer the remaining requests there."""
    import asyncio

    from ...cluster import Pool, connected

    with connected(address, say=say) as ray:
        async def run() -> None:
            opened = await ray.open(n, *asked)
            pool = Pool(opened, at_once, say)
            try:
                await work.run(pool, at_once * len(opened))
            finally:
                await pool.close()

        asyncio.run(run())
