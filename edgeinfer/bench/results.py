"""Tests and their results: rows, readings of the machine, profiles."""

from __future__ import annotations

import math
import statistics

from ..base.dataclass import dataclass
from ..errors import UsageError

PROMPT, GENERATE = "pp", "tg"
MAX_TOKENS = (1 << 24) - 1


@dataclass(frozen=True)
class Case:
    """One row to measure."""

    kind: str
    """pp (prompt processing) or tg (text generation)."""
    tokens: int
    depth: int = 0
    """Tokens of context before it starts."""

    @property
    def name(self) -> str:
        """Name of the test, as in llama-bench."""
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class Row:
    """One test's result."""

    case: Case
    samples: tuple[float, ...]
    """Tokens per second of each repetition."""
    bandwidth: tuple[float, ...]
    """GB/s that the machine gave around each repetition (mean of before and after)."""
    int8_peak: tuple[float, ...]
    """1e9 operations per second from registers, beside each repetition; prompts only."""
    bytes_per_token: float
    operations_per_token: float
    """Int8 multiplications and additions of the matrices."""

    @property
    def t_per_s(self) -> float:
        """Mean tokens per second."""
        return statistics.fmean(self.samples)

    @property
    def stddev(self) -> float:
        """Standard deviation of the sample; 0 for one repetition."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def mbu_paired(self) -> float:
        """Median share of the bandwidth measured at the same time."""
        shares = [self.bytes_per_token * speed / (gbs * 1e9)
                  for speed, gbs in zip(self.samples, self.bandwidth, strict=True)]
        return statistics.median(shares)

    @property
    def int8_share(self) -> float | None:
        """Median share of the int8 peak measured at the same time; None for single tokens and where nothing is int8."""
        if not self.int8_peak or not self.operations_per_token:
            return None
        return statistics.median(self.operations_per_token * speed / (peak * 1e9)
                                 for speed, peak in zip(self.samples, self.int8_peak, strict=True))


@dataclass(frozen=True)
class OperationTime:
    """Time of one operation of the program, all layers together, per token or per prompt."""

    operation: str
    kernel: str
    instructions: int
    seconds: float
    bytes_read: float
    """Weights and KV, per token or per prompt."""
    operations: float
    """Int8 multiplications and additions."""


@dataclass(frozen=True)
class Profile:
    """One test, instruction by instruction."""

    test: str
    operations: tuple[OperationTime, ...]
    """Longest first."""
    instructions: tuple[OperationTime, ...]
    """Times of instructions in the program's order."""

    @property
    def seconds(self) -> float:
        """All instructions together."""
        return math.fsum(item.seconds for item in self.instructions)


@dataclass(frozen=True)
class Measurement:
    """All that a run measured."""

    rows: tuple[Row, ...]
    bandwidth: tuple[float, ...]
    """Every reading in GB/s, in order."""
    int8_peak: tuple[float, ...]
    profiles: tuple[Profile, ...] = ()

    @property
    def bandwidth_gbs(self) -> float:
        """Median reading."""
        return statistics.median(self.bandwidth)

    @property
    def int8_peak_gops(self) -> float:
        """Median reading."""
        return statistics.median(self.int8_peak)

    def mbu(self, row: Row) -> float:
        """Return the share of the run's median bandwidth that a row used."""
        return row.bytes_per_token * row.t_per_s / (self.bandwidth_gbs * 1e9)


def make_cases(prompts: list[int], generated: list[int], depths: list[int]) -> list[Case]:
    """Return all combinations, depth by depth; a length of 0 leaves its rows out.

    Raises
    ------
    UsageError
        A negative number, or nothing to measure.
    """
    for option, numbers in (("-p", prompts), ("-n", generated), ("-d", depths)):
        for number in numbers:
            if not 0 <= number <= MAX_TOKENS:
                raise UsageError(f"{option} {number} is out of range; it must be from 0 to {MAX_TOKENS} tokens.")
    cases = [Case(kind, tokens, depth) for depth in dict.fromkeys(depths)
             for kind, lengths in ((PROMPT, prompts), (GENERATE, generated))
             for tokens in dict.fromkeys(lengths) if tokens]
    if not cases:
        raise UsageError("There is nothing to measure: -p and -n are 0; give one of them a length, and -d a depth.")
    return cases


def needed_ctx(cases: list[Case], longest: int) -> int:
    """Return the context that all tests need, of a model that allows `longest` tokens.

    Raises
    ------
    UsageError
        A test needs more.
    """
    worst = max(cases, key=lambda case: case.depth + case.tokens)
    ctx = worst.depth + worst.tokens
    if ctx > longest:
        raise UsageError(
            f"{worst.name} needs a context of {ctx} tokens, and the model allows {longest}; lower -d, -p or -n, or "
            "measure random weights with --shape, which have no such limit."
        )
    return ctx
