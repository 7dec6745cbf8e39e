"""Opening of a model that many requests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import CPU
from . import options
from .commands.run import OPENING
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..llm import LLM


def short_name(model: str) -> str:
    """Return the end of a path or id, without the ending of a file, as the name of a model."""
    tail = model.rstrip("/").rpartition("/")[2] if not model.startswith(("ollama:", "hf:")) else model.partition(":")[2]
    return tail.removesuffix(".gguf") or model


def open_served(source: str, left: int | None, *, given: options.Given, techniques: Mapping[str, Any], sequences: int,
          queue: int, alone: bool) -> LLM:
    """Open a model within the rest of the budget."""
    from ..llm import LLM

    opened = opening(source, left, given=given, techniques=techniques, sequences=sequences, queue=queue, alone=alone)
    with ProgressLine() as progress:
        return LLM(source, progress=progress, **opened)


def opening(source: str, left: int | None, *, given: options.Given, techniques: Mapping[str, Any], sequences: int,
            queue: int, alone: bool) -> dict[str, Any]:
    """Return the options with which a model is opened to be served."""
    weights, group_size = given.stored(source)
    opened: dict[str, Any] = {name: getattr(given, name) for name in OPENING}
    ours = given.device in (None, CPU)
    fills = alone and given.kv_memory is None and (ours or not techniques.get("draft"))  # a draft model needs a part
    return opened | dict(budget=left, kv=given.kv_on(given.device or CPU),
                         max_sequences=sequences, fill_budget=fills or None, max_queue=queue, mmap=not given.no_mmap,
                         weights=weights, group_size=group_size, prefix_file=given.prefix_file if alone else None,
                         **techniques)
