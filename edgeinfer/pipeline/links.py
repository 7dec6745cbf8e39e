"""Links between the machines of a pipeline: their names, and the time that forward passes take over them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Items
from typing import NamedTuple

from edgeinfer.errors import UsageError

ROW_BYTES = 4
"""Bytes of a value of the residual rows."""
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kMGT]?)(B|bit)/s", re.ASCII)
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Link(NamedTuple):
    """A network, as far as it delays messages between a runner and a stage."""

    name: str
    bytes_per_s: float
    """Bandwidth of payload."""
    seconds: float
    """Seconds of a message without rows, one way, with the work of both programs."""


LINKS = {link.name: link for link in (
    Link("100Mbit", 11.7e6, 0.3e-3), Link("1GbE", 117e6, 0.2e-3), Link("2.5GbE", 293e6, 0.2e-3),
    Link("10GbE", 1.17e9, 0.15e-3), Link("wifi6", 60e6, 3e-3), Link("tb4", 2e9, 0.15e-3))}
"""Ethernet carries 94 % of its rate as payload; the rate and the delay of wifi6 and tb4 (IP over Thunderbolt) are
typical of quiet links."""
RATE_SECONDS = LINKS["1GbE"].seconds
"""Delay of a link that is given by its rate alone."""


def parse_link(text: str) -> Link:
    """Return the link of a name such as ``1GbE`` or a rate such as ``50MB/s``; raises `UsageError` for others."""
    named = {name.lower(): link for name, link in LINKS.items()}
    if link := named.get(text.strip().lower()):
        return link
    if not (found := _RATE.fullmatch(text.strip())):
        raise UsageError(f"--link is {text!r:.80}; give {', '.join(LINKS)}, or a rate such as 50MB/s or 1Gbit/s.")
    rate = float(found[1]) * _UNITS[found[2]] / (8 if found[3] == "bit" else 1)
    if not rate:
        raise UsageError(f"--link is {text!r:.80}; the rate must be above 0, as in 1MB/s.")
    return Link(text.strip(), rate, RATE_SECONDS)


def link_seconds(link: Link, stage: int, stages: int, n_tokens: int, hidden_size: int) -> float:
    """Return the time that a stage waits for the link in a pass over some tokens.

    Parameters
    ----------
    link : Link
    stage, stages : int
        Its number from 0, and how many there are. The last one is where tokens are sampled and the runner is: it sends
        each of the others a message and gets one, with rows in and out but for the first, which takes token ids.
    n_tokens, hidden_size : int
    """
    if stage == stages - 1:
        return 0.0
    rows = ROW_BYTES * hidden_size * n_tokens * (1 if stage == 0 else 2)
    return 2 * link.seconds + rows / link.bytes_per_s


def pass_seconds(stages: Items[float], n_parts: int) -> float:
    """Return the time of a pass in equal parts, of which each stage takes these seconds: the slowest sets the pace."""
    return math.fsum(stages) + (n_parts - 1) * max(stages)
