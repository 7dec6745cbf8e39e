"""edgeinfer.devices: what a machine can do.

Profiles of devices (memory, bandwidth, instruction sets, storage), those of the probe included. It knows no model.
"""

from .profile import CLASSES, CONSTANTS, Curve, DeviceProfile, parse_profile
from .store import load_profile, local_path, local_profile, machine_name, profile_table, profiles, save_profile

__all__ = [
    "CLASSES",
    "CONSTANTS",
    "Curve",
    "DeviceProfile",
    "load_profile",
    "local_path",
    "local_profile",
    "machine_name",
    "parse_profile",
    "profile_table",
    "profiles",
    "save_profile",
]
