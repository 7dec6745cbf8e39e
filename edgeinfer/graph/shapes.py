"""Well-known models by name: what their published config.json says, so that they can be planned without a download."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ..base.dataclass import dataclass


@dataclass(frozen=True)
class Shape:
    """One published model."""

    name: str
    source: str
    """Its id on the hub; figures of Gemma 3 and 4 and of Qwen3.5 are those of the text model alone, GLM's, Qwen3-Next's
    and Qwen3.5's those without the layer that drafts a further token."""
    parameters: int
    """Parameters, as published with the weights; tied matrices count once."""
    config: dict[str, Any]
    """Fields of its config.json."""


def other_names() -> dict[str, str]:
    """Return further names of built-in shapes, and of models that have the same sizes, with the shape of each."""
    return dict(json.loads(Path(__file__).with_name("shape_names.json").read_text(encoding="utf-8")))


@cache
def builtin_shapes() -> dict[str, Shape]:
    """Return the built-in shapes by name, such as ``llama-2-7b``; the table is edgeinfer/graph/shapes.json."""
    table = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return {name: Shape(name, row["source"], row["parameters"], row["config"]) for name, row in table.items()}
