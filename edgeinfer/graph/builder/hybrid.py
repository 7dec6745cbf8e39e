"""Recurrent layers as the first half of a block, and their fields of configs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgeinfer.kernels import abi

from ...errors import CheckpointError
from ..config import ModelConfig
from ..hf_config.reader import ConfigReader
from ..recurrent import DELTA, SCAN, RecurrentConfig
from ..tensors import Tensor
from ..weights import Source
from .builder import GraphBuilder

MAX_TIME = 3e38
"""An infinite time step, as a float32."""
MAX_WIDTH = 2**20
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


def read_delta(c: ConfigReader, layers: tuple[int, ...], defaults: Mapping[str, Any], **own: Any
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


def read_scan(c: ConfigReader, layers: tuple[int, ...], defaults: Mapping[str, Any], width: int | None = None, *,
              norm: bool = True, gated_first: bool = True, **own: Any) -> RecurrentConfig | None:
    """Mamba 2's scans by the names of Bamba; None without such layers.

    `width` is that of all heads together, where the config says it apart; without `norm` there is only the gate.
    """
    sizes = {name: c.integer(name, defaults[name], high=2**12)
             for name in ("mamba_n_heads", "mamba_n_groups", "mamba_d_state")}
    heads, groups, state = sizes.values()
    value_dim = c.get("mamba_d_head", "auto")
    if value_dim == "auto" and width:
        check_shared(c, "the width of a recurrent layer", width, "mamba_n_heads", heads)
        value_dim = width // heads
    else:
        value_dim = c.integer("mamba_d_head", high=2**12)
    if width and heads * value_dim != width:
        raise CheckpointError(f"{c.where}: {heads} heads of {value_dim} elements are not the {width} of a recurrent "
                              "layer; mamba_n_heads, mamba_d_head and mamba_expand must agree.")
    check_shared(c, "mamba_n_heads", heads, "mamba_n_groups", groups)
    check_width(c, heads * max(value_dim, state))
    bias = c.flag("mamba_conv_bias", True)
    c.get("mamba_chunk_size")  # of another order of the same sums
    config = RecurrentConfig(
        SCAN, layers, read_conv_width(c, "mamba_d_conv", defaults["mamba_d_conv"]), heads, groups, state, value_dim,
        conv_bias=bias, time_limits=read_time_limits(c), gated_first=gated_first or not norm,
        norm_groups=groups if norm else 0, **own)
    return config if layers else None


def read_time_limits(c: ConfigReader) -> tuple[float, ...]:
    """Bounds of time steps, of which the upper one may be infinite; transformers writes it as an object."""
    limits = c.get("time_step_limit")
    if limits is None:
        return ()
    if isinstance(limits, list | tuple):
        limits = [math.inf if bound == {"__float__": "Infinity"} else bound for bound in limits]
    good = isinstance(limits, list) and len(limits) == 2 and all(type(bound) in (int, float) for bound in limits)
    if not good or not 0 <= limits[0] < limits[1]:
        raise CheckpointError(f"{c.where}: time_step_limit is {limits!r:.60}; it must be two ascending numbers, the "
                              "first no less than 0.")
    return () if limits == [0, math.inf] else (float(limits[0]), min(float(limits[1]), MAX_TIME))


def read_conv_width(c: ConfigReader, name: str, default: int) -> int:
    """Tokens that a convolution sees."""
    width: int = c.integer(name, default, low=abi.MIN_CONV, high=abi.MAX_CONV)
    return width


def check_shared(c: ConfigReader, name: str, heads: int, shared: str, of: int) -> None:
    """Refuse heads that do not share `of` others evenly."""
    if heads % of:
        raise CheckpointError(f"{c.where}: {name} is {heads}; it must be a multiple of {shared}, {of}.")


def check_width(c: ConfigReader, width: int) -> None:
    """Refuse heads that are wider together than any model's."""
    if width > MAX_WIDTH:
        raise CheckpointError(f"{c.where}: the heads of a recurrent layer have {width} elements together, and "
                              f"{MAX_WIDTH} at most are supported.")


# -- graph -------------------------------------------------------------------------------------------------------------


class Mixer(NamedTuple):
    """The tensors of a recurrent layer."""

    rows: tuple[Source, ...]
    """Input matrices of the layer. Delta rule: the convolved q, k and v, then z, beta and decay; scan: z, then the
    convolved values, B and C, then the time step."""
    conv: tuple[Source, ...]
    a_log: str
    dt_bias: str
    norm: str | Source
    out: str | Source
    conv_bias: str = ""
    d: str = ""
    """Name of a scan's D."""
    in_bias: tuple[str | Source, ...] = ()
    out_bias: tuple[str | Source, ...] = ()


def mamba(c: ModelConfig, hf: str) -> Mixer:
    """The tensors of a scan by the usual names."""
    r, d = c.recurrent, c.hidden_size
    assert r
    rows = r.value_width + r.conv_channels + r.heads
    return Mixer((Source(hf + "in_proj.weight", (rows, d)),),
                 (Source(hf + "conv1d.weight", (r.conv_channels, 1, r.conv_width)),), hf + "A_log", hf + "dt_bias",
                 hf + "norm.weight" if r.norm_groups else "", hf + "out_proj.weight",
                 hf + "conv1d.bias" if r.conv_bias else "", hf + "D", (hf + "in_proj.bias",) if r.in_bias else (),
                 (hf + "out_proj.bias",) if r.out_bias else ())


def delta_layer(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, name: str, parts: Mixer) -> Tensor:
    """x + the gated delta rule of h."""
    r = c.recurrent
    assert r
    rows = g.linear(h, name + "mixer_in", parts.rows, tuple(source.shape[0] for source in parts.rows))
    u = g.causal_conv(rows, name + "conv", parts.conv, silu=True, normed=2 * r.key_heads, head_dim=r.key_dim)
    o = g.delta_rule(u, rows, name, parts.a_log, parts.dt_bias, gate_start=r.conv_channels + r.value_width)
    o = g.gated_norm(o, rows, name + "mixer_norm", parts.norm, start=r.conv_channels, group=r.value_dim, shared=True,
                     gated_first=r.gated_first)
    return g.linear(o, name + "mixer_out", (parts.out,), (c.hidden_size,), residual=x)


def scan_layer(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, name: str, parts: Mixer) -> Tensor:
    """x + Mamba 2's scan of h."""
    r = c.recurrent
    assert r
    widths = tuple(source.shape[0] for source in parts.rows)
    rows = g.linear(h, name + "mixer_in", parts.rows, widths, bias=parts.in_bias)
    u = g.causal_conv(rows, name + "conv", parts.conv, start=r.value_width, bias=parts.conv_bias, silu=True)
    o = g.selective_scan(u, rows, name, parts.a_log, parts.dt_bias, parts.d,
                         gate_start=r.value_width + r.conv_channels)
    o = g.gated_norm(o, rows, name + "mixer_norm", parts.norm, start=0, gated_first=r.gated_first,
                     group=r.value_width // max(r.norm_groups, 1))
    return g.linear(o, name + "mixer_out", (parts.out,), (c.hidden_size,), bias=parts.out_bias, residual=x)
