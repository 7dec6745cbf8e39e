"""Features of an ARM core, read from the operating system: LLVM's names for host CPUs omit dotprod and i8mm.

Features have LLVM's names. If the system cannot be asked the answer is "none": slower kernels, never a wrong
instruction.
"""

from __future__ import annotations

import ctypes
import sys

_AT_HWCAP, _AT_HWCAP2 = 16, 26
_LINUX = {"dotprod": (_AT_HWCAP, 20), "i8mm": (_AT_HWCAP2, 13)}
"""Auxiliary vector entry and bit (Linux, uapi/asm/hwcap.h of arm64); the kernel leaves out features that not all cores
have."""
_MACOS = {"dotprod": "hw.optional.arm.FEAT_DotProd", "i8mm": "hw.optional.arm.FEAT_I8MM"}
_WINDOWS = {"dotprod": 43, "i8mm": 66}
"""PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE (winnt.h)."""


def arm_features() -> frozenset[str]:
    """Features of this aarch64 machine among those that the list of ISA levels asks for."""
    try:
        if sys.platform == "darwin":
            return frozenset(name for name, key in _MACOS.items() if _sysctl(key))
        if sys.platform == "win32":
            return frozenset(name for name, number in _WINDOWS.items() if _processor_feature(number))
        return frozenset(name for name, (entry, bit) in _LINUX.items() if _auxiliary(entry) >> bit & 1)
    except (OSError, AttributeError):  # no such library or function
        return frozenset()


def _auxiliary(entry: int) -> int:
    """A word that the kernel gave this process at its start."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(entry))


def _sysctl(name: str) -> int:
    """An integer that macOS knows by name; 0 if it does not know the name."""
    by_name = ctypes.CDLL(None).sysctlbyname
    value = ctypes.c_int64(0)  # little-endian, so it holds an int32 as well
    size = ctypes.c_size_t(ctypes.sizeof(value))
    by_name.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    failed = by_name(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def _processor_feature(number: int) -> int:
    """Non-zero where Windows reports the feature."""
    kernel32 = getattr(ctypes, "WinDLL")("kernel32")  # noqa: B009 (absent elsewhere, and type checkers know)
    return int(kernel32.IsProcessorFeaturePresent(number))
