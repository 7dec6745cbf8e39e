"""Plots as SVG text without a library: a curve with its band, and bars; all words are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 30, 40
ROW, NAME, LETTER = 24, 24, 7.4
"""Height of a bar; letters of a name, and the width of one."""
STEPS = (1, 2, 2.5, 5, 10)


class Bar(NamedTuple):
    """One bar."""

    name: str
    value: float
    text: str
    """Text after it."""
    low: float | None = None
    high: float | None = None
    """Ends of its band."""
    quiet: bool = False
    """True if it is drawn pale."""


class Point(NamedTuple):
    """One point."""

    name: str
    x: float
    y: float
    quiet: bool = False
    """True if it is drawn pale."""


def curve(title: str, x: Sequence[float], y: Sequence[float], low: Sequence[float], high: Sequence[float],
          x_label: str, y_label: str, log: bool = True, level: tuple[float, str] | None = None) -> str:
    """Return a curve with its band.

    Parameters
    ----------
    title : str
    x : sequence of float
        Ascending; on a logarithmic axis 0 is drawn where 1/2 of the next value would be.
    y, low, high : sequence of float
    x_label, y_label : str
    log : bool
        True if the axis is logarithmic.
    level : tuple, optional
        A value that is drawn as a dashed line, and its words.
    """
    places = [math.log2(max(value, x[1] / 2 if len(x) > 1 else 1)) for value in x] if log else list(x)
    first, last = places[0], max(places[-1], places[0] + (1 if log else 1e-9))
    top = _ceiling(max(*high, level[0] if level else 0))

    def at(place: float, value: float) -> str:
        right = LEFT + (WIDTH - LEFT - RIGHT) * (place - first) / (last - first)
        down = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top
        return f"{right:.1f},{down:.1f}"

    band = " ".join([*map(at, places, high), *reversed(list(map(at, places, low)))])
    lines = " ".join(map(at, places, y))
    parts = [*_axis(top, y_label),
             f'<polygon class="band" points="{band}"/>', f'<polyline class="curve" points="{lines}"/>']
    if level:
        down = at(first, level[0]).split(",")[1]
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}"/>')
        parts.append(f'<text class="tick" x="{LEFT + 4}" y="{float(down) - 4:.1f}">{escape(level[1])}</text>')
    for i, (place, value) in enumerate(zip(places, x, strict=True)):
        if i == len(x) - 1 or not (len(x) - 1 - i) % (len(x) // 7 + 1):
            right = at(place, 0).split(",")[0]
            parts.append(f'<text class="tick" x="{right}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                         f'{value:g}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    return _drawn(title, HEIGHT, parts)


def scatter(title: str, points: Sequence[Point], x_label: str, y_label: str, limit: tuple[float, str]) -> str:
    """Return points with their names, and a line at a limit of the horizontal axis, if that is not far beyond them.

    Names do not cover each other: some points have theirs as a tooltip alone.
    """
    most = max(point.x for point in points)
    near = limit[0] <= 2 * most
    top, end = _ceiling(max(point.y for point in points)), _ceiling(max(most, limit[0] if near else 0))
    parts, names = [*_axis(top, y_label)], list[tuple[float, float, float]]()

    def right(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / end

    for point in sorted(points, key=lambda point: point.x):
        across, down = right(point.x), HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * point.y / top
        parts.append(f'<circle class="{"bar pale" if point.quiet else "bar"}" cx="{across:.1f}" cy="{down:.1f}" r="4">'
                     f'<title>{escape(point.name)}</title></circle>')
        width = LETTER * len(point.name)
        if all(abs(down - other) > 11 or across + 6 > before or across + 6 + width < start
               for start, before, other in names) and across + 6 + width < WIDTH:
            names.append((across + 6, across + 6 + width, down))
            parts.append(f'<text class="tick" x="{across + 6:.1f}" y="{down + 4:.1f}">{escape(point.name)}</text>')
    for i in range(5):
        parts.append(f'<text class="tick" x="{right(end * i / 4):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                     f'{short(end * i / 4)}</text>')
    if near:
        edge = f"{right(limit[0]):.1f}"
        parts.append(f'<line class="limit" x1="{edge}" x2="{edge}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{edge}" y="{TOP - 4}" text-anchor="middle">{escape(limit[1])}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    return _drawn(title, HEIGHT, parts)


def short(value: float) -> str:
    """Return a number with three digits or, from 1000 on, without a fraction."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _axis(top: float, label: str) -> Iterator[str]:
    for i in range(5):
        down = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * i / 4
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>'
        yield (f'<text class="tick" x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">'
               f'{short(top * i / 4)}</text>')
    yield f'<text class="tick" x="{LEFT - 44}" y="{TOP - 12}">{escape(label)}</text>'


def bars(title: str, rows: Sequence[Bar], limit: tuple[float, str] | None = None) -> str:
    """Return horizontal bars, with a line at a limit if there is one."""
    ends = [max(row.value, row.high or 0.0) for row in rows] + ([limit[0]] if limit else [])
    top = max(*ends, 1e-9)
    names = [row.name[:NAME] for row in rows]
    start = 16 + LETTER * max(map(len, names), default=0)
    room = WIDTH - start - 10 - LETTER * max((len(row.text) for row in rows), default=0)

    def length(value: float) -> float:
        return room * value / top

    parts = []
    for i, row in enumerate(rows):
        down = TOP + ROW * i
        kind = "bar pale" if row.quiet else "bar"
        parts.append(f'<text class="name" x="{start - 8:.1f}" y="{down + 13}" text-anchor="end">'
                     f'{escape(names[i])}</text>')
        parts.append(f'<rect class="{kind}" x="{start:.1f}" y="{down + 2}" width="{max(length(row.value), 1):.1f}" '
                     f'height="{ROW - 8}"/>')
        if row.low is not None and row.high is not None:
            parts.append(f'<line class="range" x1="{start + length(row.low):.1f}" y1="{down + 10}" '
                         f'x2="{start + length(row.high):.1f}" y2="{down + 10}"/>')
        end = start + length(max(row.value, row.high or 0)) + 6
        parts.append(f'<text class="tick" x="{end:.1f}" y="{down + 13}">{escape(row.text)}</text>')
    height = TOP + ROW * len(rows) + 8
    if limit:
        right = start + length(limit[0])
        parts.append(f'<line class="limit" x1="{right:.1f}" x2="{right:.1f}" y1="{TOP - 4}" y2="{height - 4}"/>')
        parts.append(f'<text class="tick" x="{right:.1f}" y="{TOP - 8}" text-anchor="middle">{escape(limit[1])}</text>')
    return _drawn(title, height, parts)


def _drawn(title: str, height: int, parts: Sequence[str]) -> str:
    return (f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title)}">{"".join(parts)}</svg></figure>')


def _ceiling(value: float) -> float:
    """Return a round number of at least this value."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(step * power for step in STEPS if step * power >= value * 0.999)
