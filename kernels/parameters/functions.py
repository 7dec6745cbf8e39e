"""Numbers of the functions that instructions name: hidden activations, and functions of single values."""

from __future__ import annotations

ACTIVATIONS = {"relu": 0, "silu": 1, "relu2": 2, "gelu": 3, "gelu_tanh": 4, "drelu": 5, "fatrelu": 6,
               "swiglu_oai": 7}
"""Numbers of the hidden activations in instructions. drelu is ReLU of the gate and of its factor (arXiv
2406.05955); fatrelu leaves values above a limit, and is 0 elsewhere (arXiv 2402.13516). swiglu_oai is gpt-oss's: the
gate, at most a limit, times its sigmoid by 1.702, and its factor within that limit, plus 1."""
PAIRED = ("swiglu_oai",)
"""Activations that are functions of a gate and its factor, not of the gate alone."""
VALUE_FUNCTIONS = {**{name: number for name, number in ACTIVATIONS.items() if name not in PAIRED},
                   "scale": 16, "soft_cap": 17}
"""Numbers of the functions of single values of rows."""
