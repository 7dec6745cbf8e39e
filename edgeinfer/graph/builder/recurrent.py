"""Builder methods for recurrent layers: causal convolution, delta rule, selective scan, gated norm."""

from __future__ import annotations

import math

from ..ops.recurrent import CausalConv, DeltaRule, DeltaRuleRows, GatedNorm, SelectiveScan
from ..tensors import Tensor
from ..weights import Source, as_source
from .base import BuilderBase

NO_LIMITS = (0.0, math.inf)


class RecurrentWords(BuilderBase):
    """Operations that keep a state; the sizes are those of the model's `recurrent`."""

    def causal_conv(self, x: Tensor, name: str, sources: tuple[Source, ...], *, start: int = 0,
                    bias: str | Source = "", gate_in: int | None = None, gate_out: int | None = None,
                    silu: bool = False, normed: int = 0, head_dim: int = 0) -> Tensor:
        """Causal depthwise convolution of columns of x from `start` on: (tokens, ...) -> (tokens, channels).

        `sources` are weights of shape (channels, 1, width), side by side. See `ops.recurrent.CausalConv`.
        """
        assert self.config.recurrent
        width, parts = self.config.recurrent.conv_width, tuple(source.stored[0] for source in sources)
        channels = sum(parts)
        weight = self._vector(name, tuple(s.tap(j) for j in range(width) for s in sources), parts * width)
        shift = self._vector(name + "_bias", (bias,), (channels,)) if bias else None
        return self._op(CausalConv(out=self._tensor("conv", channels), x=x, weight=weight, bias=shift, width=width,
                                   start=start, gate_in=gate_in, gate_out=gate_out, silu=silu, normed=normed,
                                   head_dim=head_dim, layer=self.layer))

    def delta_rule(self, x: Tensor, gates: Tensor, name: str, a_log: str | Source, dt_bias: str | Source,
                   gate_start: int) -> Tensor:
        """Gated delta rule over convolved rows of q, k and v; beta and decay are columns of `gates`."""
        r = self.config.recurrent
        assert r
        a = as_source(a_log, (r.heads,), name + "a").decay()
        kind, decays = (DeltaRuleRows, r.heads * r.key_dim) if r.by_row else (DeltaRule, r.heads)
        return self._op(kind(out=self._tensor("o", r.value_width), x=x, gates=gates,
                             a=self._vector(name + "a", (a,), (r.heads,)), gate_start=gate_start,
                             dt_bias=self._vector(name + "dt_bias", (dt_bias,), (decays,)), heads=r.heads,
                             key_heads=r.key_heads, key_dim=r.key_dim, value_dim=r.value_dim,
                             beta_scale=r.beta_scale, layer=self.layer))

    def selective_scan(self, x: Tensor, gates: Tensor, name: str, a_log: str | Source, dt_bias: str | Source,
                       d: str | Source, gate_start: int) -> Tensor:
        """Mamba 2's recurrence over convolved rows of values, B and C; time steps are columns of `gates`."""
        r = self.config.recurrent
        assert r
        a = as_source(a_log, (r.heads,), name + "a").decay()
        return self._op(SelectiveScan(out=self._tensor("o", r.value_width), x=x, gates=gates,
                                      a=self._vector(name + "a", (a,), (r.heads,)), gate_start=gate_start,
                                      dt_bias=self._vector(name + "dt_bias", (dt_bias,), (r.heads,)),
                                      d=self._vector(name + "d", (d,), (r.heads,)), heads=r.heads,
                                      key_heads=r.key_heads, key_dim=r.key_dim, value_dim=r.value_dim,
                                      limits=r.time_limits or NO_LIMITS, layer=self.layer))

    def gated_norm(self, x: Tensor, gate: Tensor, name: str, source: str | Source, *, start: int, group: int,
                   gated_first: bool = False, shared: bool = False, function: str = "silu") -> Tensor:
        """RMS norm of groups of a row, and a function of the gate, columns of `gate` from `start` on.

        `shared` says that all groups have one weight; without a source there is no norm.
        """
        width = group if shared else x.width
        weight = self._vector(name, (source,), (width,)) if source else None
        own = self.config.recurrent.norm_eps if self.config.recurrent else 0.0
        return self._op(GatedNorm(out=self._tensor("g", x.width), x=x, gate=gate, weight=weight, start=start,
                                  group=group, gated_first=gated_first, eps=own or self.config.rms_norm_eps,
                                  function=function, layer=self.layer))
