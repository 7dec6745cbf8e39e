"""Weight layouts in NumPy: the specification of tile16 and neuron, byte for byte, and the packing for converters.

tile16 stores 16 rows at a time (a tile), k in steps of 4, so that one 64-byte line feeds 16 lanes of an int8 dot
product:

* q4: a record holds two groups of columns, g/8 lines each, then one line with their 2 x 16 fp16 scales. Byte 4r+j of
  line l has the code of row r, column 8l+j in its low nibble and of column 8l+4+j in its high nibble; code = q + 8.
* int8: the same with g/4 lines per group; byte 4r+j of line l is column 4l+j.
* f16: a line holds 16 values of column 2l, then 16 of column 2l+1. f32: a line holds 16 values of one column.

neuron stores the gate rows of all neurons, then of each neuron its up row and its down column. Neurons without a gate
have two parts, and their row is where a gate would be. Each part is codes, then fp16 scales, padded to 64 bytes. In q4
byte b of a group holds column b (low nibble) and column b + g/2 (high nibble); in q2 it holds columns b, b + g/4,
b + g/2 and b + 3g/4, the lowest bits first.

Padding: the code of zero (q4 8, q2 1, int8 0) in the columns of a live group; zero bytes and scale 0 in an absent last
group and in absent rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import packed
from .table import LINE_BYTES, TILE_ROWS, TYPES
from .types import WeightType

Bytes = NDArray[np.uint8]
Codes = NDArray[np.int8]
Scales = NDArray[np.float16]
Floats = NDArray[np.float32]


def pack_tile16(values: NDArray, dtype: str, group_size: int = 0, scales: Scales | None = None) -> Bytes:
    """Bytes of a matrix in layout tile16, of a type that floats can be quantised to.

    Packing blocks of 16n rows one after another gives the same bytes as packing the whole matrix.

    Parameters
    ----------
    values : int8 or float array of shape (rows, cols)
        Codes in [-8, 7] (q4) or [-127, 127] (int8); the weights themselves for f16 and f32.
    dtype : {'q4', 'int8', 'f16', 'f32'}
    group_size : {0, 32, 64, 128}
    scales : float16 array of shape (rows, ceil(cols / group_size))
        For q4 and int8.

    Returns
    -------
    uint8 array of shape (WeightType(dtype, group_size).nbytes(values.shape),)
    """
    rows, cols = values.shape
    stored = WeightType(dtype, group_size)
    nbytes = stored.nbytes((rows, cols))
    n_tiles = -(-rows // TILE_ROWS)
    if not stored.quantised:
        return _pack_floats(values, stored, n_tiles)
    if scales is None or scales.shape != (rows, -(-cols // group_size)) or scales.dtype != np.float16:
        raise ValueError(f"{dtype} codes of shape {values.shape} need float16 scales for each group of {group_size}.")
    if not stored.storage.simple:
        return packed.pack(values, stored, packed.Factors(scales))
    n_records = stored.tile_records(cols)
    out = np.empty((n_tiles, n_records, nbytes // (n_tiles * n_records)), np.uint8)
    codes = _padded_codes(values, dtype, group_size, n_tiles * TILE_ROWS, n_records * 2 * group_size)
    steps = codes.view(np.uint32).reshape(n_tiles, TILE_ROWS, n_records, -1)  # four columns of a row move as one
    if stored.storage.bits == 4:  # even steps to the low nibbles, odd steps to the high ones
        steps = steps[..., 0::2] | steps[..., 1::2] << np.uint32(4)
    lines = out[:, :, :-LINE_BYTES].view(np.uint32).reshape(n_tiles, n_records, -1, TILE_ROWS)
    lines[:] = steps.transpose(0, 2, 3, 1)
    padded = np.zeros((n_tiles * TILE_ROWS, n_records * 2), np.float16)
    padded[:rows, : scales.shape[1]] = scales
    padded = padded.reshape(n_tiles, TILE_ROWS, n_records, 2).transpose(0, 2, 3, 1)
    out[:, :, -LINE_BYTES:] = np.ascontiguousarray(padded).reshape(n_tiles, n_records, -1).view(np.uint8)
    return out.reshape(-1)


def tile16_codes(data: Bytes, dtype: str, group_size: int, shape: tuple[int, int]) -> tuple[Codes, Scales]:
    """Codes (int8, (rows, cols)) and scales (float16, (rows, groups)) of a matrix in layout tile16.

    Its type has a uniform grid and no factors but scales in fp16.
    """
    rows, cols = shape
    if not TYPES[dtype].simple:
        stored = WeightType(dtype, group_size)
        found, factors = packed.unpack(_checked(data, stored.nbytes(shape)), stored, shape)
        return found, factors.scales
    n_tiles, n_records = -(-rows // TILE_ROWS), -(-cols // (2 * group_size))
    records = _checked(data, WeightType(dtype, group_size).nbytes(shape)).reshape(n_tiles, n_records, -1)
    lines = records[:, :, :-LINE_BYTES].reshape(n_tiles, n_records, -1, TILE_ROWS, 4).transpose(0, 3, 1, 2, 4)
    if TYPES[dtype].bits == 4:
        lines = np.stack([lines & 15, lines >> 4], axis=-2) - np.uint8(TYPES[dtype].offset)
    codes = np.ascontiguousarray(lines).view(np.int8).reshape(n_tiles * TILE_ROWS, -1)[:rows, :cols]
    scales = np.ascontiguousarray(records[:, :, -LINE_BYTES:]).view(np.float16)
    scales = scales.reshape(n_tiles, n_records, 2, TILE_ROWS).transpose(0, 3, 1, 2).reshape(n_tiles * TILE_ROWS, -1)
    return np.ascontiguousarray(codes), np.ascontiguousarray(scales[:rows, : -(-cols // group_size)])


def unpack_tile16(data: Bytes, dtype: str, group_size: int, shape: tuple[int, int], levels: tuple[int, ...] = ()
                  ) -> Floats:
    """The weights, float32 of `shape` = (rows, cols), that bytes in layout tile16 stand for."""
    if TYPES[dtype].quantised and not TYPES[dtype].simple:
        stored = WeightType(dtype, group_size, levels=levels)
        codes, factors = packed.unpack(_checked(data, stored.nbytes(shape)), stored, shape)
        return packed.values(codes, factors, stored)
    if TYPES[dtype].quantised:
        return dequantise(*tile16_codes(data, dtype, group_size, shape), group_size)
    rows, cols = shape
    n_tiles = -(-rows // TILE_ROWS)
    values = _checked(data, WeightType(dtype, group_size).nbytes(shape)).view(_float_type(dtype))
    values = values.reshape(n_tiles, -1, TILE_ROWS).transpose(0, 2, 1).reshape(n_tiles * TILE_ROWS, -1)
    return np.ascontiguousarray(values[:rows, :cols], np.float32)


def pack_neuron(codes: Codes, dtype: str, group_size: int, scales: Scales) -> Bytes:
    """Bytes of an FFN in layout neuron.

    Parameters
    ----------
    codes : int8 array of shape (n_neurons, parts, hidden_size)
        Gate row, up row and down column of each neuron, or without a gate row and column, in [-8, 7] (q4),
        [-127, 127] (int8) or [-1, 2] (q2).
    dtype : {'q4', 'int8', 'q2'}
    group_size : {32, 64, 128}
        32 is too few columns for q2.
    scales : float16 array of shape (n_neurons, parts, ceil(hidden_size / group_size))

    Returns
    -------
    uint8 array of shape (WeightType(dtype, group_size, 'neuron').nbytes(codes.shape),)
    """
    WeightType(dtype, group_size, "neuron").nbytes(codes.shape)  # or it is refused
    return np.concatenate([pack_parts(codes[:, parts], dtype, group_size, scales[:, parts])
                           for parts in (slice(0, 1), slice(1, None))])


def pack_parts(codes: Codes, dtype: str, group_size: int, scales: Scales) -> Bytes:
    """Bytes of parts of neurons as they are in layout neuron, one after the other.

    A tensor may be packed piece by piece: first all gates, then neuron by neuron the others.

    Parameters
    ----------
    codes : int8 array of shape (..., hidden_size)
    dtype : {'q4', 'int8', 'q2'}
    group_size : {32, 64, 128}
    scales : float16 array of shape (..., ceil(hidden_size / group_size))

    Returns
    -------
    uint8 array of one dimension
    """
    hidden, groups = codes.shape[-1], -(-codes.shape[-1] // group_size)
    if scales.shape != (*codes.shape[:-1], groups) or scales.dtype != np.float16:
        raise ValueError(f"{dtype} codes of shape {codes.shape} need float16 scales for each group of {group_size}.")
    rows = codes.reshape(-1, hidden)
    padded = _padded_codes(rows, dtype, group_size, len(rows), groups * group_size)
    if TYPES[dtype].bits < 8:
        pieces = padded.reshape(len(rows), groups, 8 // TYPES[dtype].bits, -1)
        padded = np.bitwise_or.reduce(pieces << _shifts(dtype), axis=2).reshape(len(rows), -1)
    out = np.zeros((len(rows), WeightType(dtype, group_size, "neuron").part_bytes(hidden)), np.uint8)
    end = padded.shape[1]
    out[:, :end] = padded
    out[:, end : end + 2 * groups] = np.ascontiguousarray(scales).reshape(-1, groups).view(np.uint8)
    return out.reshape(-1)


def neuron_codes(data: Bytes, dtype: str, group_size: int, shape: tuple[int, int, int]) -> tuple[Codes, Scales]:
    """Codes (int8, (n_neurons, parts, hidden_size)) and scales (float16, (n_neurons, parts, groups)), layout neuron."""
    n, of_one, hidden = shape
    groups, rows = -(-hidden // group_size), n * of_one
    parts = _checked(data, WeightType(dtype, group_size, "neuron").nbytes(shape)).reshape(rows, -1)
    parts = np.concatenate([parts[:n, None], parts[n:].reshape(n, of_one - 1, -1)], axis=1).reshape(rows, -1)
    end = groups * group_size * TYPES[dtype].bits // 8
    codes = parts[:, :end]
    if TYPES[dtype].bits < 8:
        together, mask = codes.reshape(rows, groups, 1, -1), np.uint8((1 << TYPES[dtype].bits) - 1)
        codes = (together >> _shifts(dtype) & mask).reshape(rows, -1) - np.uint8(TYPES[dtype].offset)
    scales = np.ascontiguousarray(parts[:, end : end + 2 * groups]).view(np.float16)
    return np.ascontiguousarray(codes[:, :hidden]).view(np.int8).reshape(shape), scales.reshape(n, of_one, groups)


def _shifts(dtype: str) -> Bytes:
    """Bits of a byte at which its codes begin: (rows, groups, codes of a byte, bytes of a group)."""
    return np.arange(0, 8, TYPES[dtype].bits, dtype=np.uint8)[None, None, :, None]


def unpack_neuron(data: Bytes, dtype: str, group_size: int, shape: tuple[int, int, int]) -> Floats:
    """The weights, float32 of `shape` = (n_neurons, parts, hidden_size), that bytes in layout neuron stand for."""
    codes, scales = neuron_codes(data, dtype, group_size, shape)
    rows = shape[0] * shape[1]
    return dequantise(codes.reshape(rows, shape[2]), scales.reshape(rows, -1), group_size).reshape(shape)


def dequantise(codes: Codes, scales: Scales, group_size: int) -> Floats:
    """codes x scales: int8 (rows, cols) and float16 (rows, groups) to float32 (rows, cols)."""
    spread = np.repeat(scales.astype(np.float32), group_size, axis=1)[:, : codes.shape[1]]
    return np.multiply(codes, spread, dtype=np.float32)


def _float_type(dtype: str) -> str:
    return f"<f{TYPES[dtype].bits // 8}"


def _pack_floats(values: NDArray, stored: WeightType, n_tiles: int) -> Bytes:
    rows, cols = values.shape
    padded = np.zeros((n_tiles * TILE_ROWS, stored.padded_columns(cols)), _float_type(stored.dtype))
    padded[:rows, :cols] = values
    lines = padded.reshape(n_tiles, TILE_ROWS, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(lines).reshape(-1).view(np.uint8)


def _padded_codes(codes: Codes, dtype: str, group_size: int, n_rows: int, n_cols: int) -> Bytes:
    """Codes as stored, uint8 (n_rows, n_cols): with their offset in live groups, zeros elsewhere."""
    rows, cols = codes.shape
    padded = np.zeros((n_rows, n_cols), np.uint8)
    padded[:rows, : -(-cols // group_size) * group_size] = TYPES[dtype].offset
    padded[:rows, :cols] += codes.view(np.uint8)  # modulo 256: -8..7 becomes 0..15
    return padded


def _checked(data: Bytes, nbytes: int) -> Bytes:
    if data.dtype != np.uint8 or data.shape != (nbytes,):
        raise ValueError(f"the layout needs {nbytes} bytes, but {data.shape} of {data.dtype} were given.")
    return data
