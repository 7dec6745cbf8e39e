"""Report on a new predictor: its divergence, whether that is within the bound, and its savings."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Predictor
from edgeinfer.config import MAX_KLD
from edgeinfer.quality.evaluate import Evaluation

from .simulate import Tally

UNSEEN = ("It was measured on the end of the text that it was fitted to alone; on other authors and subjects the "
          "divergence may be larger: 1.03 and 1.07 times as large in our trials, up to 1.7 times the bound in others'. "
          "Measure it on texts of other kinds with --held-out FILE.")


@dataclass(frozen=True)
class Sparsified:
    """Report on a new predictor."""

    destination: Path
    predictor: Predictor
    layers: tuple[Tally, ...]
    """Selections of the predictor on the measured tokens, layer by layer."""
    read_share: float
    """Bytes that a token reads of all FFNs, predictor included, over those of the dense ones."""
    result: Evaluation
    """Evaluation with the predictor, against the same bundle without it."""
    against_source: Evaluation
    """The bundle without predictor against the source: rounding by the new order, and of down matrices."""
    down_error: float
    """Squared error that quantising the down matrices again has added, over their squared norm; 0 if it was not."""
    enabled: bool
    """True if the divergence is within the bound."""
    max_kld: float
    time: tuple[float, str]
    """Time of the FFNs of a decoded token in memory, relative to the same model in tiles, dense; by whose curves."""
    dense: tuple[int, ...] = ()
    """Layers in tiles, without a predictor: leaving out neurons would not make them faster."""
    held_out: tuple[tuple[str, Evaluation], ...] = ()
    """Evaluations as `result` on other texts, by their names."""

    @property
    def worst(self) -> float:
        """The largest mean divergence of all texts, which decides."""
        return max(kld_of(result) for _, result in (("", self.result), *self.held_out))

    @property
    def reason(self) -> str:
        """Why it is enabled, or by how much it missed."""
        kld = self.worst
        name = next((f" on {name}" for name, result in self.held_out if kld_of(result) == kld), "")
        if not self.enabled:
            return f"KLD {kld:.5f}{name} is {kld / self.max_kld:.2f} times the bound of {self.max_kld:g}"
        asked = f"; run needs --max-kld {self.max_kld:g} for it" if kld > MAX_KLD else ""
        return f"KLD {kld:.5f}{name} is within {self.max_kld:g}{asked}"

    @property
    def warning(self) -> str:
        """Warning that it was measured on its own text only; empty if other texts were measured too."""
        return "" if self.held_out else UNSEEN


def kld_of(result: Evaluation) -> float:
    """Return the mean divergence of an evaluation that had a reference."""
    assert result.divergence is not None
    return result.divergence.kld_mean
