"""SIMD kernels written in Python, their NumPy twins, weight layouts, and the objects that a process links.

Shape letters: T tokens, D model (hidden_size), H heads, K key-value heads, E head size, F feed-forward, V vocabulary,
G group. Nothing here imports Numba but the build (compile.py and the kernel files that it loads in a process of its
own). `abi`, `layouts`, `parameters`, `quantise` and `reference` are offered as modules, for their names read best with
the module's; the record parameters that lowering fills are offered by name too.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import abi, layouts, parameters, quantise, reference
    from .isa import LADDER, Isa, available, choose, machine
    from .objects import Kernels, cache_directory, find_set, package_directory
    from .parameters import ACTIVATIONS, ATTENTION, LINEAR, NEURON_DOWN, NEURON_GATED, ROPE, ROWS, fill

_HOMES = {
    "Isa": "isa", "available": "isa", "choose": "isa", "machine": "isa", "LADDER": "isa",
    "Kernels": "objects", "cache_directory": "objects", "find_set": "objects",
    "package_directory": "objects",
    "ACTIVATIONS": "parameters", "ATTENTION": "parameters", "LINEAR": "parameters",
    "NEURON_DOWN": "parameters", "NEURON_GATED": "parameters", "ROPE": "parameters",
    "ROWS": "parameters", "fill": "parameters",
    "abi": "", "layouts": "", "parameters": "", "quantise": "", "reference": "",
}
__all__ = [
    "ACTIVATIONS",
    "ATTENTION",
    "LADDER",
    "LINEAR",
    "NEURON_DOWN",
    "NEURON_GATED",
    "ROPE",
    "ROWS",
    "Isa",
    "Kernels",
    "abi",
    "available",
    "cache_directory",
    "choose",
    "fill",
    "find_set",
    "layouts",
    "machine",
    "package_directory",
    "parameters",
    "quantise",
    "reference",
]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    return getattr(import_module(f".{home}", __name__), name) if home else import_module(f".{name}", __name__)
