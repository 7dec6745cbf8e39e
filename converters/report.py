"""Report on the weights of a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from edgeinfer.base.dataclass import dataclass
from edgeinfer.quant import TYPES, quantise

from .chosen_types import ChosenTypes
from .gguf import types
from .quantized import kinds as packed_kinds

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are not quantised."""


@dataclass(frozen=True)
class TensorReport:
    """One stored tensor."""

    name: str
    dtype: str
    nbytes: int
    """Bytes in the bundle."""
    errors: quantise.ErrorSums
    """Error of conversion's own rounding."""
    file_types: tuple[str, ...] = ()
    """Types of the tensors of a GGUF file that the weight is made of."""
    exact: bool = False
    """True if every value is that of the file."""
    moved: bool = False
    """True if codes are those of the file; the inexact rest are scales, or codes that no product can take."""
    output_error: float = 0.0
    """Squared error of the matrix's outputs over the calibration text, mean of a token."""
    output_error_plain: float = 0.0
    """The same had each weight been rounded to its nearest level."""
    calibrated: bool = False
    """True if it was rounded by the statistics of its input."""
    nearest: str = ""
    """Its name in the checkpoint if GPTQ was requested and not possible."""
    weights: int = 0
    """Number of weights without padding; 0 for anything but a matrix, and for outlier columns stored in another one."""
    matrix: bool = False
    """True if it counts in the mean bits of a weight."""

    @property
    def bits(self) -> float:
        """Bits of a weight, scales and padding included; 0 if it is no matrix."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0

    @property
    def was_quantised(self) -> bool:
        """True if one of the tensors that it is made of is quantised in its file."""
        return any(kind not in FLOATS for kind in self.file_types)

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
    """Sentences about omitted or missing parts."""
    chosen: ChosenTypes | None = None
    """Types, where they were chosen matrix by matrix."""

    @property
    def bits(self) -> float:
        """Mean bits of a weight of all matrices."""
        return mean_bits(self.tensors)

    @property
    def rounded(self) -> tuple[TensorReport, ...]:
        """The tensors that lost precision: all but those stored as f32, or as their file has them."""
        return tuple(tensor for tensor in self.tensors if not tensor.exact)

    @property
    def sentences(self) -> list[str]:
        """All remarks, those on requantised and inexact tensors included."""
        return [*self.remarks, *filter(None, (self.requantised, self.inexact))]

    @property
    def requantised(self) -> str:
        """A sentence on quantised tensors that were quantised again, with the error of both steps; empty for none."""
        again = [t for t in self.rounded if t.was_quantised and not t.moved and TYPES[t.dtype].quantised]
        if not again:
            return ""
        errors = {kind: own_error(kind) for tensor in again for kind in tensor.file_types if kind not in FLOATS}
        none = sorted(errors.keys() & set(types.INEXACT))
        why = f", because no type of edgeinfer's holds {', '.join(none)} exactly" if none else ""
        own = ", ".join(f"{kind} {error:.1e}" if error else f"{kind} unknown" for kind, error in sorted(errors.items()))
        first, second = max(errors.values()), max(tensor.relative_error for tensor in again)
        return (f"{len(again)} of {len(self.tensors)} tensors were requantised{why}. The file's types typically lose "
                f"({own}), requantising added up to {second:.1e}, together about {first + second:.1e}; "
                f"{sum(tensor.exact for tensor in self.tensors)} tensors are as in the file.")

    @property
    def inexact(self) -> str:
        """Sentences on quantised tensors that are neither exact nor requantised; empty for none."""
        notes = []
        widened = [t for t in self.rounded if t.was_quantised and not TYPES[t.dtype].quantised]
        if widened:
            kinds = sorted({kind for tensor in widened for kind in tensor.file_types})
            notes.append(f"{len(widened)} of {len(self.tensors)} tensors ({', '.join(kinds)}) are stored as f16 "
                        f"({sum(t.nbytes for t in widened) / 1e6:.3g} MB), with a relative error of at most 4.9e-4 for "
                        "weights above 6e-5; --weights int8 takes half the memory and reports its error.")
        if rounded := [t for t in self.rounded if t.moved]:
            worst = max(tensor.relative_error for tensor in rounded)
            notes.append(f"{len(rounded)} of {len(self.tensors)} tensors kept their codes, but scales and minima were "
                        "rounded to fp16 and codes of -128 became -127: a squared error of at most "
                        f"{worst:.1e}.")
        return " ".join(notes)

    @property
    def calibrated(self) -> tuple[TensorReport, ...]:
        """The tensors that were rounded by the statistics of their inputs."""
        return tuple(tensor for tensor in self.tensors if tensor.calibrated)

    @property
    def output_gain(self) -> float:
        """Share of the squared output error that calibration has removed: the mean over the tensors."""
        shares = [1 - one.output_error / one.output_error_plain for one in self.calibrated if one.output_error_plain]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def worst(self) -> TensorReport | None:
        """The tensor with the largest relative error; None if nothing was rounded."""
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


def not_definite(tensors: Iterable[TensorReport]) -> list[str]:
    """Return a sentence on the matrices whose codes are the nearest ones although GPTQ was requested, if there are
    any."""
    names = [one.nearest for one in tensors if one.nearest]
    if not names:
        return []
    others = {1: "", 2: " and of another matrix"}.get(len(names), f" and of {len(names) - 1} other matrices")
    return [f"The second moments of the inputs of {names[0]}{others} are not positive definite, so codes there are the "
            "nearest ones."]


def mean_bits(tensors: Sequence[TensorReport]) -> float:
    """Return the mean bits of a weight of those tensors that are matrices."""
    matrices = [one for one in tensors if one.matrix]
    return 8 * sum(one.nbytes for one in matrices) / max(sum(one.weights for one in matrices), 1)


def own_error(kind: str) -> float:
    """Return the typical error of a file's type; 0 if it is not known or there is none."""
    return types.OWN_ERROR.get(kind) or packed_kinds.own_error(kind)
