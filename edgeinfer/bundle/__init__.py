"""Bundles: weights on disk in the layouts that the kernels read, described by a table that is checked before use.

The format is specified in docs/bundle.md.
"""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

from .config_json import config_from_json
from .format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    PARTS,
    FileEntry,
    Header,
    Quantisation,
    TensorEntry,
    file_offsets,
    weights_file_bytes,
)
from .header import HEADER_FILE, header_from_json, header_to_json
from .reader import Bundle, is_bundle

if TYPE_CHECKING:
    from .parts import (
        PREDICTOR_FILE,
        PREDICTOR_TYPE,
        PREDICTORS,
        STATISTICS_FILE,
        Predictor,
        Statistics,
        named,
        read_predictor,
        read_statistics,
        weights_identity,
    )
    from .writer import BundleWriter

__all__ = ["FORMAT_NAME", "FORMAT_VERSION", "HEADER_FILE", "PARTS", "PREDICTORS", "PREDICTOR_FILE", "PREDICTOR_TYPE",
           "STATISTICS_FILE", "Bundle", "BundleWriter", "FileEntry", "Header", "Predictor", "Quantisation",
           "Statistics", "TensorEntry", "config_from_json", "file_offsets", "header_from_json", "header_to_json",
           "is_bundle", "named", "read_predictor", "read_statistics", "weights_file_bytes", "weights_identity"]
__getattr__ = lazily(__name__, {
    "writer": "BundleWriter",
    "parts": "PREDICTORS PREDICTOR_FILE PREDICTOR_TYPE STATISTICS_FILE Predictor Statistics named read_predictor "
             "read_statistics weights_identity",
})
