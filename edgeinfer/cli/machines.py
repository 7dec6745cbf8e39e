"""The device that options name or describe, and the unit and program of it that an estimate is for."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from .. import pipeline
from ..errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

    from ..pipeline import Link

DESCRIBED = {"bandwidth": "--bandwidth", "cores": "--cores", "machine_class": "--class"}
"""Options that describe a device without a profile, all of them together."""


def machine_of(given: Any) -> DeviceProfile | None:
    """Return the device as the chosen program uses it; None if no option names one.

    Parameters
    ----------
    given : Given
        With `machine`, `unit`, `program`, `bandwidth`, `cores`, `machine_class` and `memory`.

    Raises
    ------
    UsageError
        The options contradict each other, or nothing is known of the unit or the program there.
    """
    storage = getattr(given, "storage", None)
    said = [flag for name, flag in DESCRIBED.items() if getattr(given, name) is not None]
    if said and given.machine and given.by_flag("machine"):
        raise UsageError(f"--machine {given.machine} has a profile, and {said[0]} describes a device without one; use "
                         "one or the other.")
    if said:
        if missing := [flag for flag in DESCRIBED.values() if flag not in said]:
            raise UsageError(f"{said[0]} describes a device together with {' and '.join(missing)}; add "
                             f"{'it' if len(missing) == 1 else 'them'}.")
        profile = devices.unlisted(given.bandwidth, given.cores, given.machine_class, given.memory)
    elif given.memory is not None:
        raise UsageError("--memory belongs to --bandwidth, --cores and --class; with --machine write the memory into "
                         "the name, such as 'rpi5 8GB'.")
    elif given.machine is None:
        if storage is not None:
            raise UsageError(f"--storage {storage} replaces the storage of a device; add --machine NAME (local is this "
                             "one).")
        if given.unit is None and given.program is None:
            return None
        flag = "--unit" if given.program is None else "--runtime"
        raise UsageError(f"{flag} selects among the facts about a device; add --machine NAME.")
    else:
        profile = devices.load_profile(given.machine)
    return devices.equipped(devices.chosen(profile, given.unit, given.program), storage)


def named_nodes(nodes: str, link: str) -> tuple[list[DeviceProfile], Link]:
    """Return the processors of machines that an option lists, and the network between them.

    Raises
    ------
    UsageError
        There are fewer than two names, one is unknown or has no processor, or the network is.
    """
    names = [name.strip() for name in nodes.split(",")]
    if len(names) < 2 or "" in names:
        raise UsageError(f"--nodes is {nodes!r:.80}; name two machines or more, as in rpi5,rpi5.")
    network = pipeline.parse_link(link)
    return [_processor(devices.load_profile(name)) for name in names], network


def _processor(machine: DeviceProfile) -> DeviceProfile:
    if machine.own_memory:
        raise UsageError(f"--nodes splits a model between processors, and {machine.title} is a card; several cards "
                         "cannot be planned, so name the processors of the machines.")
    return devices.chosen(machine, "cpu")


def devices_of(given: Any) -> list[DeviceProfile]:
    """Return all known devices as the chosen program uses them, without those where nothing is known of it.

    A processor that has a profile of its own, and the device that it is in, are one device for edgeinfer.

    Raises
    ------
    UsageError
        No device has speeds of the program, or there is no such storage.
    """
    found: dict[tuple[str, str], DeviceProfile] = {}
    for profile in devices.profiles().values():
        with suppress(UsageError):
            one = devices.chosen(profile, given.unit, given.program)
            found.setdefault((one.name, one.device_class), one)
    if not found:
        where = "device" if given.unit is None else given.unit.upper()
        raise UsageError(f"No speed of {given.program!r:.80} is known on any {where}; known programs are "
                         f"{', '.join(devices.programs(given.unit))}.")
    return [devices.equipped(one, getattr(given, "storage", None)) for one in found.values()]
