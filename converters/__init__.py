"""From foreign checkpoints to bundles: Hugging Face directories and the hub; random bundles for measurements."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, is_checkpoint
    from .conversion import convert
    from .gguf_header import read_gguf_config
    from .hub import fetch, fetch_config
    from .json_file import read_json
    from .random_bundle import SHAPES, write_random_bundle
    from .report import ConversionReport, TensorReport

__all__ = [
    "SHAPES",
    "Checkpoint",
    "ConversionReport",
    "TensorReport",
    "convert",
    "fetch",
    "fetch_config",
    "is_checkpoint",
    "read_gguf_config",
    "read_json",
    "write_random_bundle",
]
_HOMES = {
    "Checkpoint": "checkpoint", "is_checkpoint": "checkpoint", "read_json": "json_file",
    "convert": "conversion", "fetch": "hub", "fetch_config": "hub", "read_gguf_config": "gguf_header",
    "SHAPES": "random_bundle", "write_random_bundle": "random_bundle",
    "ConversionReport": "report", "TensorReport": "report",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
