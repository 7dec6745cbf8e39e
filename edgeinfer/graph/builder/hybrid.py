"""Recurrent layers as the first half of a block, and what configs say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgeinfer.kernels import abi

from ...errors import CheckpointError
from ..config import ModelConfig
from ..hf_config.reader import ConfigReader
from ..recurrent import DELTA, RecurrentConfig
from ..tensors import Tensor
from ..weights import Source
from .builder import GraphBuilder

MOST_WIDTH = 2**20
"""Elements of all heads of a state."""

# -- configs -----------------------------------------------------------------------------------------------------------


def read_kinds(c: ConfigReader, kinds: Mapping[str, str], default: Sequence[str], name: str = "layer_types"
               ) -> tuple[str, ...]:
    """The kind of each layer: `kinds` has ours by the config's names, `default` applies where the config has none."""
    layers, types = c.integer("num_hidden_layers", high=2**12), c.get(name)
    types = list(default) if types is None else types
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"{c.where}: {name} is {types!r:.60}; it must list {layers} types.")
    return tuple(kinds[c.choice(name, kind, kinds)] for kind in types)


def every_fourth(c: ConfigReader) -> list[str]:
    """Types of layers of which the last of each period has attention (Qwen)."""
    period = c.integer("full_attention_interval", 4)
    return ["linear_attention" if (i + 1) % period else "full_attention"
            for i in range(c.integer("num_hidden_layers", high=2**12))]


def read_delta(c: ConfigReader, layers: tuple[int, ...], defaults: Mapping[str, int], **own: Any
               ) -> RecurrentConfig | None:
    """Gated delta rules by Qwen's names; None without such layers."""
    sizes = {name: c.integer(name, defaults[name], high=2**12)
             for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                          "linear_value_head_dim")}
    key_heads, heads, key_dim, value_dim = sizes.values()
    width = read_conv_width(c, "linear_conv_kernel_dim", defaults["linear_conv_kernel_dim"])
    check_shared(c, "linear_num_value_heads", heads, "linear_num_key_heads", key_heads)
    check_width(c, heads * max(value_dim, key_dim))
    return RecurrentConfig(DELTA, layers, width, heads, key_heads, key_dim, value_dim, **own) if layers else None


def read_conv_width(c: ConfigReader, name: str, default: int) -> int:
    """Tokens that a convolution sees."""
    width: int = c.integer(name, default, low=abi.LEAST_CONV, high=abi.MOST_CONV)
    return width


def check_shared(c: ConfigReader, name: str, heads: int, shared: str, of: int) -> None:
    """Refuse heads that do not share `of` others evenly."""
    if heads % of:
        raise CheckpointError(f"{c.where}: {name} is {heads}; it must be a multiple of {shared}, {of}.")


def check_width(c: ConfigReader, width: int) -> None:
    """Refuse heads that are wider together than any model's."""
    if width > MOST_WIDTH:
        raise CheckpointError(f"{c.where}: the heads of a recurrent layer have {width} elements together, and "
                              f"{MOST_WIDTH} at most are supported.")


# -- graph -------------------------------------------------------------------------------------------------------------


class Mixer(NamedTuple):
    """The tensors of a recurrent layer."""

    rows: tuple[Source, ...]
    """Its input matrices: what is convolved (delta: q, k, v), then the delta rule's z, beta and decay."""
    conv: tuple[Source, ...]
    a_log: str
    dt_bias: str
    norm: str | Source
    out: str | Source
    conv_bias: str = ""


def delta_layer(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, name: str, parts: Mixer) -> Tensor:
    """x + the gated delta rule of h."""
    r = c.recurrent
    assert r
    rows = g.linear(h, name + "mixer_in", parts.rows, tuple(source.shape[0] for source in parts.rows))
    u = g.causal_conv(rows, name + "conv", parts.conv, silu=True, normed=2 * r.key_heads, head_dim=r.key_dim)
    o = g.delta_rule(u, rows, name, parts.a_log, parts.dt_bias, gate_start=r.conv_channels + r.value_width)
    o = g.gated_norm(o, rows, name + "mixer_norm", parts.norm, start=r.conv_channels, group=r.value_dim, shared=True)
    return g.linear(o, name + "mixer_out", (parts.out,), (c.hidden_size,), residual=x)
