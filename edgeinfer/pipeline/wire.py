"""Messages between a runner and a stage in another process: a JSON object with its length, then the bytes of an array.

Nothing that is received is executed: a message has numbers, texts and float32 rows, and anything else is refused.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import EdgeInferError

_LENGTHS = struct.Struct("<IQ")
MAX_HEADER, MAX_ROWS = 1 << 24, 1 << 32
"""Bytes of a message's object, and of its rows; a length beyond means that the two do not understand each other."""


def send(stream: BinaryIO, message: dict[str, Any], rows: NDArray[np.float32] | None = None) -> None:
    """Write a message, whole."""
    if rows is not None:
        rows = np.ascontiguousarray(rows, np.float32)
        message = {**message, "rows": rows.shape}
    header = json.dumps(message, separators=(",", ":")).encode()
    stream.write(_LENGTHS.pack(len(header), 0 if rows is None else rows.nbytes) + header)
    if rows is not None and rows.nbytes:
        stream.write(rows.data.cast("B"))
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], NDArray[np.float32] | None] | None:
    """Read a message; None at the end of the stream, also in the middle of a message.

    Raises `EdgeInferError` for anything but a message.
    """
    if (lengths := _exactly(stream, _LENGTHS.size)) is None:
        return None
    n_header, n_rows = _LENGTHS.unpack(lengths)
    if n_header > MAX_HEADER or n_rows > MAX_ROWS:
        raise EdgeInferError(f"A stage of the pipeline sent a message of {n_header} and {n_rows} bytes, more than any "
                             "has; run the same version of edgeinfer everywhere.")
    header, data = _exactly(stream, n_header), _exactly(stream, n_rows)
    if header is None or data is None:
        return None
    try:
        message = json.loads(header)
        shape = message.pop("rows", None)
        rows = None if shape is None else np.frombuffer(data, "<f4").reshape(shape)
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise EdgeInferError("A stage of the pipeline sent an invalid message; run the same version of edgeinfer "
                             "everywhere.") from None
    return message, rows


def _exactly(stream: BinaryIO, n: int) -> bytearray | None:
    data = bytearray(n)
    left = memoryview(data)
    while left.nbytes:
        if not (got := stream.readinto(left)):  # type: ignore[attr-defined]
            return None
        left = left[got:]
    return data
