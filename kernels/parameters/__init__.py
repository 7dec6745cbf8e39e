"""Names of the int32 parameters in each kernel family's instructions: lowering fills them, kernels and references read
them.

A family is a named tuple of indices, so that ``LINEAR.tiles`` is a constant in a kernel and a name everywhere else.
"""

from __future__ import annotations

import struct
from typing import Any

from .attention import ATTENTION, LATENT, ROPE
from .experts import EXPERTS_INPUT, EXPERTS_RESOLVE, ROUTE
from .functions import ACTIVATIONS, PAIRED, VALUE_FUNCTIONS
from .head import SAMPLE, SCREEN
from .matmul import LINEAR
from .neurons import NEURON_DOWN, NEURON_GATED, NEURON_MASK, NEURON_RESOLVE
from .recurrent import CONV, GATED_NORM, RULE
from .rows import POSITIONS, ROWS, VALUES
from .stream import RELEASE

__all__ = ["ACTIVATIONS", "ATTENTION", "CONV", "EXPERTS_INPUT", "EXPERTS_RESOLVE", "GATED_NORM", "LATENT", "LINEAR",
           "NEURON_DOWN", "NEURON_GATED", "NEURON_MASK", "NEURON_RESOLVE", "PAIRED", "POSITIONS", "RELEASE", "ROPE",
           "ROUTE", "ROWS", "RULE", "SAMPLE", "SCREEN", "VALUES", "VALUE_FUNCTIONS", "fill"]

assert len(SCREEN) <= min(LINEAR.head_tiles, LINEAR.halved)  # a screened head's matmuls read 0 there


def fill(family: Any, **values: int | float) -> list[int]:
    """Parameters of an instruction in the family's order; floats become their float32 bits, missing ones are 0.

    Raises
    ------
    AttributeError
        If the family has no parameter of a given name.
    """
    out = [0] * len(family)
    for name, value in values.items():
        bits = struct.unpack("<i", struct.pack("<f", value))[0] if isinstance(value, float) else value
        out[getattr(family, name)] = bits
    return out
