"""Families that edgeinfer cannot run yet, in outline: their weights and activations are known, so they can be planned.

An outline is a graph whose operations say what they cost, some of which have no kernel; a session refuses it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..dataclass import dataclass
from ..sizes import round_up
from .builder import GraphBuilder
from .check import check
from .common import read_decoder
from .config import ModelConfig
from .experts import ExpertsDown, ExpertsGated
from .graph import Graph
from .reader import ConfigReader
from .storage import TypeOf
from .types import Tensor
from .weights import Source, Weight

LONGEST = 32768


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (arXiv 2401.04088): each token goes through a few of many FFNs."""

    total: int
    active: int
    """Experts that a token goes through."""
    intermediate_size: int
    """Of one expert."""


@dataclass(frozen=True)
class Outline:
    """A model of a family that can be planned but not run."""

    config: ModelConfig
    family: str
    """What the family is called, and what of it is missing here."""
    experts: Experts
    qk_norm: bool = False

    def graph(self, type_of: TypeOf) -> Graph:
        """The outline's operations, with weights stored as `type_of` says."""
        g, c = _Builder(self.config, type_of), self.config
        x = g.embed("model.embed_tokens.weight")
        for i in range(c.num_hidden_layers):
            x = self._layer(g, x, i)
        return check(g.build(g.logits(x, "model.norm.weight", "lm_head.weight")))

    def _layer(self, g: _Builder, x: Tensor, i: int) -> Tensor:
        c, g.layer = self.config, i
        hf, name = f"model.layers.{i}.", f"layers.{i}."
        widths = (c.query_width, c.kv_width, c.kv_width)
        h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight", feeds=name + "qkv")
        h = g.linear(h, name + "qkv", (hf + "q", hf + "k", hf + "v"), widths)
        h = g.attention(g.rope_store(h, *((hf + "q_norm", hf + "k_norm") if self.qk_norm else ())))
        x = g.linear(h, name + "o", (hf + "o",), (c.hidden_size,), residual=x)
        h = g.rms_norm(x, name + "ffn_norm", hf + "post_attention_layernorm.weight", feeds=name + "gate_up")
        return g.experts(h, x, name, self.experts)


class _Builder(GraphBuilder):
    """One more word: experts."""

    def experts(self, h: Tensor, x: Tensor, name: str, experts: Experts) -> Tensor:
        """x + the weighted FFNs of the chosen experts; each expert's matrices are padded by themselves."""
        n, active, width = experts.total, experts.active, experts.intermediate_size
        self.linear(h, name + "router", (name + "router",), (n,))
        gate_up = self._stacked(name + "experts_gate_up", 2 * n, width, h.width)
        f = self._op(ExpertsGated(out=self._tensor("f", width), x=self._as_input(h, self._types[gate_up.name]),
                                  weight=gate_up, experts=n, active=active, activation=self.config.hidden_act,
                                  layer=self.layer))
        down = self._stacked(name + "experts_down", n, x.width, width)
        return self._op(ExpertsDown(out=self._after(x), x=self._as_input(f, self._types[down.name]), weight=down,
                                    residual=x, experts=n, active=active, layer=self.layer))

    def _stacked(self, name: str, n: int, rows: int, cols: int) -> Weight:
        """n matrices as one weight, each padded to whole tiles."""
        source = Source(name, (n, rows, cols))
        weight = Weight(name, (n * round_up(rows, 16), cols), "matrix", (source,), "interleave16")
        self._weights[name], self._types[name] = weight, self._type_of(weight)
        return weight


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


def _mixtral(c: ConfigReader) -> Outline:
    defaults = {"max_position_embeddings": LONGEST, "num_key_value_heads": 8}
    window, layers = c.integer("sliding_window", None), c.integer("num_hidden_layers", high=2**12)
    config = read_decoder(c, defaults, windows=(window,) * layers if window else ())
    experts = Experts(*_experts(c, "num_local_experts", 8, 2), config.intermediate_size)
    return Outline(config, "Mixtral, a mixture of experts", experts)


def _qwen3_moe(c: ConfigReader) -> Outline:
    config = read_decoder(c, {"max_position_embeddings": LONGEST, "num_key_value_heads": 4, "head_dim": 128})
    experts = Experts(*_experts(c, "num_experts", 128, 8), c.integer("moe_intermediate_size", 768, high=2**20))
    if c.get("mlp_only_layers") or c.integer("decoder_sparse_step", 1) != 1:
        raise c.unsupported("mlp_only_layers", c.get("mlp_only_layers"), "only models whose layers all have experts "
                            "can be planned")
    return Outline(config, "Qwen3 MoE, a mixture of experts", experts, qk_norm=True)


def _experts(c: ConfigReader, name: str, total: int, active: int) -> tuple[int, int]:
    n = c.integer(name, total, high=4096)
    return n, c.integer("num_experts_per_tok", active, high=n)


FAMILIES: dict[str, Callable[[ConfigReader], Outline]] = {
    "mixtral": _mixtral, "qwen3_moe": _qwen3_moe,
}
