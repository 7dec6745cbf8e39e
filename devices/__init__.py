"""edgeinfer.devices: capabilities of machines.

Profiles of devices (memory, bandwidth, instruction sets, storage), those of the probe included, and the estimator of
tokens per second over a plain object of traffic. It knows no model.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .calibration import DecodeRun, PromptRun, believable, contradictions, solve_constants
    from .device_classes import BANDWIDTH_MOVED, NO_CONSTANTS, OURS, WIDEST, Constants, classes, constants_of
    from .estimator import DRAFT_SHARE, Estimate, constants_for, crossover, decode_terms, estimate, prefill_terms
    from .gpus import SERVED, gpu_profile, served
    from .known import profiles
    from .learning import fit_errors, learn, may_learn, with_runs
    from .mixed_steps import MixedSteps
    from .neurons import DENSE_SHARE, GATES_SHARE, MASKED_SHARE, PER_MILLE, break_even_density, fastest, relative_time
    from .power import Power, power_of
    from .profile import CLASSES, Curve, DeviceProfile, parse_profile
    from .random_reads import break_even, smallest_row
    from .several_rows import RowsRun, peak_of, solve_rows
    from .speculation import drafted, least_acceptance, pass_ms, tokens_per_pass
    from .storage import MEMORY_SPREAD, equipped, slow_and_fast, spread_of, storage_report, storages
    from .store import (
        load_profile,
        local_path,
        local_profile,
        machine_name,
        processor_name,
        profile_table,
        save_profile,
    )
    from .traffic import Traffic
    from .type_costs import REFERENCE_TYPE, TYPES, TypeShares, costs_of, drawn_gbs, solve_type
    from .units import chosen, processor_of, programs
    from .without_profile import unlisted

__all__ = [
    "BANDWIDTH_MOVED", "CLASSES", "DENSE_SHARE", "DRAFT_SHARE", "GATES_SHARE", "MASKED_SHARE", "MEMORY_SPREAD",
    "NO_CONSTANTS", "OURS", "PER_MILLE", "REFERENCE_TYPE", "SERVED", "TYPES", "WIDEST", "Constants", "Curve",
    "DecodeRun", "DeviceProfile", "Estimate", "MixedSteps", "Power", "PromptRun", "RowsRun", "Traffic", "TypeShares",
    "believable", "break_even", "break_even_density", "chosen", "classes", "constants_for", "constants_of",
    "contradictions", "costs_of", "crossover", "decode_terms", "drafted", "drawn_gbs", "equipped", "estimate",
    "fastest", "fit_errors", "gpu_profile", "learn", "least_acceptance", "load_profile", "local_path",
    "local_profile", "machine_name", "may_learn", "parse_profile", "pass_ms", "peak_of", "power_of", "prefill_terms",
    "processor_name", "processor_of", "profile_table", "profiles", "programs", "relative_time", "save_profile",
    "served", "slow_and_fast", "smallest_row", "solve_constants", "solve_rows", "solve_type", "spread_of",
    "storage_report", "storages", "tokens_per_pass", "unlisted", "with_runs",
]
__getattr__ = lazily(__name__, {
    "calibration": "DecodeRun PromptRun believable contradictions solve_constants",
    "device_classes": "BANDWIDTH_MOVED NO_CONSTANTS OURS WIDEST Constants classes constants_of",
    "estimator": "DRAFT_SHARE Estimate constants_for crossover decode_terms estimate prefill_terms",
    "several_rows": "RowsRun peak_of solve_rows",
    "type_costs": "REFERENCE_TYPE TYPES TypeShares costs_of drawn_gbs solve_type",
    "mixed_steps": "MixedSteps",
    "learning": "fit_errors learn may_learn with_runs",
    "neurons": "DENSE_SHARE GATES_SHARE MASKED_SHARE PER_MILLE break_even_density fastest relative_time",
    "power": "Power power_of",
    "profile": "CLASSES Curve DeviceProfile parse_profile",
    "random_reads": "break_even smallest_row",
    "speculation": "drafted least_acceptance pass_ms tokens_per_pass",
    "storage": "MEMORY_SPREAD equipped slow_and_fast spread_of storage_report storages",
    "known": "profiles",
    "gpus": "SERVED gpu_profile served",
    "store": "load_profile local_path local_profile machine_name processor_name profile_table "
             "save_profile",
    "traffic": "Traffic",
    "units": "chosen processor_of programs",
    "without_profile": "unlisted",
})
