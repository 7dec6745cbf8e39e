"""Bundles: weights on disk in the layouts that the kernels read, described by a table that is checked before use.

The format is specified in docs/reference/bundle.md.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

from .config_json import config_from_json
from .files import is_bundle
from .format import (
    APPROXIMATING,
    FORMAT_VERSION,
    PARTS,
    Quantisation,
    TensorEntry,
    cluster_shape,
    file_offsets,
    neuron_layers,
    weights_file_bytes,
)
from .header import HEADER_FILE
from .mapping import check_state, watch
from .reader import Bundle

if TYPE_CHECKING:
    from .arrays import open_arrays, pack_arrays
    from .cold import COLD_FILE, Cold, cold_bytes, pack_cold, read_cold
    from .draft_heads import DRAFT_HEAD_FILE, own_weights, pack_draft_head, read_draft_head
    from .naming import named
    from .parts import (
        PREDICTOR_FILE,
        PREDICTOR_TYPE,
        STATISTICS_FILE,
        Predictor,
        Statistics,
        part_extents,
        predictor_settings,
        read_predictor,
        read_statistics,
        weights_identity,
    )
    from .screens import SCREEN_FILE, HeadScreen, read_screen, screen_settings
    from .writer import BundleWriter

__all__ = ["APPROXIMATING", "COLD_FILE", "DRAFT_HEAD_FILE", "FORMAT_VERSION", "HEADER_FILE", "PARTS", "PREDICTOR_FILE",
           "PREDICTOR_TYPE", "SCREEN_FILE", "STATISTICS_FILE", "Bundle", "BundleWriter", "Cold", "HeadScreen",
           "Predictor", "Quantisation", "Statistics", "TensorEntry", "check_state", "cluster_shape", "cold_bytes",
           "config_from_json", "file_offsets", "is_bundle", "named", "neuron_layers", "open_arrays", "own_weights",
           "pack_arrays", "pack_cold", "pack_draft_head", "part_extents", "predictor_settings", "read_cold",
           "read_draft_head", "read_predictor", "read_screen", "read_statistics", "screen_settings", "watch",
           "weights_file_bytes", "weights_identity"]
__getattr__ = lazily(__name__, {
    "writer": "BundleWriter", "arrays": "open_arrays pack_arrays",
    "cold": "COLD_FILE Cold cold_bytes pack_cold read_cold",
    "parts": "PREDICTOR_FILE PREDICTOR_TYPE STATISTICS_FILE Predictor Statistics part_extents predictor_settings "
             "read_predictor read_statistics weights_identity",
    "draft_heads": "DRAFT_HEAD_FILE own_weights pack_draft_head read_draft_head",
    "naming": "named", "screens": "SCREEN_FILE HeadScreen read_screen screen_settings",
})
