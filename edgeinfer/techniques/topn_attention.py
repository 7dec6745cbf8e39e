"""The technique ``attention``: decoded tokens read the rows of V that scores choose (TopN-V: arXiv 2404.18057)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.units import number_of
from ..base.validation import Rule
from ..registry import DECODED, Option, Technique

if TYPE_CHECKING:
    from ..graph import Graph

EXACT = "exact"
VALUES = "exact, eps:X with X from 0 to 1, or top:N with N of 1 or more"
"""All rows of V are read, those whose weight is at least X times their head's largest, or N a head."""


def _checked(value: Any) -> str:
    """Return the option's text; raises ValueError for any other."""
    name, number = _parsed(value) if isinstance(value, str) else ("", "")
    good = name == "eps" and not isinstance(number, str) and 0 <= number <= 1
    if value != EXACT and not good and not (name == "top" and isinstance(number, int) and number >= 1):
        raise ValueError
    return str(value)


def _parsed(text: str) -> tuple[str, str | float]:
    name, _, number = text.partition(":")
    return name, number_of(number)


def ask(values: Mapping[str, Any]) -> dict[str, str | float] | None:
    """Return the pass's settings: none for ``exact``, which needs no pass."""
    (text,) = values.values()
    return None if text is None else {} if text == EXACT else dict([_parsed(text)])


def rewrite(graph: Graph, eps: float | None = None, top: int | None = None, instead: str = "mean",
            exact: int = 0) -> Graph:
    """Say which rows of V decoded tokens read, in layers without a window.

    Those whose weight is at least `eps` times their head's largest, or the `top` largest of each head; `instead` says
    the replacement of the others: nothing, scale (the rest adds up to 1) or mean. The first `exact` layers read all.
    """
    from ..errors import UsageError
    from ..graph import with_selection

    if (eps is None) == (top is None):
        raise UsageError("The pass attention takes either eps or top; give one of them.")
    if not (top is None or (type(top) is int and top >= 1)) \
            or not (eps is None or (isinstance(eps, int | float) and 0 <= eps <= 1)):
        asked = f"eps:{eps}" if top is None else f"top:{top}"
        raise UsageError(f"attention is {asked:.60}; choose {VALUES}.")
    return with_selection(graph, eps, top, instead, exact)


TECHNIQUE = Technique(
    name="attention",
    options=(Option(
        "attention", Rule(VALUES, _checked, lead="choose"), "exact|eps:X|top:N",
        "Attention of decoded tokens: read all rows of V (exact), only blocks with a weight of at least X times the "
        "head's maximum (eps:X), or only blocks with one of the head's N largest weights (top:N); the mean of V "
        "replaces the rest.", unset="exact"),),
    ask=ask,
    exact=lambda settings: False,
    kv=DECODED,
    rewrite=rewrite,
)
