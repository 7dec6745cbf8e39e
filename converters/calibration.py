"""Rounding of weights by the inputs that matrices have over a text, and the bundle's record of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError
from edgeinfer.graph import Graph, Weight
from edgeinfer.quant import InputStatistics, WeightType, layouts, packed, quantise, rounding

from .checkpoint.directory import Checkpoint
from .chosen_types import ChosenTypes
from .report import TensorReport, mean_bits

CALIBRATION_FILE = "calibration.json"
BLOCK_WEIGHTS = 48 << 20
"""Weights that are rounded at a time: 200 MB as float32."""
Statistics = Sequence[InputStatistics] | None
"""Statistics of a weight's input, one for each of its experts or heads; None if they are not known."""


@dataclass(frozen=True)
class Calibration:
    """Statistics of the inputs of a model's matrices over a text."""

    method: str
    """``gptq`` or ``importance``."""
    text: str
    """Name of the text, for people."""
    sha256: str
    """Hash of the text's token ids, or of an imatrix file."""
    tokens: int
    """Tokens of the text; 0 if that is not known."""
    of: Callable[[Weight], Statistics]
    """Returns the statistics of the input of a weight of the graph that is converted."""
    remarks: tuple[str, ...] = ()
    """Sentences for the person who converts."""
    scale: bool = True
    """True if factors may move between weights where that is expected to help (scaling.py)."""
    scaled: tuple[str, ...] = ()
    """Names of the matrices whose columns have such factors."""
    effects: Mapping[str, tuple[float, float]] | None = None
    """Divergence in nats by a weight's name, for an error as large as its output, and as its rows where tokens look
    them up, would cause if it grew with the square of the error; None if that was not measured."""
    outliers: str = ""
    """Columns that are stored apart, in f16: ``auto``, a percentage of them, or none (outliers.py)."""
    folder: Path | None = None
    """Directory of the statistics, where copies of rounded weights may be kept until the bundle is complete."""
    apart: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Columns with outliers, by the names of matrices."""


@dataclass(frozen=True)
class ByOption:
    """A conversion's calibration, and the option that asked for it."""

    made: Callable[[Checkpoint], Calibration]
    option: str
    outliers: bool = False
    """Whether columns are stored apart, which take bytes of a size, too."""

    def __call__(self, checkpoint: Checkpoint) -> Calibration:
        """Return the calibration of a checkpoint."""
        return self.made(checkpoint)


def record(calibration: Calibration | None, tensors: Sequence[TensorReport], chosen: ChosenTypes | None) -> bytes:
    """Return the content of the file in which a bundle records how its weights were rounded."""
    data: dict[str, Any] = {"method": "plain"}
    if calibration:
        rounded = [one for one in tensors if one.calibrated]
        data = {"method": calibration.method, "text": calibration.text, "sha256": calibration.sha256,
                "tokens": calibration.tokens, "output_error": sum(one.output_error for one in rounded),
                "output_error_plain": sum(one.output_error_plain for one in rounded),
                "scaled": list(calibration.scaled), **({"outliers": calibration.apart} if calibration.apart else {}),
                "tensors": {one.name: [one.output_error, one.output_error_plain] for one in rounded}}
    if chosen:
        data |= {"request": chosen.request, "bits": mean_bits(tensors), "gap": _shortened(chosen.gap),
                 "cost": _shortened(chosen.cost),
                 "bits_of": {one.name: one.bits for one in tensors if one.weights}}
    return (json.dumps(data, indent=1) + "\n").encode()


def _shortened(value: float | None) -> float | None:
    """Return a number without the digits that depend on the number of threads."""
    return None if value is None else float(f"{value:.6g}")


def check_something_is_rounded(checkpoint: Checkpoint, graph: Graph, option: str) -> None:
    """Refuse to calibrate a conversion that rounds no matrix; `option` is the one that asked for it.

    Raises
    ------
    UsageError
        All matrices stay as the checkpoint has them, or FFNs are stored by neuron.
    """
    matrices = [weight for weight in graph.weights if weight.kind in ("matrix", "experts", "embedding", "head")]
    if any(graph.types[weight.name].layout == "neuron" for weight in graph.weights):
        raise UsageError(f"{option} rounds matrices in tiles, and --ffn-layout neuron stores neurons one by one; "
                         "leave one of the two out.")
    if not any(is_rounded(checkpoint, weight, graph.types[weight.name]) for weight in matrices):
        kinds = sorted({graph.types[weight.name].dtype for weight in matrices})
        other = "tableq" if "q4" in kinds else "q4"
        raise UsageError(f"{option} has nothing to round: all {len(matrices)} matrices of {checkpoint.path} are "
                         f"stored as they are ({', '.join(kinds)}); give --weights {other} to round those that are "
                         "not in this type.")


def is_rounded(checkpoint: Checkpoint, weight: Weight, stored: WeightType) -> bool:
    """Return whether a weight is read as values and rounded to levels."""
    return stored.quantised and checkpoint.moved(weight, stored, lambda *_: None, []) is None


def is_free(checkpoint: Checkpoint, graph: Graph, weight: Weight) -> bool:
    """Return whether a weight is rounded, or a vector of floats: it may have factors."""
    stored = graph.types[weight.name]
    return weight.kind == "vector" or (weight.kind == "matrix" and is_rounded(checkpoint, weight, stored))


def rounded(read: Callable[[int, int], NDArray[np.float32]], weight: Weight, stored: WeightType, name: str,
            statistics: Statistics, sums: list[quantise.ErrorSums], nearest: list[str]) -> Iterator[NDArray[np.uint8]]:
    """Yield the stored bytes of a weight, rounded by the statistics of its input, piece by piece.

    `read` gives stored rows start to stop as float32; `nearest` gets the name where GPTQ was not possible.
    """
    pieces, cols = len(statistics) if statistics else 1, prod(weight.shape[1:])
    rows = weight.shape[0] // pieces
    step = max(16, BLOCK_WEIGHTS // cols // 16 * 16)
    for piece in range(pieces):
        own = statistics[piece] if statistics else None
        for start in range(piece * rows, (piece + 1) * rows, step):
            block = read(start, min(start + step, (piece + 1) * rows))
            found = rounding.quantise_matrix(np.ascontiguousarray(block), stored, name, own)
            sums.append(found.errors)
            nearest += [name] if found.nearest else []
            yield _packed(found, stored)


def _packed(found: rounding.Rounded, stored: WeightType) -> NDArray[np.uint8]:
    """Return the bytes of codes and factors."""
    if stored.storage.simple:
        return layouts.pack_tile16(found.codes, stored.dtype, stored.group_size, found.factors.scales)
    return packed.pack(found.codes, found.stored, found.factors)
