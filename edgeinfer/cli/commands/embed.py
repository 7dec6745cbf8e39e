"""`edgeinfer embed`: embeddings of texts, one JSON object a line."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ...errors import UsageError
from .. import options
from ..progress import ProgressLine
from .run import LongInput

JSON_FIELDS = {"embed": {"index": "place of the text", "tokens": "of the text", "embedding": "float32 values"}}
"""Fields of the JSON object on each line, by command."""
MAX_BYTES = 64 << 20


def embed(
    model: options.Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT...", show_default=False, help="Texts; without any, each line of standard input."),
    ] = None,
    pooling: Annotated[str, typer.Option(metavar="mean|last", help="Mean over all tokens, or the last one.")] = "mean",
    no_normalize: Annotated[
        bool, typer.Option("--no-normalize", help="Do not divide embeddings by their length."),
    ] = False,
    ctx: Annotated[
        int | None, typer.Option("--ctx", "-c", metavar="N", help="Longest text, in tokens.", show_default=False),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum memory of the process.", show_default=False),
    ] = None,
    threads: options.Threads = None,
) -> None:
    """Print the embeddings of texts, one JSON object per line.

    \b
    Examples:
      edgeinfer embed ./my-bundle "The fox and the crow" "A tale of a bird"
      echo "The fox and the crow" | edgeinfer embed ./my-bundle --pooling last
    """
    given = texts or _lines()
    if not given:
        raise UsageError("There is no text to embed; give some, or lines on standard input.")
    with ProgressLine() as progress:
        from ...llm import LLM

        llm = LLM(model, ctx=ctx, budget=budget, threads=threads, progress=progress)
    with llm:
        ids = [llm.prompt_ids(text) for text in given]
        found = llm.embed(ids, pooling=pooling, normalize=not no_normalize)
        for index, (row, own) in enumerate(zip(found.tolist(), ids, strict=True)):
            print(json.dumps({"index": index, "tokens": len(own), "embedding": row}))


def _lines() -> list[str]:
    """Return the lines of standard input that are not empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    text = LongInput(b"").whole(MAX_BYTES)
    return [line for line in text.splitlines() if line.strip()]
