"""Output of `edgeinfer devices`: tables, JSON objects, and the picture of a device's curves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...config import CPU
from ...errors import UsageError
from ..output import folded, print_table, table
from .plot import Chart, Line

if TYPE_CHECKING:
    from edgeinfer.devices import Curve, DeviceProfile

QUEUE = "storage_random_gbs_queue_"
MAX_TITLE = 38
"""Characters of a title in the list, which fits a terminal."""
_UNITS = {
    "bandwidth_gbs": "GB/s", "effective_gbs": "GB/s", "storage_sequential_gbs": "GB/s", "int8_peak_gops": "GOPS",
    "f32_peak_gflops": "GFLOPS", "f16_peak_gflops": "GFLOPS",
}
_NAMES = {
    "device_class": "class", "memory_bytes": "memory", "bandwidth_gbs": "memory bandwidth",
    "effective_gbs": "drawn by decoding", "cores": "cores", "isa": "instruction set", "int8_peak_gops": "int8 peak",
    "f32_peak_gflops": "f32 peak", "f16_peak_gflops": "f16 peak", "storage_sequential_gbs": "storage, in order",
}


def list_object(known: list[DeviceProfile], local: DeviceProfile | None) -> dict[str, Any]:
    """Return the JSON object of all devices."""
    return {"devices": [device_object(profile) for profile in known],
            "local": None if local is None else device_object(local), "executors": _executors()}


def _executors() -> dict[str, str]:
    """Return the values of --device, each with the reason why it does not work here, empty if it does."""
    from ...backends import PROVIDERS, why_not

    return {CPU: "", **{device: why_not(device) for device in PROVIDERS}}


def device_object(profile: DeviceProfile) -> dict[str, Any]:
    """Return the JSON object of a device."""
    from edgeinfer.devices import profile_table

    return {"name": profile.name, **profile_table(profile)}


def print_list(known: list[DeviceProfile], local: DeviceProfile | None) -> None:
    """Print all devices as a table."""
    rows = [("name", "memory", "GB/s", "drawn", "device")]
    for profile in ([local] if local else []) + known:
        drawn = "" if profile.effective_gbs is None else _rate(profile.effective_gbs)
        short = profile.title if len(profile.title) <= MAX_TITLE else f"{profile.title[: MAX_TITLE - 3]}..."
        rows.append((profile.name, _gib(profile.memory_bytes), _rate(profile.bandwidth_gbs), drawn, short))
    print_table(rows, right=[1, 2, 3])
    remark = ("GB/s is the vendor's peak (of this machine: measured), drawn is the measured bandwidth of decoding. "
              "'edgeinfer devices NAME' has cores, instructions, class and sources.")
    print("\n" + "\n".join(folded(remark + ("" if local else " 'edgeinfer devices --probe' measures this machine."))))
    print("\nExecutors here (--device):")
    for device, why in _executors().items():
        print("\n".join(folded(why or "works", f"  {device:9} ")))


def print_device(profile: DeviceProfile) -> None:
    """Print a device: fields with their sources, then curves."""
    print(f"{profile.name}: {profile.title}" + (f" (measured {profile.measured})" if profile.measured else "") + "\n")
    rows = [(name, text, " ".join(profile.sources.get(key, "").split())) for key, name, text in _fields(profile)]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, text, source in rows:
        print("\n".join(folded(source, f"{name:{wide[0]}}  {text:{wide[1]}}  ")))
    for title, curve in _curves(profile):
        print(f"\n{title}")
        for line in table([(x, f"{value:.4g}") for x, value in curve], right=[0, 1]):
            print(f"  {line}")


def _fields(profile: DeviceProfile) -> Iterator[tuple[str, str, str]]:
    """Yield (field, name, value) of the known facts."""
    for key, name in _NAMES.items():
        value = getattr(profile, key)
        if value is None:
            continue
        if key == "memory_bytes":
            yield key, name, _gib(value)
        else:
            yield key, name, f"{value:.{4 if value < 1e4 else 6}g} {_UNITS[key]}" if key in _UNITS else f"{value}"
    yield from ((key, key, f"{value:.3g}") for key, value in profile.constants.items())
    yield from ((key, key.replace("_", " "), f"{value:.3g}") for key, value in profile.figures.items())


def _curves(profile: DeviceProfile) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield (title, points with their first value as text) of the curves that are known."""
    for key, title in (("memory_random", "scattered pieces of memory, GB/s"),
                       ("storage_random", "scattered reads of storage, GB/s")):
        curve = getattr(profile, key)
        if curve is not None:
            yield title, [(_piece(size), value) for size, value in curve.points]
    for key, curve in profile.curves.items():
        sizes = "storage" in key
        yield key.replace("_", " "), [(_piece(x) if sizes else f"{x}", value) for x, value in curve.points]


def _rate(gbs: float) -> str:
    return f"{gbs:.3g}" if gbs < 100 else f"{gbs:.0f}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.{0 if nbytes % 2**30 == 0 else 1}f} GiB"


def _piece(nbytes: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def profile_chart(profile: DeviceProfile) -> Chart:
    """Return the curves of a device as a picture: GB/s of memory and of storage over the size of scattered pieces.

    Raises `UsageError`: the device has no curves.
    """
    lines = []
    if profile.memory_random:
        lines.append(_line("memory, scattered", profile.memory_random))
        ends = profile.memory_random.points[0][0], profile.memory_random.points[-1][0]
        lines.append(Line("memory, in order", ends, (profile.bandwidth_gbs, profile.bandwidth_gbs)))
    by_depth = [(key.removeprefix(QUEUE), curve) for key, curve in profile.curves.items() if key.startswith(QUEUE)]
    lines += [_line(f"storage, {depth} at a time", curve) for depth, curve in by_depth]
    if profile.storage_random and not by_depth:
        lines.append(_line("storage, scattered", profile.storage_random))
    if not lines:
        raise UsageError(f"{profile.name} has no curves to draw; 'edgeinfer devices --probe' measures this machine's.")
    return Chart(profile.title, "bytes of a piece", "GB/s", lines, log_x=True, log_y=True)


def _line(name: str, curve: Curve) -> Line:
    return Line(name, [size for size, _ in curve.points], [value for _, value in curve.points])
