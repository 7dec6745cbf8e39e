"""Profile of a device: memory, bandwidth, cores, storage, and the source of each figure."""

from __future__ import annotations

import bisect
import datetime
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, NoReturn

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.validation import similar
from edgeinfer.errors import ProfileError

CLASSES = (
    "arm-sbc", "arm-phone", "arm-laptop", "arm-server", "x86-desktop", "x86-laptop", "apple-gpu", "cuda-consumer",
    "cuda-datacentre", "cuda-embedded", "cuda-onnxruntime", "radeon", "igpu", "npu", "local",
)
"""Classes of the estimator."""
ISAS = (
    "generic", "avx2", "avxvnni", "avx512vnni", "neon", "neon_dotprod", "neon_i8mm", "cuda", "metal", "vulkan", "sycl",
    "npu",
)
"""edgeinfer's instruction sets, and the programming interfaces of other devices."""
OWN_MEMORY = ("cuda-consumer", "cuda-datacentre", "cuda-onnxruntime")
"""Classes of cards, on whose memory no system runs."""
SYSTEM_BYTES = 1 << 30
"""Of other devices' memory, at most a quarter: what the system and its services keep, an assumption."""
MOST_GBS = 1e6
LEAST = 1e-6
"""Of what cannot be zero: rates in their units, and shares."""
MOST_OPERATIONS = 1e9
"""In 1e9 per second."""
MOST_BYTES = 1 << 50
MOST_CORES = 1 << 20
MOST_SHOWN = 60
"""Characters of a wrong value that a complaint quotes."""
SHARES = ("f_w", "f_kv", "mfu", "mfu_attention")
CONSTANTS = {**dict.fromkeys(SHARES, 1.0), "t0_ms": 1e4, "token_ms": 1e4, "activation_cost": 1e5, "attention_ms": 1e4}
MAY_BE_ZERO = ("t0_ms", "token_ms", "activation_cost", "attention_ms")
"""Constants of the estimator and the largest value of each: shares of the bandwidth that weights and the KV cache draw,
shares of the int8 peak that a prompt's matrices and its attention reach, milliseconds per token and 32 layers, and per
token, that are spent on neither, and operations of the peak whose time a prompt spends on a value between matrices."""
FIGURES = {"clock_ghz": (0.01, 100.0), "ecc_share": (0.01, 1.0)}
"""The least and the largest value of figures that the estimator divides by."""


@dataclass(frozen=True)
class Curve:
    """GB/s over chunk size: between two points by the logarithms of both sizes, constant beyond the ends."""

    points: tuple[tuple[int, float], ...]
    """(bytes of a chunk, GB/s), ascending in bytes; for some curves of a probe (threads, value)."""

    def at(self, chunk_bytes: int) -> float:
        """Value at a chunk size."""
        sizes = [size for size, _ in self.points]
        above = bisect.bisect_left(sizes, chunk_bytes)
        if above == 0 or above == len(sizes):
            return self.points[min(above, len(sizes) - 1)][1]
        (low, a), (high, b) = self.points[above - 1], self.points[above]
        share = math.log(chunk_bytes / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(a) + share * math.log(b))


@dataclass(frozen=True)
class DeviceProfile:
    """A device. Figures that were neither published nor measured are None."""

    name: str
    """Name that ``--machine`` takes."""
    title: str
    """Its name for people."""
    device_class: str
    """One of CLASSES."""
    memory_bytes: int
    """Largest common capacity."""
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
    """Other names that it goes by, for example in published tables."""
    memory_gib: tuple[int, ...] = ()
    """Capacities in which it is sold, in GiB; none if its builder chooses."""
    programs: Mapping[str, float] = field(default_factory=dict)
    """Bandwidth observed while decoding, by program, in GB/s, if several were measured; that of effective_gbs is among
    them.
    """
    versions: Mapping[str, float] = field(default_factory=dict)
    """Vendor's peak of the memory, in GB/s, of versions that share its name, by what is different."""


    @property
    def own_memory(self) -> bool:
        """Whether it is a card with memory of its own, on which no system runs."""
        return self.device_class in OWN_MEMORY

    @property
    def usable_bytes(self) -> int:
        """Memory that a run can have: of a card of its own all, else what the system leaves."""
        if self.own_memory:
            return self.memory_bytes
        return self.memory_bytes - min(SYSTEM_BYTES, self.memory_bytes // 4)

    @property
    def titled(self) -> str:
        """Its name for people, with the memory of this version where it exists with several amounts."""
        stated = f"{self.memory_bytes >> 30} GB"
        return self.title if len(self.memory_gib) < 2 or stated in self.title else f"{self.title}, {stated}"


TABLE_KEYS = tuple(key for key in DeviceProfile.__dataclass_fields__ if key != "name")
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
    check = _Checker(where)
    check.keys(table, TABLE_KEYS)
    numbers = {
        "bandwidth_gbs": MOST_GBS, "effective_gbs": MOST_GBS, "storage_sequential_gbs": MOST_GBS,
        "int8_peak_gops": MOST_OPERATIONS, "f32_peak_gflops": MOST_OPERATIONS,
        "f16_peak_gflops": MOST_OPERATIONS,
    }
    values: dict[str, Any] = {
        key: check.number(key, table[key], most) for key, most in numbers.items() if key in table
    }
    for key in _CURVE_FIELDS:
        values[key] = check.curve(key, table[key]) if key in table else None
    values["title"] = check.name("title", table["title"])
    values["device_class"] = check.choice("device_class", table["device_class"], CLASSES)
    values["isa"] = check.choice("isa", table["isa"], ISAS)
    values["memory_bytes"] = check.whole("memory_bytes", table["memory_bytes"], MOST_BYTES, "bytes")
    values["cores"] = check.whole("cores", table["cores"], MOST_CORES, "cores")
    values["constants"] = check.constants(table.get("constants", {}))
    values["sources"] = {key: check.text(f"sources.{key}", value)
                         for key, value in check.table("sources", table.get("sources", {})).items()}
    values["aliases"] = check.texts("aliases", table.get("aliases", []))
    values["measured"] = check.moment("measured", table["measured"]) if "measured" in table else None
    values["machine"] = check.name("machine", table["machine"]) if "machine" in table else None
    values["curves"] = {key: check.curve(f"curves.{key}", value)
                        for key, value in check.table("curves", table.get("curves", {})).items()}
    values["figures"] = check.figures(table.get("figures", {}))
    values["memory_gib"] = tuple(check.whole("a capacity in memory_gib", item, MOST_BYTES >> 30, "GiB")
                                 for item in check.items("memory_gib", table.get("memory_gib", [])))
    for key in ("programs", "versions"):
        values[key] = {check.name(f"a name in {key}", label): check.number(f"{key}.{label}", value, MOST_GBS)
                       for label, value in check.table(key, table.get(key, {})).items()}
    effective = values.setdefault("effective_gbs", None)
    if effective is not None and effective > values["bandwidth_gbs"]:
        check.fail("effective_gbs", effective, f"it cannot exceed bandwidth_gbs, {values['bandwidth_gbs']:g}")
    return DeviceProfile(name, **values)


class _Checker:
    """Checks values; every complaint names the file, the field, the value and what is allowed."""

    def __init__(self, where: str):
        self.where = where

    def fail(self, name: str, value: object, want: str) -> NoReturn:
        text = repr(value)
        shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
        raise ProfileError(f"{self.where}: {name} is {shown}; {want}.")

    def keys(self, table: Mapping[str, Any], known: Iterable[str]) -> None:
        for key in ("title", "device_class", "memory_bytes", "bandwidth_gbs", "cores", "isa"):
            if key not in table:
                raise ProfileError(f"{self.where}: {key} is missing; every profile gives title, device_class, "
                                   "memory_bytes, bandwidth_gbs, cores and isa.")
        self.known("field", table, tuple(known))

    def known(self, kind: str, names: Iterable[str], known: tuple[str, ...]) -> None:
        for name in names:
            if name not in known:
                near = similar(name, known)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
                raise ProfileError(f"{self.where}: there is no {kind} {name!r}; {hint}")

    def text(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > 1000:
            self.fail(name, value, "it must be a text of 1 to 1000 characters in quotes")
        return str(value)

    def name(self, name: str, value: object) -> str:
        text = self.text(name, value)
        if not text.isprintable():  # it is shown on terminals, which take some characters for commands
            self.fail(name, value, "it must be on one line and without control characters")
        return text

    def items(self, name: str, value: object, what: str = "whole numbers") -> list[Any]:
        if not isinstance(value, list | tuple):
            self.fail(name, value, f"it must be a list of {what}")
        return list(value)

    def texts(self, name: str, value: object) -> tuple[str, ...]:
        return tuple(self.name(name, item) for item in self.items(name, value, "texts"))

    def choice(self, name: str, value: object, choices: tuple[str, ...]) -> str:
        if value not in choices:
            self.fail(name, value, f"choose one of {', '.join(choices)}")
        return str(value)

    def whole(self, name: str, value: Any, most: int, unit: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.fail(name, value, f"it must be a whole number of {unit} from 1 to {most}")
        return int(value)

    def number(self, name: str, value: Any, most: float, zero: bool = False, least: float = LEAST) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not (least <= value <= most or (zero and value == 0)):
            self.fail(name, value, f"it must be {'0, or ' if zero else ''}a number from {least:g} to {most:g}")
        return float(value)

    def table(self, name: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(name, value, f"it must be a table, written [{name}]")
        return value

    def figures(self, value: object) -> dict[str, float]:
        figures = {}
        for key, figure in self.table("figures", value).items():
            least, most = FIGURES.get(key, (LEAST, MOST_OPERATIONS))
            figures[key] = self.number(f"figures.{key}", figure, most, key not in FIGURES, least)
        return figures

    def constants(self, value: object) -> dict[str, float]:
        table = self.table("constants", value)
        self.known("constant", table, tuple(CONSTANTS))
        for key in SHARES:
            if isinstance(table.get(key), int | float) and table[key] > 1:
                self.fail(f"constants.{key}", table[key], "a share above 1 is impossible: other programs disturbed the "
                          "measurement. Of this machine, measure again with 'edgeinfer devices --probe'")
        return {key: self.number(f"constants.{key}", value, CONSTANTS[key], zero=key in MAY_BE_ZERO)
                for key, value in table.items()}

    def curve(self, name: str, value: Any) -> Curve:
        if not isinstance(value, list) or not value or \
                not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            self.fail(name, value, "it must be a list of pairs, as in [[4096, 0.4], [65536, 1.5]]")
        points = [(self.whole(f"a size in {name}", size, MOST_BYTES, "bytes"),
                   self.number(f"a value in {name}", speed, MOST_OPERATIONS)) for size, speed in value]
        for (before, _), (size, _) in itertools.pairwise(points):
            if size <= before:
                self.fail(f"a size in {name}", size, f"sizes must ascend, and it follows {before}")
        return Curve(tuple(points))

    def moment(self, name: str, value: Any) -> str:
        try:
            return datetime.datetime.fromisoformat(value).isoformat()
        except (TypeError, ValueError):
            self.fail(name, value, "it must be a date and time such as '2026-05-01T12:00:00'")
