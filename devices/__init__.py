"""edgeinfer.devices: what a machine can do.

Profiles of devices (memory, bandwidth, instruction sets, storage), those of the probe included, and the estimator of
tokens per second over a plain record of traffic. It knows no model.
"""

from .calibration import DecodeRun, PromptRun, believable, contradictions, solve_constants
from .classes import NO_CONSTANTS, Constants, classes, constants_of
from .estimator import DRAFT_SHARE, Estimate, decode_terms, estimate
from .learning import fit_errors, learn, may_learn, with_runs
from .profile import CLASSES, CONSTANTS, Curve, DeviceProfile, parse_profile
from .random_reads import BreakEven, break_even, smallest_row
from .store import (
    load_profile,
    local_path,
    local_profile,
    machine_name,
    processor_of,
    profile_table,
    profiles,
    save_profile,
)
from .traffic import Traffic

__all__ = [
    "CLASSES", "CONSTANTS", "DRAFT_SHARE", "NO_CONSTANTS", "BreakEven", "Constants", "Curve", "DecodeRun",
    "DeviceProfile", "Estimate", "PromptRun", "Traffic", "believable", "break_even", "classes", "constants_of",
    "contradictions", "decode_terms", "estimate", "fit_errors", "learn", "load_profile", "local_path",
    "local_profile", "machine_name", "may_learn", "parse_profile", "processor_of", "profile_table", "profiles",
    "save_profile", "smallest_row", "solve_constants", "with_runs",
]
