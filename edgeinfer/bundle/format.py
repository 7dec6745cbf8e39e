"""What a bundle holds: its entries, and how many bytes a tensor of each type takes in each layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgeinfer.config import GROUP_SIZES
from edgeinfer.errors import BundleError
from edgeinfer.graph import ModelConfig, WeightType

FORMAT_NAME = "edgeinfer-bundle"
FORMAT_VERSION = 1
WEIGHTS_FILE = "weights.bin"

LAYOUTS = {"tile16": ("q4", "int8", "f16", "f32"), "neuron": ("q4", "int8"), "plain": ("f32",)}
"""Layouts, and the types that each of them can hold."""
LINE_BYTES = 64
"""Everything in weights.bin is a multiple of a cache line."""
LARGE_ALIGNMENT = 65536
"""Large tensors start on the largest page in use (64 KiB on some ARM systems), so that each can be mapped alone."""
LARGE_TENSOR_BYTES = 1 << 20
MAX_DIMENSION = 2**31 - 1
MAX_BYTES = 2**63 - 1
"""Offsets and sizes must fit the kernels' int64."""


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table."""

    name: str
    layout: str
    dtype: str
    group_size: int
    """Elements that share one fp16 scale; 0 for f16 and f32."""
    shape: tuple[int, ...]
    """Logical shape, without padding."""
    offset: int
    """First byte in weights.bin."""
    nbytes: int
    """Bytes with padding of rows, columns and groups."""
    sha256: str
    """Checksum of these bytes, in hexadecimal."""

    @property
    def type(self) -> WeightType:
        """The storage of this tensor in the graph's words."""
        return WeightType(self.dtype, self.group_size, self.layout)


@dataclass(frozen=True)
class FileEntry:
    """One file that travels with the weights: tokenizer, chat template, licence."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Quantisation:
    """The storage that was asked for when the bundle was made; each tensor's own is in the table."""

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
    """Where the weights came from, for people: a checkpoint's directory name or its id on the hub."""
    made_by: str = ""
    """Program and version that wrote the bundle."""


def round_up(n: int, step: int) -> int:
    """Smallest multiple of `step` that is at least n."""
    return -(-n // step) * step


def alignment(nbytes: int) -> int:
    """Alignment in weights.bin of a tensor of this many bytes."""
    return LARGE_ALIGNMENT if nbytes >= LARGE_TENSOR_BYTES else LINE_BYTES


def check_type(layout: str, dtype: str, group_size: int) -> None:
    """Refuse a combination of layout, type and group size that no kernel reads.

    Raises
    ------
    BundleError
        The sentence names the value and what is possible.
    """
    if layout not in LAYOUTS:
        raise BundleError(f"layout {layout!r} is unknown; this version reads {', '.join(LAYOUTS)}.")
    if dtype not in LAYOUTS[layout]:
        raise BundleError(f"type {dtype!r} does not exist in layout {layout}; it holds {', '.join(LAYOUTS[layout])}.")
    if dtype in ("q4", "int8"):
        if group_size not in GROUP_SIZES:
            raise BundleError(f"group size {group_size} is unknown; {dtype} has groups of 32, 64 or 128.")
    elif group_size != 0:
        raise BundleError(f"group size {group_size} makes no sense for {dtype}; it must be 0.")


def stored_bytes(layout: str, dtype: str, group_size: int, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor takes in weights.bin, padding of rows, columns and groups included.

    Parameters
    ----------
    layout : {'tile16', 'neuron', 'plain'}
    dtype : {'q4', 'int8', 'f16', 'f32'}
    group_size : {0, 32, 64, 128}
    shape : tuple of int
        (rows, cols) for tile16, (intermediate_size, 3, hidden_size) for neuron, (n,) for plain.

    Raises
    ------
    BundleError
        For an unknown combination, a shape that the layout cannot have, or a size beyond 2^63 - 1 bytes.
    """
    check_type(layout, dtype, group_size)
    dimensions = {"tile16": 2, "neuron": 3, "plain": 1}[layout]
    if len(shape) != dimensions or (layout == "neuron" and shape[1] != 3):
        raise BundleError(f"shape {list(shape)} does not fit layout {layout}.")
    if not all(1 <= n <= MAX_DIMENSION for n in shape):
        raise BundleError(f"shape {list(shape)} is out of range; each dimension is from 1 to {MAX_DIMENSION}.")
    if layout == "plain":
        nbytes = 4 * shape[0]
    elif layout == "neuron":
        nbytes = shape[0] * 3 * neuron_part_bytes(dtype, group_size, shape[2])
    else:
        nbytes = -(-shape[0] // 16) * tile_bytes(dtype, group_size, shape[1])
    if nbytes > MAX_BYTES - LARGE_ALIGNMENT:
        raise BundleError(f"shape {list(shape)} needs {nbytes} bytes, more than a 64-bit offset can address.")
    return nbytes


def weights_file_bytes(tensors: Iterable[tuple[WeightType, tuple[int, ...]]]) -> int:
    """Bytes of weights.bin that holds these tensors (storage, shape) in this order, gaps included.

    Raises
    ------
    BundleError
        As `stored_bytes`.
    """
    end = 0
    for stored, shape in tensors:
        nbytes = stored_bytes(stored.layout, stored.dtype, stored.group_size, shape)
        end = round_up(end, alignment(nbytes)) + nbytes
    return round_up(end, LINE_BYTES)


def tile_bytes(dtype: str, group_size: int, cols: int) -> int:
    """Bytes of 16 rows in layout tile16."""
    if dtype == "f32":
        return cols * LINE_BYTES
    if dtype == "f16":
        return -(-cols // 2) * LINE_BYTES
    record = (16 if dtype == "q4" else 32) * group_size + LINE_BYTES
    return -(-cols // (2 * group_size)) * record


def neuron_part_bytes(dtype: str, group_size: int, cols: int) -> int:
    """Bytes of one of a neuron's three parts in layout neuron: codes, scales, padding to a cache line."""
    groups = -(-cols // group_size)
    codes = group_size // 2 if dtype == "q4" else group_size
    return round_up(groups * (codes + 2), LINE_BYTES)
