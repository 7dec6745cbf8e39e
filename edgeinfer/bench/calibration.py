"""Runs of edgeinfer's own kernels on random models of known widths, from which the estimator's constants are solved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..base.dataclass import dataclass
from ..base.progress import OnStageProgress
from ..bundle import Bundle
from ..config import RuntimeConfig
from ..devices import REFERENCE_TYPE, DecodeRun, PromptRun, RowsRun, costs_of
from .probe import repeated
from .repetitions import token_ids
from .results import GENERATE, PROMPT, Case
from .traffic import bytes_per_token, operations_per_token

if TYPE_CHECKING:
    from ..graph import ModelConfig
    from ..runtime import Session
    from .probe import MachineProbe

T = TypeVar("T")
WARM_UP_TOKENS = 32
SLOW_GOPS, SLOW_PROMPT = 200.0, 128
"""Below this int8 peak prompts are short."""
CALM_SHARE = 0.85
"""Share of the processors from which on a run counts as undisturbed; waking threads takes some."""
PEAK_SECONDS = 0.1
FEW_ROWS = (2, 4, 8, 16, 32)
"""Tokens of a pass for which it matters how much of the reading arithmetic hides."""
MAX_TRIES = 3
"""Runs made at most for each that counts."""


@dataclass(frozen=True)
class Shape:
    """A random model to run."""

    name: str
    """One of converters.SHAPES, for its widths."""
    layers: int
    vocab_size: int
    weights: str = REFERENCE_TYPE
    """Type of its matrices."""


SHAPES = (Shape("smollm2-135m", 30, 49152), Shape("tinyllama-1.1b", 5, 8192), Shape("llama-2-7b", 2, 8192))
"""Widths from 576 to 4096; few layers, because each is like the other, but too many bytes for the caches."""


@dataclass(frozen=True)
class Lengths:
    """Test lengths for each model."""

    depth: int = 4096
    """Context to fill, by prompts that are measured."""
    prompt: int = 512
    """Tokens of such a prompt; divides the depth."""
    generated: int = 16
    """Tokens of a run of decoding."""
    repetitions: int = 6
    """Runs of decoding at each end of the context."""
    seconds: float = 12.0
    """Prompts of a model that begin after this time are left out: a slow machine fills less context."""


def lengths_for(int8_peak_gops: float) -> Lengths:
    """Return lengths for a machine with this peak."""
    return Lengths() if int8_peak_gops >= SLOW_GOPS else Lengths(prompt=SLOW_PROMPT)


@dataclass(frozen=True)
class Runs:
    """Measurements of a calibration."""

    decodes: list[DecodeRun]
    prompts: list[PromptRun]
    shares: list[float]
    """Share of the processors that this process had during each run."""
    rows: list[RowsRun] = field(default_factory=list)


def calibrate(
    bundles: list[Path], probe: MachineProbe, lengths: Lengths, progress: OnStageProgress | None = None,
    figures: Mapping[str, float] = MappingProxyType({}),
) -> Runs:
    """Run each model: decoding without context, passes over a few tokens, prompts until the context is full, decoding
    after it.

    Parameters
    ----------
    bundles : list of Path
    probe : MachineProbe
        With the threads that sessions use; read before and after each run.
    lengths : Lengths
    progress : callable, optional
        Called with (done, total, item).
    figures : mapping, optional
        Costs of types of weights: the runs count bytes of the memory alone, and operations with q4, that take as long.
    """
    from ..runtime import Session

    runs = Runs([], [], [])
    for number, path in enumerate(bundles):
        def tell(item: str, number: int = number, name: str = path.name) -> None:
            if progress:
                progress(number, len(bundles), f"{name}, {item}")

        tell("opening")
        with Bundle.open(path) as bundle:
            ctx = lengths.depth + max(lengths.generated, WARM_UP_TOKENS)
            session = Session(bundle, RuntimeConfig(ctx=ctx, threads=probe.threads))
            try:
                runner = _Runner(session, probe, lengths, figures)
                tell("decoding")
                runs.decodes.extend(runner.decode())
                tell("a few tokens")
                runs.rows.extend(runner.few_rows())
                tell("prompts")
                runs.prompts.extend(runner.fill())
                tell("decoding")
                runs.decodes.extend(runner.decode())
                runs.shares.extend(runner.shares)
            finally:
                session.close()
    return runs


class _Runner:
    """One sequence of one session, and the readings of the machine beside its runs.

    Where other programs took the processor during a run it is repeated, and the calmest count: the share that the
    threads got of it shows in the process's own clock, since they spin while they wait.
    """

    def __init__(self, session: Session, probe: MachineProbe, lengths: Lengths, figures: Mapping[str, float]):
        self.session, self.probe, self.lengths = session, probe, lengths
        self.shares: list[float] = []
        """Share of the processors that each run which counts had."""
        self._costs = partial(costs_of, figures, types=session.graph.type_shares)
        self._ids = token_ids(session.model.vocab_size)
        self._threads = min(probe.threads, os.cpu_count() or 1)
        self.sequence = session.new_sequence()
        session.prefill(self.sequence, self._some(WARM_UP_TOKENS))  # also brings the weights into memory
        session.truncate(self.sequence, 0)

    def decode(self) -> list[DecodeRun]:
        """Generate some tokens at the present depth, several times, and forget them again."""
        depth, count = len(self.sequence), self.lengths.generated
        kv_bytes = bytes_per_token(self.session, Case(GENERATE, count, depth)) - self.session.program.bytes_read
        model, until = self.session.model, time.perf_counter() + self.lengths.seconds / 3
        layers, attention = model.num_hidden_layers, _attention_operations(model, depth + (count + 1) / 2)
        tried: list[tuple[float, DecodeRun]] = []
        self.session.checkpoint(self.sequence)
        while not self._enough(tried, self.lengths.repetitions, until):
            share, seconds, reading = self._timed(
                partial(self._generate, self._some(count)), self.probe.read_gbs, lambda both: sum(both) / 2)
            self.session.rollback(self.sequence, depth)
            tried.append((share, DecodeRun(layers, self._weight_bytes(reading), kv_bytes, seconds / count, reading,
                                           attention)))
        return self._calmest(tried, self.lengths.repetitions)

    def few_rows(self) -> list[RowsRun]:
        """Process prompts of a few tokens, several times each, and forget them again; before there is a context."""
        runs: list[RowsRun] = []
        until, peak = time.perf_counter() + self.lengths.seconds / 3, self._peak()
        self.session.checkpoint(self.sequence)
        for count in FEW_ROWS:
            tried: list[tuple[float, RowsRun]] = []
            while not self._enough(tried, self.lengths.repetitions, until):
                share, seconds, reading = self._timed(
                    partial(self.session.prefill, self.sequence, self._some(count)), self.probe.read_gbs,
                    lambda both: sum(both) / 2)
                self.session.rollback(self.sequence, 0)
                run = self._prompt_run(0, seconds, peak, count)
                tried.append((share, RowsRun(run.layers, count, self._weight_bytes(reading), run.operations, run.values,
                                             seconds, reading, peak)))
            runs += self._calmest(tried, self.lengths.repetitions)
        return runs

    def fill(self) -> list[PromptRun]:
        """Process prompts one after the other until the context or the time is full; each is a run of its own depth."""
        runs: list[PromptRun] = []
        until = time.perf_counter() + self.lengths.seconds
        while len(self.sequence) < self.lengths.depth and (not runs or time.perf_counter() < until):
            depth = len(self.sequence)
            self.session.checkpoint(self.sequence)
            tried: list[tuple[float, PromptRun]] = []
            while not self._enough(tried, 1, until):
                self.session.rollback(self.sequence, depth)
                prompt = partial(self.session.prefill, self.sequence, self._some(self.lengths.prompt))
                share, seconds, peak = self._timed(prompt, self._peak, max)
                tried.append((share, self._prompt_run(depth, seconds, peak, self.lengths.prompt)))
            runs += self._calmest(tried, 1)
        return runs

    def _generate(self, tokens: list[int]) -> None:
        for token in tokens:
            self.session.decode([self.sequence], [token])

    def _peak(self) -> float:
        """Read the int8 peak: a maximum, for whatever disturbs a reading makes it lower."""
        return max(repeated(self.probe.int8_gops, PEAK_SECONDS))

    def _timed(
        self, run: Callable[[], object], read: Callable[[], float], together: Callable[[tuple[float, float]], float]
    ) -> tuple[float, float, float]:
        """Return the least share of the processors in a run and the readings around it, its seconds, the reading."""
        before, first = self._watched(read)
        began = time.perf_counter()
        _, share = self._watched(run)
        seconds = time.perf_counter() - began
        after, last = self._watched(read)
        return min(first, share, last), seconds, together((before, after))

    def _watched(self, work: Callable[[], T]) -> tuple[T, float]:
        """Return a result, and the share of the processors that this process had meanwhile."""
        wall, used = time.perf_counter(), time.process_time()
        result = work()
        return result, (time.process_time() - used) / (self._threads * (time.perf_counter() - wall))

    def _enough(self, tried: list[tuple[float, T]], wanted: int, until: float) -> bool:
        calm = sum(share >= CALM_SHARE for share, _ in tried)
        late = len(tried) >= wanted and time.perf_counter() > until
        return calm >= wanted or late or len(tried) >= MAX_TRIES * wanted

    def _calmest(self, tried: list[tuple[float, T]], wanted: int) -> list[T]:
        chosen = sorted(tried, key=lambda one: -min(one[0], CALM_SHARE))[:wanted]  # equally calm ones in order
        self.shares += [min(share, 1.0) for share, _ in chosen]
        return [run for _, run in chosen]

    def _weight_bytes(self, bandwidth_gbs: float) -> float:
        """Return the bytes that the memory would deliver in the time of a token's weights."""
        return self.session.program.bytes_read * self._costs(bandwidth_gbs)[0]

    def _prompt_run(self, depth: int, seconds: float, peak: float, count: int) -> PromptRun:
        model = self.session.model
        layers, operations = model.num_hidden_layers, operations_per_token(self.session, Case(PROMPT, count, depth))
        attention = _attention_operations(model, count * depth + count * (count + 1) / 2)
        return PromptRun(layers, operations * count * self._costs(1.0)[1], attention, seconds, peak,
                         self.session.graph.activation_values * count)

    def _some(self, count: int) -> list[int]:
        return [next(self._ids) for _ in range(count)]


def _attention_operations(model: ModelConfig, seen: float) -> float:
    """Return the operations of attention for this many pairs of a token and a position that it sees."""
    return 4.0 * model.num_attention_heads * model.head_dim * model.num_hidden_layers * seen
