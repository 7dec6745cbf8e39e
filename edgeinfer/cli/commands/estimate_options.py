"""Options of `edgeinfer estimate` alone, and the questions that they ask."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...base.units import parse_size
from ...config import DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS
from ...errors import UsageError
from ..lengths import FLAGS, check_lengths
from ..options import Given
from ..reports.nodes import DEFAULT_LINK
from ..reports.questions import Questions
from ..reports.users import check_users

if TYPE_CHECKING:
    from ...config import RuntimeConfig
    from ...models.description import ModelDescription

MAX_ACCEPTED = 64
"""Tokens of one sequence that a forward pass can check."""
MAX_ROW_BYTES = 1 << 30
MAX_PADDING = 0.02
"""Difference of two vocabularies that is padding, as a share."""

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
    metavar="N", show_default=False, help="Also predict latency and throughput for N concurrent users.")]
Answer = Annotated[int | None, typer.Option(
    "-n", "--answer", metavar="TOKENS", show_default=False,
    help="Length of an answer, to predict time to first token, time per token and total time.  "
         "[default: 128 with --users]")]
Goodput = Annotated[str | None, typer.Option(
    metavar="METRIC:MS,...", show_default=False,
    help="With --users: how many meet these bounds, such as ttft:500,tpot:100.")]
Draft = Annotated[str | None, typer.Option(
    metavar="MODEL", show_default=False, help="A smaller model with the same tokenizer that drafts tokens.")]
Acceptance = Annotated[float | None, typer.Option(
    metavar="SHARE", help="With --draft: share of its tokens that are accepted.  [default: 0.7]",
    show_default=False)]
DraftTokens = Annotated[int | None, typer.Option(
    metavar="N", show_default=False, help="With --draft: maximum number of draft tokens per pass.  [default: 7]")]
Speculate = Annotated[str | None, typer.Option(
    metavar="lookup|off", show_default=False,
    help="Also predict the gain of prompt lookup, by kind of text.")]
Nodes = Annotated[str | None, typer.Option(
    "--nodes", metavar="NAME,...", show_default=False,
    help="Compare each machine alone, the layers split between them, and the prompt on one with decoding on another.")]
NodeLink = Annotated[str | None, typer.Option(
    "--link", metavar="NAME|RATE", show_default=False,
    help="With --nodes: the network between them, 100Mbit, 1GbE, 2.5GbE, 10GbE, wifi6, tb4, or a rate such as 50MB/s.  "
    f"[default: {DEFAULT_LINK}]")]
Energy = Annotated[bool, typer.Option(
    "--energy", help="Report the energy per token first, if a power figure of the device is published.")]
Sparsity = Annotated[float | None, typer.Option(
    metavar="SHARE", show_default=False,
    help="Share of neurons that are zero, such as 0.8: whether leaving them out pays there.")]
Rows = Annotated[str | None, typer.Option(
    metavar="SIZE", show_default=False,
    help="With --sparsity: contiguous bytes of a neuron, such as 4KiB.  [default: those of the model]")]
Explain = Annotated[bool, typer.Option(
    "--explain", help="Write the formulas out with their numbers, limits and techniques.")]
AllDevices = Annotated[bool, typer.Option("--all-devices", help="Estimate on every known device.")]
Plot = Annotated[str | None, typer.Option(
    metavar="FILE", help="Plot tokens per second by context size: .svg, .png or .pdf.")]
Html = Annotated[str | None, typer.Option(
    metavar="FILE", help="Write the report with plots as one self-contained page.", show_default=False)]


def questions_of(given: Given, users: int | None, answer: int | None, goodput: str | None, explain: bool, energy: bool,
                 sparsity: float | None, rows: str | None) -> Questions:
    """Return the further questions; raises `UsageError` for one that is out of range."""
    check_users(users)
    bounds: tuple[tuple[str, float], ...] = ()
    if goodput is not None:
        from ...bench import parse_goodput

        bounds = parse_goodput(goodput)
    return Questions(users, answer, bounds, explain, given.storage, sparsity, _row_bytes(sparsity, rows),
                     energy=energy)


def _row_bytes(sparsity: float | None, rows: str | None) -> int | None:
    if sparsity is not None and not 0 <= sparsity < 1:
        raise UsageError(f"--sparsity is {sparsity:g}; it is the share of zeros, from 0 to below 1, such as 0.8.")
    if rows is None:
        return None
    try:
        nbytes = int(rows) if rows.isascii() and rows.isdecimal() and len(rows) < 12 else parse_size(rows)
    except UsageError:
        nbytes = 0
    if not 1 <= nbytes <= MAX_ROW_BYTES:
        raise UsageError(f"--rows is {rows!r:.80}; give a size from 1 byte to 1GiB, such as 4KiB.")
    return nbytes


def check_request(given: Given, prompt: int | None, answer: int | None, plot: str | None, html: str | None) -> None:
    """Refuse values that are wrong for any model and machine."""
    check_lengths(FLAGS, given.ctx, prompt, answer)
    if html is not None:
        from ..reports.page import check_page

        check_page(html)
    if plot is not None:
        from ..reports.plot import check_plot

        check_plot(plot)


def with_drafting(questions: Questions, draft: str | None, acceptance: float | None, draft_tokens: int | None,
                  speculate: str | None) -> Questions:
    """Return the questions with those on speculative decoding; the draft model is described later.

    Raises
    ------
    UsageError
        A share or number out of range, or options that contradict each other.
    """
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise UsageError(f"--acceptance is {acceptance:g}; it is the share of draft tokens that are accepted, from 0 "
                         "to 1, such as 0.7.")
    if draft_tokens is not None and not 1 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise UsageError(f"--draft-tokens is {draft_tokens}; it must be from 1 to {MAX_DRAFT_TOKENS}.")
    if speculate not in (None, "lookup", "off"):
        raise UsageError(f"--speculate is {speculate!r:.80}; give lookup or off, or --draft MODEL for a draft model.")
    if speculate == "off" and draft is not None:
        raise UsageError(f"--speculate off drafts nothing, and --draft {draft} is a model that drafts; leave one out.")
    return replace(questions, acceptance=acceptance, draft_tokens=draft_tokens or DEFAULT_DRAFT_TOKENS,
                   lookup=speculate == "lookup")


def draft_of(name: str, model: ModelDescription, stored: tuple[str | None, int | None],
             config: RuntimeConfig) -> ModelDescription:
    """Return the description of a draft model; raises `EdgeInferError` if it cannot draft for the model."""
    from ...engine.speculation.load import check_described
    from ...models.describe import describe

    found = describe(name, *stored)
    check_described(found, model, config)
    own, other = model.config.vocab_size, found.config.vocab_size
    if not (model.path and found.path) and abs(own - other) > MAX_PADDING * own:
        raise UsageError(f"--draft {name} has {other} tokens in its vocabulary and {model.name} has {own}; give a "
                         "model of the same family, which has the same tokenizer.")
    return found


def check_drafting(accepted: float, draft_cost: float | None) -> None:
    """Refuse tokens of a pass and costs of drafting that are out of range."""
    if not 1 <= accepted <= MAX_ACCEPTED:
        raise UsageError(f"--accepted is {accepted:g}; a forward pass yields 1 to {MAX_ACCEPTED} tokens.")
    if draft_cost is not None and not (math.isfinite(draft_cost) and draft_cost >= 0):
        raise UsageError(f"--draft-cost is {draft_cost:g}; it must be a share of a token's time, 0 or more.")
