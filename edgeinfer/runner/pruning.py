"""Share of a prompt's tokens in each layer (LazyLLM, arXiv 2407.14057): schedules and their rules."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import field, replace
from typing import Any

from ..base.dataclass import dataclass
from ..base.validation import real, shown, whole
from ..errors import RequestError, UsageError

FIRST_SHARE, LAST_SHARE = 0.3, 0.9
"""Boundaries that are not given part the layers evenly up to LAST_SHARE of them, each stage FIRST_SHARE at most: three
are those of the paper, after 30, 60 and 90 %."""
RECENT = 16
"""Last tokens of a prompt that always continue, as does the first of a text; their attention chooses the others."""
NEIGHBOURS = 2
"""Neighbours on each side: a token counts as much as the one among them that is attended to most
(docs/explanation/long-context.md)."""
MIN_PROMPT = 64
"""Prompts of fewer tokens go through all layers: most of them would stay anyway."""
ASSUMPTION = "assumed: a layer takes time as it has tokens, attention included"
"""Assumption behind the predicted time of a pruned prompt."""
_FORM = "write keep=SHARE,SHARE,..., as in keep=0.7,0.5,0.35"


@dataclass(frozen=True)
class Schedule:
    """Boundaries between layers, and the share of a prompt's tokens that continues after each."""

    keep: tuple[float, ...]
    """Fractions of the whole prompt, from above 0 to 1, none larger than the one before."""
    layers: tuple[int, ...] = field(default=())
    """Layers after which the boundaries are; empty leaves them to `placed`."""

    def __post_init__(self) -> None:
        for name, kind in (("keep", real), ("layers", whole)):
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, tuple(map(kind, given)))
            except (TypeError, ValueError, OverflowError):
                raise UsageError(f"{name} of a pruning schedule is {shown(given)}; it must be a list of "
                                 f"{'shares' if name == 'keep' else 'numbers of layers'}.") from None
        self._check()

    def _check(self) -> None:
        if not self.keep:
            raise UsageError(f"A pruning schedule keeps nothing to speak of; {_FORM}.")
        for share in self.keep:
            if not 0 < share <= 1:
                raise UsageError(f"keep is {share:g} at one boundary; shares are above 0 and at most 1.")
        for before, share in zip(self.keep, self.keep[1:], strict=False):
            if share > before:
                raise UsageError(f"keep grows from {before:g} to {share:g}; pruned tokens are never revived, "
                                 "so no share may be larger than the one before.")
        if self.layers and len(self.layers) != len(self.keep):
            raise UsageError(f"{len(self.keep)} shares are given for {len(self.layers)} boundaries between layers; "
                             "give one for each.")
        for earlier, later in zip((0, *self.layers), self.layers, strict=False):
            if later <= earlier:
                raise UsageError(f"The boundary after layer {later} comes after {earlier}; number layers from 1, "
                                 "each boundary after the one before.")

    @classmethod
    def parse(cls, text: str, layers: str | None = None) -> Schedule:
        """Return the schedule that ``keep=0.7,0.5,0.35`` and, for the boundaries, ``9,18,27`` stand for.

        Raises
        ------
        UsageError
            They are no such lists, or contradict each other.
        """
        share = r"(\d*\.)?\d+(e-\d+)?"  # with an exponent, as small ones are printed
        if not re.fullmatch(f"keep={share}(,{share})*", text, re.ASCII):
            raise UsageError(f"The pruning schedule {text!r:.80} cannot be read; {_FORM}.")
        return cls(tuple(float(share) for share in text.removeprefix("keep=").split(",")), layers_of(layers))

    def placed(self, n_layers: int) -> Schedule:
        """Return the schedule for a model of this many layers.

        Raises
        ------
        UsageError
            It has not as many, or none after the last boundary.
        """
        n = len(self.keep)
        if n >= n_layers:
            raise UsageError(f"A schedule with {n} boundaries has {n + 1} stages, and the model has {n_layers} layers; "
                             f"give {'fewer shares' if n_layers > 1 else 'no schedule'}.")
        step = min(FIRST_SHARE, LAST_SHARE / n) * n_layers
        found = self if self.layers else replace(self, layers=tuple(
            min(n_layers - n + i, max(i + 1, round(step * (i + 1)))) for i in range(n)))
        if found.layers[-1] >= n_layers:
            raise UsageError(f"The boundary after layer {found.layers[-1]} has no layer after it; the model has "
                             f"{n_layers}.")
        return found

    def stage(self, layer: int) -> int:
        """Return how many boundaries are before a layer, counted from 0."""
        return sum(boundary <= layer for boundary in self.layers)

    def tokens(self, n: int, before: int = 0) -> tuple[int, ...]:
        """Return how many of a prompt's n tokens each stage computes, after this many tokens of the text; a single
        number where the prompt is too short for stages."""
        if n < MIN_PROMPT:
            return (n,)
        least = RECENT + (before == 0)
        return (n, *(max(math.ceil(share * n), least) for share in self.keep))

    def share(self, tokens: tuple[int, ...], n_layers: int) -> float:
        """Return which share of the dense prompt's tokens times layers this many tokens in each stage are."""
        if len(tokens) == 1:
            return 1.0
        stages = zip(tokens, itertools.pairwise((0, *self.layers, n_layers)), strict=True)
        return sum(n * (stop - first) for n, (first, stop) in stages) / (tokens[0] * n_layers)

    def outlook(self, n: int, n_layers: int) -> dict[str, Any]:
        """Return the prediction for a prompt of n tokens, as JSON objects have it; its boundaries are placed."""
        tokens = self.tokens(n)
        share = self.share(tokens, n_layers)
        said = f"{n} tokens are too few to prune, all go through all layers"
        if tokens[1:]:
            went = ", ".join(map(str, tokens[1:]))
            said = f"of {n} tokens {went} continue, {share:.0%} of the tokens' layers are computed"
        return {"schedule": str(self), "tokens": list(tokens), "share": share, "said": f"{self}: {said}",
                "assumed": ASSUMPTION}

    def __str__(self) -> str:
        places = f" after layers {','.join(map(str, self.layers))}" if self.layers else ""
        return f"keep={','.join(f'{share:g}' for share in self.keep)}{places}"


def calibrated(layers: tuple[int, ...], divergence: Callable[[Schedule], float], target: float) -> Schedule:
    """Return the schedule with these boundaries that drops most of those that diverge by the target at most.

    At each boundary the same share of the arriving tokens continues. It is searched by halves, in steps of a hundredth.

    Raises
    ------
    RequestError
        Even the one that drops least diverges by more.
    """
    def schedule(percent: int) -> Schedule:
        return Schedule(tuple(max(1e-4, round((percent / 100) ** (i + 1), 4)) for i in range(len(layers))), layers)

    low, high = 0, 100  # of which the first is too little, and all is enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if (least := divergence(schedule(middle))) <= target else (middle, high)
    if high == 100:
        raise RequestError(f"Even {schedule(99)} diverges by {least:.5f}, and the target is {target:g}; raise it, or "
                           "put the boundaries after later layers (--lazy-layers).")
    return schedule(high)


def layers_of(text: str | None) -> tuple[int, ...]:
    """Parse boundaries such as ``9,18,27``; None gives an empty tuple.

    Raises `UsageError` for a text that is no such list.
    """
    if text is not None and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
        raise UsageError(f"The boundaries {text!r:.80} are not numbers of layers, as in 9,18,27.")
    return () if text is None else tuple(map(int, text.split(",")))
