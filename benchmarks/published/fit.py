"""Constants fitted to published rows of decoding, and the errors of simpler models on the same rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.devices import classes, constants_of, decode_terms
from edgeinfer.devices.cores import core_kinds

from .rows import Row

STEP, MIN_STEP = 0.16, 0.01
"""Steps of the search, of logarithms."""
PROGRAMS = ("T-MAC", "ROCm")
"""Programs with a factor: T-MAC unpacks by tables, ROCm has longer fixed times."""
PARAMETERS_ONLY = {  # the formula of llmfit: tokens/s = K / 1e9 parameters x factor of the quantisation
    "apple-gpu": 160, "cuda-consumer": 220, "cuda-datacentre": 220, "cuda-embedded": 220, "radeon": 180, "igpu": 100,
    "arc": 100, "npu": 90, "x86-desktop": 70, "x86-laptop": 70, "x86-server": 70,
}
QUANTISATION_FACTORS = (("F16", 0.6), ("Q8", 0.8), ("w8", 0.8), ("Q5", 1.0), ("Q3", 1.25), ("Q2", 1.35), ("", 1.15))
Values = dict[str, float]
"""Constants of a fit, by name: f_w, t0_ms and so on; of a generation 'ada.t0_ms', of a class 'arm-sbc.f_w', of a group
of cores 'cores.middle', of a program 'ROCm' and 'T-MAC'."""


@dataclass(frozen=True)
class Prediction:
    """A row beside its prediction."""

    row: Row
    tok_per_s: float
    one_constant: float

    @property
    def miss(self) -> float:
        """Predicted over measured, less one."""
        return self.tok_per_s / self.row.tok_per_s - 1


def mean_miss(misses: Iterable[float]) -> float:
    """Mean absolute error."""
    return statistics.fmean(abs(miss) for miss in misses)


def table_of(row: Row, values: Mapping[str, float]) -> dict[str, Any]:
    """The constants of a row's class with those of a fit in their places."""
    table = dict(classes()[row.profile.device_class])
    families: dict[str, Values] = {}
    for name, value in values.items():
        of, _, key = name.rpartition(".")
        if of == "cores":
            table.setdefault("groups", {})[key] = value
        elif of in (row.profile.device_class, table.get("experts_of")) or not of:
            table[key] = value
        elif of not in classes():
            families.setdefault(of, {})[key] = value
    if families or "t0_ms" in values:
        table.pop("families_of", None)
        table["families"] = families
    if "ROCm" in row.program and "ROCm" in values:
        table["t0_ms"] *= values["ROCm"]
    if "T-MAC" in row.program and "T-MAC" in values and "groups" in table:
        table["groups"] = {group: value * values["T-MAC"] for group, value in table["groups"].items()}
    return table


def predict(row: Row, values: Mapping[str, float]) -> float:
    """Tokens per second by the estimator with the constants of a fit; those of its class where it has none."""
    constants = constants_of(row.profile, table_of(row, values), row.bits, row.experts, row.recurrent)
    return 1000 / math.fsum(decode_terms(row.profile, row.traffic, constants, row.tokens).values())


def parameters_only(row: Row) -> float:
    """Tokens per second by the number of parameters and the kind of device, without any bandwidth."""
    factor = next(factor for name, factor in QUANTISATION_FACTORS if name in row.type)
    return PARAMETERS_ONLY.get(row.profile.device_class, 90) / (row.parameters / 1e9) * factor


def fit_one_constant(rows: Sequence[Row]) -> float:
    """The share of the bandwidth that explains the rows best if nothing but reading the weights took time."""
    return statistics.median(row.read_bytes * row.tok_per_s / 1e9 / row.profile.bandwidth_gbs for row in rows)


def one_constant(row: Row, share: float) -> float:
    """Tokens per second by that share."""
    return share * row.profile.bandwidth_gbs * 1e9 / row.read_bytes


def fit(rows: Sequence[Row], priors: Mapping[str, tuple[float, float]], start: Mapping[str, float] | None = None,
        step: float = STEP) -> Values:
    """Fit constants: least sum of absolute logarithms of predicted over measured, with a pull to a prior each.

    Parameters
    ----------
    rows : sequence of Row
    priors : mapping
        By name the expected value, and the weight of the squared logarithm of the ratio to it, in rows.
    start : mapping, optional
        Values to start from; by default the expected ones.
    step : float
        First step of the search, of logarithms.
    """
    values = dict(start) if start else {name: value for name, (value, _) in priors.items()}
    concerned = {name: [i for i, row in enumerate(rows) if _concerns(name, row)] for name in priors}
    misses = [_miss(row, values) for row in rows]

    def pull(name: str, value: float) -> float:
        expected, weight = priors[name]
        return weight * math.log(value / expected) ** 2

    while step >= MIN_STEP:
        improved = False
        for name in priors:
            for factor in (math.exp(step), math.exp(-step)):
                tried = {**values, name: values[name] * factor}
                changed = {i: _miss(rows[i], tried) for i in concerned[name]}
                gain = math.fsum(misses[i] - miss for i, miss in changed.items())
                if gain + pull(name, values[name]) - pull(name, tried[name]) > 1e-9:
                    for i, miss in changed.items():
                        misses[i] = miss
                    values, improved = tried, True
                    break
        if not improved:
            step /= 2
    return values


def _miss(row: Row, values: Mapping[str, float]) -> float:
    return abs(math.log(predict(row, values) / row.tok_per_s))


def _concerns(name: str, row: Row) -> bool:
    """Return whether a constant may change a row's prediction."""
    of, _, key = name.rpartition(".")
    if of == "cores":
        return any(core_kinds()[kind].group == key for kind in row.profile.processor)
    if of:
        return of in (row.profile.device_class, row.profile.family,
                      classes()[row.profile.device_class].get("experts_of"))
    return name not in PROGRAMS or name in row.program


def leave_one_device_out(rows: Sequence[Row], priors: Mapping[str, tuple[float, float]], fitted: Values,
                         share: Callable[[Sequence[Row]], float] = fit_one_constant) -> list[Prediction]:
    """Predict every row with constants fitted to the other devices."""
    found = []
    for device in dict.fromkeys(row.known.name for row in rows):
        others = [row for row in rows if row.known.name != device]
        values = fit(others, priors, fitted, STEP / 4)
        one = share(others)
        found += [Prediction(row, predict(row, values), one_constant(row, one))
                  for row in rows if row.known.name == device]
    return found


def held(priors: Mapping[str, tuple[float, float]], at: Values) -> tuple[dict[str, tuple[float, float]], Values]:
    """Return the priors of a simpler model and the values to start from: some constants are held at a value.

    Constants that are held at 0 are left out, and one for all ('t0_ms') is fitted in their place.
    """
    free = {name: prior for name, prior in priors.items() if name not in at}
    dropped = [priors[name][0] for name, value in at.items() if not value]
    if dropped:
        free["t0_ms"] = (statistics.fmean(dropped), 1.0)
    return free, {**{name: value for name, (value, _) in free.items()},
                  **{name: value for name, value in at.items() if value}}


def shipped(rows: Sequence[Row]) -> list[Prediction]:
    """Predict rows with the constants of classes.toml; the one constant is fitted to the same rows."""
    one = fit_one_constant(rows)
    return [Prediction(row, predict(row, {}), one_constant(row, one)) for row in rows]


def error_of_known(row: Row) -> float:
    """Miss of `edgeinfer estimate` for the device with all known facts."""
    constants = constants_of(row.known, bits=row.bits, experts=row.experts, recurrent=row.recurrent)
    speed = 1000 / math.fsum(decode_terms(row.known, row.traffic, constants, row.tokens).values())
    return speed / row.tok_per_s - 1
