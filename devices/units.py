"""Units of a device and the programs that use them: by default edgeinfer on its processor, or on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgeinfer.errors import UsageError

from .cores import cores_isa, cores_peak
from .device_classes import OURS, constants_of
from .gpus import served
from .known import profiles
from .names import unit_of
from .profile import DeviceProfile
from .store import LOCAL

FOREIGN = ("riscv-sbc",)
"""Classes of processors that numba does not compile for: their speed is another program's."""
_ENDINGS = ("-cpu", "-igpu", "-npu")


def processor_of(profile: DeviceProfile) -> DeviceProfile | None:
    """Return the processor of a device whose profile is that of a GPU or a neural unit; None if nothing is known of it.

    It is a profile of its own, or derived from the kinds of its cores.
    """
    base = _base(profile)
    for name in (f"{base}-cpu", base):
        found = profiles().get(name)
        if found is not None and found.name != profile.name and unit_of(found) == "cpu":
            return _with_memory_of(profile, found)
    if not profile.processor:
        return None
    return replace(
        profile, device_class="apple-cpu" if profile.isa == "metal" else "arm-sbc" if profile.isa == "cuda" else
        "x86-laptop" if cores_isa(profile.processor).startswith("avx") else "arm-sbc",
        isa=cores_isa(profile.processor), cores=sum(number for number, _ in profile.processor.values()),
        int8_peak_gops=cores_peak(profile.processor, "int8"), f32_peak_gflops=cores_peak(profile.processor, "f32"),
        f16_peak_gflops=None, effective_gbs=None, programs={}, constants={}, figures={},
    )


def chosen(profile: DeviceProfile, unit: str | None = None, runtime: str | None = None) -> DeviceProfile:
    """Return a device as a program uses one of its units; by default as edgeinfer does.

    Parameters
    ----------
    profile : DeviceProfile
    unit : {"cpu", "gpu", "npu"}, optional
    runtime : str, optional
        Name of a program whose speeds are known there, such as llama.cpp.

    Raises
    ------
    UsageError
        The device has no such unit, or no speed of that program is known there.
    """
    if profile.device_class == "local":
        if unit in (None, "cpu") and (runtime or OURS).lower() == OURS:
            return profile
        raise UsageError(f"--machine {LOCAL} is edgeinfer on this processor; leave --unit and --runtime out, or name "
                         "the device.")
    if runtime is None or runtime.lower() == OURS:
        return _ours(profile, unit)
    units = [one for one in _units(profile) if unit in (None, unit_of(one))]
    known = {name.lower(): (one, name) for one in reversed(units) for name in _programs(one)}
    if found := known.get(runtime.lower()):
        device, name = found
        gbs = device.programs.get(name, device.effective_gbs)
        return replace(device, runtime=name, effective_gbs=gbs)
    all_known = sorted({name for one in _units(profile) for name in _programs(one)}, key=str.lower)
    where = f" on its {unit.upper()}" if unit and not units else ""
    raise UsageError(f"No speed of {runtime!r} is known on {profile.title}{where}; known are "
                     f"{', '.join([*all_known, OURS])}.")


def _ours(profile: DeviceProfile, unit: str | None) -> DeviceProfile:
    """Return the device as edgeinfer uses it; with a unit that it cannot use, as the known program does."""
    own = unit_of(profile)
    if unit is None and profile.device_class in FOREIGN:
        return profile
    if unit is None and (served(profile) or own == "cpu"):
        return replace(profile, runtime=OURS if own == "cpu" else "")
    if unit in (None, "cpu") and profile.device_class not in FOREIGN:
        found = profile if own == "cpu" else processor_of(profile)
        if found is not None:
            return replace(found, runtime=OURS)
        if unit is None:
            return profile
    for one in _units(profile):
        if unit_of(one) == unit:
            return one
    have = dict.fromkeys(unit_of(one) for one in _units(profile))
    article = "an" if unit == "npu" else "a"
    raise UsageError(f"Nothing is known of {article} {str(unit).upper()} of {profile.title}; known is its "
                     f"{' and '.join(name.upper() for name in have)}.")


def _units(profile: DeviceProfile) -> Iterator[DeviceProfile]:
    """Yield a device, and its other units."""
    yield profile
    if unit_of(profile) != "cpu" and (processor := processor_of(profile)):
        yield processor
    base = _base(profile)
    for ending in ("", *_ENDINGS):
        found = profiles().get(base + ending)
        if found is not None and unit_of(found) not in ("cpu", unit_of(profile)):
            yield _with_memory_of(profile, found)


def _programs(profile: DeviceProfile) -> list[str]:
    """Return the programs whose speeds are known on a unit: those of its rows, else of its class."""
    return list(profile.programs) or constants_of(replace(profile, runtime="")).program.split(" or ")


def programs(unit: str | None = None) -> list[str]:
    """Return the programs whose speeds are known on some device, or on a unit of one."""
    units = (one for profile in profiles().values() for one in _units(profile) if unit in (None, unit_of(one)))
    return sorted({name for one in units for name in (*_programs(one), OURS)}, key=str.lower)


def _base(profile: DeviceProfile) -> str:
    """Return the name of the device without that of its unit."""
    return next((profile.name.removesuffix(end) for end in _ENDINGS if profile.name.endswith(end)), profile.name)


def _with_memory_of(profile: DeviceProfile, other: DeviceProfile) -> DeviceProfile:
    return replace(other, memory_bytes=profile.memory_bytes, memory_gib=profile.memory_gib)
