"""Profile of a device: memory, bandwidth, cores, storage, and the source of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from edgeinfer.base.dataclass import dataclass

from .profile_checks import CONSTANTS as CONSTANTS
from .profile_checks import LEAST as LEAST
from .profile_checks import MAX_BYTES, MAX_CORES, MAX_GBS, MAX_OPERATIONS, Checker
from .profile_checks import Curve as Curve

CLASSES = (
    "arm-sbc", "arm-phone", "arm-laptop", "arm-server", "riscv-sbc", "apple-cpu", "x86-desktop", "x86-laptop",
    "x86-server", "apple-gpu", "cuda-consumer", "cuda-datacentre", "cuda-embedded", "cuda-onnxruntime", "radeon",
    "arc", "igpu", "npu", "local",
)
"""Classes of the estimator."""
PROCESSORS = tuple(name for name in CLASSES if name.startswith(("arm-", "x86-", "riscv-", "apple-cpu")))
"""Classes of processors."""
ISAS = (
    "generic", "avx2", "avxvnni", "avx512vnni", "neon", "neon_dotprod", "neon_i8mm", "cuda", "metal", "vulkan", "sycl",
    "npu",
)
"""edgeinfer's instruction sets, and the programming interfaces of other devices."""
OWN_MEMORY = ("cuda-consumer", "cuda-datacentre", "cuda-onnxruntime", "arc")
"""Classes of cards, on whose memory no system runs."""
SYSTEM_BYTES = 1 << 30
"""Memory of the system and its services on other devices, at most a quarter, an assumption."""


@dataclass(frozen=True)
class DeviceProfile:
    """A device. Figures that were neither published nor measured are None."""

    name: str
    """Name that ``--machine`` takes."""
    title: str
    """Name for people."""
    device_class: str
    """One of CLASSES."""
    memory_bytes: int
    """Smallest common capacity, or the one that a name stated."""
    bandwidth_gbs: float
    """Vendor's peak of the memory; in a probed profile the measured bandwidth of all threads."""
    effective_gbs: float | None
    """Bandwidth observed while decoding, weights and KV cache together."""
    cores: int
    """Processor cores, or the vendor's count of a GPU's multiprocessors."""
    isa: str
    """One of ISAS."""
    int8_peak_gops: float | None = None
    """Multiplications and additions of int8, in 1e9 per second."""
    f32_peak_gflops: float | None = None
    """Multiplications and additions of f32, in 1e9 per second."""
    f16_peak_gflops: float | None = None
    """Multiplications and additions of f16 that are summed in f32, in 1e9 per second."""
    storage_sequential_gbs: float | None = None
    """Large reads in order."""
    storage_random: Curve | None = None
    """Scattered reads by their size, at the deepest queue that was measured."""
    memory_random: Curve | None = None
    """Reads of scattered pieces of memory by their size, all threads, with prefetch along the list."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Values of CONSTANTS that differ from those of the class."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each field's figure, by field; that of a constant by its name."""
    measured: str | None = None
    """When it was probed, as an ISO date and time; None for published profiles."""
    machine: str | None = None
    """The machine that was probed, in words."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Further curves of the probe, such as ``read_gbs_by_threads``."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the probe, such as ``frequency_share``; of some GPUs ``clock_ghz``."""
    aliases: tuple[str, ...] = ()
    """Other names, for example in published tables."""
    memory_gib: tuple[int, ...] = ()
    """Capacities in which it is sold, in GiB; none if its builder chooses."""
    programs: Mapping[str, float] = field(default_factory=dict)
    """Bandwidth observed while decoding, by program, in GB/s, if several were measured; that of effective_gbs is among
    them.
    """
    versions: Mapping[str, float] = field(default_factory=dict)
    """Vendor's peak of the memory, in GB/s, of versions that share its name, by their difference."""
    processor: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Kinds of processor cores (rows of cores.toml), with their number and their usual clock in GHz."""
    family: str = ""
    """Generation of a GPU, such as ada or m3, whose constants it has."""
    runtime: str = ""
    """Program that uses it, where one was chosen; never part of a file."""

    @property
    def own_memory(self) -> bool:
        """True if it is a card with memory of its own, on which no system runs."""
        return self.device_class in OWN_MEMORY

    @property
    def usable_bytes(self) -> int:
        """Memory available to a run: all of a discrete GPU's, else the part that the system leaves."""
        if self.own_memory:
            return self.memory_bytes
        return self.memory_bytes - min(SYSTEM_BYTES, self.memory_bytes // 4)

    @property
    def titled(self) -> str:
        """Name for people, with the memory of this version if it exists with several amounts."""
        stated = f"{self.memory_bytes >> 30} GB"
        return self.title if len(self.memory_gib) < 2 or stated in self.title else f"{self.title}, {stated}"


TABLE_KEYS = tuple(key for key in DeviceProfile.__dataclass_fields__ if key not in ("name", "runtime"))
_CURVE_FIELDS = ("storage_random", "memory_random")


def parse_profile(name: str, table: Mapping[str, Any], where: str) -> DeviceProfile:
    """Make a profile of a TOML table, checking every field.

    Parameters
    ----------
    name : str
    table : mapping
        Fields of DeviceProfile without the name; curves as lists of pairs.
    where : str
        The file, for messages.

    Raises
    ------
    ProfileError
        A field is missing, unknown, of the wrong type or absurd.
    """
    check = Checker(where)
    check.keys(table, TABLE_KEYS)
    numbers = {
        "bandwidth_gbs": MAX_GBS, "effective_gbs": MAX_GBS, "storage_sequential_gbs": MAX_GBS,
        "int8_peak_gops": MAX_OPERATIONS, "f32_peak_gflops": MAX_OPERATIONS,
        "f16_peak_gflops": MAX_OPERATIONS,
    }
    values: dict[str, Any] = {
        key: check.number(key, table[key], most) for key, most in numbers.items() if key in table
    }
    for key in _CURVE_FIELDS:
        values[key] = check.curve(key, table[key]) if key in table else None
    values["title"] = check.name("title", table["title"])
    values["device_class"] = check.choice("device_class", table["device_class"], CLASSES)
    values["isa"] = check.choice("isa", table["isa"], ISAS)
    values["memory_bytes"] = check.whole("memory_bytes", table["memory_bytes"], MAX_BYTES, "bytes")
    values["cores"] = check.whole("cores", table["cores"], MAX_CORES, "cores")
    values["constants"] = check.constants(table.get("constants", {}))
    values["sources"] = {key: check.text(f"sources.{key}", value)
                         for key, value in check.table("sources", table.get("sources", {})).items()}
    values["aliases"] = check.texts("aliases", table.get("aliases", []))
    values["measured"] = check.moment("measured", table["measured"]) if "measured" in table else None
    values["family"] = check.name("family", table["family"]) if "family" in table else ""
    values["machine"] = check.name("machine", table["machine"]) if "machine" in table else None
    values["curves"] = {key: check.curve(f"curves.{key}", value)
                        for key, value in check.table("curves", table.get("curves", {})).items()}
    values["figures"] = check.figures(table.get("figures", {}))
    values["memory_gib"] = tuple(check.whole("a capacity in memory_gib", item, MAX_BYTES >> 30, "GiB")
                                 for item in check.items("memory_gib", table.get("memory_gib", [])))
    values["processor"] = check.processor(table.get("processor", {}))
    for key in ("programs", "versions"):
        values[key] = {check.name(f"a name in {key}", label): check.number(f"{key}.{label}", value, MAX_GBS)
                       for label, value in check.table(key, table.get(key, {})).items()}
    effective = values.setdefault("effective_gbs", None)
    if effective is not None and effective > values["bandwidth_gbs"]:
        check.fail("effective_gbs", effective, f"it cannot exceed bandwidth_gbs, {values['bandwidth_gbs']:g}")
    return DeviceProfile(name, **values)
