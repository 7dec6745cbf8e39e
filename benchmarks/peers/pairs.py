"""Paired measurements: both sides take turns, and each pair has the machine's limits of the same minute beside it."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from benchmarks.harness import Others, wait_for_calm
from benchmarks.peers.worker import Worker

MAX_OTHERS = 0.15
"""Cores that others may use during a sample; a pair with more is measured again, as long as there are attempts."""
ATTEMPTS = 3
"""Times the wanted number of pairs that are tried before disturbed ones are accepted."""


@dataclass
class Pair:
    """One turn of each side."""

    ours: float
    """Tokens per second."""
    peer: float
    read_gbs: float
    """Bandwidth of the machine, mean of before and after."""
    int8_gops: float
    others: float
    """Cores that others used, the worse of both turns."""


@dataclass
class Comparison:
    """One test against one setting of a peer."""

    shape: str
    test: str
    """llama-bench's name."""
    peer: str
    setting: str
    bytes_per_token: float
    """Bytes that edgeinfer reads for a token."""
    operations_per_token: float
    pairs: list[Pair] = field(default_factory=list)
    disturbed: int = 0
    """Pairs that were thrown away."""

    @property
    def noisy(self) -> int:
        """Pairs during which others used the machine, kept for want of calm ones."""
        return sum(pair.others > MAX_OTHERS for pair in self.pairs)

    def median(self, name: str) -> float:
        """Median of a field of the pairs."""
        return statistics.median(getattr(pair, name) for pair in self.pairs)

    @property
    def ratios(self) -> list[float]:
        """edgeinfer / peer, pair by pair."""
        return [pair.ours / pair.peer for pair in self.pairs]

    @property
    def bandwidth_share(self) -> float:
        """Median share of the read bandwidth that edgeinfer drew."""
        return statistics.median(self.bytes_per_token * pair.ours / pair.read_gbs / 1e9 for pair in self.pairs)

    @property
    def int8_share(self) -> float:
        """Median share of the int8 peak that edgeinfer reached."""
        return statistics.median(self.operations_per_token * pair.ours / pair.int8_gops / 1e9 for pair in self.pairs)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Comparison:
        """Restore a comparison from `as_json`."""
        names = {item.name for item in fields(cls)}
        known = {key: value for key, value in row.items() if key in names}
        return cls(**{**known, "pairs": [Pair(**pair) for pair in row["pairs"]]})

    def as_json(self) -> dict[str, Any]:
        """All figures, for other programs."""
        return {**asdict(self), "ratio_median": statistics.median(self.ratios), "ratio_low": min(self.ratios),
                "ratio_high": max(self.ratios), "bandwidth_share": self.bandwidth_share, "int8_share": self.int8_share}


class Bench:
    """Two sides and the probe.

    Parameters
    ----------
    ours, peer, probe : Worker
        Loaded, each with its context.
    probe_request : dict
        Arguments of the probe.
    repetitions : int
        Wanted pairs.
    patience : float
        Seconds to wait for a calm machine before each pair.
    """

    def __init__(self, ours: Worker, peer: Worker, probe: Worker, probe_request: dict[str, Any], repetitions: int,
                 patience: float):
        self._ours, self._peer, self._probe, self._probe_request = ours, peer, probe, probe_request
        self._repetitions, self._patience = repetitions, patience

    def compare(self, shape: str, kind: str, tokens: int, depth: int, peer: str, setting: str) -> Comparison:
        """Measure one test on both sides."""
        request = {"kind": kind, "tokens": tokens, "depth": depth}
        warm = {**request, "tokens": min(tokens, 16) if kind == "tg" else tokens}
        for side in (self._ours, self._peer):
            side.ask("run", **warm)
        pairs: list[Pair] = []
        kept: list[Pair] = []
        traffic: dict[str, float] = {}
        while len(kept) < self._repetitions and len(pairs) < ATTEMPTS * self._repetitions:
            pair, traffic = self._pair(request, first_ours=len(pairs) % 2 == 0)
            pairs.append(pair)
            if pair.others <= MAX_OTHERS:
                kept.append(pair)
        missing = self._repetitions - len(kept)
        if missing > 0:  # the least disturbed ones, if the machine never calmed down
            kept += sorted((p for p in pairs if p.others > MAX_OTHERS), key=lambda p: p.others)[:missing]
        name = f"{kind}{tokens}" + (f" @ d{depth}" if depth else "")
        return Comparison(shape, name, peer, setting, traffic["bytes_per_token"], traffic["operations_per_token"], kept,
                          len(pairs) - len(kept))

    def _pair(self, request: dict[str, Any], first_ours: bool) -> tuple[Pair, dict[str, float]]:
        wait_for_calm(self._patience, MAX_OTHERS)
        before = self._probe.ask("probe", **self._probe_request)
        speeds, others, traffic = {}, 0.0, {}
        for side in (self._ours, self._peer) if first_ours else (self._peer, self._ours):
            meter = Others(side.pid)
            answer = side.ask("run", **request)
            others = max(others, meter.cores())
            speeds[side] = request["tokens"] / answer["seconds"]
            traffic |= {key: answer[key] for key in ("bytes_per_token", "operations_per_token") if key in answer}
        after = self._probe.ask("probe", **self._probe_request)
        read, peak = ((before[key] + after[key]) / 2 for key in ("read_gbs", "int8_gops"))
        return Pair(speeds[self._ours], speeds[self._peer], read, peak, others), traffic
