"""The table that a run writes, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import row
from benchmarks.peers.pairs import Comparison

HEAD = ("shape", "test", "against", "edgeinfer t/s", "peer t/s", "ratio (least to most)", "read bandwidth GB/s",
        "share of bandwidth", "share of int8 peak")


def markdown(run: dict[str, Any], comparisons: list[Comparison], extras: list[dict[str, Any]]) -> str:
    """The whole report.

    Parameters
    ----------
    run : dict
        ``machine``, ``versions``, ``date``, ``threads``.
    comparisons : list of Comparison
    extras : list of dict
        Per shape: first token and memory of both sides.
    """
    parts = (_header(run), _best(comparisons), _speeds(comparisons), _extras(extras))
    return "\n".join("\n".join(part) + "\n" for part in parts)


def _header(run: dict[str, Any]) -> Iterator[str]:
    yield "# Side by side with other programs"
    yield ""
    yield "Written by `python benchmarks/against_peers.py` (method and columns: docs/measurements/speed.md)."
    yield ""
    yield f"Measured {run['date']}: {', '.join(run['machine'].values())}; {run['threads']} threads."
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in run["versions"].items()) + "."
    yield ""
    yield "Medians of pairs that alternate; ratio = edgeinfer / peer, pair by pair; bandwidth and int8 peak measured"
    yield "before and after each pair. Pairs during which others used the machine were measured again; if it stayed"
    yield "busy, their number is in brackets and the ratio is unreliable."


def _speeds(comparisons: list[Comparison]) -> Iterator[str]:
    yield "## All settings"
    yield ""
    yield row(*HEAD)
    yield row(*["---"] * 2 + ["---"] + ["---:"] * (len(HEAD) - 3))
    for item in comparisons:
        read = [pair.read_gbs for pair in item.pairs]
        generating = item.test.startswith("tg")
        yield row(*[
            item.shape, item.test, f"{item.peer} {item.setting}", f"{item.median('ours'):.1f}",
            f"{item.median('peer'):.1f}", f"**{statistics.median(item.ratios):.2f}** ({min(item.ratios):.2f} to "
            f"{max(item.ratios):.2f})" + (f" [{item.noisy} of {len(item.pairs)}]" if item.noisy else ""),
            f"{statistics.median(read):.1f} ({min(read):.1f} to {max(read):.1f})",
            f"{item.bandwidth_share:.0%}" if generating else "", "" if generating else f"{item.int8_share:.0%}",
        ])


def _best(comparisons: list[Comparison]) -> Iterator[str]:
    """The ratio against each peer's best setting of each test, of those measured in calm if there are any."""
    yield "## Against the best setting"
    yield ""
    yield row(*["shape", "test", "peer", "its best setting", "ratio"])
    yield row(*["---", "---", "---", "---", "---:"])
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for item in comparisons:
        groups.setdefault((item.shape, item.test, item.peer), []).append(item)
    for (shape, test, peer), items in groups.items():
        best = min(items, key=lambda item: (bool(item.noisy), statistics.median(item.ratios)))
        ratio = f"{statistics.median(best.ratios):.2f}" + (" (disturbed)" if best.noisy else "")
        yield row(*[shape, test, peer, best.setting, ratio])


def _extras(extras: list[dict[str, Any]]) -> Iterator[str]:
    """First token and peak memory; memory without that of Python and the imported libraries themselves."""
    if not extras:
        return
    yield "## First token and memory"
    yield ""
    yield "A prompt of 8 tokens, from the start of the process, median of three; then one prompt, and the peak memory."
    yield ""
    yield row(*["shape", "side", "first token of a process, ms", "peak memory, MB", "of it Python and imports, MB"])
    yield row(*["---", "---", "---:", "---:", "---:"])
    for item in extras:
        yield row(*[item["shape"], item["side"], _number(item["first_token_ms"], 1),
                     _number(item["peak_rss_bytes"], 1e6), _number(item["base_rss_bytes"], 1e6)])


def _number(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:.0f}"
