"""Contents of a bundle: its entries, and their offsets in weights.bin."""

from __future__ import annotations

from collections.abc import Iterable

from edgeinfer.base.units import round_up
from edgeinfer.errors import BundleError
from edgeinfer.graph import Graph, ModelConfig
from edgeinfer.quant import LINE_BYTES, WeightType

from ..base.dataclass import dataclass

FORMAT_NAME = "edgeinfer-bundle"
FORMAT_VERSION = 3
"""Version that is written; older ones can be read."""
WEIGHTS_FILE = "weights.bin"
PARTS = ("predictor", "statistics", "cold", "quality", "draft_head", "screen")
"""Optional parts of a model that are files of their own."""
APPROXIMATING = ("predictor", "screen")
"""Parts with which a run may approximate, so that its predictions depend on them."""
LARGE_ALIGNMENT = 65536
"""Large tensors start on the largest page in use (64 KiB on some ARM systems), so that each can be mapped alone."""
LARGE_TENSOR_BYTES = 1 << 20
UNIT_BYTES = 4096
"""Direct I/O reads multiples of it from multiples of it."""
END_BYTES = LINE_BYTES
"""Zeros after the last tensor, since format 2: kernels read up to 30 bytes after a tensor in layout neuron."""


class UnknownError(Exception):
    """A value that a later version may have added; the `BundleError` has advice if the header's writer is known."""


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table."""

    name: str
    type: WeightType
    shape: tuple[int, ...]
    """Logical shape, without padding."""
    offset: int
    """First byte in weights.bin."""
    nbytes: int
    """Bytes with padding of rows, columns and groups."""
    sha256: str
    """Checksum of these bytes, in hexadecimal."""
    pieces: int = 0
    """Pieces that it is in, `stride` bytes apart, with those of other tensors between them; 0: it is in one."""
    stride: int = 0

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return self.nbytes // max(1, self.pieces)

    @property
    def piece_offsets(self) -> range:
        """First byte of each piece in weights.bin."""
        step = self.stride or 1
        return range(self.offset, self.offset + max(1, self.pieces) * step, step)


@dataclass(frozen=True)
class FileEntry:
    """One file that travels with the weights: tokenizer, chat template, licence, or an optional part."""

    name: str
    nbytes: int
    sha256: str
    part: str = ""
    """Entry of `PARTS` that it belongs to; empty for the others."""


@dataclass(frozen=True)
class Quantisation:
    """The storage that was requested when the bundle was made; each tensor's own is in the table."""

    weights: str = "q4"
    """Type of the layers' matrices."""
    group_size: int = 32
    """Elements that share one fp16 scale."""
    embedding: str = "int8"
    head: str = "int8"


@dataclass(frozen=True)
class Header:
    """The content of bundle.json."""

    config: ModelConfig
    quantisation: Quantisation
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    weights_bytes: int
    """Length of weights.bin."""
    source: str = ""
    """Origin of the weights, for people: a checkpoint's directory name or its id on the hub."""
    made_by: str = ""
    """Program and version that wrote the bundle."""
    version: int = FORMAT_VERSION
    """Version of the format."""


def neuron_layers(tensors: Iterable[TensorEntry]) -> dict[int, TensorEntry]:
    """Return the FFNs stored neuron by neuron, by layer, in the order of the layers."""
    found = {int(entry.name.split(".")[1]): entry for entry in tensors if entry.type.layout == "neuron"}
    return dict(sorted(found.items()))


def next_offset(end: int, nbytes: int) -> int:
    """Return where a tensor of this many bytes starts in weights.bin, after one that ends at `end`."""
    return round_up(end, LARGE_ALIGNMENT if nbytes >= LARGE_TENSOR_BYTES else LINE_BYTES)


class TensorLayout:
    """Offsets of tensors in weights.bin, one after the other.

    Attributes
    ----------
    end : int
        End of the last tensor, or of the allocation that several share.
    """

    def __init__(self) -> None:
        self.end = self._at = self._filled = 0
        self._shared = 0, 0

    def add(self, nbytes: int, pieces: int = 0, stride: int = 0) -> int:
        """Return where a tensor of this many bytes begins; raises `BundleError` for tensors that cannot share an
        allocation."""
        if not pieces:
            self.close()
            offset = next_offset(self.end, nbytes)
            self.end = offset + nbytes
            return offset
        own, whole = nbytes // pieces, pieces * stride
        if not self._filled:
            self._at, self._shared = next_offset(self.end, whole), (pieces, stride)
            self.end = self._at + whole
        begins = self._filled
        if (pieces, stride) != self._shared or own * pieces != nbytes or own % LINE_BYTES or begins + own > stride:
            raise BundleError(f"has {pieces} pieces of {own} bytes, {stride} apart, which do not fit beside each other")
        self._filled = (begins + own) % stride
        return self._at + begins

    def close(self) -> None:
        """Raise `BundleError` if an allocation that tensors share is not full."""
        if self._filled:
            raise BundleError("does not follow on tensors that share an allocation and fill it")


def end_of_file(end: int, version: int = FORMAT_VERSION) -> int:
    """Return the length of weights.bin whose last tensor ends at `end`."""
    return round_up(end, LINE_BYTES) + (END_BYTES if version > 1 else 0)


def cluster_shape(neuron_bytes: int) -> tuple[int, int]:
    """Return the neurons of a cluster of cold neurons, a power of two, and its bytes on storage."""
    neurons = 1 << max(0, (UNIT_BYTES // neuron_bytes).bit_length() - 1)
    return neurons, round_up(neurons * neuron_bytes, UNIT_BYTES)


def file_offsets(graph: Graph) -> dict[str, int]:
    """First byte in weights.bin of each of a graph's weights."""
    return _placed(graph)[0]


def weights_file_bytes(graph: Graph) -> int:
    """Return the bytes of weights.bin that holds a graph's weights, gaps included.

    Raises
    ------
    BundleError
        As `WeightType.nbytes`.
    """
    return end_of_file(_placed(graph)[1])


def _placed(graph: Graph) -> tuple[dict[str, int], int]:
    layout, strides = TensorLayout(), graph.strides
    offsets = {weight.name: layout.add(graph.stored_bytes[weight.name], weight.pieces, strides.get(weight.name, 0))
               for weight in graph.weights}
    return offsets, layout.end
