"""Curves as a picture, drawn by matplotlib (extra `plot`)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.dataclass import dataclass
from ...base.files import os_errors
from ...errors import DestinationError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def check_plot(path: Path | str) -> None:
    """Refuse a picture that cannot be made, before anything is computed.

    Raises `UsageError`: the file's ending is none of FORMATS, or matplotlib is absent.
    """
    from importlib.util import find_spec

    kind = Path(path).suffix.lower()
    if kind not in FORMATS:
        raise UsageError(f"--plot {str(path)!r} has no known ending; use one of {', '.join(FORMATS)}.")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'edgeinfer[plot]'.")


def save_plot(chart: Chart, path: Path) -> None:
    """Write a chart, whole or not at all.

    Raises `UsageError` as `check_plot`. Raises `DestinationError`: the file cannot be written.
    """
    check_plot(path)
    from matplotlib import rc_context

    with os_errors(DestinationError, f"The picture {path} cannot be written"):
        target = Path(os.path.realpath(path))
        part = target.with_name(f".{target.stem[:32]}.{secrets.token_hex(8)}{path.suffix}")
        try:  # x: a new file, never one that exists
            with open(part, "xb") as file, rc_context({"svg.fonttype": "none"}):  # words stay words
                draw(chart).savefig(file, format=path.suffix[1:].lower())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def draw(chart: Chart) -> Figure:
    """Return the chart as a figure of matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.8), layout="constrained")
    axes = figure.add_subplot()
    for line in chart.lines:
        (drawn,) = axes.plot(line.x, line.y, label=line.name)
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, color=drawn.get_color(), alpha=0.15)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.log_y:
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _number(value))
    axes.legend()
    axes.grid(alpha=0.4)
    return figure


def _number(value: float) -> str:
    for factor, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if value >= factor and value % factor == 0:
            return f"{value / factor:g} {unit}"
    return f"{value:g}"
