"""Families that edgeinfer cannot run yet, in outline: their weights and activations are known, so they can be planned.

An outline is a graph of the same operations without what the family has beside them; a session refuses it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..dataclass import dataclass
from .architectures import mixtral
from .builder import GraphBuilder
from .check import check
from .common import read_decoder
from .config import ExpertsConfig, ModelConfig
from .graph import Graph
from .mixture import count_experts
from .reader import ConfigReader
from .storage import TypeOf


@dataclass(frozen=True)
class Outline:
    """A model of a family that can be planned but not run."""

    config: ModelConfig
    family: str
    """What the family is called, and what of it is missing here."""

    def graph(self, type_of: TypeOf) -> Graph:
        """The outline's operations, with weights stored as `type_of` says."""
        return check(mixtral.forward(GraphBuilder(self.config, type_of), self.config))


def read_outline(config: Mapping[str, Any], where: str = "config.json") -> Outline | None:
    """Understand the sizes in a config of a family that cannot be run; None for a family that is not known here.

    Raises
    ------
    CheckpointError
        A needed field is missing, or has a value that no model can have.
    UnsupportedModelError
        A field has a value whose meaning is not known.
    """
    reader = FAMILIES.get(str(config.get("model_type")))
    if reader is None:
        return None
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    return reader(ConfigReader(plain, where))


def _gpt_oss(c: ConfigReader) -> Outline:
    """Every second layer has a window."""
    window, layers = c.integer("sliding_window", 128), c.integer("num_hidden_layers", high=2**12)
    defaults = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64}
    experts = ExpertsConfig(*count_experts(c, "num_local_experts", 128, 4), c.integer("intermediate_size", high=2**20))
    config = read_decoder(c, defaults, windows=tuple(0 if i % 2 else window for i in range(layers)),
                          attention_bias=True, attention_output_bias=True, experts=experts)
    return Outline(config, "gpt-oss, whose attention has sinks and whose experts have biases")


FAMILIES: dict[str, Callable[[ConfigReader], Outline]] = {"gpt_oss": _gpt_oss}
