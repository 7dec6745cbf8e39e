"""A technique that no product file knows: half a model, which approximates, a region of memory, a field of reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.base.validation import choice
from edgeinfer.graph import PASSES, Graph
from edgeinfer.memory_planner import Region, Request
from edgeinfer.registry import COMMANDS, Option, Part, Reported, Technique

MODES = "off", "half"
REGION_BYTES = 12_345_678


def rewrite(graph: Graph, mode: str) -> Graph:
    """Leave out the second half of the layers."""
    return PASSES["early_exit"](graph, graph.config.num_hidden_layers // 2) if mode == "half" else graph


def regions(graph: Graph, request: Request, settings: dict[str, Any]) -> Iterator[Region]:
    """Yield the region of the other half."""
    if settings["mode"] == "half":
        yield Region("shade", REGION_BYTES, "what a planted technique takes")


def report(run: Reported) -> dict[str, Any]:
    """Return its field of the report."""
    return {"shade": run.settings and {"mode": run.settings["mode"], "in": run.command}}


TECHNIQUE = Technique(
    name="shade",
    options=(Option("shade", choice(MODES), "|".join(MODES), "How much of the model is in the shade."),),
    exact=lambda settings: settings["mode"] == "off",
    by_itself="half",
    part=Part("draft_head", lambda bundle: {}),
    rewrite=rewrite,
    regions=regions,
    report=report,
    fields=tuple((command, "shade", "what is in the shade") for command in COMMANDS),
)
