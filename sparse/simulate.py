"""A predictor in the model's own program, before kernels apply it: scores in NumPy, everything else by the kernels.

The pass stops after each layer's f; there the neurons that are not chosen are set to 0, and the down matrix continues
from that. A neuron of 0 adds nothing, so the sums are those of a program that leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Predictor
from edgeinfer.calibration.hooks import Hook, HookedRunner, View
from edgeinfer.errors import RequestError
from edgeinfer.runtime import Session

from .ffn import Ffn
from .predictors import Scores


@dataclass
class Tally:
    """Neurons that a layer's predictor selected, summed over tokens."""

    neurons: int = 0
    """All of them."""
    chosen: int = 0
    fired: int = 0
    """Number of neurons whose value was not 0 without the predictor."""
    hit: int = 0
    """Chosen and fired."""

    @property
    def density(self) -> float:
        """Share of the neurons that fired."""
        return self.fired / max(self.neurons, 1)

    @property
    def recall(self) -> float:
        """Share of those that fired which were chosen."""
        return self.hit / max(self.fired, 1)

    @property
    def read_share(self) -> float:
        """Share of the neurons that were chosen."""
        return self.chosen / max(self.neurons, 1)

    @property
    def skipped(self) -> float:
        """Share of those that did not fire which were left out."""
        return 1 - (self.chosen - self.hit) / max(self.neurons - self.fired, 1)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.neurons + other.neurons, self.chosen + other.chosen, self.fired + other.fired,
                     self.hit + other.hit)


def predicted(session: Session, networks: Sequence[Ffn], scores: Sequence[Scores],
              thresholds: Sequence[NDArray[np.float32]]) -> tuple[HookedRunner, list[Tally]]:
    """Return a runner that leaves out neurons as a predictor says, and the choices of each layer's predictor so far.

    Parameters
    ----------
    session : of `open_plain`; its forward passes must have two tokens or more
    networks : of `ffns`
    scores, thresholds : of each of them
    """
    tallies = [Tally() for _ in networks]

    def hook(i: int) -> Hook:
        def leave_out(view: View) -> None:
            if view.tokens == 1:  # then layout neuron has added up the columns already
                raise RequestError("A predictor is simulated in forward passes of two tokens or more; take another "
                                   "window.")
            f = view.floats(networks[i].f)
            chosen, fired = scores[i](view.values(networks[i].x)) > thresholds[i], f != 0
            tallies[i] += Tally(chosen.size, *(int(np.count_nonzero(a)) for a in (chosen, fired, chosen & fired)))
            f[~chosen] = 0

        return leave_out

    return HookedRunner(session, {ffn.op: (hook(i),) for i, ffn in enumerate(networks)}), tallies


def read_bytes_share(predictor: Predictor, tally: Tally, dense_bytes: int, gates: float) -> float:
    """Share of the dense FFN's bytes that a token reads: of neurons those that are chosen, and the predictor.

    Where the gates decide themselves, all gates are read, this share, and of the rest the chosen ones.
    """
    rows = tally.read_share if predictor.kind != "threshold" else gates + (1 - gates) * tally.read_share
    return rows + predictor.nbytes / dense_bytes
