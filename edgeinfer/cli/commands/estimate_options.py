"""Options of `edgeinfer estimate` alone, and the questions that they ask."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ...base.units import parse_size
from ...errors import UsageError
from ..options import Given
from ..reports.estimate_object import Questions
from ..reports.users import check_users

MOST_CTX = (1 << 24) - 1
MOST_ACCEPTED = 64
"""Tokens of one sequence that a forward pass can check."""
MOST_ROW_BYTES = 1 << 30

Model = Annotated[str, typer.Argument(
    metavar="MODEL", show_default=False,
    help="Bundle, checkpoint, config.json, GGUF file, known shape such as llama-2-7b, or hub id; no weights are read.")]
Prompt = Annotated[int | None, typer.Option(
    "-p", metavar="TOKENS", help="Prompt length.  [default: 512, at most the context]")]
Accepted = Annotated[float, typer.Option(
    metavar="N", help="Speculative decoding: mean number of tokens per forward pass.")]
DraftCost = Annotated[float | None, typer.Option(
    metavar="SHARE", help="With --accepted: drafting time per forward pass as a fraction of a token's time.  "
    "[default: 0.1 for each token beyond the first]")]
Users = Annotated[int | None, typer.Option(
    metavar="N", show_default=False, help="Also predict what N users get who ask at the same time.")]
Answer = Annotated[int | None, typer.Option(
    "-n", "--answer", metavar="TOKENS", show_default=False,
    help="Length of an answer: the time of its first word, of a token and in total.  [default: 128 with --users]")]
Goodput = Annotated[str | None, typer.Option(
    metavar="METRIC:MS,...", show_default=False,
    help="With --users: how many meet these bounds, such as ttft:500,tpot:100.")]
Sparsity = Annotated[float | None, typer.Option(
    metavar="SHARE", show_default=False,
    help="Share of neurons that are zero, such as 0.8: whether leaving them out pays there.")]
Rows = Annotated[str | None, typer.Option(
    metavar="SIZE", show_default=False,
    help="With --sparsity: contiguous bytes of a neuron, such as 4KiB.  [default: those of the model]")]
Explain = Annotated[bool, typer.Option(
    "--explain", help="Write the formulas out with their numbers, limits and techniques.")]
AllDevices = Annotated[bool, typer.Option("--all-devices", help="Estimate on every known device.")]
Plot = Annotated[Path | None, typer.Option(
    metavar="FILE", help="Plot tokens per second by context size: .svg, .png or .pdf.")]

ONE_MACHINE = {"users": "--users", "answer": "-n", "goodput": "--goodput", "explain": "--explain"}
"""Questions about a single device."""


def questions_of(given: Given, all_devices: bool, users: int | None, answer: int | None, goodput: str | None,
                 explain: bool, sparsity: float | None, rows: str | None) -> Questions:
    """Return the further questions.

    Raises
    ------
    UsageError
        One of them is out of range, contradicts another, or is about a single device.
    """
    check_users(users, 1 if answer is None else answer)
    asked: dict[str, Any] = {"users": users, "answer": answer, "goodput": goodput, "explain": explain or None}
    for name, flag in ONE_MACHINE.items():
        if asked[name] is not None and all_devices:
            raise UsageError(f"{flag} applies to a single machine; omit --all-devices.")
    if goodput is not None and users is None:
        raise UsageError(f"--goodput {goodput} is of several users; add --users N.")
    bounds: tuple[tuple[str, float], ...] = ()
    if goodput is not None:
        from ...bench import parse_goodput

        bounds = parse_goodput(goodput)
    return Questions(users, answer, bounds, explain, given.storage, sparsity, _row_bytes(sparsity, rows))


def _row_bytes(sparsity: float | None, rows: str | None) -> int | None:
    if sparsity is not None and not 0 <= sparsity < 1:
        raise UsageError(f"--sparsity is {sparsity:g}; it is the share of zeros, from 0 to below 1, such as 0.8.")
    if rows is None:
        return None
    if sparsity is None:
        raise UsageError(f"--rows {rows} is of neurons that are left out; add --sparsity SHARE, such as 0.8.")
    try:
        nbytes = int(rows) if rows.isascii() and rows.isdecimal() and len(rows) < 12 else parse_size(rows)
    except UsageError:
        nbytes = 0
    if not 1 <= nbytes <= MOST_ROW_BYTES:
        raise UsageError(f"--rows is {rows!r:.80}; give a size from 1 byte to 1GiB, such as 4KiB.")
    return nbytes


def check_request(given: Given, prompt: int | None, all_devices: bool, plot: Path | None) -> None:
    """Refuse what is wrong whatever the model and the machine."""
    for flag, value in (("--ctx", given.ctx), ("-p", prompt)):
        if value is not None and not 1 <= value <= MOST_CTX:
            raise UsageError(f"{flag} is {value}; it must be from 1 to {MOST_CTX} tokens.")
    if given.ctx is not None and prompt is not None and prompt > given.ctx:
        raise UsageError(f"-p {prompt} does not fit --ctx {given.ctx}; the prompt is part of the context.")
    if all_devices and (given.machine is not None or plot is not None):
        what = "--machine" if given.machine is not None else "--plot"
        raise UsageError(f"{what} applies to a single machine; omit --all-devices.")
    if plot is not None:
        from ..reports.plot import check_plot

        check_plot(plot)


def check_drafting(accepted: float, draft_cost: float | None) -> None:
    """Refuse tokens of a pass and costs of drafting that are out of range."""
    if not 1 <= accepted <= MOST_ACCEPTED:
        raise UsageError(f"--accepted is {accepted:g}; a forward pass yields 1 to {MOST_ACCEPTED} tokens.")
    if draft_cost is not None and not (math.isfinite(draft_cost) and draft_cost >= 0):
        raise UsageError(f"--draft-cost is {draft_cost:g}; it must be a share of a token's time, 0 or more.")
