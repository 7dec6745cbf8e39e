"""SIMD kernels written in Python, their NumPy twins, weight layouts, and the objects that a process links.

Shape letters: T tokens, D model (hidden_size), H heads, K key-value heads, E head size, F feed-forward, V vocabulary, G group.
Nothing here imports Numba but the build (compile.py and the kernel files that it loads in a process of its own).
"""

from importlib import import_module

_HOMES = {
    "Isa": "isa", "available": "isa", "choose": "isa", "machine": "isa", "LADDER": "isa",
    "Kernels": "objects", "cache_directory": "objects", "find_set": "objects",
    "abi": "", "layouts": "", "parameters": "", "quantise": "", "reference": "",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    return getattr(import_module(f".{home}", __name__), name) if home else import_module(f".{name}", __name__)
