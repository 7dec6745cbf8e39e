"""Speed of storage types of weights with one thread, in turns with q4 on models of the same widths: for the probe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..base.progress import OnStageProgress
from ..bundle import Bundle
from ..config import RuntimeConfig
from ..devices import TYPES, solve_type
from .calibration import Shape
from .repetitions import token_ids

if TYPE_CHECKING:
    from ..runtime import Session
    from .probe import MachineProbe

TYPED = tuple(Shape("tinyllama-1.1b", 5, 1024, dtype) for dtype in TYPES)
"""The same model in each type, with a head too small to matter; the first one is that of the constants."""
TURNS, TRIES, GENERATED, PROMPT = 5, 10, 8, 64
"""Measurements of each type that count, those made for them, tokens of a text, tokens of a prompt."""


class _Turn(NamedTuple):
    """A measurement of a type, and of the reference beside it."""

    token: float
    prompt: float
    """Seconds."""
    beside: float
    """Seconds of the reference's prompt."""
    gbs: float
    """Bandwidth of one thread."""
    share: float
    """Share of a processor that the thread had."""


def measure_types(paths: Sequence[Path], probe: MachineProbe, threads: float,
                  progress: OnStageProgress | None = None) -> dict[str, float]:
    """Return the figures of each type (devices/type_costs.py).

    One thread unpacks half or less of what the memory gives it on most machines, and is seldom interrupted on one that
    is shared; where it was, other turns count.

    Parameters
    ----------
    paths : sequence of Path
        Bundles of the same model, the first one in q4.
    probe : MachineProbe
    threads : float
        Threads that all of the machine's are worth in arithmetic.
    progress : callable, optional
        Called with (done, total, item).
    """
    found: dict[str, float] = {}
    with _opened(paths[0]) as reference:
        for number, path in enumerate(paths):
            if progress:
                progress(number, len(paths), path.name)
            with _opened(path) as other:
                turns = sorted((_turn(reference, other, probe) for _ in range(TRIES)), key=lambda turn: -turn.share)
                calm = turns[:TURNS]
                found.update(solve_type(
                    other.bundle.quantisation.weights, other.program.bytes_read,
                    [(turn.token, turn.gbs) for turn in calm], [turn.prompt / turn.beside for turn in calm], threads))
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Session]:
    """Open a model and run it once, which brings its weights into memory."""
    from ..runtime import Session

    with ExitStack() as stack:
        bundle = stack.enter_context(Bundle.open(path))
        session = Session(bundle, RuntimeConfig(ctx=PROMPT + GENERATED, threads=1))
        stack.callback(session.close)
        _times(session)
        yield session


def _turn(reference: Session, other: Session, probe: MachineProbe) -> _Turn:
    gbs, wall, used = probe.read_gbs(1), time.perf_counter(), time.process_time()
    (_, beside), (token, prompt) = _times(reference), _times(other)
    share = (time.process_time() - used) / (time.perf_counter() - wall)
    return _Turn(token, prompt, beside, (gbs + probe.read_gbs(1)) / 2, share)


def _times(session: Session) -> tuple[float, float]:
    """Return the seconds of a token, and of a prompt."""
    ids, sequence = token_ids(session.model.vocab_size), session.new_sequence()
    began = time.perf_counter()
    session.prefill(sequence, [next(ids) for _ in range(PROMPT)])
    middle = time.perf_counter()
    for _ in range(GENERATED):
        session.decode([sequence], [next(ids)])
    ended = time.perf_counter()
    session.release(sequence)
    return (ended - middle) / GENERATED, middle - began
