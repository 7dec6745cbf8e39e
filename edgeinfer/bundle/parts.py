"""Optional parts of a bundle for sparse FFNs: a predictor of live neurons, and statistics of how often they live.

`sparse/` makes them; the runtime and `offload/` read them. A part names the weights that it was made for, by the
checksum of their table, so that none is taken for another model's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BundleError
from edgeinfer.graph import PREDICTOR_TYPE, PREDICTORS, ModelConfig
from edgeinfer.quant import LINE_BYTES, WeightType

from ..base.dataclass import dataclass
from .arrays import Arrays, offsets, open_arrays, pack_arrays
from .format import TensorEntry, neuron_layers

if TYPE_CHECKING:
    from .reader import Bundle

PREDICTOR_FILE, STATISTICS_FILE = "predictor.bin", "statistics.bin"
FIELDS = {"predictor": ("kind", "rank"), "statistics": ("tokens",), "screen": ("rank", "share"),
          "draft_head": ("types",)}
"""Fields that describe a part, beside its name and its weights."""
Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape and type of each array, by name."""


@dataclass(frozen=True)
class Predictor:
    """Predictor of active neurons: a layer computes those whose score is above their threshold.

    Arrays are by layer, those of layers in tiles empty.

    The score is, by kind: ``sign``, hidden_size minus twice the positions where the signs of x and of the gate row
    differ; ``lowrank``, outer (inner x), x and inner x quantised to int8 in groups of 32; ``threshold``, the magnitude
    of the gate's activation.
    """

    kind: str
    """One of `PREDICTORS`."""
    rank: int
    """Rows of the inner matrix; 0 for the other kinds."""
    signs: tuple[NDArray[np.uint64], ...] = ()
    """sign: bit c % 64 of word c // 64 of a row says whether the gate's weight in column c is negative; (neurons,
    words) a layer."""
    inner: tuple[NDArray[np.uint8], ...] = ()
    """lowrank: bytes of a matrix (rank, hidden_size) of `PREDICTOR_TYPE` a layer."""
    outer: tuple[NDArray[np.uint8], ...] = ()
    """lowrank: bytes of a matrix (neurons, rank) of `PREDICTOR_TYPE` a layer."""
    thresholds: tuple[NDArray[np.float32], ...] = ()
    """Thresholds of each layer, one per neuron; a single one per layer for the kind ``threshold``."""

    @property
    def nbytes(self) -> int:
        """Bytes that one token reads of it."""
        return sum(array.nbytes for layers in (self.signs, self.inner, self.outer, self.thresholds) for array in layers)

    def pack(self, weights: str) -> Iterator[bytes]:
        """Yield the file's bytes; `weights` is `weights_identity` of the weights that it was made for."""
        arrays: Arrays = {}
        for name in ("signs", "inner", "outer", "thresholds"):
            arrays |= {f"layers.{i}.{name}": array for i, array in enumerate(getattr(self, name)) if array.size}
        yield from pack_arrays({"part": "predictor", "weights": weights, "kind": self.kind, "rank": self.rank}, arrays)


@dataclass(frozen=True)
class Statistics:
    """Activity of each layer's neurons over a text, in the order in which the bundle stores them."""

    tokens: int
    """Tokens of the text."""
    fired: tuple[NDArray[np.int64], ...]
    """Tokens for which each neuron gave anything but 0."""
    largest: tuple[NDArray[np.float32], ...]
    """Largest magnitude that each neuron gave."""
    order: tuple[NDArray[np.int32], ...]
    """Index of each stored neuron in the source; neurons are stored from the most to the least active, as counted with
    the source's weights.
    """
    chosen: tuple[NDArray[np.int64], ...] = ()
    """One number a layer: neurons that the bundle's predictor would have chosen, all tokens together; or nothing."""

    def densities(self, predicted: bool) -> list[float]:
        """Share of each layer's neurons that a token computes whole: of those that fire, or that a mask chooses."""
        counts = self.chosen if predicted and self.chosen else self.fired
        return [float(count.sum()) / (self.tokens * len(self.fired[0])) for count in counts]

    def pack(self, weights: str) -> Iterator[bytes]:
        """Yield the file's bytes, as `Predictor.pack`."""
        arrays: Arrays = {}
        for name in ("fired", "largest", "order", "chosen"):
            arrays |= {f"layers.{i}.{name}": array for i, array in enumerate(getattr(self, name))}
        yield from pack_arrays({"part": "statistics", "weights": weights, "tokens": self.tokens}, arrays)


def weights_identity(tensors: Iterable[TensorEntry]) -> str:
    """Return a checksum of the weights: of the names and checksums of all tensors."""
    return hashlib.sha256(json.dumps([[entry.name, entry.sha256] for entry in tensors]).encode()).hexdigest()


def read_predictor(bundle: Bundle, contents: bool = True) -> Predictor | None:
    """Return a bundle's predictor, its arrays mapped, or None if it has none.

    Parameters
    ----------
    bundle : Bundle
    contents : bool
        Look through its matrices, which brings all their pages into memory; else only at their shapes.

    Raises
    ------
    BundleError
        It was made for other weights, does not fit the model, or has values that are not numbers.
    """
    if (opened := open_part(bundle, "predictor", FIELDS["predictor"])) is None:
        return None
    about, arrays, where = opened
    kind, rank = _kind_and_rank(about, bundle.config, where)
    shapes = _predictor_shapes(kind, rank, bundle.config)
    by_neuron = neuron_layers(bundle.header.tensors)
    made = Predictor(kind, rank, **layers_of(bundle.config, arrays, shapes, where, by_neuron))
    if not contents:
        return made
    if any((signs[..., -1:] >> np.uint64(bundle.config.hidden_size % 64)).any() for signs in made.signs) \
            and bundle.config.hidden_size % 64:
        raise BundleError(f"{where} has signs after the model's last column; make it again.")
    columns = {"inner": bundle.config.hidden_size, "outer": rank}
    for name, cols in columns.items():
        for i, matrix in enumerate(getattr(made, name)):
            if i in by_neuron:
                check_scales(matrix, PREDICTOR_TYPE, cols, f"layers.{i}.{name}", where)
    return made


def part_extents(bundle: Bundle, part: str) -> tuple[Path, dict[str, tuple[int, int]]]:
    """Return the file of a part, and of each of its arrays offset and bytes there, for readers that do not map it.

    The reader of the part checks them; raises `BundleError` if there is none.
    """
    if (opened := open_part(bundle, part, FIELDS[part])) is None:
        raise BundleError(f"The bundle {bundle.path} has no {part}.")
    path = bundle.path / next(entry.name for entry in bundle.header.files if entry.part == part)
    begin = offsets(path, opened[1])
    return path, {name: (begin[name], array.nbytes) for name, array in opened[1].items()}


def predictor_settings(bundle: Bundle) -> dict[str, str | float]:
    """Return kind and rank of a bundle's predictor, without its arrays; nothing if it has none."""
    if (opened := open_part(bundle, "predictor", FIELDS["predictor"])) is None:
        return {}
    kind, rank = _kind_and_rank(opened[0], bundle.config, opened[2])
    return {"kind": kind} | ({"rank": rank} if rank else {})


def _kind_and_rank(about: dict[str, Any], config: ModelConfig, where: str) -> tuple[str, int]:
    """Return the kind and rank in a predictor's file; refuse those that this model cannot have."""
    kind, rank = about["kind"], about["rank"]
    if kind not in PREDICTORS:
        raise BundleError(f"{where} is of the unknown kind {str(kind)[:60]!r}; the kinds are {', '.join(PREDICTORS)}.")
    if type(rank) is not int or not (1 <= rank <= config.hidden_size if kind == "lowrank" else rank == 0):
        raise BundleError(f"{where} has the rank {str(rank)[:60]}, which no {kind} predictor of this model has.")
    return kind, rank


def read_statistics(bundle: Bundle) -> Statistics | None:
    """Return a bundle's statistics, or None if it has none; raises as `read_predictor`."""
    if (opened := open_part(bundle, "statistics", FIELDS["statistics"])) is None:
        return None
    about, arrays, where = opened
    if type(about["tokens"]) is not int or about["tokens"] < 1:
        raise BundleError(f"{where} says it is of {str(about['tokens'])[:60]} tokens.")
    neurons = bundle.config.intermediate_size
    shapes: Shapes = {"fired": ((neurons,), "<i8"), "largest": ((neurons,), "<f4"), "order": ((neurons,), "<i4")}
    if any(name.endswith(".chosen") for name in arrays):
        shapes["chosen"] = ((1,), "<i8")
    made = Statistics(about["tokens"], **layers_of(bundle.config, arrays, shapes, where))
    for i, (fired, order) in enumerate(zip(made.fired, made.order, strict=True)):
        if fired.min() < 0 or fired.max() > made.tokens:
            raise BundleError(f"{where}: a neuron of layer {i} fired {fired.max()} times in {made.tokens} tokens.")
        if not np.array_equal(np.sort(order), np.arange(neurons)):
            raise BundleError(f"{where}: the order of layer {i} does not name each neuron once.")
    for i, chosen in enumerate(made.chosen):
        if not 0 <= chosen[0] <= made.tokens * neurons:
            raise BundleError(f"{where}: {chosen[0]} neurons of layer {i} were chosen in {made.tokens} tokens.")
    return made


def _predictor_shapes(kind: str, rank: int, config: ModelConfig) -> Shapes:
    neurons, hidden = config.intermediate_size, config.hidden_size
    if kind == "sign":
        return {"signs": ((neurons, -(-hidden // 64)), "<u8"), "thresholds": ((neurons,), "<f4")}
    if kind == "threshold":
        return {"thresholds": ((1,), "<f4")}
    return {"inner": ((PREDICTOR_TYPE.nbytes((rank, hidden)),), "u1"),
            "outer": ((PREDICTOR_TYPE.nbytes((neurons, rank)),), "u1"), "thresholds": ((neurons,), "<f4")}


def open_part(bundle: Bundle, part: str, fields: tuple[str, ...]) -> tuple[dict[str, Any], Arrays, str] | None:
    """Open the file of a part and see that it was made for these weights."""
    entry = next((entry for entry in bundle.header.files if entry.part == part), None)
    if entry is None:
        return None
    where = f"Cannot use the bundle {bundle.path}: its {part} {entry.name}"
    try:
        about, arrays = open_arrays(bundle.path / entry.name)
    except BundleError as error:
        raise BundleError(f"Cannot use the bundle {bundle.path}: its {part} {error}") from None
    if sorted(about) != sorted(("part", "weights", *fields)) or about["part"] != part:
        raise BundleError(f"{where} does not have the fields of a {part}; make it again.")
    if about["weights"] != weights_identity(bundle.header.tensors):
        raise BundleError(f"{where} was made for other weights; make it again for these.")
    return about, arrays, where


def layers_of(config: ModelConfig, arrays: Arrays, shapes: Shapes, where: str,
              layers: Collection[int] | None = None) -> dict[str, Any]:
    """Arrays by name and layer, each of its shape and without NaN; empty for other layers than these (None: all)."""
    every = range(config.num_hidden_layers)
    expected = {f"layers.{i}.{name}": want for name, want in shapes.items()
                for i in (every if layers is None else layers)}
    check_arrays(arrays, expected, where)
    return {name: tuple(arrays.get(f"layers.{i}.{name}", np.zeros(0, kind)) for i in every)
            for name, (_, kind) in shapes.items()}


def check_arrays(arrays: Arrays, expected: Shapes, where: str) -> None:
    """Refuse arrays that are not exactly those expected, each of its shape and without NaN."""
    if odd := sorted(set(expected) ^ set(arrays)):
        raise BundleError(f"{where} {'lacks' if odd[0] in expected else 'has'} the array {odd[0][:60]!r}; it does not "
                          "belong to this model.")
    for name, (shape, kind) in expected.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != np.dtype(kind):
            raise BundleError(f"{where}: {name} has shape {list(array.shape)} of {array.dtype}; the model needs "
                              f"{list(shape)} of {np.dtype(kind)}.")
        if array.dtype.kind == "f":
            check_finite(array, name, where)


def check_finite(array: NDArray[Any], name: str, where: str) -> None:
    """Refuse values that are not finite numbers."""
    if not np.isfinite(array).all():
        raise BundleError(f"{where}: {name} has values that are not finite numbers.")


def check_scales(data: NDArray[np.uint8], stored: WeightType, cols: int, name: str, where: str) -> None:
    """Refuse a matrix in tile16 with scales that are not finite numbers."""
    records = data.reshape(-1, stored.tile_bytes(cols) // stored.tile_records(cols))
    check_finite(np.ascontiguousarray(records[:, -LINE_BYTES:]).view(np.float16), name, where)
