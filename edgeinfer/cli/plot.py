"""Curves as a picture: SVG by hand, other formats with matplotlib (extra `plot`)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..errors import DestinationError, UsageError

WIDTH, HEIGHT = 820, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 200, 50, 60
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
FORMATS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Line:
    """One curve, with a band around it where `low` and `high` are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """Curves over one axis; an axis is logarithmic if it says so, and never shows numbers of 0 or less then."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be made, before anything is computed.

    Raises
    ------
    UsageError
        The file's ending is none of FORMATS, or matplotlib is needed and absent.
    """
    from importlib.util import find_spec

    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise UsageError(f"--plot {str(path)!r} has no known ending; use one of {', '.join(FORMATS)}.")
    if kind != ".svg" and find_spec("matplotlib") is None:
        raise UsageError(f"--plot with {kind} needs matplotlib: pip install 'edgeinfer[plot]'; .svg needs nothing.")


def save_plot(chart: Chart, path: Path) -> None:
    """Write a chart, whole or not at all.

    Raises
    ------
    UsageError
        As `check_plot`.
    DestinationError
        The file cannot be written.
    """
    check_plot(path)
    try:
        target = Path(os.path.realpath(path))
        part = target.with_name(f".{target.stem[:32]}.{os.getpid()}{path.suffix}")
        try:
            if path.suffix.lower() == ".svg":
                part.write_text(svg(chart), encoding="utf-8")
            else:
                _with_matplotlib(chart, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DestinationError(f"The picture {path} cannot be written: {error.strerror or error}.") from error


def svg(chart: Chart) -> str:
    """Return the chart as an SVG document."""
    x_axis = _Axis([x for line in chart.lines for x in line.x], chart.log_x, LEFT, WIDTH - RIGHT, zero=False)
    values = [y for line in chart.lines for y in (*line.y, *line.low, *line.high)]
    y_axis = _Axis(values, chart.log_y, HEIGHT - BOTTOM, TOP, zero=not chart.log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 22, chart.title, size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, chart.x_label, "middle"),
        _text(LEFT, TOP - 6, chart.y_label),
    ]
    for value in x_axis.ticks():
        x = x_axis.at(value)
        parts += [_rule(x, TOP, x, HEIGHT - BOTTOM), _text(x, HEIGHT - BOTTOM + 18, _number(value), "middle")]
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts += [_rule(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 6, y + 4, _number(value), "end")]
    for index, line in enumerate(chart.lines):
        parts += _curve(line, x_axis, y_axis, COLOURS[index % len(COLOURS)], TOP + 14 + 20 * index)
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """Where values lie between two pixels."""

    def __init__(self, values: Sequence[float], log: bool, first: float, last: float, zero: bool):
        shown = [value for value in values if value > 0] if log else list(values)
        low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
        self.low, self.high = (0.0 if zero else low), high * (1.05 if zero else 1)
        if self.low == self.high:
            self.high = 2 * self.low or 1.0
        self.log, self.first, self.last = log, first, last

    def at(self, value: float) -> float:
        low, high, value = (math.log(max(v, self.low)) if self.log else v for v in (self.low, self.high, value))
        return self.first + (value - low) / (high - low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if self.log:
            base = 2 if self.high / self.low < 1000 else 4 if self.high / self.low < 1e5 else 10
            first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
            return [float(base) ** n for n in range(first, last + 1)]
        span = self.high - self.low
        step = next(s for n in range(-9, 20) for s in (10.0**n, 2 * 10.0**n, 5 * 10.0**n) if span / s <= 8)
        return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def _curve(line: Line, x_axis: _Axis, y_axis: _Axis, colour: str, legend_y: float) -> list[str]:
    def points(values: Sequence[float]) -> list[str]:
        return [f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in zip(line.x, values, strict=True)]

    parts = []
    if line.low and line.high:
        around = " ".join([*points(line.low), *reversed(points(line.high))])
        parts.append(f'<polygon points="{around}" fill="{colour}" fill-opacity="0.15"/>')
    parts.append(f'<polyline points="{" ".join(points(line.y))}" fill="none" stroke="{colour}" stroke-width="2"/>')
    x = WIDTH - RIGHT + 14
    parts.append(f'<line x1="{x}" y1="{legend_y}" x2="{x + 20}" y2="{legend_y}" stroke="{colour}" stroke-width="2"/>')
    return [*parts, _text(x + 26, legend_y + 4, line.name)]


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _number(value: float) -> str:
    for factor, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if value >= factor and value % factor == 0:
            return f"{value / factor:g} {unit}"
    return f"{value:g}"


def _with_matplotlib(chart: Chart, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line in chart.lines:
        (drawn,) = axes.plot(line.x, line.y, label=line.name)
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, color=drawn.get_color(), alpha=0.15)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    axes.legend()
    axes.grid(alpha=0.4)
    figure.tight_layout()
    figure.savefig(path)
