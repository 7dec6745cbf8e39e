"""Output of the commands: JSON on standard output, sentences and figures on standard error."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ..base.process import folded_for_terminal as folded_for_terminal
from ..base.process import say as say
from ..base.units import format_size
from ..errors import UsageError, printable

if TYPE_CHECKING:
    from ..devices import DeviceProfile, Estimate
    from ..engine import Completion, SpeculationReport
    from ..memory_planner import Alternative, MemoryPlan


T = TypeVar("T", bound=Mapping[str, Any])
COLUMNS = 80
REFUSED = "refused"
"""Mode of a plan that does not fit."""


def print_json(report: Mapping[str, Any]) -> None:
    """Print one object on standard output. Numbers that JSON lacks (infinities, NaN) become null."""
    print(json.dumps(_plain(report), allow_nan=False), flush=True)


def show(report: T, as_json: bool, words: Callable[[T], object]) -> None:
    """Print a report as JSON, or for people by a function that prints it in words."""
    if as_json:
        print_json(report)
    else:
        words(report)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Align rows in columns, those numbered in `right` to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in cells).rstrip()


def print_table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print rows as `table` aligns them."""
    for line in table(rows, right):
        print(line)


def confirm(question: str) -> None:
    """Ask on the terminal whether to continue; anything but yes ends the command."""
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Add --yes, because there is no terminal to confirm on.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort


def speed(value: float) -> str:
    """Return tokens per second with two or more digits that say something: ``0.032``, ``0.80``, ``7.1``, ``431``."""
    return f"{value:#.2g}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def seconds(ms: float) -> str:
    """Return a time in seconds as people count it: ``0.13 s``, ``26.8 s``, ``295 s``."""
    return f"{ms / 1000:.{2 if ms < 10_000 else 1 if ms < 100_000 else 0}f} s"


def whose_object(found: Estimate) -> dict[str, Any]:
    """Return the fields of an estimate that name the program and unit it is for."""
    others = [{"name": name, "decode_tok_per_s": value} for name, value in found.others.items()]
    return {"program": found.program, "unit": found.unit, "unit_words": found.unit_words, "others": others}


def whose(found: dict[str, Any]) -> str:
    """Return whose speed an estimate's object holds, such as llama.cpp on the GPU (Metal)."""
    return f"{found['program']} on {found['unit_words']}"


def by(name: str) -> str:
    """Name the difference: a version is "with DDR4", "on PCIe"; else it is a program."""
    return name if name.startswith(("with ", "on ")) else f"with {name}"


def not_ours(found: dict[str, Any], profile: DeviceProfile, refused: str = "") -> str:
    """Return the sentence for speeds that are another program's, or were not measured; empty for edgeinfer's own.

    `refused` says why edgeinfer does not run the model on an NVIDIA card.
    """
    from ..devices import OURS, SERVED, processor_of, served

    if found["unit"] == "cpu" and profile.runtime == OURS:
        source = "another program's bandwidth there" if profile.effective_gbs else "its cores and its memory"
        return (f"edgeinfer was not measured on this device: the speed is derived from {source}. 'edgeinfer devices "
                "--probe' measures it there.")
    if found["unit"] == "cpu":
        return "" if found["program"] == OURS else (
            f"This is the speed of {found['program']}: edgeinfer has not been measured on this device. 'edgeinfer "
            "devices --probe' measures it there.")
    if profile.device_class == SERVED:
        return ("This is derived from the GPU's published figures and shares of them: edgeinfer has been measured on "
                "an H100 and an H200 alone.")
    if served(profile):
        return (f"This is the speed of {whose(found)}, not of edgeinfer, which does not run this there"
                + (f": {refused} Memory is compared as if weights and KV were on the card." if refused else "."))
    processor = processor_of(profile)
    known = " (--unit cpu estimates it)" if processor else " of the machine around it, which has a name of its own"
    return (f"This is the speed of {whose(found)}. edgeinfer cannot use {found['unit_words']} and runs on the "
            f"CPU{known}.")


def folded(text: str, label: str = "") -> Iterator[str]:
    """Return a text in lines of at most 80 characters, the first after a label, the others below its text."""
    text = printable("".join(" " if letter.isspace() else letter for letter in text))
    lines = textwrap.wrap(text, COLUMNS, initial_indent=label,
                          subsequent_indent=" " * len(label), break_long_words=False, break_on_hyphens=False)
    yield from lines or [label.rstrip()]


def plan_lines(plan: MemoryPlan) -> Iterator[str]:
    """Return the memory plan as a table: region, size, how it is kept, reason."""
    rows = [(region.name, format_size(region.bytes), region.kind, region.reason) for region in plan.regions]
    yield from table([*rows, ("total", format_size(plan.total_bytes), "", "")], right=[1])


def alternative_object(option: Alternative) -> dict[str, Any]:
    """Return an alternative as a JSON object."""
    return {"change": option.change, "value": option.value, "options": option.options,
            "total_bytes": option.total_bytes}


def speculated(found: SpeculationReport | None) -> str:
    """Return the effect of draft tokens, for the line of statistics; empty if nothing was drafted."""
    if not found or found.state == "idle" or (found.state == "on" and not found.walks):
        return ""
    gain = "" if found.gain is None else f", {found.gain:.2f}x"
    if found.state == "off":
        return f"{found.drafter} off: slower here{gain}"
    return f"{found.drafter} {found.tokens_per_walk:.1f} tokens a pass{gain}"


def figures(completion: Completion, plan: MemoryPlan, peak_bytes: int | None, device_bytes: int | None = None) -> str:
    """Return the statistics of a request in one line, with the memory of process and device that was measured."""
    parts = []
    if completion.ttft_ms is not None:
        parts.append(f"TTFT {completion.ttft_ms:.1f} ms")
    if completion.tpot_ms is not None:
        parts.append(f"{completion.tpot_ms:.2f} ms/token")
        parts.append(f"{completion.tok_per_s:.1f} tok/s")
    if said := speculated(completion.speculation):
        parts.append(said)
    cached = f" ({completion.cached_tokens} cached)" if completion.cached_tokens else ""
    parts.append(f"{completion.prompt_tokens}{cached} prompt + {completion.completion_tokens} new tokens")
    parts.append(f"finish: {completion.finish_reason}")
    if completion.score is not None:
        parts.append(f"score {completion.score:.4f}")
    peak = "" if peak_bytes is None else f"peak {format_size(peak_bytes)} of "
    parts.append(f"memory {peak}{format_size(plan.total_bytes)} planned")
    if device_bytes is not None:
        parts.append(f"GPU {format_size(device_bytes)} of {format_size(plan.device_bytes)} planned")
    if completion.score is None:
        parts.append(f"seed {completion.seed}")
    return " | ".join(parts)
