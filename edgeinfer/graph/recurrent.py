"""Sizes of recurrent layers: which layers they are, and their state of a sequence."""

from __future__ import annotations

from ..base.dataclass import dataclass

CONV, DELTA, SCAN = "conv", "delta", "scan"
"""Kinds of recurrent layers: a gated causal convolution alone (LFM2), the gated delta rule (arXiv 2412.06464), and
Mamba 2's selective scan (arXiv 2405.21060)."""


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers that keep a state of fixed size instead of keys and values."""

    kind: str
    """``conv``, ``delta`` or ``scan``."""
    layers: tuple[int, ...]
    """Numbers of the recurrent layers, ascending."""
    conv_width: int
    """Tokens that the convolution sees, the newest included."""
    heads: int = 0
    """Heads of the state: value heads of a delta rule, heads of a scan."""
    key_heads: int = 0
    """Heads that keys and queries have (delta), or groups that share B and C (scan)."""
    key_dim: int = 0
    """Elements of a key (delta), or of B and C (scan)."""
    value_dim: int = 0
    """Elements of a value, or of a head of a scan."""
    conv_bias: bool = False
    in_bias: bool = False
    """Bias on a scan's input matrix."""
    out_bias: bool = False
    """Bias on a scan's output matrix."""
    time_limits: tuple[float, ...] = ()
    """Bounds of a scan's time steps; empty: there are none."""
    gated_first: bool = False
    """True if the heads' norm follows the gate (Mamba 2) instead of coming before it (delta rule)."""
    norm_groups: int = 1
    """Groups of a row that a scan norms one by one; 0: it has a gate and no norm."""
    norm_eps: float = 0.0
    """Epsilon of that norm; 0: the model's."""
    beta_scale: float = 1.0
    """Factor of a delta rule's beta; 2 lets states have negative eigenvalues."""
    by_row: bool = False
    """True if each row of a delta rule's state decays by itself (Kimi delta attention, arXiv 2510.26692)."""

    @property
    def value_width(self) -> int:
        """Elements of the values of all heads."""
        return self.heads * self.value_dim

    @property
    def key_width(self) -> int:
        """Elements of all keys (delta), or of B of all groups (scan)."""
        return self.key_heads * self.key_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution of a delta rule or a scan."""
        return self.value_width + 2 * self.key_width
