"""The file of external data: tensors one after the other at multiples of 4 KiB, written as they are made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple

import numpy as np

from edgeinfer.base.units import round_up
from edgeinfer.errors import BundleError

from ...base.progress import OnStageProgress
from .model import ExternalTensor
from .weights import KINDS, Reader, Stored

ALIGNMENT = 4096
"""Alignment of tensors, so that onnxruntime can map each alone."""
F16_MAX = 65504.0


class Data(NamedTuple):
    """Data written for a model."""

    tensors: dict[str, ExternalTensor]
    nbytes: int

    @property
    def identity(self) -> str:
        """Checksum of the names, offsets, lengths and checksums of all tensors."""
        entries = sorted((name, *entry) for name, entry in self.tensors.items())
        return hashlib.sha256(repr(entries).encode()).hexdigest()


def data_bytes(tensors: Iterable[Stored]) -> int:
    """Return the length of a file of these tensors."""
    end = 0
    for stored in tensors:
        end = round_up(end, ALIGNMENT) + stored.nbytes
    return end


def write_data(tensors: Iterable[Stored], read: Reader, file: BinaryIO,
               progress: OnStageProgress | None = None) -> Data:
    """Write all tensors.

    Raises
    ------
    BundleError
        A weight is too large for f16.
    OSError
        The file cannot be written.
    """
    tensors = list(tensors)
    total, end, written = data_bytes(tensors), 0, {}
    for stored in tensors:
        file.write(bytes(-end % ALIGNMENT))
        offset = end = round_up(end, ALIGNMENT)
        own = hashlib.sha256()
        for piece in stored.pieces(read):
            data = _bytes(piece, stored)
            file.write(data)
            own.update(data)
            end += len(data)
            if progress:
                progress(end, total, stored.name)
        if end - offset != stored.nbytes:
            raise BundleError(f"The tensor {stored.name!r} came out with {end - offset} bytes instead of "
                              f"{stored.nbytes}, which is a bug.")
        written[stored.name] = ExternalTensor(offset, stored.nbytes, own.hexdigest())
    return Data(written, end)


def _bytes(piece: np.ndarray, stored: Stored) -> memoryview:
    """The bytes of a piece in the tensor's type."""
    if stored.kind == "f16" and piece.dtype.itemsize > 2 and piece.size:
        largest = float(np.abs(piece).max())
        if not largest <= F16_MAX:
            raise BundleError(f"The weight {stored.name} has the value {largest:g}, beyond f16's {F16_MAX:g}; export "
                              "with --dtype f32.")
    return np.ascontiguousarray(piece, KINDS[stored.kind]).data.cast("B")
