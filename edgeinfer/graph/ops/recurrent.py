"""Operations of recurrent layers, which keep a state of fixed size of each sequence (kernels/abi/state.py)."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.kernels import abi

from ...base.dataclass import dataclass
from ...base.units import round_up
from ..tensors import Tensor, Types
from ..weights import Weight
from .base import Op, RowOp, other_width
from .costs import Scratch, Sizes


@dataclass(frozen=True, kw_only=True)
class CausalConv(RowOp):
    """Causal depthwise convolution over the last `width` tokens of each sequence, then SiLU or nothing.

    Its input is `channels` columns of x from `start` on, times those from `gate_in` on where that is given; its
    output is multiplied by those from `gate_out` on. The first `normed` heads of `head_dim` channels are divided by
    their length (delta rule), and the first half of these, which are queries, by sqrt(head_dim).
    """

    KERNELS = ("causal_conv",)
    x: Tensor
    weight: Weight
    """Taps of the oldest token first: vector of width x channels elements."""
    bias: Weight | None = None
    width: int
    start: int = 0
    gate_in: int | None = None
    gate_out: int | None = None
    silu: bool = False
    normed: int = 0
    head_dim: int = 0

    @property
    def state_bytes(self) -> int:
        """The inputs of the last tokens."""
        return abi.conv_state_bytes(self.out.width, self.width)

    @property
    def state_traffic(self) -> float:
        """The inputs that it sees, and its own."""
        return 4.0 * self.width * self.out.width

    def operations(self) -> float:
        """A multiplication and an addition for each tap."""
        return 2.0 * self.width * self.out.width

    def faults(self, types: Types) -> Iterator[str]:
        """Columns that it reads are there, and so are its weights."""
        last = max(self.start, self.gate_in or 0, self.gate_out or 0) + self.out.width
        if last > self.x.width:
            yield f"it reads {last} columns of {self.x}"
        if self.weight.shape != (self.width * self.out.width,):
            yield f"its {self.width} weights of {self.out.width} channels are {self.weight.shape}"
        if not abi.MIN_CONV <= self.width <= abi.MAX_CONV:
            yield f"it sees {self.width} tokens, not {abi.MIN_CONV} to {abi.MAX_CONV}"


@dataclass(frozen=True, kw_only=True)
class StateRule(Op):
    """A matrix for each head that tokens change one after the other: the common part of DeltaRule and SelectiveScan.

    x has the convolved columns, `gates` further columns of the layer's input from `gate_start` on.
    """

    x: Tensor
    gates: Tensor
    a: Weight
    """-exp(A_log) of each head."""
    dt_bias: Weight
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    gate_start: int

    @property
    def journaled(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First column and number of columns of x, and of the gates, from which a token can be replayed."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """The matrices of all heads, and a journal of the last tokens."""
        (_, values), (_, gates) = self.journaled
        return abi.rule_state_bytes(self.heads, self.key_dim, self.value_dim, values, gates)

    @property
    def state_traffic(self) -> float:
        """Return the bytes of all matrices, read and written."""
        return 2.0 * abi.rule_stamps(self.heads, self.key_dim, self.value_dim)

    def reads(self, types: Types) -> tuple[()]:
        """Vectors of a few elements, which count for nothing."""
        return ()

    def operations(self) -> float:
        """Multiplications and additions with the state."""
        return 6.0 * self.heads * self.key_dim * self.value_dim

    def scratch(self, sizes: Sizes) -> Scratch:
        """A tile of the state, and the gates of some tokens."""
        return Scratch(abi.rule_scratch(self.key_dim))

    def faults(self, types: Types) -> Iterator[str]:
        """Heads share keys evenly, and rows are as wide as they say."""
        if self.heads % self.key_heads:
            yield f"{self.heads} heads do not share {self.key_heads} keys evenly"
        yield from other_width("its values have", self.heads * self.value_dim, self.out)
        yield from other_width("it reads", self.heads * self.value_dim + 2 * self.key_heads * self.key_dim, self.x)


@dataclass(frozen=True, kw_only=True)
class DeltaRule(StateRule):
    """Gated delta rule (arXiv 2412.06464, equation 10): columns of x are q, k, v; of the gates beta, then decay.

    For each head S' = e^g S; S = S' + k (beta (v - S'^T k))^T; out = S^T q, with g = a softplus(decay + dt_bias) and
    beta = `beta_scale` x sigmoid.
    """

    KERNELS = ("delta_rule", "state_journal")
    beta_scale: float = 1.0

    @property
    def journaled(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """k and v, and both gates."""
        keys = self.key_heads * self.key_dim
        return (keys, keys + self.heads * self.value_dim), (self.gate_start, 2 * self.heads)


@dataclass(frozen=True, kw_only=True)
class DeltaRuleRows(DeltaRule):
    """Delta rule in which each row of the state decays by itself (Kimi delta attention, arXiv 2510.26692).

    Of the gates beta comes first and then, from the next multiple of 16 columns on, the decays of each head's rows;
    `dt_bias` has as many elements. g is a vector of key_dim elements: S' = diag(e^g) S, and the rest as in DeltaRule.
    """

    KERNELS = ("delta_rule_rows", "state_journal")

    @property
    def journaled(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """k and v, beta and all decays."""
        gates = round_up(self.heads, 16) + self.heads * self.key_dim
        return super().journaled[0], (self.gate_start, gates)

    def operations(self) -> float:
        """Also those that multiply keys and queries by decays."""
        return super().operations() + 2.0 * self.heads * self.key_dim

    def scratch(self, sizes: Sizes) -> Scratch:
        """Also the decays of some tokens, and their products with key and query."""
        return Scratch(abi.rule_scratch(self.key_dim, by_row=True))

    def faults(self, types: Types) -> Iterator[str]:
        """Check that each row of each head has a decay, and a bias for it."""
        yield from super().faults(types)
        yield from other_width("its gates end with column", sum(self.journaled[1]), self.gates)
        if self.dt_bias.shape != (self.heads * self.key_dim,):
            yield f"its biases of {self.heads} x {self.key_dim} decays are {self.dt_bias.shape}"


@dataclass(frozen=True, kw_only=True)
class SelectiveScan(StateRule):
    """Mamba 2's recurrence (arXiv 2405.21060): columns of x are the values, B, C; of the gates the time step.

    For each head D = clip(softplus(dt + dt_bias)); S = e^(a D) S + B (D x)^T; out = S^T C + d x.
    """

    KERNELS = ("selective_scan", "state_journal")
    d: Weight
    limits: tuple[float, ...] = (0.0, float("inf"))

    @property
    def journaled(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The values and B, and the time step."""
        return (0, self.heads * self.value_dim + self.key_heads * self.key_dim), (self.gate_start, self.heads)


@dataclass(frozen=True, kw_only=True)
class GatedNorm(RowOp):
    """RMS norm of groups of a row and a gate, SiLU or sigmoid, before the norm or after it."""

    KERNELS = ("gated_norm",)
    x: Tensor
    gate: Tensor
    weight: Weight | None
    """Norm of a whole row, or of one group that all share; None: only the gate."""
    start: int
    """First column of the gate."""
    group: int
    """Elements that are normed together."""
    gated_first: bool
    eps: float
    function: str = "silu"
    """Function of the gate that multiplies: ``silu`` or ``sigmoid``."""

    def faults(self, types: Types) -> Iterator[str]:
        """Groups fill the row, and the weight is that of a group or of a row."""
        yield from other_width("it gates rows of", self.x.width, self.out)
        if self.x.width % self.group:
            yield f"{self.x} has no groups of {self.group}"
        if self.weight and self.weight.shape[0] not in (self.group, self.x.width):
            yield f"its weight has {self.weight.shape[0]} elements"
        if self.start + self.x.width > self.gate.width:
            yield f"it reads {self.start + self.x.width} columns of {self.gate}"
