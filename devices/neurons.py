"""Cost of an FFN stored neuron by neuron, by the share of its neurons that are computed, and its fastest mode.

Times are multiples of the time of the same FFN in tiles, dense. Bytes are read at a share of the speed of tiles; the
share grows with the density, because neighbours among the selected rows are read as a stream. The probe measures these
shares with the kernels themselves; other devices take the default, which docs/explanation/neuron.md has.
"""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.errors import UsageError

from .profile import Curve, DeviceProfile

MASKED_SHARE, GATES_SHARE, DENSE_SHARE = "neuron_masked_share", "neuron_gates_share", "neuron_dense_share"
"""Names of the curves and the figure in a profile: speed of reads as a share of that of tiles, by neurons in
a thousand: of whole neurons that a mask chooses; of all gates with the pairs of those that live; of all neurons."""
PER_MILLE = (20, 50, 100, 200, 500, 1000)
"""Densities at which the curves are measured."""
DEFAULT_CURVES = {
    MASKED_SHARE: Curve(((20, 0.30), (50, 0.43), (100, 0.52), (200, 0.61), (500, 0.68), (1000, 0.79))),
    GATES_SHARE: Curve(((20, 0.82), (50, 0.82), (100, 0.82), (200, 0.78), (500, 0.74), (1000, 0.80))),
}
DEFAULT_DENSE = 0.84
GATES = 1 / 3
"""Share of an FFN's bytes that say which neurons live. Of one without a gate it is a half; it is taken to have the same
curves."""
MIN_DENSITY = 1e-3
BISECTIONS = 20


def relative_time(profile: DeviceProfile | None, mode: str, density: float, predictor: float = 0.0,
                  gates: float = GATES) -> float:
    """Return the time of an FFN by neuron as a multiple of the time in tiles.

    Parameters
    ----------
    profile : DeviceProfile or None
        None and profiles without the curves take the default.
    mode : {"off", "exact", "predict", "tiles"}
    density : float
        Share of the neurons that live, or in mode predict of those that the mask chooses.
    predictor : float
        Bytes of the predictor over those of the FFN.
    gates : float
        Share of the FFN's bytes that say which neurons live.

    Raises
    ------
    UsageError
        The density is not from 0 to 1.
    """
    if not 0 <= density <= 1:
        raise UsageError(f"A density of {density} is impossible; it is a share of the neurons, from 0 to 1.")
    if mode == "tiles":
        return 1.0
    curves, figures = (profile.curves, profile.figures) if profile else ({}, {})
    if mode == "off":
        return 1 / (figures.get(DENSE_SHARE) or DEFAULT_DENSE)
    name = MASKED_SHARE if mode == "predict" else GATES_SHARE
    share = curves.get(name, DEFAULT_CURVES[name]).at(max(1, round(1000 * density)))
    if mode == "predict":
        return density / share + predictor
    return (gates + (1 - gates) * density) / share


def fastest(profile: DeviceProfile | None, modes: tuple[str, ...], density: dict[str, float], predictor: float,
            gates: float = GATES) -> str:
    """Return the mode of the least time, the first of those that are alike; `density` is by mode, dense is 1."""
    return min(modes, key=lambda mode: relative_time(profile, mode, density.get(mode, 1.0), predictor, gates))


def break_even_density(profile: DeviceProfile | None, mode: str, predictor: float = 0.0,
                       gates: float = GATES) -> float:
    """Return the density up to which a mode is faster than all neurons of the same layout; 0 never, 1 always."""
    dense = relative_time(profile, "off", 1.0)

    def pays(density: float) -> bool:
        return relative_time(profile, mode, density, predictor, gates) < dense

    return _last(pays)


def _last(pays: Callable[[float], bool]) -> float:
    if pays(1.0):
        return 1.0
    low, high = 0.0, 1.0
    if not pays(MIN_DENSITY):
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
