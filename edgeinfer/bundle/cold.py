"""Neurons by themselves, for reads from storage: a part of a bundle beside its weights, which holds them a second time.

A cluster is the unit of a read: a neuron's gate row, up row and down column together, or as many neurons as fit a
unit of direct I/O where they are small, filled up with zeros to whole units. Each has a checksum of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.errors import BundleError
from edgeinfer.quant import WeightType

from ..base.dataclass import dataclass
from .arrays import Later, offsets, pack_arrays
from .format import UNIT_BYTES, TensorEntry, cluster_shape, neuron_layers
from .parts import layers_of, open_part, weights_identity

if TYPE_CHECKING:
    from .reader import Bundle

COLD_FILE = "cold.bin"
_STEP_BYTES = 1 << 20
Bytes = NDArray[np.uint8]


def cold_bytes(tensors: Iterable[tuple[WeightType, tuple[int, ...]]]) -> int:
    """Return about how long the file is for weights of these types and shapes."""
    shapes = (_clusters(shape, stored) for stored, shape in tensors if stored.layout == "neuron")
    return sum(n * (nbytes + 4) for n, _, nbytes in shapes)


def pack_cold(tensors: Iterable[TensorEntry], stored: Callable[[TensorEntry], Bytes]) -> Iterator[bytes]:
    """Yield the file's bytes, a layer at a time.

    Parameters
    ----------
    tensors : of TensorEntry
        All of the bundle: the part names the weights that it repeats.
    stored : callable
        Gives a tensor's bytes.
    """
    tensors = list(tensors)
    entries, sums, arrays = neuron_layers(tensors), dict[str, NDArray[np.uint32]](), dict[str, Any]()

    def clusters(entry: TensorEntry) -> Iterator[Bytes]:
        data = clusters_of(entry, stored(entry))
        sums[entry.name] = np.array([zlib.crc32(cluster) for cluster in data], np.uint32)
        yield data

    def checksums(entry: TensorEntry) -> Iterator[NDArray[np.uint32]]:
        yield sums[entry.name]

    for i, entry in entries.items():
        n, _, nbytes = _clusters(entry.shape, entry.type)
        arrays[f"layers.{i}.clusters"] = Later(np.dtype("u1"), (n, nbytes), partial(clusters, entry))
    for i, entry in entries.items():
        arrays[f"layers.{i}.checksums"] = Later(np.dtype("<u4"), (_clusters(entry.shape, entry.type)[0],),
                                                partial(checksums, entry))
    neurons = _cluster_of(entries)[1]
    about = {"part": "cold", "weights": weights_identity(tensors), "neurons": neurons}
    yield from pack_arrays(about, arrays, UNIT_BYTES)


def clusters_of(entry: TensorEntry, data: Bytes) -> Bytes:
    """Return a layer's neurons as the file holds them, of shape (clusters, bytes of one)."""
    neurons, part = entry.shape[0], entry.type.part_bytes(entry.shape[2])
    n, of_one, nbytes = _clusters(entry.shape, entry.type)
    out = np.zeros((n, nbytes), np.uint8)
    parts = entry.shape[1]
    together = np.zeros((n * of_one, parts, part), np.uint8)
    together[:neurons, 0] = data[: neurons * part].reshape(neurons, part)
    together[:neurons, 1:] = data[neurons * part :].reshape(neurons, parts - 1, part)
    out[:, : of_one * parts * part] = together.reshape(n, -1)
    return out


@dataclass(frozen=True)
class Cold:
    """Clusters of a bundle, in a file that is not open yet."""

    path: Path
    neurons: int
    """Neurons of a cluster."""
    nbytes: int
    """Bytes of a cluster."""
    offsets: tuple[int, ...]
    """Start of each layer's clusters in the file: multiples of `UNIT_BYTES`; 0 for layers in tiles."""
    checksums: tuple[NDArray[np.uint32], ...]
    """CRC-32 of each cluster, layer by layer; none of layers in tiles."""

    def verify(self) -> None:
        """Read all clusters and compare their checksums; raises `BundleError` that names the first damaged one."""
        with os_errors(BundleError, f"{self.path} cannot be read"):
            self._verify()

    def _verify(self) -> None:
        per_step = max(1, _STEP_BYTES // self.nbytes)
        with open_plain(self.path) as file:
            for layer, (offset, sums) in enumerate(zip(self.offsets, self.checksums, strict=True)):
                file.seek(offset)
                for first in range(0, len(sums), per_step):
                    some = sums[first : first + per_step]
                    data = memoryview(file.read(len(some) * self.nbytes))
                    for i, expected in enumerate(some):
                        self.check(layer, first + i, data[i * self.nbytes : (i + 1) * self.nbytes], int(expected))

    def check(self, layer: int, cluster: int, data: Any, expected: int | None = None) -> None:
        """Raise `BundleError` if the bytes of a cluster differ from those that were written."""
        expected = int(self.checksums[layer][cluster]) if expected is None else expected
        if zlib.crc32(data) != expected:
            which = f"neurons {cluster * self.neurons} to {(cluster + 1) * self.neurons - 1} of layer {layer}"
            raise BundleError(f"{self.path}: {which} are damaged: their checksum does not match; make or copy the "
                              "bundle again.")


def read_cold(bundle: Bundle) -> Cold | None:
    """Return the locations of a bundle's clusters, or None; raises as `read_predictor`."""
    if (opened := open_part(bundle, "cold", ("neurons",))) is None:
        return None
    about, arrays, where = opened
    if not (entries := neuron_layers(bundle.header.tensors)):
        raise BundleError(f"{where} belongs to FFNs stored neuron by neuron, which the bundle lacks; make it again.")
    n, neurons, nbytes = _cluster_of(entries)
    if about["neurons"] != neurons:
        raise BundleError(f"{where} says it has {str(about['neurons'])[:60]} neurons in a cluster; this model has "
                          f"{neurons}.")
    made = layers_of(bundle.config, arrays, {"clusters": ((n, nbytes), "u1"), "checksums": ((n,), "<u4")}, where,
                     entries)
    path = bundle.path / next(entry.name for entry in bundle.header.files if entry.part == "cold")
    begin = offsets(path, arrays)
    found = tuple(begin.get(f"layers.{i}.clusters", 0) for i in range(bundle.config.num_hidden_layers))
    if any(offset % UNIT_BYTES for offset in found):
        raise BundleError(f"{where} has clusters that do not begin at multiples of {UNIT_BYTES} bytes; make it again.")
    return Cold(path, neurons, nbytes, found, tuple(sums.copy() for sums in made["checksums"]))


def _cluster_of(entries: dict[int, TensorEntry]) -> tuple[int, int, int]:
    first = next(iter(entries.values()))
    return _clusters(first.shape, first.type)


def _clusters(shape: tuple[int, ...], stored: WeightType) -> tuple[int, int, int]:
    """Clusters of a layer, neurons of one, bytes of one."""
    neurons, nbytes = cluster_shape(shape[1] * stored.part_bytes(shape[2]))
    return -(-shape[0] // neurons), neurons, nbytes
