"""Documents under the schemas of JSON-Schema-Test-Suite, checked by the package jsonschema.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python benchmarks/json_schema_suite.py JSON-Schema-Test-Suite --model demo --document docs/measurements/...

For every schema of draft 2020-12 that is accepted, a model writes documents, greedily and sampled, and another
validator reads them. A document is valid, invalid, cut by the token limit, left without a token that may come next, or
unchecked because Python's regular expressions, dates or numbers lack its features. Small models begin most texts alike
and write without end: objects, arrays and strings are favoured in turns, repeated tokens have a penalty, and ends have
a bias.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, row, table
from edgeinfer import LLM
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.text import Tokenizer

DRAFT = "draft2020-12"
YEAR_0000 = re.compile(r'"0000-\d\d-\d\d')
"""A date of RFC 3339 that Python does not have."""
VERDICTS = ("valid", "invalid", "cut", "no token", "unchecked")


class Case(NamedTuple):
    """A schema of the suite."""

    name: str
    schema: Any


def cases(suite: Path) -> Iterator[Case]:
    """Yield the schemas of all cases, also of the optional ones."""
    folder = suite / "tests" / DRAFT
    if not (files := sorted(folder.rglob("*.json"))):
        raise SystemExit(f"{folder} has no cases; clone https://github.com/json-schema-org/JSON-Schema-Test-Suite.")
    for file in files:
        for case in json.loads(file.read_text(encoding="utf-8"), parse_float=Decimal):  # multipleOf wants exact ones
            yield Case(f"{file.stem}: {case['description']}", case["schema"])


def as_floats(value: Any) -> Any:
    """Return JSON with floats where it was read with decimals."""
    return json.loads(json.dumps(value, default=float))


def validator(suite: Path, schema: Any) -> Any:
    """Return a validator that asserts formats and knows the suite's remote schemas."""
    from jsonschema import Draft202012Validator
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    remotes = suite / "remotes"
    resources = ((f"http://localhost:1234/{file.relative_to(remotes).as_posix()}",
                  DRAFT202012.create_resource(json.loads(file.read_text(encoding="utf-8"))))
                 for file in remotes.rglob("*.json"))
    return Draft202012Validator(schema, registry=Registry().with_resources(resources),
                                format_checker=Draft202012Validator.FORMAT_CHECKER)


def judge(text: str, finish_reason: str, schema: Any, suite: Path) -> str:
    """Return the verdict on a text, one of `VERDICTS`."""
    if finish_reason != "stop":
        return {"length": "cut", "grammar": "no token"}[finish_reason]
    try:
        document = json.loads(text, parse_constant=_not_json, parse_float=Decimal)
        if validator(suite, schema).is_valid(document):
            return "valid"
        return "unchecked" if YEAR_0000.search(text) else "invalid"
    except (re.error, ArithmeticError):
        return "unchecked"
    except ValueError:
        return "invalid"


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def biases(tokenizer: Tokenizer) -> list[dict[int, float]]:
    """Return biases towards the end of any text, and towards objects, arrays, strings and nothing else in turns."""
    texts = [tokenizer.token_text(token_id).strip() for token_id in range(tokenizer.vocab_size)]
    ends = {i: 6.0 for i, text in enumerate(texts) if text.endswith(("}", "]", '"'))} | dict.fromkeys(
        tokenizer.eos_ids, 10.0)
    return [ends | {i: 5.0 for i, text in enumerate(texts) if first and text.startswith(first)}
            for first in ("", "{", "[", '"')]


def main() -> None:
    """Write documents and count them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--samples", type=int, default=12, help="documents of each schema besides the greedy one")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--document", type=Path)
    given = parser.parse_args()
    schemas: Counter[str] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    with LLM(given.model, ctx=given.max_tokens + 32, max_sequences=1 + given.samples) as llm:
        favoured = biases(llm.tokenizer)
        for name, schema in cases(given.suite):
            form = {"type": "json_schema", "json_schema": {"schema": as_floats(schema)}}
            options = {"response_format": form, "max_tokens": given.max_tokens, "frequency_penalty": 1.0}
            try:
                requests = [llm.request("The document: ", {**options, "temperature": 2.0 * (seed > 0), "seed": seed,
                                                           "logit_bias": favoured[seed % len(favoured)]})
                            for seed in range(1 + given.samples)]
            except (RequestError, UsageError) as error:
                schemas["refused"] += 1
                print(f"refused  {name}: {error}")
                continue
            schemas["accepted"] += 1
            for request in requests:
                request.start_whole()
            for seed, request in enumerate(requests):
                done = request.finish()
                verdict = judge(done.text, done.finish_reason, schema, given.suite)
                found["sampled" if seed else "greedy", verdict] += 1
                if verdict != "valid":
                    print(f"{verdict:9} {name}: {json.dumps(as_floats(schema))[:300]} -> {done.text[:200]!r}")
    rows = [row(kind, *(found[kind, verdict] for verdict in VERDICTS)) for kind in ("greedy", "sampled")]
    publish(f"{machine()}; {given.model}; {schemas['accepted']} schemas accepted, {schemas['refused']} refused.\n\n"
            + table("documents | valid | invalid | cut by max_tokens | no token left | unchecked", rows),
            given.document, "json-schema")


if __name__ == "__main__":
    main()
