"""Runs of edgeinfer's own kernels on random models of known widths, from which the estimator's constants are solved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle import Bundle
from ..config import RuntimeConfig
from ..devices import DecodeRun, PromptRun
from .repetitions import token_ids
from .results import GENERATE, PROMPT, Case
from .traffic import bytes_per_token, operations_per_token

if TYPE_CHECKING:
    from ..runtime import Probe, Session

Progress = Callable[[int, int, str], None]
WARM_UP_TOKENS = 32
SLOW_GOPS, SLOW_PROMPT = 200.0, 128
"""Below this int8 peak prompts are short."""


@dataclass(frozen=True)
class Shape:
    """A random model to run."""

    name: str
    """One of converters.SHAPES, for its widths."""
    layers: int
    vocab_size: int


SHAPES = (Shape("smollm2-135m", 30, 49152), Shape("tinyllama-1.1b", 5, 8192), Shape("llama-2-7b", 2, 8192))
"""Widths from 576 to 4096; few layers, because each is like the other, but too many bytes for the caches."""


@dataclass(frozen=True)
class Lengths:
    """What each model is asked for."""

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


def calibrate(
    bundles: list[Path], probe: Probe, lengths: Lengths, progress: Progress | None = None
) -> tuple[list[DecodeRun], list[PromptRun]]:
    """Run each model: decoding without context, prompts until the context is full, decoding behind it.

    Parameters
    ----------
    bundles : list of Path
    probe : Probe
        With the threads that sessions use; read before and after each run.
    lengths : Lengths
    progress : callable, optional
        Called with (done, total, item).
    """
    from ..runtime import Session

    decodes: list[DecodeRun] = []
    prompts: list[PromptRun] = []
    for number, path in enumerate(bundles):
        def tell(item: str, number: int = number, name: str = path.name) -> None:
            if progress:
                progress(number, len(bundles), f"{name}, {item}")

        tell("opening")
        with Bundle.open(path) as bundle:
            ctx = lengths.depth + max(lengths.generated, WARM_UP_TOKENS)
            session = Session(bundle, RuntimeConfig(ctx=ctx, threads=probe.threads))
            try:
                runner = _Runner(session, probe, lengths)
                tell("decoding")
                decodes += runner.decode()
                tell("prompts")
                prompts += runner.fill()
                tell("decoding")
                decodes += runner.decode()
            finally:
                session.close()
    return decodes, prompts


class _Runner:
    """One sequence of one session, and the readings of the machine beside its runs."""

    def __init__(self, session: Session, probe: Probe, lengths: Lengths):
        self.session, self.probe, self.lengths = session, probe, lengths
        self._ids = token_ids(session.model.vocab_size)
        self.sequence = session.new_sequence()
        session.prefill(self.sequence, self._some(WARM_UP_TOKENS))  # also brings the weights into memory
        session.truncate(self.sequence, 0)

    def decode(self) -> list[DecodeRun]:
        """Generate some tokens at the present depth, several times, and forget them again."""
        depth, count = len(self.sequence), self.lengths.generated
        weight_bytes = float(self.session.program.bytes_read)
        kv_bytes = bytes_per_token(self.session, Case(GENERATE, count, depth)) - weight_bytes
        runs, before = [], self.probe.read_gbs()
        for _ in range(self.lengths.repetitions):
            tokens = self._some(count)
            began = time.perf_counter()
            for token in tokens:
                self.session.decode([self.sequence], [token])
            seconds = time.perf_counter() - began
            self.session.truncate(self.sequence, depth)
            after = self.probe.read_gbs()
            runs.append(DecodeRun(self.session.model.num_hidden_layers, weight_bytes, kv_bytes, seconds / count,
                                  (before + after) / 2))
            before = after
        return runs

    def fill(self) -> list[PromptRun]:
        """Process prompts one after the other until the context or the time is full; each is a run of its own depth."""
        runs: list[PromptRun] = []
        count, started, before = self.lengths.prompt, time.perf_counter(), self.probe.int8_gops()
        while len(self.sequence) < self.lengths.depth:
            if runs and time.perf_counter() - started > self.lengths.seconds:
                break
            tokens, depth = self._some(count), len(self.sequence)
            began = time.perf_counter()
            self.session.prefill(self.sequence, tokens)
            seconds = time.perf_counter() - began
            after = self.probe.int8_gops()
            runs.append(self._prompt_run(depth, seconds, (before + after) / 2))
            before = after
        return runs

    def _prompt_run(self, depth: int, seconds: float, peak: float) -> PromptRun:
        model, count = self.session.model, self.lengths.prompt
        layers, operations = model.num_hidden_layers, operations_per_token(self.session, Case(PROMPT, count, depth))
        seen = count * depth + count * (count + 1) / 2
        attention = 4.0 * model.num_attention_heads * model.head_dim * layers * seen
        return PromptRun(layers, operations * count, attention, seconds, peak,
                         self.session.graph.activation_values * count)

    def _some(self, count: int) -> list[int]:
        return [next(self._ids) for _ in range(count)]
