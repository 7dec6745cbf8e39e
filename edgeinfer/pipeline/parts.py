"""Division of a forward pass into parts, which go through the stages one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

from edgeinfer.runner import PROMPT, Segment

from .calls import Part, StageSegment

MIN_PROMPT = 32
"""Tokens of a part of a prompt at least: shorter ones read the weights too often."""
TRIES = 2
"""Passes with each number of parts before the fastest is used."""
AGAIN = 64
"""Passes after which the other numbers are tried again."""
SHARE = 0.25
"""Weight of the latest time."""


class PartCounts:
    """Chooses the number of parts of forward passes by the times that they have taken.

    Several sequences in parts read the weights once for each part, which pays where computing takes longer than
    reading; prompts nearly always gain. The text does not depend on it.

    Parameters
    ----------
    stages : int
        Stages that compute at the same time; 1 leaves passes whole.
    """

    def __init__(self, stages: int):
        self._stages = stages
        self._seconds: dict[tuple[bool, int], dict[int, tuple[float, int]]] = {}
        """Seconds of a token and the number of passes that they come from, by kind of pass and number of parts."""

    def choices(self, n_tokens: int, most: int, prompt: bool) -> list[int]:
        """Return the numbers of parts that a pass may have, the most promising first."""
        least = MIN_PROMPT if prompt else 1
        counts = (self._stages * 4, self._stages * 2, self._stages)
        fitting = [k for k in counts if k <= most and n_tokens // k >= least]
        if self._stages == 1 or not fitting:
            return [1]
        return [*fitting, 1] if prompt else [1, *reversed(fitting)]

    @contextmanager
    def timed(self, n_tokens: int, most: int, prompt: bool) -> Iterator[int]:
        """Give the number of parts for a pass, and take its time unless it fails.

        Parameters
        ----------
        n_tokens : int
        most : int
            Parts that it can be divided into.
        prompt : bool
            Whether chunks of prompts are among its tokens.
        """
        choices = self.choices(n_tokens, most, prompt)
        if len(choices) == 1:
            yield choices[0]
            return
        known = self._seconds.setdefault((prompt, n_tokens.bit_length()), {})
        chosen = self._choose(choices, known)
        began = time.perf_counter()
        yield chosen
        seconds = (time.perf_counter() - began) / n_tokens
        before, passes = known.get(chosen, (seconds, 0))
        latest = min(before, seconds) if passes < TRIES else before + SHARE * (seconds - before)
        known[chosen] = latest, passes + 1  # the first pass touches memory for the first time

    @staticmethod
    def _choose(choices: list[int], known: dict[int, tuple[float, int]]) -> int:
        total = sum(passes for _, passes in known.values())
        for k in choices:
            if known.get(k, (0.0, 0))[1] < TRIES + total // (AGAIN * len(choices)):
                return k
        return min(choices, key=lambda k: known[k][0])


def most_parts(segments: Items[Segment]) -> int:
    """Return how many parts a pass can be divided into."""
    return sum(len(one.ids) if _divisible(one) else 1 for one in segments)


def divide(segments: Items[Segment], numbers: Items[int], n_parts: int) -> list[Part]:
    """Divide a pass into about `n_parts` parts of as many tokens, in the order of its segments.

    A chunk of a prompt is cut where it is longer than a part; other segments stay whole and share parts. The first part
    has the room of the whole pass to make.

    Parameters
    ----------
    segments : of Segment
    numbers : of int
        Of their sequences.
    n_parts : int
    """
    size = -(-sum(len(segment.ids) for segment in segments) // n_parts)
    parts: list[Part] = []
    together: list[StageSegment] = []
    for number, segment in zip(numbers, segments, strict=True):
        if together and sum(len(one.ids) for one in together) + len(segment.ids) > size:
            parts.append(Part(together))
            together = []
        if len(segment.ids) <= size or not _divisible(segment):
            together.append(_piece(number, segment, 0, len(segment.ids), True))
            continue
        starts = range(0, len(segment.ids), size)
        first = next((start for start in starts if any(start <= i < start + size for i in segment.outputs)), starts[-1])
        parts += [Part([_piece(number, segment, start, start + size, start == first)], start) for start in starts]
    if together:
        parts.append(Part(together))
    begins = [(number, len(segment.ids)) for number, segment in zip(numbers, segments, strict=True)]
    return [parts[0]._replace(begins=begins), *parts[1:]]


def _divisible(segment: Segment) -> bool:
    in_order = list(segment.outputs) == sorted(segment.outputs)  # of the parts, as of the whole
    return segment.role == PROMPT and segment.parents is None and in_order


def _piece(number: int, segment: Segment, start: int, stop: int, prepares: bool) -> StageSegment:
    """Tokens start .. stop - 1 of a segment, with those of its outputs that are after them."""
    outputs = [i for i, output in enumerate(segment.outputs) if start <= output < stop]
    specs = tuple(segment.sample_specs[i] for i in outputs) if segment.sample_specs else ()
    after = [segment.outputs[i] - start for i in outputs]
    return StageSegment(number, list(segment.ids[start:stop]), after, segment.role, segment.parents, specs,
                        segment.prepare if prepares else None)
