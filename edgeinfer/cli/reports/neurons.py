"""Cost and gain of FFNs stored neuron by neuron on a device, for plans and estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

    from ...models.description import ModelDescription

FIELD = ("of a bundle with FFNs by neuron: as `sparse` of `info`, with `relative_time` and `dense_time` as "
         "multiples of the time of tiles, `predictor_share` of the FFN's bytes, and `break_even_density`, the share of "
         "neurons up to which `exact` and `predict` are faster than dense; else null")
"""Description of the field `neurons` of a JSON object."""


def neurons_object(model: ModelDescription, profile: DeviceProfile | None) -> dict[str, Any] | None:
    """Return how the FFNs of a bundle by neuron run, and up to which densities leaving out neurons pays; else None.

    Without a profile the default curves count.
    """
    from edgeinfer.devices import break_even_density, relative_time

    if model.sparse is None:
        return None
    own, layers = model.sparse, model.sparse.layers()
    return {
        **own.report(), "predictor_share": own.predictor,
        "relative_time": sum(relative_time(profile, *layer, gates=own.gates) for layer in layers) / len(layers)
        + own.predictor * own.runs.count("predict") / len(layers),
        "dense_time": relative_time(profile, "off", 1.0),
        "break_even_density": {mode: break_even_density(profile, own.reads(mode), own.predictor, own.gates)
                               for mode in ("exact", "predict")},
    }


def neurons_line(found: dict[str, Any]) -> str:
    """Describe the densities up to which leaving out neurons pays here, and the gain."""
    pays = found["break_even_density"]
    return (f"FFNs by neuron, {found['mode']}: {found['relative_time']:.2f} x the time of tiles, predictor included; "
            f"dense {found['dense_time']:.2f} x. Of this layout exact is faster than dense where at most "
            f"{pays['exact']:.0%} of the neurons fire, predict where a mask names at most {pays['predict']:.0%}.")
