"""The technique ``sparse``: FFNs stored neuron by neuron leave out neurons that are inactive, or predicted to be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgeinfer.base.validation import choice
from edgeinfer.registry import DECODED, Option, Part, Reported, Technique

if TYPE_CHECKING:
    from edgeinfer.bundle import Bundle
    from edgeinfer.devices import Traffic
    from edgeinfer.graph import Graph

MODES = OFF, EXACT, PREDICT = "off", "exact", "predict"
"""All neurons are computed; of inactive ones the gates alone; or those that a predictor names."""


def rewrite(graph: Graph, mode: str, kind: str = "", rank: int = 0, dense: str | float = "none",
            exact: str | float = "none") -> Graph:
    """Describe the reads of FFNs stored neuron by neuron.

    All neurons (off), of dead ones the gates alone (exact; the same bits), or for decoded tokens the neurons that a
    predictor of a kind and a rank names (predict). `dense` and `exact` name layers, as in 0/3/4, that do so whatever
    the mode is: those that fall back where leaving out neurons would cost more. FFNs in tiles have nothing to leave
    out.
    """
    from edgeinfer.errors import UsageError
    from edgeinfer.graph import NeuronDown, NeuronGated, with_predictor

    if mode not in MODES:
        raise UsageError(f"sparse is {mode!r}; choose one of {', '.join(MODES)}.")
    if any(isinstance(op, NeuronGated) and (op.dense or op.mask or op.threshold) for op in graph.ops):
        raise UsageError("The recipe has the pass sparse twice; name it once.")
    if mode == PREDICT and not kind:
        raise UsageError("sparse is 'predict', but the model has no predictor of its neurons; choose off or exact, or "
                         "make one with `edgeinfer sparsify`.")
    layers = graph.config.num_hidden_layers
    whole, gates = _layers("dense", dense, layers), _layers("exact", exact, layers)
    if mode == PREDICT:
        graph = with_predictor(graph, kind, rank, whole | gates)
    everywhere = mode == OFF
    return replace(graph, ops=tuple(
        replace(op, dense=everywhere or op.layer in whole) if isinstance(op, NeuronGated | NeuronDown) else op
        for op in graph.ops))


def _layers(name: str, value: str | float, layers: int) -> set[int]:
    """Return the numbers of layers that a setting names, joined by slashes; none is "none"."""
    from edgeinfer.errors import UsageError

    text = str(value)
    numbers = [] if text == "none" else text.split("/")
    if not all(number.isascii() and number.isdigit() and int(number) < layers for number in numbers):
        raise UsageError(f"sparse has {name} {text!r:.60}; name layers from 0 to {layers - 1}, joined by slashes, or "
                         "none.")
    return {int(number) for number in numbers}


def _read(bundle: Bundle) -> dict[str, str | float]:
    from edgeinfer.bundle import predictor_settings

    return predictor_settings(bundle)


def traffic(traffic: Traffic, model: Any, settings: object) -> Traffic:
    """Return the reads of a token in FFNs by neuron, whatever was requested: layers may leave out neurons by
    default."""
    if model.sparse is None:
        return traffic
    return replace(traffic, neuron_layers=model.sparse.layers(), gate_share=model.sparse.gates)


def report(run: Reported) -> dict[str, Any]:
    """Return how the FFNs run, and in ``info`` the predictor too."""
    if run.command == "run":
        return {TECHNIQUE.name: run.runner.sparse.report() if run.runner.sparse else None}
    if run.command != "info":
        return {}
    from edgeinfer.bundle import read_predictor
    from edgeinfer.runtime import decide

    own, found = read_predictor(run.model), decide(run.config.recipe, run.model)[1]
    return {"predictor": own and {"kind": own.kind, "rank": own.rank, "bytes": own.nbytes},
            TECHNIQUE.name: found and found.report()}


TECHNIQUE = Technique(
    name="sparse",
    options=(Option(
        "sparse", choice(MODES), "|".join(MODES),
        "How sparse FFNs run: dense (off), skip inactive neurons (exact), or skip neurons predicted inactive "
        "(predict).", unset="exact if the bundle stores FFNs by neuron"),),
    exact=lambda settings: settings.get("mode") != PREDICT,
    by_itself=PREDICT,
    drafts=True,
    part=Part("predictor", _read, ("kind", "rank")),
    kv=DECODED,
    rewrite=rewrite,
    traffic=traffic,
    report=report,
    label="neurons",
    fields=(
        ("run", "sparse", "of FFNs stored by neuron: `mode`, `layers`, `basis`, `said`, as in `info`; else null"),
        ("info", "predictor", "of live neurons: `kind`, `rank`, `bytes`, or null"),
        ("info", "sparse", "FFNs by neuron: `mode`, per layer in `layers` how it `runs` (tiles: stored so), which "
         "share of its neurons `fires`, and which is `chosen` by masks (null without statistics), `basis` of the "
         "decision, `said`; null for tile16"),
    ),
)
