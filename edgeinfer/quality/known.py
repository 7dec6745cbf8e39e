"""Measured losses of storage types: KL divergence from float32 in nats per token (docs/measurements/quality.md)."""

from __future__ import annotations

LOSSES: dict[str, tuple[float, float]] = {
    "f32": (0.0, 0.0), "f16": (0.0, 0.0), "int8": (0.00012, 0.00018), "Q8_0": (0.00012, 0.00018),
    "q4": (0.0032, 0.0078), "Q4_K_M": (0.0021, 0.0021), "tableq": (0.0048, 0.0048), "tableq3": (0.023, 0.023),
}
"""Smallest and largest mean over models of 5 million parameters; larger models lose less. Q8_0 has the codes of int8,
Q4_K_M and the types of fitted levels were measured on one model, the latter with embedding and head in float32. Of the
other types there is no measurement."""


def loss_words(kind: str) -> str:
    """Return the largest measured loss of a type for a table; empty where none was measured."""
    return "" if kind not in LOSSES else f"{LOSSES[kind][1]:.1g}"
