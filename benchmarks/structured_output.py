"""Structured output: the cost of a mask by form, requests at once with and without a form, and forced tokens.

    python benchmarks/structured_output.py TOKENIZER --shape qwen2.5-0.5b --rounds 5 \\
        --document docs/measurements/structured-output.md

TOKENIZER is a directory with the tokenizer of a model of this shape. Weights are random, so a text is a random walk
through its form; no form below ends within the measured tokens, so all requests have as many. Speeds are ratios of
neighbouring runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, ratios, row, spread, table
from edgeinfer.base.text_form import TextForm, text_form
from edgeinfer.bundle import Bundle
from edgeinfer.cli.commands.bench_run import find_bundle
from edgeinfer.cli.progress import ProgressLine
from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.engine import Engine, Generation, Request
from edgeinfer.runtime import Session
from edgeinfer.text import Constraint, GrammarCompiler, Tokenizer

TOKENS = 64


def records(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an array of many objects with these properties."""
    return {"type": "array", "minItems": 200, "items": {"type": "object", "properties": fields,
                                                        "required": list(fields), "additionalProperties": False}}


FORMS: dict[str, Any] = {
    "strings": {"type": "array", "minItems": 200, "items": {"type": "string"}},
    "strings with maxLength": {"type": "array", "minItems": 200, "items": {"type": "string", "maxLength": 200}},
    "records": records({"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}}),
    "records with long keys": records({"name_of_the_customer": {"type": "boolean"}, "preferred_language":
                                       {"enum": ["English", "Japanese"]}, "number_of_orders": {"type": "integer"}}),
    "regex": {"type": "regex", "pattern": "([A-Z][a-z]{2,20} ){300}"},
}


def mask_costs(grammars: GrammarCompiler, form: TextForm, vocab_size: int, walks: int) -> tuple[float, list[float]]:
    """Return the seconds in which a form is compiled, and those in which a token is accepted and the next mask
    computed, along random texts."""
    began = time.perf_counter()
    grammars.begin(form)
    compiled, found, random = time.perf_counter() - began, [], np.random.default_rng(0)
    for _ in range(walks):
        constraint = grammars.begin(form)
        constraint.mask()
        for _ in range(TOKENS):
            allowed = np.unpackbits(constraint.words.view(np.uint8), bitorder="little")[:vocab_size]
            token_id = int(random.choice(np.flatnonzero(allowed)))
            began = time.perf_counter()
            if constraint.accept(token_id):
                break
            constraint.mask()
            found.append(time.perf_counter() - began)
    return compiled, found


class Requests:
    """Runs requests at once on one engine."""

    def __init__(self, session: Session, grammars: GrammarCompiler):
        self._session, self._grammars, self._engine = session, grammars, Engine(session)

    def speed(self, form: TextForm | None, n: int) -> float:
        """Return the tokens per second of n requests."""
        config = GenerationConfig(max_tokens=TOKENS, seed=1, ignore_eos=True)
        begin: Callable[[], Any] | None = None if form is None else lambda: self._grammars.begin(form)
        requests = [Request(self._engine, Generation(self._session, None, [5 + i, 6, 7, 8], config, begin_form=begin))
                    for i in range(n)]
        began = time.perf_counter()
        for request in requests:
            request.start_whole()
        done = [request.finish() for request in requests]
        seconds = time.perf_counter() - began
        assert all(one.finish_reason == "length" for one in done), [one.finish_reason for one in done]
        return sum(len(one.token_ids) for one in done) / seconds

    def share(self, form: TextForm, n: int) -> float:
        """Return the share of the time of n requests in which masks are computed and tokens consumed."""
        spent, methods = [0.0], (Constraint.prepare, Constraint.prepare_draft, Constraint.accept, Constraint.forced)

        def timed(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                began = time.perf_counter()
                try:
                    return method(*given)
                finally:
                    spent[0] += time.perf_counter() - began

            return call

        for method in methods:
            setattr(Constraint, method.__name__, timed(method))
        try:
            seconds = n * TOKENS / self.speed(form, n)
        finally:
            for method in methods:
                setattr(Constraint, method.__name__, method)
        return spent[0] / seconds

    def close(self) -> None:
        """End the engine, and the session with it."""
        self._engine.close()


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--document", type=Path)
    given = parser.parse_args()
    with ProgressLine() as progress:
        path = find_bundle(None, given.shape, None, None, progress)
    tokenizer, config = Tokenizer.open(given.tokenizer), RuntimeConfig(ctx=256, max_sequences=8, threads=given.threads)
    with closing(Requests(session := Session(Bundle.open(path), config), grammars := GrammarCompiler(
            tokenizer, vocab_size := session.model.vocab_size, tokenizer.eos_ids))) as requests:
        rows = []
        for name, source in FORMS.items():
            form = text_form(source)
            compiled, costs = mask_costs(grammars, form, vocab_size, 10)
            requests.speed(form, 1), requests.speed(None, 1)
            one, eight = (ratios(partial(requests.speed, form, n), partial(requests.speed, None, n), given.rounds)
                          for n in (1, 8))
            share = requests.share(form, 8)
            rows.append(row(name, f"{1e3 * compiled:.1f} ms", f"{1e6 * statistics.median(costs):.0f} us",
                            f"{1e6 * statistics.mean(costs):.0f} us", f"{1e6 * np.percentile(costs, 99):.0f} us",
                            f"{100 * share:.1f} %", spread(one), spread(eight)))
            print(rows[-1], flush=True)
        speeds = ", ".join(f"{n}: {requests.speed(None, n):.1f} tokens/s" for n in (1, 8))
    publish(f"{machine()}; {given.shape}, {vocab_size:,} tokens; without a form {speeds}.\n\n" + table(
        "form | compiled in | mask, median | mean | 99th percentile | share | one request | 8 at once", rows),
        given.document, "structured-output")


if __name__ == "__main__":
    main()
