"""Queries of NVIDIA's driver and GPU through libcuda, made before onnxruntime is loaded."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

from edgeinfer.errors import UsageError

MIN_CUDA, MIN_DRIVER = 13000, 580
"""Oldest version of CUDA, in the driver's notation (1000 x major + 10 x minor), and the first driver that has it:
onnxruntime-gpu is for CUDA 13 from 1.27 on."""
CODE = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
"""Compute capabilities for which the wheel has code (onnxruntime-gpu 1.31.1): it runs on the same major with at least
that minor number, and there is none to be compiled for others."""
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR."""


class Gpu(NamedTuple):
    """The first GPU."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    cuda: int
    """Newest CUDA that the driver runs, as `MIN_CUDA`."""


def load_driver() -> Any:
    """Return libcuda; raises OSError if there is no driver."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def read_gpu() -> Gpu:
    """Return the driver's facts; raises `UsageError` if there is no driver, or no GPU."""
    try:
        cuda = load_driver()
    except OSError:
        raise UsageError("There is no NVIDIA driver on this system (libcuda.so.1 was not found); install one, or run "
                         "with --device cpu.") from None
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    major, minor, name, total = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value \
            or cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise UsageError("NVIDIA's driver finds no GPU that this process may use; see nvidia-smi and "
                         "CUDA_VISIBLE_DEVICES, or run with --device cpu.")
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value), int(total.value), version.value)


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def load_management() -> Any:
    """Return NVML, which comes with the driver; raises OSError if there is none."""
    return ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")


def gpu_free_bytes() -> int:
    """Return the free memory of the first GPU, without making a context, which would take some itself.

    Raises `UsageError` if the driver does not say.
    """
    try:
        cuda, nvml = load_driver(), load_management()
        bus, handle, memory = ctypes.create_string_buffer(64), ctypes.c_void_p(), _Memory()
        failed = (cuda.cuInit(0) or cuda.cuDeviceGetPCIBusId(bus, 64, 0) or nvml.nvmlInit_v2()
                  or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle))
                  or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
    except OSError:
        failed = True
    if failed:
        raise UsageError("NVIDIA's driver does not say how much memory is free; see nvidia-smi.")
    return int(memory.free)


def check_driver(wheel: str, version: str) -> Gpu:
    """Return the GPU; raises `UsageError` if driver or GPU are none that the wheel of onnxruntime has code for."""
    gpu = read_gpu()
    if gpu.cuda < MIN_CUDA:
        raise UsageError(f"NVIDIA's driver runs CUDA up to {gpu.cuda // 1000}.{gpu.cuda % 1000 // 10}, and {wheel} "
                         f"{version} is for CUDA 13; update the driver to {MIN_DRIVER} or newer, or run with "
                         "--device cpu.")
    major, minor = gpu.capability
    if not any(major == known and minor >= least for known, least in CODE):
        known = ", ".join(f"{one}.{two}" for one, two in CODE)
        raise UsageError(f"{gpu.name} has compute capability {major}.{minor}, for which {wheel} {version} has no code "
                         f"(it has {known}); run with --device cpu.")
    return gpu
