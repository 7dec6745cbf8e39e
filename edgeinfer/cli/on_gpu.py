"""What edgeinfer does on a GPU with a published profile, as `estimate`, `plan`, `run` and `bench` say it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config import CUDA, RuntimeConfig
from ..errors import UsageError
from .output import whose_object

if TYPE_CHECKING:
    from ..devices import DeviceProfile, Traffic

PROMPT = 512


def served_as_asked(profile: DeviceProfile, config: RuntimeConfig, kv: str | None) -> DeviceProfile | None:
    """Return a GPU as `run --device cuda` uses it; None for other devices, and for what is refused there.

    `kv` is the type of the KV cache that was asked for, if any.
    """
    from ..devices import served

    if (found := served(profile)) is None:
        return None
    from ..backends import PROVIDERS, device_config

    provider = PROVIDERS[CUDA]
    try:
        device_config(replace(config, kv=kv or provider.kv[0]), provider)
    except UsageError:
        return None
    return found


def gpu_here() -> DeviceProfile | None:
    """Return the profile of this machine's first GPU; None where there is no driver or no profile of that name."""
    from ..backends import read_gpu
    from ..devices import gpu_profile

    try:
        return gpu_profile(read_gpu().name)
    except UsageError:
        return None


def speed_object(profile: DeviceProfile, traffic: Traffic, ctx: int, sequences: int,
                 computed: float = 1.0) -> dict[str, Any]:
    """Return the `estimate` of `plan`: speed with full contexts, and with empty ones."""
    from ..devices import estimate

    full, empty = (estimate(profile, traffic, depth, min(PROMPT, ctx), computed=computed, sequences=sequences)
                   for depth in (ctx, 0))
    return {
        "device": profile.name, "depth": ctx, "sequences": sequences, "decode_tok_per_s": full.decode_tok_per_s,
        "low": full.low, "high": full.high, "decode_tok_per_s_empty": empty.decode_tok_per_s,
        "prefill_tok_per_s": empty.prefill_tok_per_s, "prompt": empty.prompt, "ttft_ms": empty.ttft_ms,
        "basis": full.basis, "error_source": full.error_source, **whose_object(full),
    }
