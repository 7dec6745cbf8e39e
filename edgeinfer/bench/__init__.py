"""How fast a model runs here, beside what the machine could give in the same minutes. Nothing here prints.

Rows carry llama-bench's names: ``pp512`` processes a prompt of 512 tokens, ``tg128`` generates 128 tokens one by one,
and ``tg128 @ d4096`` does so after 4096 tokens of context.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .calibration import CALM_SHARE, SHAPES, Lengths, Shape
    from .machine import ProbeRequest, probe_machine
    from .profile import make_profile, operation_name
    from .repetitions import measure, token_ids
    from .results import Case, Measurement, OperationTime, Profile, Row, make_cases, needed_ctx
    from .startup import first_token_ms, prompt_of
    from .storage import StorageProbe, StorageSpeed
    from .traffic import bytes_per_token, kv_read_bytes, operations_per_token

_HOMES = {
    "CALM_SHARE": "calibration", "SHAPES": "calibration", "Lengths": "calibration", "Shape": "calibration",
    "ProbeRequest": "machine", "probe_machine": "machine", "StorageProbe": "storage", "StorageSpeed": "storage",
    "measure": "repetitions", "token_ids": "repetitions", "make_profile": "profile", "operation_name": "profile",
    "Measurement": "results", "OperationTime": "results", "Profile": "results", "Row": "results", "Case": "results",
    "make_cases": "results", "needed_ctx": "results", "first_token_ms": "startup", "prompt_of": "startup",
    "bytes_per_token": "traffic", "kv_read_bytes": "traffic", "operations_per_token": "traffic",
}
__all__ = ["CALM_SHARE", "SHAPES", "Case", "Lengths", "Measurement", "OperationTime", "ProbeRequest", "Profile", "Row",
           "Shape", "StorageProbe", "StorageSpeed", "bytes_per_token", "first_token_ms", "kv_read_bytes", "make_cases",
           "make_profile", "measure", "needed_ctx", "operation_name", "operations_per_token", "probe_machine",
           "prompt_of", "token_ids"]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
