"""Choice of the layers that skip neurons: those in which skipping is predicted to be faster.

The choice depends on how often a layer's neurons are active or selected (the bundle's statistics) and on the speed of
the kernels by density (the device's profile). It is made before the graph is built: the recipe then names the layers
that run in another mode.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ..base.dataclass import dataclass
from ..base.process import say
from ..bundle import Bundle, named, neuron_layers
from ..config import Recipe, Step
from ..errors import EdgeInferError
from ..graph import RELUS

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

FALLBACKS = {"dense": "off", "exact": "exact"}
"""Settings of the pass `sparse` that name layers, and the mode that these run in."""

DEFAULT_BASIS = "the default curves ('edgeinfer devices --probe' measures this machine's)"


@dataclass(frozen=True)
class SparseFfn:
    """Mode of each sparse FFN of a bundle."""

    mode: str
    """Mode that was requested: off, exact or predict."""
    runs: tuple[str, ...]
    """Mode of each layer, ``tiles`` if it is stored in tiles."""
    densities: tuple[tuple[float, float], ...]
    """Shares of the neurons that fire and that a mask chooses, by layer; none if the bundle has no statistics."""
    predictor: float
    """Bytes of the predictor over those of the FFNs."""
    basis: str
    """Machine whose curves decided."""
    kind: str = ""
    """Kind of the predictor; thresholds read the gates of all neurons, as exact runs do."""
    gates: float = 1 / 3
    """Share of their bytes that say which neurons live: a third, or of FFNs without a gate a half."""

    def layers(self) -> tuple[tuple[str, float], ...]:
        """Mode and density of each layer, as the estimator takes them; density 1 if unknown."""
        whole = self.densities or ((1.0, 1.0),) * len(self.runs)
        return tuple((self.reads(mode), density[mode == "predict"])
                     for mode, density in zip(self.runs, whole, strict=True))

    def reads(self, mode: str) -> str:
        """Return the mode whose curve of reads applies to a mode."""
        return "exact" if mode == "predict" and self.kind == "threshold" else mode

    def sentence(self) -> str:
        """Return which layers deviate from the requested mode, and their densities; empty if none does."""
        others = {mode: [i for i, own in enumerate(self.runs) if own == mode] for mode in ("off", "exact", "tiles")}
        words = {"off": "dense", "exact": "exact"}
        found = [f"{_layer_names(others[mode])} {word} (densities {_densities(self.densities, others[mode], mode)})"
                 for mode, word in words.items() if others[mode] and mode != self.mode]
        said = []
        if found:
            left = [i for i, own in enumerate(self.runs) if own == self.mode]
            rest = f"; {_layer_names(left)} {self.mode} ({_densities(self.densities, left, self.mode)})" if left else ""
            said.append(f"by {self.basis} it is faster to run {' and '.join(found)}{rest}")
        if at := others["tiles"]:
            said.append(f"{_layer_names(at)} lie{'s' * (len(at) == 1)} in tiles, dense (densities "
                        f"{_densities(self.densities, at, 'off')})")
        return f"sparse {self.mode}: {'; '.join(said)}." if said else ""

    def report(self) -> dict[str, Any]:
        """Return a JSON object."""
        densities = self.densities or ((None, None),) * len(self.runs)
        layers = [{"runs": own, "fires": fires, "chosen": chosen}
                  for own, (fires, chosen) in zip(self.runs, densities, strict=True)]
        return {"mode": self.mode, "layers": layers, "basis": self.basis, "said": self.sentence()}


def decide(recipe: Recipe, bundle: Bundle, profile: DeviceProfile | None = None,
           contents: bool = True) -> tuple[Recipe, SparseFfn | None]:
    """Return the recipe with the bundle's predictor and the layers that fall back, and how the FFNs run.

    The latter is None if all FFNs are in tiles. A step `sparse` that names such layers itself (or none) is left as
    it is, and so are one of a bundle without statistics and a recipe without the step; the densities are known in all
    of them but the second.

    Parameters
    ----------
    recipe : Recipe
    bundle : Bundle
    profile : DeviceProfile, optional
        Whose curves decide; by default this machine's, and those of docs/explanation/neuron.md where it was not probed.
    contents : bool
        As for `read_predictor`.

    Raises
    ------
    BundleError
        Predictor or statistics are not this bundle's.
    UsageError
        The recipe asks for another predictor.
    """
    recipe = named(recipe, bundle)
    by_neuron = neuron_layers(bundle.header.tensors)
    if not (ffn_bytes := sum(entry.nbytes for entry in by_neuron.values())):
        return recipe, None
    from ..bundle import read_predictor, read_statistics  # with NumPy, which a plan of most bundles does not need

    relu, n = bundle.config.hidden_act in RELUS, bundle.config.num_hidden_layers
    step = next((step for step in recipe.steps if step.name == "sparse"), Step("sparse"))
    settings = dict(step.settings)
    mode = str(settings.get("mode", "exact" if relu else "off"))
    statistics = read_statistics(bundle) if mode != "off" else None
    predictor = read_predictor(bundle, contents) if mode == "predict" else None
    share, kind = (predictor.nbytes / ffn_bytes, predictor.kind) if predictor else (0.0, "")
    gates = 1 / next(iter(by_neuron.values())).shape[1]
    densities = tuple(zip(statistics.densities(False), statistics.densities(True), strict=True)) if statistics else ()
    as_named = step not in recipe.steps or FALLBACKS.keys() & settings
    if not densities or as_named or not (relu or mode == "predict"):
        named_runs = tuple(own if i in by_neuron else "tiles" for i, own in enumerate(_named(settings, mode, n)))
        return recipe, SparseFfn(mode, named_runs, densities, share, "the recipe", kind, gates)
    profile = profile or _local()
    modes = (mode, *(other for other in FALLBACKS.values() if other != mode and (relu or other == "off")))
    runs = tuple(_fastest(profile, modes, settings, density, share, gates) if i in by_neuron else "tiles"
                 for i, density in enumerate(densities))
    found = ((name, "/".join(str(i) for i, own in enumerate(runs) if own == other))
             for name, other in FALLBACKS.items() if other != mode)
    own = replace(step, settings=(*step.settings, *((name, text) for name, text in found if text)))
    return Recipe(tuple(own if one is step else one for one in recipe.steps)), \
        SparseFfn(mode, runs, densities, share, _basis(profile), kind, gates)


def dense_layers(densities: Sequence[float], predictor: float, profile: DeviceProfile | None = None,
                 gates: float = 1 / 3) -> tuple[list[int], str]:
    """Return the layers that are faster in tiles, dense, than without neurons that do not fire; whose curves say so.

    Parameters
    ----------
    densities : sequence of float
        Share of each layer's neurons that fire: those of an ideal mask.
    predictor : float
        Least bytes of a predictor over those of the FFN.
    profile : as for `decide`
    gates : float
        Share of the FFN's bytes that say which neurons live.
    """
    profile, modes = profile or _local(), ("predict", "exact", "tiles")
    found = [i for i, density in enumerate(densities)
             if devices.fastest(profile, modes, dict.fromkeys(modes, density), predictor, gates) == "tiles"]
    return found, _basis(profile)


def predicted_time(kind: str, chosen: Sequence[float], predictor: float, in_tiles: Collection[int],
                   gates: float = 1 / 3) -> tuple[float, str]:
    """Return the time of FFNs with a predictor over that of the same in tiles, dense, and whose curves say so.

    Parameters
    ----------
    kind : of the predictor
    chosen : share of each layer's neurons that it names
    predictor : its bytes over those of the FFNs by neuron
    in_tiles : layers without one
    gates : share of these bytes that say which neurons live
    """
    profile, mode = _local(), "exact" if kind == "threshold" else "predict"
    times = [devices.relative_time(profile, "tiles" if i in in_tiles else mode, share, predictor, gates)
             for i, share in enumerate(chosen)]
    return sum(times) / len(times), _basis(profile)


def everywhere(recipe: Recipe) -> Recipe:
    """Return the recipe for a run in which no layer falls back: for measuring the quality of all of them."""
    def whole(step: Step) -> Step:
        plain = step.name == "sparse" and not FALLBACKS.keys() & dict(step.settings)
        return replace(step, settings=(*step.settings, ("dense", "none"))) if plain else step

    return Recipe(tuple(map(whole, recipe.steps)))


def _named(settings: dict[str, str | float], mode: str, layers: int) -> tuple[str, ...]:
    """Return the mode of each layer that the recipe itself names; the pass refuses layers that do not exist."""
    other = {number: mode for name, mode in FALLBACKS.items() for number in str(settings.get(name, "")).split("/")}
    return tuple(other.get(str(i), mode) for i in range(layers))


def _fastest(profile: DeviceProfile | None, modes: tuple[str, ...], settings: dict[str, str | float],
             density: tuple[float, float], predictor: float, gates: float) -> str:
    fired, chosen = density
    if settings.get("kind") == "threshold":  # it reads all gates, and of the pairs those that are left
        found = devices.fastest(profile, ("exact", "off"), {"exact": chosen}, 0.0, gates)
        return {"exact": "predict"}.get(found, found)
    return devices.fastest(profile, modes, {"exact": fired, "predict": chosen}, predictor, gates)


def _basis(profile: DeviceProfile | None) -> str:
    measured = profile and devices.MASKED_SHARE in profile.curves
    return f"the curves measured on {profile.name}" if profile and measured else DEFAULT_BASIS


def _local() -> DeviceProfile | None:
    try:
        return devices.local_profile()
    except EdgeInferError as error:
        say(f"this machine's profile cannot be used ({str(error).rstrip('.')}); default curves decide which layers "
            "skip neurons.")
        return None


def _layer_names(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def _densities(densities: Sequence[tuple[float, float]], layers: Sequence[int], mode: str) -> str:
    if not densities:
        return "unknown"
    found = sorted(densities[i][mode == "predict"] for i in layers)
    return f"{found[0]:.2f}" if len(found) == 1 else f"{found[0]:.2f} to {found[-1]:.2f}"
