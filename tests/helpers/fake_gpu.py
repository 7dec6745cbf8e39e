"""Stand-ins for NVIDIA's libraries, on a machine with one GPU."""

from __future__ import annotations

from typing import Any


class Driver:
    """libcuda of a machine with one GPU."""

    def __init__(self, cuda: int = 13000, capability: tuple[int, int] = (9, 0), count: int = 1):
        self._cuda, self._count = cuda, count
        self._attributes = {75: capability[0], 76: capability[1]}

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._cuda
        return 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._count
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        name.value = b"NVIDIA Test"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self._attributes[attribute]
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: Any) -> int:
        total._obj.value = 12_000_000_000
        return 0

    def cuDeviceGetPCIBusId(self, bus: Any, length: int, device: int) -> int:
        bus.value = b"0000:01:00.0"
        return 0


class Management:
    """NVML of that machine."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, handle: Any) -> int:
        return int(bus.value != b"0000:01:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.free = 11_000_000_000
        return 0
