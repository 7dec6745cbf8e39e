"""edgeinfer: run language models on laptops and ARM boards, and know first whether they fit and how fast they are."""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from .config import GenerationConfig
    from .errors import EdgeInferError
    from .llm import LLM

if not (_Path(__file__).parent / "kernels").is_dir():  # a checkout: the parts lie beside this folder
    __path__.append(str(_Path(__file__).parent.parent))

__version__ = "0.1.0"
__all__ = ["LLM", "EdgeInferError", "GenerationConfig", "__version__"]

_HOMES = {"LLM": "llm", "EdgeInferError": "errors", "GenerationConfig": "config"}


def __getattr__(name: str) -> object:
    """Load public names on first use, so that importing edgeinfer loads neither numpy nor numba."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edgeinfer.{_HOMES[name]}"), name)
