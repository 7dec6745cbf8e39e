"""Common parts of mixtures of experts: their numbers in a config, and a block whose FFN is a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from ...errors import CheckpointError
from ..config import ExpertsConfig, ModelConfig
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor
from ..weights import Source
from .builder import GraphBuilder

MAX_EXPERTS = 1 << 18
"""Most experts of all layers together; the largest published models have a tenth of it."""
MAX_EXPERTS_PER_LAYER = 4096
SAME = "num_local_experts"
"""Name of the number of experts in newer versions of transformers, beside or instead of a family's own name."""


def read_experts(c: ConfigReader, name: str, total: int, active: int, size: int, *, normalise: bool = True,
                 shared_size: int = 0) -> ExpertsConfig | None:
    """The fields that families share; None if every layer has a plain FFN.

    Parameters
    ----------
    c : ConfigReader
    name : str
        The family's field for the number of its experts.
    total, active : int
        The family's numbers of experts where its config is silent.
    size : int
        Intermediate size of an expert.
    normalise : bool
    shared_size : int
        Intermediate size of the expert that all tokens go through.
    """
    n, used = count_experts(c, name, total, active)
    layers = c.integer("num_hidden_layers", high=2**12)
    step, only = c.integer("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(i) is int and 0 <= i < layers for i in only):
        raise CheckpointError(f"{c.where}: mlp_only_layers is {only!r:.60}; it must list layers from 0 to "
                              f"{layers - 1}.")
    dense = tuple(i for i in range(layers) if i in only or (i + 1) % step)
    return with_dense_layers(ExpertsConfig(n, used, size, normalise=normalise, shared_size=shared_size), dense, layers)


def with_dense_layers(experts: ExpertsConfig, dense: tuple[int, ...], layers: int) -> ExpertsConfig | None:
    """Return the experts of a model whose `dense` layers have a plain FFN; None if these are all of its layers."""
    return None if len(dense) == layers else replace(experts, dense_layers=dense)


def count_experts(c: ConfigReader, name: str, total: int, active: int, chosen: str = "num_experts_per_tok"
                  ) -> tuple[int, int]:
    """Return how many experts a layer has and how many a token goes through, `chosen`; see `read_experts`."""
    layers, said = c.integer("num_hidden_layers", high=2**12), name if c.has(name) or not c.has(SAME) else SAME
    n = c.integer(said, total, high=MAX_EXPERTS_PER_LAYER)
    if layers * n > MAX_EXPERTS:
        raise CheckpointError(f"{c.where}: {layers} layers of {n} experts are more than {MAX_EXPERTS} experts, which "
                              "no model has.")
    if c.has(SAME) and c.integer(SAME) != n:
        raise CheckpointError(f"{c.where}: {name} is {n} and {SAME} {c.integer(SAME)}; they must agree.")
    return n, c.integer(chosen, active, high=n)


def moe(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, routes: Tensor | None = None, *,
        norm: str | Source = "") -> Tensor:
    """Build the second half of a pre-norm block: x + the experts of norm(x), and the shared expert if there is one.

    Experts are chosen by norm(x), or were by `routes`; `norm` is its weight where that has another name.
    """
    e, hf, name = c.experts, f"model.layers.{i}.", f"layers.{i}."
    mlp, norm = hf + "mlp.", norm or hf + "post_attention_layernorm.weight"
    if e is None or i in e.dense_layers:
        h = g.rms_norm(x, name + "ffn_norm", norm)
        return g.ffn(h, name, (mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj"), residual=x, bias=c.mlp_bias)
    h = g.rms_norm(x, name + "ffn_norm", norm)
    routes = routes or g.route(h, name, mlp)  # first: later operations run while experts are read
    if e.shared_size:
        x = _shared(g, h, x, name, mlp, e.shared_size)
    return g.experts(h, routes, name, mlp, residual=x)


def _shared(g: GraphBuilder, h: Tensor, x: Tensor, name: str, mlp: str, size: int) -> Tensor:
    """x + the FFN that all tokens go through; times sigmoid(h s^T), by which its inner values are weighted, or whole.
    """
    e = g.config.experts
    if e and not e.shared_gate:
        up = mlp + "shared_experts."
        f = g.gated(h, name + "shared_gate_up", up + "gate_proj.weight", up + "up_proj.weight", size=size)
        return g.linear(f, name + "shared_down", (up + "down_proj.weight",), (x.width,), residual=x, in_ffn=True)
    gate = g.linear(h, name + "shared_gate", (mlp + "shared_expert_gate.weight",), (1,), kind="router")
    up = mlp + "shared_expert."
    f = g.gated(h, name + "shared_gate_up", up + "gate_proj.weight", up + "up_proj.weight", size=size)
    return g.linear(g.sigmoid_gate(f, gate), name + "shared_down", (up + "down_proj.weight",), (x.width,), residual=x,
                    in_ffn=True)
