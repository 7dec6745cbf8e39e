"""Bundles: weights on disk in the layouts that the kernels read, described by a table that is checked before use.

The format is specified in docs/bundle.md.
"""

from .config_json import config_from_json, config_to_json
from .format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    LAYOUTS,
    FileEntry,
    Header,
    Quantisation,
    TensorEntry,
    alignment,
    round_up,
    stored_bytes,
    weights_file_bytes,
)
from .header import HEADER_FILE, header_from_json, header_to_json
from .lock import DestinationLock
from .reader import Bundle, is_bundle
from .writer import BundleWriter

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "HEADER_FILE",
    "LAYOUTS",
    "Bundle",
    "BundleWriter",
    "DestinationLock",
    "FileEntry",
    "Header",
    "Quantisation",
    "TensorEntry",
    "alignment",
    "config_from_json",
    "config_to_json",
    "header_from_json",
    "header_to_json",
    "is_bundle",
    "round_up",
    "stored_bytes",
    "weights_file_bytes",
]
