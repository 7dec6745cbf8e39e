"""A served model whose layers are in several processes, here or on the nodes of a cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..base.units import format_size
from .output import say
from .progress import ProgressLine
from .served import open_served, opening

if TYPE_CHECKING:
    from ..cluster import Ray
    from ..llm import LLM
    from .options import Given


def open_split(source: str, left: int | None, *, ray: Ray | None = None, given: Given, **settings: Any) -> LLM:
    """Open a model in processes of this machine, or on the nodes of a cluster, and report the layers of each."""
    llm = open_served(source, left, given=given, **settings) if ray is None else \
        _on_nodes(ray, source, left, given=given, **settings)
    for stage in llm.runner.stages:
        info = stage.info
        say(f"Layers {info.first}-{info.last} are in {stage.where}: {format_size(info.total_bytes)} planned.")
    say("One sequence gains memory, not speed: its tokens go through one stage after the other.")
    return llm


def _on_nodes(ray: Ray, source: str, left: int | None, *, given: Given, **settings: Any) -> LLM:
    from ..cluster import Stored
    from ..llm import LLM

    options = opening(source, left, given=given, **settings)
    where = os.path.abspath(source) if os.path.exists(source) else source
    options["split"] = ray.split(options["split"], Stored(where, options["weights"], options["group_size"]), say)
    with ProgressLine() as progress:
        return LLM(source, progress=progress, **options)
