"""Power and energy of devices, from vendors' limits and published measurements (power.toml)."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

from edgeinfer.base.dataclass import dataclass

from .profile import DeviceProfile
from .toml_files import read_toml


@dataclass(frozen=True)
class Power:
    """Watts of a device."""

    watts: float
    """Published figure."""
    title: str
    """Part of the machine that the figure is for."""
    decoding: float
    """Watts while decoding, from `low` to `high`."""
    low: float
    high: float
    prompt: float
    """Watts during a prompt."""
    source: str

    def joules(self, tok_per_s: float, spread: float = 0.0) -> tuple[float, float, float]:
        """Return the energy of a token in joules, with its lower and upper bound.

        Parameters
        ----------
        tok_per_s : float
        spread : float
            Half-width of the speed's band, relative to the speed.
        """
        value = self.decoding / tok_per_s
        below, above = (math.hypot(end / self.decoding - 1, spread) for end in (self.low, self.high))
        return value, value * (1 - min(below, 0.95)), value * (1 + above)


@cache
def _tables() -> tuple[dict[str, Any], dict[str, tuple[str, float]]]:
    table = read_toml(Path(__file__).with_name("power.toml"))
    return table["kinds"], {name: (kind, float(watts)) for kind, row in table["watts"].items()
                            for name, watts in row.items()}


def power_of(profile: DeviceProfile) -> Power | None:
    """Return the power of a device; None where no figure was published."""
    kinds, figures = _tables()
    name = profile.name if profile.name in figures else profile.name.removesuffix("-cpu").removesuffix("-igpu")
    if name not in figures:
        return None
    kind, watts = figures[name]
    row = kinds[kind]
    return Power(watts, row["title"], watts * row["share"], watts * row["low"], watts * row["high"],
                 watts * row["prompt"], row["source"])
