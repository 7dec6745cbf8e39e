"""Well-known models by name, from their published config.json, so that they can be planned without a download."""

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
    """Its id on the hub; figures of Gemma 3 and 4, of Qwen3.5 and of Llama 4 are those of the text model alone, GLM's,
    Qwen3-Next's and Qwen3.5's those without the layer that drafts a further token."""
    parameters: int
    """Parameters, as published with the weights; tied matrices count once."""
    config: dict[str, Any]
    """Fields of its config.json; of a family that is not run, those of another whose layers have the same sizes."""
    family: str = ""
    """The family (`model_type`) of a shape that edgeinfer does not run. Parts that only it has are left out: an
    index of sparse attention, Gemma 3n's AltUp, the windows of Llama 4, biases; `parameters` are 1 % off at most."""

    @property
    def origin(self) -> str:
        """Source of the figures, as reports say it."""
        return f"built-in shape, as {self.source}" + (
            f" (its sizes; edgeinfer does not run {self.family})" if self.family else "")


def other_names() -> dict[str, str]:
    """Return further names of built-in shapes, and of models that have the same sizes, with the shape of each."""
    return dict(json.loads(Path(__file__).with_name("shape_names.json").read_text(encoding="utf-8")))


@cache
def builtin_shapes() -> dict[str, Shape]:
    """Return the built-in shapes by name, such as ``llama-2-7b``; the table is edgeinfer/graph/shapes.json."""
    table = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return {name: Shape(name, row["source"], row["parameters"], row["config"], row.get("family", ""))
            for name, row in table.items()}
