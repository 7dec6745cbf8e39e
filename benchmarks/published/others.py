"""Published speeds that no constant was fitted to: a file of them is judged as it comes."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.devices import CLASSES, DeviceProfile, Traffic, classes, constants_of, estimate, load_profile
from edgeinfer.errors import UsageError

COLUMNS = ("class", "device", "bandwidth_gbs", "model", "gb_read_per_token", "tok_per_s")
LAYERS = ((0.3, 30), (0.8, 24), (1.4, 22), (4.5, 28), (10.0, 32), (20.0, 40), (50.0, 60), (1e9, 80))
"""Layers that models of up to so many 1e9 parameters mostly have."""
KINDS = {"gpu-2024": "cuda-datacentre", "gpu": "cuda-consumer", "edge": "unknown"}
"""Classes of the estimator for the classes of others, for devices without a profile."""
OLDER = "gpu-2024"
"""Rows of NVIDIA's GPUs with a program of 2024, whose fixed times were longer."""
OF_2024 = {"f_w": 0.91, "issue_bytes_per_clock": 6.4, "families": {
    "ampere": {"t0_ms": 1.97}, "ga100": {"t0_ms": 1.84}, "hopper": {"t0_ms": 2.16}, "ada": {"t0_ms": 1.79}}}
"""Constants that `estimator_fit.py` gives such rows."""


@dataclass(frozen=True)
class Other:
    """A row and its estimate."""

    device: str
    model: str
    tok_per_s: float
    estimated: float
    how: str
    """Source of the constants: a profile or a class."""

    @property
    def miss(self) -> float:
        """Estimated over measured, less one."""
        return self.estimated / self.tok_per_s - 1


def judge_file(path: Path) -> list[Other]:
    """Estimate every row of a tab-separated file with at least COLUMNS.

    Raises
    ------
    UsageError
        A column is missing, or a figure is none.
    """
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t")
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise UsageError(f"{path} has no column {missing[0]!r}; it needs {', '.join(COLUMNS)}, separated by tabs.")
        try:
            return [_judged(row) for row in reader]
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise UsageError(f"{path} has a figure that cannot be read: {error}.") from error


def layers_of(model: str) -> int:
    """Layers that a model of this name most likely has; 32 where it names no size."""
    size = re.search(r"(\d+(?:\.\d+)?) ?B\b", model)
    return next(layers for most, layers in LAYERS if float(size[1]) <= most) if size else 32


def _judged(row: Mapping[str, str]) -> Other:
    profile, how = _profile(row)
    traffic = Traffic(1e9 * float(row["gb_read_per_token"]), layers_of(row["model"]))
    if row["class"] == OLDER and profile.device_class.startswith("cuda"):
        table = {**classes()[profile.device_class], **OF_2024}
        table.pop("families_of", None)
        constants = constants_of(profile, table)
        profile = replace(profile, constants={"f_w": constants.f_w, "t0_ms": constants.t0_ms})
        how += ", constants of 2024"
    speed = estimate(profile, traffic).decode_tok_per_s
    return Other(row["device"], row["model"], float(row["tok_per_s"]), speed, how)


def _profile(row: Mapping[str, str]) -> tuple[DeviceProfile, str]:
    """The device's profile, else one of its class and its bandwidth."""
    try:
        profile = load_profile(row["device"])
        return profile, f"profile {profile.name}"
    except UsageError:
        kind = row["class"] if row["class"] in CLASSES else KINDS.get(row["class"], "unknown")
        name, bandwidth = row["device"], float(row["bandwidth_gbs"])
        return DeviceProfile(name, name, kind, 1 << 40, bandwidth, None, 1, "generic"), f"class {kind}"
