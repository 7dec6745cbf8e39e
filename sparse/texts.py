"""Texts that predictors and screens are fitted to and measured on, cut into a part for each."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.errors import RequestError
from edgeinfer.quality.evaluate import Stream
from edgeinfer.quality.measurements import MIN_TOKENS as MIN_EVALUATED

OUTPUTS = 64
"""Rows of logits of a forward pass: no part of a text leaves a single token over."""
CALIBRATION_TOKENS, MEASURED_TOKENS = 32768, 2048
"""Most tokens for statistics and factors, and most to measure a divergence on, twice: the lambda is searched on other
tokens than the result is measured on."""
MAX_TOKENS = CALIBRATION_TOKENS + 2 * MEASURED_TOKENS
MIN_TOKENS = 2048
MIN_HELD_OUT = 4 * MIN_EVALUATED
"""Tokens of a held-out text: a half of them measures, in windows of which some tokens may not count."""


def cut(stream: Stream) -> tuple[Stream, Stream, Stream]:
    """Split a text into consecutive parts: to fit on, to choose lambda on, and to measure on."""
    n = len(stream.ids)
    if n < MIN_TOKENS:
        raise RequestError(f"The text has {n} tokens, too few to learn from; give {MIN_TOKENS} at least, and better "
                           "ten times as many.")
    some = min(MEASURED_TOKENS, n // 5)
    a, b = n - 2 * some, n - some
    first = max(0, a - CALIBRATION_TOKENS)
    end = f"the end of {stream.name}" if stream.name else ""
    return _part(stream, first, a), _part(stream, a, b), replace(_part(stream, b, n), name=end)


def cut_held_out(stream: Stream) -> tuple[Stream, Stream]:
    """Split another text: to choose lambda on, and to measure on."""
    n = min(len(stream.ids), 2 * MEASURED_TOKENS)
    if n < MIN_HELD_OUT:
        raise RequestError(f"The held-out text {stream.name} has {n} tokens, too few to measure on; give "
                           f"{MIN_HELD_OUT} at least.")
    return _part(stream, 0, n // 2), _part(stream, n // 2, n)


def _part(stream: Stream, start: int, stop: int) -> Stream:
    """A part of a stream that is not cut into a window of a single token."""
    stop -= (stop - start - 1) % OUTPUTS == 1
    share = (stop - start) / len(stream.ids)
    return Stream(tuple(stream.ids[start:stop]), tuple(stream.counted[start:stop]),
                  max(round(stream.text_bytes * share), 1), stream.name)
