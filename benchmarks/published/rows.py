"""Speeds that others published, and the devices they were measured on with nothing of them but the vendor's figures."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from edgeinfer.devices import DeviceProfile, Traffic, load_profile, processor_of
from edgeinfer.devices.cores import core_kinds

FILE = Path(__file__).with_name("speeds.tsv")
WIDE = ("Q8_0", "F16", "BF16", "w8a8")
"""Types of 8 bits and more."""
EXPERTS = r"A\d+B$|gpt-oss|671B|V2-Lite"
"""Names of mixtures of experts."""
RECURRENT = r"Qwen3\.[56]|Qwen3-Next|Nemotron-3|Falcon-H1|Granite-4"
"""Names of models with recurrent layers."""


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    group: str
    """Rows that are judged together: of one kind of device, and programs that decode alike."""
    device: str
    unit: str
    """"cpu" of a device whose profile is that of its GPU."""
    bandwidth_gbs: float
    """Bandwidth of this version of the device; 0 if equal to its profile's. Likewise `multiprocessors`."""
    multiprocessors: int
    program: str
    model: str
    type: str
    parameters: float
    """Weights that a token uses: the active ones of a mixture of experts, without rows of the embedding."""
    layers: int
    width: int
    read_bytes: float
    kv_bytes_per_position: float
    test: str
    """tg (decoding) or pp (prompt)."""
    tokens: int
    """Mean context of decoding, or length of the prompt."""
    tok_per_s: float
    threads: int
    """0 if they are not known."""
    note: str
    doubt: str
    """Why the row is not used; empty if nothing speaks against it."""
    date: str
    source: str

    @property
    def decodes(self) -> bool:
        """True if it is a speed of decoding."""
        return self.test == "tg"

    @cached_property
    def known(self) -> DeviceProfile:
        """The device as `edgeinfer estimate` knows it."""
        profile = load_profile(self.device)
        return (processor_of(profile) or profile) if self.unit == "cpu" else profile

    @cached_property
    def profile(self) -> DeviceProfile:
        """The device without any speed that was measured on it, in this version and with these threads."""
        known = self.known
        return replace(
            known, effective_gbs=None, programs={}, versions={}, constants={},
            bandwidth_gbs=self.bandwidth_gbs or known.bandwidth_gbs, cores=self.multiprocessors or known.cores,
            processor=_used(known.processor, self.threads),
            **_peak_of_version(known, self.multiprocessors))

    @property
    def bits(self) -> float:
        """Bits of a weight's code, as far as the estimator tells types apart."""
        return 8.0 if self.type in WIDE else 4.0

    @property
    def experts(self) -> bool:
        """True if the model is a mixture of experts."""
        return re.search(EXPERTS, self.model) is not None

    @property
    def recurrent(self) -> bool:
        """True if some of the model's layers are recurrent."""
        return re.search(RECURRENT, self.model) is not None

    @cached_property
    def traffic(self) -> Traffic:
        """The model, as the estimator takes it."""
        return Traffic(
            self.read_bytes, self.layers, kv_bytes=self.kv_bytes_per_position, operations=2 * self.parameters,
            attention_operations=4.0 * self.width * self.layers, pure_bits=self.bits)


def _peak_of_version(known: DeviceProfile, multiprocessors: int) -> dict[str, float]:
    peak = known.f32_peak_gflops
    return {"f32_peak_gflops": peak * multiprocessors / known.cores} if peak and multiprocessors else {}


def _used(processor: Mapping[str, tuple[int, float]], threads: int) -> dict[str, tuple[int, float]]:
    """The cores that so many threads run on, the fastest first."""
    left, used = threads or 1 << 20, {}
    for kind, (number, clock) in sorted(processor.items(),
                                        key=lambda item: -item[1][1] * core_kinds()[item[0]].bytes_per_clock):
        if taken := min(number, left):
            used[kind] = (taken, clock)
            left -= taken
    return used


def read_rows(path: Path = FILE) -> list[Row]:
    """Return all rows."""
    with open(path, encoding="utf-8", newline="") as file:
        return [_row(fields) for fields in csv.DictReader(file, delimiter="\t")]


def usable(rows: list[Row]) -> list[Row]:
    """Rows that nothing speaks against."""
    return [row for row in rows if not row.doubt]


def _row(fields: Mapping[str, str]) -> Row:
    return Row(
        fields["group"], fields["device"], fields["unit"], float(fields["bandwidth_gbs"] or 0),
        int(fields["multiprocessors"] or 0), fields["program"], fields["model"], fields["type"],
        1e9 * float(fields["parameters_1e9"]), int(fields["layers"]), int(fields["width"]),
        1e9 * float(fields["gb_read_per_token"]), float(fields["kv_bytes_per_position"]), fields["test"],
        int(fields["tokens"]), float(fields["tok_per_s"]), int(fields["threads"] or 0), fields["note"],
        fields["doubt"], fields["date"], fields["source"],
    )
