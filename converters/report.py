"""What a conversion did to the weights."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.dataclass import dataclass
from edgeinfer.quant import TYPES, quantise


@dataclass(frozen=True)
class TensorReport:
    """One stored tensor."""

    name: str
    dtype: str
    nbytes: int
    """Bytes in the bundle."""
    errors: quantise.ErrorSums

    @property
    def relative_error(self) -> float:
        """Squared error / squared norm of the weights."""
        return self.errors.relative

    @property
    def gain(self) -> float:
        """Share of the squared error of max-based scales that the search has removed."""
        return self.errors.gain


@dataclass(frozen=True)
class ConversionReport:
    """Sizes, time, and the error of each tensor's quantisation."""

    destination: Path
    source_bytes: int
    """Bytes of the checkpoint's tensors that were read."""
    bundle_bytes: int
    """Length of weights.bin."""
    seconds: float
    tensors: tuple[TensorReport, ...]
    remarks: tuple[str, ...] = ()
    """Sentences about what was left out or missing."""

    @property
    def rounded(self) -> tuple[TensorReport, ...]:
        """The tensors that lost precision: all but those stored as f32."""
        return tuple(tensor for tensor in self.tensors if tensor.dtype != "f32")

    @property
    def worst(self) -> TensorReport | None:
        """The tensor with the largest relative error; None where nothing was rounded."""
        return max(self.rounded, key=lambda tensor: tensor.relative_error, default=None)

    @property
    def mean_relative_error(self) -> float:
        """Mean of the tensors' relative squared errors."""
        return sum(t.relative_error for t in self.rounded) / len(self.rounded) if self.rounded else 0.0

    @property
    def gain(self) -> float:
        """Share of the squared error of max-based scales that the search has removed, over all quantised tensors."""
        sums = sum((t.errors for t in self.tensors if TYPES[t.dtype].quantised), quantise.ErrorSums())
        return sums.gain
