"""The report of `edgeinfer estimate` as one page of HTML: no script is needed, and nothing outside it is loaded."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from ...base.files import os_errors, replacement
from ...base.units import format_size
from ...errors import DestinationError, UsageError
from ...quality.known import loss_words
from ..output import speed
from .svg import Bar, Point, bars, curve, scatter, short

STYLE = """
:root { color-scheme: light dark; --back: #fff; --soft: #f3f3f0; --line: #d9d9d4; --text: #1e1f21; --quiet: #66676c;
  --accent: #2f7d5b; --pale: #b9d6c8; --wrong: #b3261e; font: 16px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --back: #18191b; --soft: #26282b; --line: #3a3c40; --text: #e9e9ea;
  --quiet: #a0a1a8; --accent: #73c39f; --pale: #2f5a47; --wrong: #ff9d94; } }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; color: var(--text); background: var(--back); }
h1 { font-size: 1.4rem; } .answer { font-size: 1.15rem; } .no { color: var(--wrong); }
form { display: flex; flex-wrap: wrap; gap: .75rem; padding: .75rem; background: var(--soft); border-radius: .5rem; }
label { display: grid; font-size: .8rem; color: var(--quiet); }
select, input, button { font: inherit; padding: .3rem .5rem; color: var(--text); background: var(--back);
  border: 1px solid var(--line); border-radius: .3rem; max-width: 16rem; }
input { width: 7rem; } button { align-self: end; font-size: .8rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }
th { white-space: nowrap; }
figure { display: inline-block; width: min(100%, 29rem); margin: .5rem .25rem; vertical-align: top; }
figcaption { font-size: .9rem; font-weight: 600; } svg { width: 100%; height: auto; font-size: 12px; }
.grid { stroke: var(--line); } .tick, .name { fill: var(--text); } .tick { fill: var(--quiet); }
.band { fill: var(--pale); opacity: .6; } .curve { fill: none; stroke: var(--accent); stroke-width: 2; }
.bar { fill: var(--accent); } .pale { fill: var(--pale); } .range { stroke: var(--text); stroke-width: 1.5; }
.limit { stroke: var(--wrong); stroke-width: 1.5; stroke-dasharray: 4 3; } footer { color: var(--quiet);
  font-size: .85rem; }
"""

ICON = '<link rel="icon" href="data:,">'
"""No picture, so that browsers ask for none."""


def document(title: str, body: str, script: str = "", meta: bool = True) -> tuple[bytes, str]:
    """Return a whole page, and a content policy that allows nothing outside it.

    Parameters
    ----------
    title : str
        Not escaped yet.
    body : str
        HTML, all texts of which are escaped.
    script : str
        Run by the page.
    meta : bool
        Whether the page states its policy itself; a server sends it as a header.
    """
    policy = f"default-src 'none'; style-src {_hash(STYLE)}; img-src data:; base-uri 'none'"
    if script:
        policy += f"; script-src {_hash(script)}; form-action 'self'"
    own = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">' if meta else ""
    code = f"<script>{script}</script>" if script else ""
    page = (f'<!doctype html><html lang="en"><head><meta charset="utf-8">{own}<meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>{escape(title)}</title>{ICON}'
            f"<style>{STYLE}</style></head><body>{body}{code}</body></html>\n")
    return page.encode(), policy


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def estimate_body(out: dict[str, Any], compared: dict[str, Any] | None) -> str:
    """Return the report of an estimate as HTML, the answer first.

    Parameters
    ----------
    out : dict
        The JSON object of `estimate`.
    compared : dict, optional
        That of `plan --compare`, for built-in shapes.
    """
    from .estimate import remarks_of, rows_of

    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows_of(out))
    notes = "".join(f"<p>{escape(line)}</p>" for line in remarks_of(out))
    return (f"<h1>{escape(out['model'])} on {escape(out['device_title'])}</h1>{_answer(out)}"
            f"{''.join(_plots(out, compared))}<table>{rows}</table><footer>{notes}</footer>")


def _answer(out: dict[str, Any]) -> str:
    from .estimate import short_of

    fits = "It fits" if out["fits"] and out["mode"] == "resident" else \
        "It runs, with weights read from storage" if out["fits"] else "It does not fit"
    wait = "" if out["ttft_ms"] is None else f", first word after {out['ttft_ms'] / 1000:.1f} s"
    needs, limit, _ = short_of(out)
    needed, there = format_size(needs), format_size(limit)
    memory = f"{needed} of {there}" if fits == "It fits" else f"{needed} where {there} are free"
    said = (f"{fits}: {memory}; {speed(out['decode_tok_per_s'])} tokens/s "
            f"({speed(out['low'])} to {speed(out['high'])}){wait}.")
    return f'<p class="answer{"" if out["fits"] else " no"}">{escape(said)}</p>'


def _plots(out: dict[str, Any], compared: dict[str, Any] | None) -> Iterator[str]:
    depths, speeds, low, high = ([step[key] for step in out["contexts"]] for key in (
        "depth", "decode_tok_per_s", "low", "high"))
    yield curve("Tokens per second by context", depths, speeds, low, high, "tokens of context", "tokens/s")
    weights, kv = out["weight_bytes"], out["kv_bytes"] * out["sequences"]
    rest = max(0, (out["device_bytes"] or out["unstreamed_bytes"]) - weights - kv)
    yield bars("Memory", [Bar(name, nbytes, format_size(nbytes)) for name, nbytes in (
        ("weights", weights), ("KV cache", kv), ("rest", rest), ("all", weights + kv + rest))],
        (out["budget_bytes"], format_size(out["budget_bytes"])))
    terms = {name: ms for name, ms in out["terms_ms"].items() if not name.startswith("prefill")}
    yield bars("Time of a token", [Bar(name.replace("_", " "), ms, f"{short(ms)} ms") for name, ms in terms.items()])
    if users := out["users"]:
        yield from _of_users(users["by_users"])
    if found := out["speculation"]:
        yield _of_drafts(found)
    if compared:
        yield memory_and_speed(compared)
        yield bars("Tokens per second by type of weights", [
            Bar(row["weights"], row["decode_tok_per_s"], f"{speed(row['decode_tok_per_s'])}"
                f"{', KLD ' + loss_words(row['weights']) if loss_words(row['weights']) else ''}"
                f"{'' if row['fits'] else ', does not fit'}", row["low"], row["high"], not row["fits"])
            for row in compared["types"]])


def _of_users(rows: list[dict[str, Any]]) -> Iterator[str]:
    users = [row["users"] for row in rows]
    for title, key, label in (("Tokens per second of all users", "output_throughput", "tokens/s"),
                              ("Tokens per second of each user", "tok_per_s_each", "tokens/s"),
                              ("First token of a user", "ttft_ms", "ms")):
        values = [row[key] for row in rows]
        yield curve(title, users, values, values, values, "users", label)


def _of_drafts(found: dict[str, Any]) -> str:
    """Return the gain of a draft model by its acceptance, or of prompt lookup by kind of text."""
    plain = found["plain_tok_per_s"]
    if found["texts"]:
        return bars("Tokens per second with prompt lookup", [
            *(Bar(one["text"], one["decode_tok_per_s"], speed(one["decode_tok_per_s"])) for one in found["texts"]),
            Bar("without", plain, speed(plain), quiet=True)])
    shares, speeds = ([row[key] for row in found["by_acceptance"]] for key in ("acceptance", "decode_tok_per_s"))
    return curve(f"Tokens per second with {found['draft']}", shares, speeds, speeds, speeds, "acceptance", "tokens/s",
                 log=False, level=(plain, f"{speed(plain)} without"))


def memory_and_speed(compared: dict[str, Any]) -> str:
    """Return the plot of a comparison: speed by memory, a point for each type of weights."""
    points = [Point(row["weights"], row["total_bytes"] / 1e9, row["decode_tok_per_s"], not row["fits"])
              for row in compared["types"]]
    return scatter("Memory and speed by type of weights", points, "GB of memory", "tokens/s",
                   (compared["budget_bytes"] / 1e9, format_size(compared["budget_bytes"])))


def comparison_body(out: dict[str, Any]) -> str:
    """Return the report of `plan --compare` as HTML, the answer first."""
    from .comparison import remarks_of, table_of, verdict_of

    heading, *rows = table_of(out)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    table = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    notes = "".join(f"<p>{escape(line)}</p>" for line in remarks_of(out))
    answer = "answer" if any(row["fits"] for row in out["types"]) else "answer no"
    return (f'<h1>{escape(out["model"])} on {escape(out["device_title"])}</h1><p class="{answer}">'
            f"{escape(verdict_of(out))}</p>{memory_and_speed(out)}<table><tr>{head}</tr>{table}</table>"
            f"<footer>{notes}</footer>")


def check_page(path: str) -> None:
    """Raise `UsageError` for a file of another ending, before anything is computed."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--html {path!r} has no known ending; use .html.")


def save_page(out: dict[str, Any], body: str, path: Path) -> None:
    """Write a report on a device, whole or not at all; raises `DestinationError` if it cannot be written."""
    data, _ = document(f"{out['model']} on {out['device_title']}", body)
    with os_errors(DestinationError, f"The page {path} cannot be written"), replacement(path) as file:
        file.write(data)
