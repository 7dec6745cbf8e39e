"""GPUs as edgeinfer uses them, through onnxruntime's CUDA provider: published figures with constants of their own.

The constants were fitted to an H100 (classes.toml, docs/measurements/gpu.md).
"""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.errors import ProfileError, UsageError

from .device_classes import OURS
from .profile import DeviceProfile
from .store import load_profile

SERVED = "cuda-onnxruntime"
"""Class of such a device."""


def served(profile: DeviceProfile) -> DeviceProfile | None:
    """Return a GPU as `run --device cuda` uses it; None for others, and where its f16 throughput is not known."""
    card = profile.device_class in ("cuda-consumer", "cuda-datacentre") and profile.f16_peak_gflops
    if not card or profile.runtime not in ("", OURS):
        return None
    return replace(profile, device_class=SERVED, effective_gbs=None, programs={}, constants={})


def gpu_profile(name: str) -> DeviceProfile | None:
    """Return the GPU that NVIDIA's driver calls so, as `served` does; None if there is no profile of it."""
    try:
        return served(load_profile(name))
    except (UsageError, ProfileError):
        return None
