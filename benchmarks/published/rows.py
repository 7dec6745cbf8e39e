"""Speeds that others published, and the devices they were measured on."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.devices import DeviceProfile, Traffic

FILE = Path(__file__).with_name("speeds.tsv")
INLINE_ECC = 15 / 16
"""Share of the bandwidth left for data where error correction lies in the same memory (GDDR6): a sixteenth is codes."""


@dataclass(frozen=True)
class Row:
    """One published measurement of decoding."""

    group: str
    """Rows of one maker and one generation of software, which share constants."""
    device_class: str
    device: str
    bandwidth_gbs: float
    """Of the vendor."""
    multiprocessors: int
    """GPU cores of Apple, streaming multiprocessors of NVIDIA; 1 if they do not enter."""
    clock_ghz: float | None
    ecc: bool
    """Whether error correction takes its part of the bandwidth."""
    model: str
    parameters: float
    layers: int
    read_bytes: float
    kv_bytes_per_position: float
    positions: int
    """Mean context during the test; 0 if it is not known."""
    tok_per_s: float
    source: str

    @property
    def profile(self) -> DeviceProfile:
        """The device, as the estimator takes it."""
        return DeviceProfile(
            name=self.device, title=self.device, device_class=self.device_class, memory_bytes=1 << 40,
            bandwidth_gbs=self.bandwidth_gbs * (INLINE_ECC if self.ecc else 1), effective_gbs=None,
            cores=self.multiprocessors, isa="generic", figures={"clock_ghz": self.clock_ghz} if self.clock_ghz else {},
        )

    @property
    def traffic(self) -> Traffic:
        """The model, as the estimator takes it."""
        return Traffic(self.read_bytes, self.layers, kv_bytes=self.kv_bytes_per_position)


def read_rows(path: Path = FILE) -> list[Row]:
    """Return all rows."""
    with open(path, encoding="utf-8", newline="") as file:
        return [_row(fields) for fields in csv.DictReader(file, delimiter="\t")]


def _row(fields: Mapping[str, str]) -> Row:
    return Row(
        fields["group"], fields["class"], fields["device"], float(fields["bandwidth_gbs"]),
        int(fields["multiprocessors"] or 1), float(fields["clock_ghz"]) if fields["clock_ghz"] else None,
        fields["ecc"] == "inline", fields["model"], 1e9 * float(fields["parameters_1e9"]), int(fields["layers"]),
        1e9 * float(fields["gb_read_per_token"]), float(fields["kv_bytes_per_position"]), int(fields["positions"]),
        float(fields["tok_per_s"]), fields["source"],
    )
