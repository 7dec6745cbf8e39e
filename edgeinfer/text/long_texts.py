"""Long texts: their parts, which are tokenised one by one, and calls that end when a request is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ..base.dataclass import dataclass
from ..errors import CancelledError

PART = 16_384
"""Characters of a part, but for the way to the next cut: a few megabytes and tens of milliseconds."""
WHITE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
"""Characters that an added token with `lstrip` takes before it."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Cuts:
    """Places where a tokenizer's texts can be cut."""

    find: Callable[[str, int], int | None]
    """Returns the first cut of a text at an index or after it; it looks at two characters after a cut at most."""
    skipped: int = 0
    """Characters that are left out at a cut."""
    continues: bool = False
    """True if parts but the first are tokenised as the continuation of a text."""


def parts(pieces: Iterable[str], cuts: Cuts) -> Iterator[str]:
    """Yield the parts of a text that comes in pieces.

    The parts are the same however the text comes, and no more of it is held than a part and a piece.
    """
    text, seen = "", 0
    for piece in pieces:
        text, start = text + piece, 0
        while len(text) - start > PART and (found := cuts.find(text, max(start + PART, seen))) is not None:
            yield text[start:found]
            start = found + cuts.skipped
        seen = max(len(text) - start - 2, 0)  # a cut is seen by the two characters after it
        text = text[start:]
    yield text


def check_wanted(stopped: Callable[[], bool] | None) -> None:
    """Raise `CancelledError` once the tokens are no longer wanted."""
    if stopped and stopped():
        raise CancelledError("The request was cancelled while its prompt was tokenised.")


def interruptible(work: Callable[[], _Result], stopped: Callable[[], bool] | None = None) -> _Result:
    """Return the result of a long call into a library.

    Ctrl-C, or `stopped`, leaves the call behind in a thread that ends with it or with the process.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        check_wanted(stopped)
    if errors:
        raise errors[0]
    return results[0]
