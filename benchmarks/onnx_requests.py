"""The same 60 requests of every architecture by our kernels and by onnxruntime's CPU provider: token ids are compared.

    python benchmarks/onnx_requests.py [--families NAME ...] [--jobs N] [--output FILE.md]

Each model is a tiny one with weights, activations and KV in f32, for our kernels quantise the activations that they
multiply with codes. The requests are greedy ones, samples by seed, several samples of a prompt, beams, penalties and
biases, prompt lookup, and a draft model: the same checkpoint in q4. Speculation drafts in each step, whatever it costs.
A request is equal if the tokens of all its samples or beams are. Of one that is not, the first token that differs is
shown with the logits of both, as shares of the largest: a token is close if these differ by less than 1e-4.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import measured, publish, row, table
from benchmarks.onnx_models import CLOSE, is_lowered
from edgeinfer import LLM, engine
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.graph import supported_architectures
from tests.helpers.onnx_families import Storage, models, write_tiny
from tests.helpers.sessions import tokens

NEW = 24
OPTIONS: dict[str, Any] = {"ctx": 60, "threads": 1, "kv": "f32", "max_sequences": 4, "beams": 4, "draft_tokens": 4}
SECTION = "onnx requests"
GREEDY = {"temperature": 0}
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 1.3, "top_k": 0, "top_p": 0.8}, {"min_p": 0.05, "top_k": 0}, {"temperature": 0.5, "top_k": 5})
"""Of sampling."""
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY] * 10,
    "seeds": [{"seed": seed, **SETTINGS[seed % 4]} for seed in range(12)],
    "n": [{"seed": seed, "n": 2 + seed % 3, **SETTINGS[seed % 4]} for seed in range(6)],
    "beams": [{"beams": beams, "n": n, "length_penalty": penalty, "ignore_eos": False} for beams, n, penalty in (
        (2, 1, 1.0), (2, 2, 0.7), (3, 1, 0.0), (3, 3, 1.5), (4, 1, 1.0), (4, 2, 0.7), (4, 4, 1.0), (4, 4, -0.7))],
    "penalties": [{**one, **which} for one in (GREEDY, {"seed": 5}) for which in (
        {"repetition_penalty": 1.3}, {"presence_penalty": 0.6}, {"frequency_penalty": 0.4},
        {"logit_bias": {7: -100.0, 11: 1.5}, "logprobs": 3})],
    "lookup": [*[GREEDY] * 4, *({"seed": seed, "n": 1 + seed % 2} for seed in range(4))],
    "draft": [*[GREEDY] * 4, *({"seed": seed, "n": 1 + seed % 2} for seed in range(4))]}
LENGTHS = (1, 3, 7, 8, 15, 16, 17, 24, 31, 33)


class Compared(NamedTuple):
    """The requests of one architecture."""

    architecture: str
    model: str
    equal: dict[str, int | None]
    """Requests of each kind with equal tokens; None where onnxruntime's device refuses the kind."""
    drafted: int
    """Draft tokens that were verified on onnxruntime."""
    others: list[str]
    """Differences of the others, one each."""


def asked(kind: str, vocabulary: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield prompts and options of the requests of a kind."""
    for i, options in enumerate(KINDS[kind]):
        prompt = tokens(LENGTHS[i % len(LENGTHS)], i, vocabulary)
        if kind == "lookup":
            prompt = tokens(7, i, vocabulary) * 4
        speculate = kind if kind in ("lookup", "draft") else "off"
        yield prompt, {"max_tokens": NEW, "ignore_eos": True, "speculate": speculate, **options}


def run(architecture: str, most: int | None = None) -> Compared:
    """Return the comparison of the requests of an architecture, at most so many of each kind."""
    name = next(iter(models(architecture)))
    with tempfile.TemporaryDirectory() as folder, \
            mock.patch.object(engine, "Speculation", partial(engine.Speculation, fixed=True)):
        path = write_tiny(name, Storage("f32", 0), Path(folder) / "f32").path
        draft = write_tiny(name, Storage("q4", 32), Path(folder) / "q4").path
        found = Compared(architecture, name, {}, 0, [])
        for kinds, more in ((KINDS.keys() - {"draft"}, {}), ({"draft"}, {"draft": draft})):
            try:
                with LLM(path, device="onnx-cpu", **OPTIONS, **more) as theirs, LLM(path, **OPTIONS, **more) as ours:
                    for kind in sorted(kinds, key=list(KINDS).index):
                        found = compared(ours, theirs, kind, found, most)
            except UsageError:  # the device has no draft models for it
                found.equal.update(dict.fromkeys(kinds, None))
    return found


def compared(ours: LLM, theirs: LLM, kind: str, found: Compared, most: int | None) -> Compared:
    """Return the comparison with the requests of one more kind."""
    equal, others, drafted = 0, list[str](), 0
    for prompt, request in list(asked(kind, theirs.runner.model.vocab_size))[:most]:
        try:
            answer = theirs.complete(prompt, **request)
        except RequestError:  # the device does not verify draft tokens of it
            return found._replace(equal={**found.equal, kind: None})
        drafted += answer.speculation.drafted if answer.speculation else 0
        why = unlike(ours, theirs, prompt, ours.complete(prompt, **request), answer)
        equal, others = equal + (not why), others + [f"{kind}: {why}"] * bool(why)
    return found._replace(equal={**found.equal, kind: equal}, drafted=found.drafted + drafted,
                          others=found.others + others)


def unlike(ours: LLM, theirs: LLM, prompt: list[int], wanted: Any, found: Any) -> str:
    """Return what is different in the answer of onnxruntime; empty if all tokens are equal."""
    for i, (one, other) in enumerate(zip(wanted.choices, found.choices, strict=True)):
        if one.token_ids != other.token_ids:
            at = next(j for j, pair in enumerate(zip((*one.token_ids, None), (*other.token_ids, None), strict=False))
                      if pair[0] != pair[1])
            rows = [after(llm, [*prompt, *one.token_ids[:at]]) for llm in (ours, theirs)]
            size = float(np.abs(rows[0]).max())
            apart = f"logits of both runners differ by {float(np.abs(rows[0] - rows[1]).max()) / size:.1e}"
            if at < min(len(one.token_ids), len(other.token_ids)):
                gap = abs(float(rows[0][one.token_ids[at]] - rows[0][other.token_ids[at]])) / size
                return f"{'close' if gap < CLOSE else 'another'} token {at} of choice {i}, by {gap:.1e}; {apart}"
            return f"an end at token {at} of choice {i}; {apart}"
    return ""


def after(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the logits after a text."""
    sequence = llm.runner.new_sequence()
    logits = llm.runner.prefill(sequence, ids).reshape(-1).copy()
    llm.runner.release(sequence)
    return logits


def text_of(all_of: list[Compared]) -> str:
    """Return the table, as Markdown."""
    n = {kind: len(requests) for kind, requests in KINDS.items()}
    what = (f"{len(all_of)} architectures x {sum(n.values())} requests, onnx {version('onnx')}, onnxruntime "
            f"{version('onnxruntime')}")
    rows = [row(one.architecture, one.model, *("refused" if one.equal[kind] is None else one.equal[kind] for kind in n),
                one.drafted, share(one, n), "; ".join(one.others)) for one in all_of]
    total = {kind: sum(one.equal[kind] or 0 for one in all_of) for kind in n}
    asked_of_all = sum(n[kind] for one in all_of for kind in n if one.equal[kind] is not None)
    rows.append(row("all", "", *total.values(), sum(one.drafted for one in all_of),
                    f"{sum(total.values())} of {asked_of_all}", f"{sum(len(one.others) for one in all_of)}"))
    head = " | ".join(("architecture", "model", *(f"{kind} ({n[kind]})" for kind in n), "draft tokens", "equal",
                       "others"))
    return "\n\n".join((measured(what).rstrip(), table(head, rows)))


def share(one: Compared, n: dict[str, int]) -> str:
    """Return how many of the requests that were answered are equal."""
    answered = sum(n[kind] for kind, equal in one.equal.items() if equal is not None)
    return f"{sum(equal or 0 for equal in one.equal.values())} of {answered}"


def main(arguments: list[str] | None = None) -> int:
    """Run the requests, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=sorted(supported_architectures()), metavar="NAME",
                        default=sorted(supported_architectures()))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced")
    given = parser.parse_args(arguments)
    found = list[Compared]()
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        for one in pool.map(run, [name for name in given.families if is_lowered(name)]):
            found.append(one)
            print(*one, file=sys.stderr, flush=True)
    publish(text_of(found), given.output, SECTION)
    return 0


if __name__ == "__main__":
    sys.exit(main())
