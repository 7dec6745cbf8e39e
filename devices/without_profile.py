"""Devices without a profile, from their bandwidth, the number of their cores and their kind."""

from __future__ import annotations

import math

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError

from .cores import core_kinds, cores_peak
from .profile import PROCESSORS, DeviceProfile
from .profile_checks import MAX_CORES, MAX_GBS

UNLISTED = "unlisted"
"""Name of such a device."""
MIN_MEMORY, MAX_MEMORY = 64 << 20, 64 << 40
ASSUMED_GIB = 16
"""Memory where none is given."""


@dataclass(frozen=True)
class Kind:
    """A kind of device."""

    device_class: str
    core: str
    """Kind of its cores, which stands in for all; empty for GPUs."""
    clock: float
    """Usual clock of all cores together, in GHz."""
    isa: str = ""


KINDS = {
    "desktop": Kind("x86-desktop", "zen3", 4.2), "laptop": Kind("x86-laptop", "golden-cove", 3.5),
    "server": Kind("x86-server", "zen4", 3.0), "board": Kind("arm-sbc", "a76", 2.2),
    "phone": Kind("arm-phone", "a720", 2.6), "arm-laptop": Kind("arm-laptop", "oryon", 3.4),
    "arm-server": Kind("arm-server", "neoverse-v1", 2.6), "mac": Kind("apple-cpu", "apple-p2", 3.5),
    "mac-gpu": Kind("apple-gpu", "", 1.4, "metal"), "nvidia": Kind("cuda-consumer", "", 2.0, "cuda"),
    "radeon": Kind("radeon", "", 2.0, "vulkan"),
}
"""Kinds by the name that ``--class`` takes."""


def unlisted(bandwidth_gbs: float, cores: int, kind: str, memory_bytes: int | None = None) -> DeviceProfile:
    """Return the profile of a device that has none.

    Parameters
    ----------
    bandwidth_gbs : float
        Vendor's peak of the memory, in GB/s.
    cores : int
        Processor cores, or multiprocessors of a GPU.
    kind : str
        One of `KINDS`.
    memory_bytes : int, optional
        By default 16 GiB.

    Raises
    ------
    UsageError
        A figure is absurd, or there is no such kind.
    """
    if not (math.isfinite(bandwidth_gbs) and 0 < bandwidth_gbs <= MAX_GBS):
        raise UsageError(f"--bandwidth is {bandwidth_gbs:g}; it must be above 0 and at most {MAX_GBS:g} GB/s.")
    if not 1 <= cores <= MAX_CORES:
        raise UsageError(f"--cores is {cores}; it must be from 1 to {MAX_CORES}.")
    if memory_bytes is not None and not MIN_MEMORY <= memory_bytes <= MAX_MEMORY:
        raise UsageError(f"--memory is {memory_bytes} bytes; a device has {MIN_MEMORY >> 20} MiB to "
                         f"{MAX_MEMORY >> 40} TiB.")
    if kind not in KINDS:
        raise UsageError(f"--class is {kind!r}; choose one of {', '.join(KINDS)}.")
    row = KINDS[kind]
    processor = {row.core: (cores, row.clock)} if row.core else {}
    own = row.device_class in PROCESSORS
    return DeviceProfile(
        UNLISTED, f"{kind} with {cores} cores and {bandwidth_gbs:g} GB/s", row.device_class,
        memory_bytes or ASSUMED_GIB << 30, float(bandwidth_gbs), None, cores,
        core_kinds()[row.core].isa if own else row.isa, processor=processor,
        int8_peak_gops=cores_peak(processor, "int8") if own else None,
        f32_peak_gflops=cores_peak(processor, "f32") if own else None,
        sources={"bandwidth_gbs": "--bandwidth", "cores": "--cores", "device_class": "--class"},
    )
