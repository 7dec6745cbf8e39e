"""Slow loops that say where every nibble of a layout lies; NumPy alone, nothing of the product."""

from __future__ import annotations

import itertools

import numpy as np


def f16_bytes(value) -> bytes:
    return np.float16(value).tobytes()


def tile16(values: np.ndarray, dtype: str, group: int = 0, scales: np.ndarray | None = None) -> bytes:
    rows, cols = values.shape
    out = bytearray()
    for tile in range(0, rows, 16):
        if dtype == "f32":
            for c in range(cols):
                out += b"".join(np.float32(values[r, c] if r < rows else 0).tobytes() for r in range(tile, tile + 16))
        elif dtype == "f16":
            for c in range(cols + cols % 2):
                live = c < cols
                out += b"".join(f16_bytes(values[r, c] if live and r < rows else 0) for r in range(tile, tile + 16))
        else:
            groups = -(-cols // group)
            for first in range(0, groups, 2):
                for g in (first, first + 1):
                    out += tile16_group(values, dtype, group, tile, g, g < groups)
                for g in (first, first + 1):
                    for r in range(tile, tile + 16):
                        out += f16_bytes(scales[r, g] if r < rows and g < groups else 0)
    return bytes(out)


def tile16_group(codes: np.ndarray, dtype: str, group: int, tile: int, g: int, live: bool) -> bytes:
    rows, cols = codes.shape
    out = bytearray()

    def code(r: int, c: int) -> int:
        if not live or r >= rows:
            return 0
        value = int(codes[r, c]) if c < cols else 0
        return value + 8 if dtype == "q4" else value & 255

    for line in range(group // (8 if dtype == "q4" else 4)):
        for lane in range(16):
            for j in range(4):
                if dtype == "q4":
                    c = g * group + 8 * line + j
                    out.append(code(tile + lane, c) | code(tile + lane, c + 4) << 4)
                else:
                    out.append(code(tile + lane, g * group + 4 * line + j))
    return bytes(out)


def tile16_packed(
    stored: np.ndarray, bits: int, group: int, factors: list[np.ndarray], outer: list[np.ndarray]
) -> bytes:
    """Codes as they are stored (rows, cols), factors (rows, groups), outer ones (rows, 256-column blocks) or none."""
    rows, cols = stored.shape
    per_record = 256 // group if outer else 2
    low = 4 if bits >= 4 else 2
    steps, each = {2: 4, 4: 2}.get(bits) or 8 // (bits - low), 8 // low
    out = bytearray()

    def number(values: np.ndarray, r: int, i: int) -> bytes:
        there = r < rows and i < values.shape[1]
        return (values[r, i] if there else values.dtype.type(0)).tobytes()

    for tile, first in itertools.product(range(0, rows, 16), range(0, -(-cols // group), per_record)):
        for start in range(first * group, (first + per_record) * group, 4 * steps):  # a run
            def code(lane: int, step: int, j: int, start: int = start, tile: int = tile) -> int:
                r, c = tile + lane, start + 4 * step + j
                return int(stored[r, c]) if r < rows and c < cols else 0

            for line in range(steps // each):
                for lane, j in itertools.product(range(16), range(4)):
                    out.append(sum(code(lane, each * line + s, j) % (1 << low) << low * s for s in range(each)))
            if bits > low:
                for lane, j in itertools.product(range(16), range(4)):
                    out.append(sum((code(lane, step, j) >> low) << (bits - low) * step for step in range(steps)))
        for values in factors:
            for i, lane in itertools.product(range(first, first + per_record), range(16)):
                out += number(values, tile + lane, i)
        for values in outer:
            for lane in range(16):
                out += number(values, tile + lane, first // per_record)
        out += bytes(-len(out) % 64)
    return bytes(out)


def neuron(codes: np.ndarray, dtype: str, group: int, scales: np.ndarray) -> bytes:
    n, _, hidden = codes.shape
    groups = -(-hidden // group)
    out = bytearray()
    for parts in ((0,), (1, 2)):
        for i, part in itertools.product(range(n), parts):
            start = len(out)

            def code(c: int, i: int = i, part: int = part) -> int:
                value = int(codes[i, part, c]) if c < hidden else 0
                return value + {"q4": 8, "q2": 1}[dtype] if dtype != "int8" else value & 255

            for g in range(groups):
                if dtype == "q4":
                    half = group // 2
                    out += bytes(code(g * group + b) | code(g * group + b + half) << 4 for b in range(half))
                elif dtype == "q2":
                    four = group // 4
                    out += bytes(sum(code(g * group + b + i * four) << 2 * i for i in range(4)) for b in range(four))
                else:
                    out += bytes(code(g * group + b) for b in range(group))
            out += b"".join(f16_bytes(scales[i, part, g]) for g in range(groups))
            out += bytes(-(len(out) - start) % 64)
    return bytes(out)
