"""Norms, activations and rotary embedding of the oracle (reference.py), in plain NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def normalised(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.array(eps, x.dtype))


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _gelu(x: np.ndarray) -> np.ndarray:
    return (x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))).astype(x.dtype)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {
    "silu": lambda x: x * 0.5 * (1 + np.tanh(x / 2)),  # x sigmoid(x), without overflow
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


def gated_values(op: Any, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if op.activation == "drelu":
        return np.maximum(gate, 0) * np.maximum(up, 0)
    if op.activation == "swiglu_oai":
        gate, up = np.minimum(gate, op.limit), np.clip(up, -op.limit, op.limit)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate)).astype(gate.dtype)
    if op.activation == "fatrelu":
        return np.where(gate > op.limit, gate, 0).astype(gate.dtype) * up
    return ACTIVATIONS[op.activation](gate) * up


def frequencies(rope: Any, head_dim: int, context: int = 0) -> np.ndarray:
    """Radians per position of each pair of dimensions, one pair at a time as the papers have it."""
    pairs = head_dim // 2
    plain = [rope.theta ** (-2 * i / head_dim) for i in range(pairs)]
    if rope.kind == "none":
        plain = [0.0] * pairs
    elif rope.kind == "linear":
        plain = [f / rope.factor for f in plain]
    elif rope.kind == "dynamic" and context > rope.original_max_position_embeddings:
        stretch = rope.factor * context / rope.original_max_position_embeddings - (rope.factor - 1)
        theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
        plain = [theta ** (-2 * i / head_dim) for i in range(pairs)]
    elif rope.kind == "llama3":
        plain = [_llama3(rope, f) for f in plain]
    elif rope.kind == "longrope":
        far = context > rope.original_max_position_embeddings
        plain = [f / factor for f, factor in zip(plain, rope.long_factors if far else rope.short_factors, strict=True)]
    elif rope.kind == "yarn":
        low, high = _yarn_range(rope, head_dim)
        ramps = [min(max((i - low) / (high - low), 0), 1) for i in range(pairs)]
        plain = [(1 - r) * f + r * f / rope.factor for f, r in zip(plain, ramps, strict=True)]
    return np.array(plain)


def _llama3(rope: Any, frequency: float) -> float:
    wavelength = 2 * math.pi / frequency
    original = rope.original_max_position_embeddings
    if wavelength < original / rope.high_freq_factor:
        return frequency
    if wavelength > original / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn_range(rope: Any, head_dim: int) -> tuple[float, float]:
    """Pairs between which YaRN blends: those that turn beta_fast and beta_slow times over the training context."""
    low, high = (
        head_dim * math.log(rope.original_max_position_embeddings / (beta * 2 * math.pi)) / (2 * math.log(rope.theta))
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high
