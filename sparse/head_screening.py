"""The technique ``head``: decoded tokens compute the rows of the output head that can hold the largest logit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeinfer.base.validation import choice
from edgeinfer.registry import NEVER, Option, Part, Reported, Technique

if TYPE_CHECKING:
    from edgeinfer.bundle import Bundle
    from edgeinfer.graph import Graph

MODES = EXACT, SCREENED = "exact", "screened"
"""All rows are computed, or those that a low-rank matmul says can matter."""


def rewrite(graph: Graph, mode: str, rank: int = 0, share: float = 0.0) -> Graph:
    """Describe which part of the output head decoded tokens compute.

    All rows (exact), or those that a low-rank matmul says can hold the largest logit; the others keep its estimates
    (screened). It never leaves out the largest logit, so greedy decoding gives the same text.
    """
    from edgeinfer.errors import UsageError
    from edgeinfer.graph import ScreenedHead, with_screen

    if mode not in MODES:
        raise UsageError(f"head is {mode!r}; choose one of {', '.join(MODES)}.")
    if any(isinstance(op, ScreenedHead) for op in graph.ops):
        raise UsageError("The recipe has the pass head twice; name it once.")
    if mode == EXACT:
        return graph
    if not rank:
        raise UsageError("head is 'screened', but the model has no screen; choose exact, or make a bundle with one "
                         "by `edgeinfer sparsify --head`.")
    return with_screen(graph, rank, share)


def _read(bundle: Bundle) -> dict[str, str | float]:
    from edgeinfer.bundle import screen_settings

    return screen_settings(bundle)


def report(run: Reported) -> dict[str, Any]:
    """Return the screen of a bundle's head, for ``info``."""
    if run.command != "info":
        return {}
    from edgeinfer.bundle import read_screen

    found = read_screen(run.model)
    return {"screen": found and {"rank": found.rank, "share": found.share, "bytes": found.nbytes}}


TECHNIQUE = Technique(
    name="head",
    options=(Option(
        "head", choice(MODES), "|".join(MODES),
        "Output head of decoded tokens: compute all rows (exact), or only rows that the bundle's screen does not rule "
        "out (screened); greedy text is unchanged.", unset="exact"),),
    exact=lambda settings: settings.get("mode") != SCREENED,
    by_itself=SCREENED,
    part=Part("screen", _read, ("share", "rank")),
    kv=NEVER,
    rewrite=rewrite,
    report=report,
    fields=(("info", "screen", "of the output head: `rank`, `share` of it that is computed, `bytes`, or null"),),
)
