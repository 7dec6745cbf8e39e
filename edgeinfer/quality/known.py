"""Measured losses of storage types: KL divergence from float32 in nats per token (docs/measurements/quality.md)."""

from __future__ import annotations

LOSSES: dict[str, tuple[float, float]] = {
    "f32": (0.0, 0.0), "f16": (0.0, 0.0), "int8": (0.00012, 0.00018), "Q8_0": (0.00012, 0.00018),
    "q4": (0.0032, 0.0078), "tableq": (0.0048, 0.0071), "tableq3": (0.023, 0.033), "q5": (0.0016, 0.0022),
    "q5m": (0.0011, 0.0017), "q6": (0.00034, 0.00034), "q5k": (0.0011, 0.0011), "q4m": (0.0042, 0.0042),
    "q4k": (0.0042, 0.0042), "iq4": (0.0045, 0.0045), "iq4k": (0.0045, 0.0045), "mxfp4": (0.0068, 0.0068),
    "Q6_K": (0.00078, 0.00078), "Q5_K_M": (0.0015, 0.0015), "Q4_K_M": (0.0021, 0.0042), "Q4_0": (0.0073, 0.0073),
    "IQ4_XS": (0.0058, 0.0058),
}
"""Smallest and largest mean over models of 5 million parameters; larger models lose less. Q8_0 has the codes of int8.
Types with one figure were measured on one model; the types of edgeinfer among them with embedding and head in float32,
the files with those of the file."""


def loss_words(kind: str) -> str:
    """Return the largest measured loss of a type for a table; empty where none was measured."""
    return "" if kind not in LOSSES else f"{LOSSES[kind][1]:.1g}"
