"""What a conversion did to the weights."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.dataclass import dataclass
from edgeinfer.quant import TYPES, quantise

from .gguf_types import OWN_ERROR


@dataclass(frozen=True)
class TensorReport:
    """One stored tensor."""

    name: str
    dtype: str
    nbytes: int
    """Bytes in the bundle."""
    errors: quantise.ErrorSums
    """Of what conversion itself rounded."""
    file_types: tuple[str, ...] = ()
    """Of a GGUF file: the types of the tensors that it is made of."""
    exact: bool = False
    """Whether every value is that of the file."""

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
        """The tensors that lost precision: all but those stored as f32, or as their file has them."""
        return tuple(tensor for tensor in self.tensors if not tensor.exact)

    @property
    def anew(self) -> str:
        """A sentence on quantised tensors that were quantised again, with the error of both steps; empty for none."""
        again = [t for t in self.rounded if any(kind in OWN_ERROR or "Q" in kind for kind in t.file_types)]
        if not again:
            return ""
        kinds = sorted({kind for tensor in again for kind in tensor.file_types})
        own = ", ".join(f"{kind} {OWN_ERROR[kind]:.1e}" if kind in OWN_ERROR else f"{kind} unknown" for kind in kinds)
        first = max(OWN_ERROR.get(kind, 0.0) for kind in kinds)
        second = max(tensor.relative_error for tensor in again)
        return (f"{len(again)} of {len(self.tensors)} tensors were quantised anew: what the file's own types lose is "
                f"typically ({own}), this step added up to {second:.1e}, which together is about {first + second:.1e}; "
                f"{sum(tensor.exact for tensor in self.tensors)} are as in the file.")

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
