"""Matrix multiplications, whole or neuron by neuron."""

from __future__ import annotations

import math
from collections.abc import Iterator

from edgeinfer.kernels import PAIRED, VALUE_FUNCTIONS, abi

from ...base.dataclass import dataclass
from ...base.units import round_up
from ...quant import WeightType
from ..tensors import Number, RowType, Tensor, Types
from ..weights import Weight
from .base import Op, other_width
from .costs import OnDemand, Read, Scratch, Sizes
from .rows import Quantize

RELUS = ("relu", "relu2", "drelu", "fatrelu")
"""Activations that are exactly 0 for negative values: the weights after such neurons need not be read."""


@dataclass(frozen=True, kw_only=True)
class MatMul(Op):
    """A matrix multiplication.

    With a `source`, a pass of one token has no operation that makes x: the matmul's threads each quantise the source
    (after a norm, or in an order, if there is one), which costs less than a barrier.
    """

    x: Tensor
    weight: Weight
    bias: Weight | None = None
    source: Tensor | None = None
    norm: Weight | None = None
    eps: float | None = None
    """Epsilon of the norm."""
    order: Weight | None = None
    """Order of the source's elements in x."""
    left_out: Weight | None = None
    """Columns of x that are outliers: zeros among its codes, floats at the end of its rows."""
    outliers: Weight | None = None
    """Matrix of these columns, floats."""

    def reads(self, types: Types) -> tuple[Read, ...]:
        """Matrices and bias, whole. The norm's weight is counted where it is normally read."""
        return tuple(Read.whole(weight, types) for weight in (self.weight, self.bias, self.outliers) if weight)

    def operations(self) -> float:
        """Two for each weight, without padding; columns of outliers are counted in the matrix, too."""
        return 2 * parameters(self.weight)

    def activation_values(self) -> float:
        """Columns and rows of a layer's matrix."""
        return sum(self.weight.shape) if self.layer is not None else 0

    def int8(self, types: Types) -> bool:
        """Quantised weights multiply quantised rows."""
        return types[self.weight.name].quantised

    def scratch(self, sizes: Sizes) -> Scratch:
        """A gate and an up tile, and the row of a fused input: quantised, and normed before that."""
        row = abi.q8_row_bytes(self.x.width, self.x.group_size, self.x.apart)[0] if self.source else 0
        floats = 4 * round_up(self.x.width, 16) if self.norm or self.order or self.left_out else 0
        return Scratch(abi.GATED_SCRATCH_BYTES + row + floats)

    @property
    def again(self) -> bool:
        """True if its input is made again for it, as for another matmul of the same rows (quantize_activations)."""
        return False

    def quantiser(self, x: Tensor, group: int, number: Number) -> Op:
        """Return the operation that makes its input of rows x of floats; `number` completes the name of the output."""
        return Quantize(out=Tensor(number("q"), x.width, "q8", group, x.rows), x=x, layer=self.layer)

    def faults(self, types: Types) -> Iterator[str]:
        """The matrix's columns are the input's, in the type that its matmuls take."""
        yield from other_width("the matrix has columns:", self.weight.shape[-1], self.x)
        yield from _type(self.x, types[self.weight.name])
        if self.outliers and self.x.dtype == "q8" and self.outliers.shape[1] != self.x.apart:
            yield f"the matrix has columns of outliers: {self.outliers.shape[1]}, but {self.x} has {self.x.apart} apart"


@dataclass(frozen=True, kw_only=True)
class Linear(MatMul):
    """x W^T (+ bias) (+ residual)."""

    KERNELS = ("linear_{stored.suffix}",)
    OVER = "residual"
    residual: Tensor | None = None
    in_ffn: bool = False
    """True if it is the last matrix of a feed-forward network."""

    @property
    def ffn(self) -> bool:
        """True if the builder marked it so."""
        return self.in_ffn

    def faults(self, types: Types) -> Iterator[str]:
        """The matrix's rows are the output's."""
        yield from super().faults(types)
        yield from other_width("the matrix has rows:", self.weight.shape[0], self.out)


@dataclass(frozen=True, kw_only=True)
class LinearPart(Linear):
    """x W^T (+ bias) in some columns of the output: the rows of one matmul that are stored in one type."""

    OVER = "onto"
    first: int
    """Column where they begin."""
    onto: Tensor | None = None
    """Output of the parts before it; None for the first."""

    @property
    def again(self) -> bool:
        """Each part is fused with a norm of its own."""
        return self.onto is not None

    def faults(self, types: Types) -> Iterator[str]:
        """The columns are the output's, from a whole tile on."""
        yield from MatMul.faults(self, types)
        if self.first % 16 or self.first + self.weight.shape[0] > self.out.width:
            yield f"the columns {self.first} to {self.first + self.weight.shape[0] - 1} are not part of {self.out}"


@dataclass(frozen=True, kw_only=True)
class GatedLinear(MatMul):
    """act(x G^T) * (x U^T), gate and up in one matrix that alternates by tile of 16 rows."""

    KERNELS = ("gated_{stored.suffix}",)
    activation: str
    limit: float = 0.0
    """Limit of fatrelu and swiglu_oai."""
    ffn = True

    @property
    def name(self) -> str:
        """The name in programs and profiles."""
        return "gated"

    def faults(self, types: Types) -> Iterator[str]:
        """Half of the matrix's rows, without their padding, are the output's."""
        yield from super().faults(types)
        yield from other_width("gate and up have rows, padded:", self.weight.shape[0] // 2, self.out, 16)


@dataclass(frozen=True, kw_only=True)
class NeuronGated(MatMul):
    """A `GatedLinear` over an FFN stored neuron by neuron: gate, up and, for one token, the sums of columns.

    Without a gate act(x U^T): an up row is where a gate would be, and decides likewise which neurons live.
    """

    KERNELS = ("neuron_gated_{stored.dtype}",)
    activation: str
    limit: float = 0.0
    """Limit of fatrelu."""
    dense: bool = False
    """True if dead neurons are read and computed too."""
    mask: Tensor | None = None
    """Mask of the neurons that decoded tokens compute; None: all."""
    threshold: Weight | None = None
    """One value: decoded tokens take gates whose activation is no larger for 0 (CATS, arXiv 2404.08763)."""
    f_norm: Weight | None = None
    """Weight of the RMS norm of f in front of the columns, whose sums this makes for one token."""
    ffn = True

    def reads(self, types: Types) -> tuple[Read, ...]:
        """Gate and up rows: all but a part of each neuron."""
        return _parts(self, self.weight.shape[1] - 1, types)

    def memory(self, types: Types) -> OnDemand | None:
        """Neurons, down columns included; a mask names those of a decoded token."""
        neurons, parts, hidden = self.weight.shape
        nbytes = types[self.weight.name].part_bytes(hidden) * parts
        return OnDemand("neurons", self.layer or 0, self.weight, neurons, nbytes, chosen=self.mask is not None)

    def read_share(self, mode: str, density: float) -> float:
        """Return the share of weights read; in mode exact all gates, and the ups of live neurons."""
        if mode == "exact":
            ups = self.weight.shape[1] - 2
            return (1 + ups * density) / (1 + ups)
        return density if mode == "predict" else 1.0

    def operations(self) -> float:
        """Return the operations of gate and up, whose matmuls are int8; `NeuronDown` has the rest."""
        neurons, parts, hidden = self.weight.shape
        return 2 * (parts - 1) * neurons * hidden

    def activation_values(self) -> float:
        """Read the same as the matrices that it replaces."""
        neurons, parts, hidden = self.weight.shape
        return (parts - 1) * neurons + hidden

    def scratch(self, sizes: Sizes) -> Scratch:
        """Sums, gates and lists of a batch of neurons; sums of columns by blocks of neurons, shared."""
        (neurons, _, hidden), stored = self.weight.shape, sizes.types[self.weight.name]
        return Scratch(abi.neuron_gated_scratch_bytes(hidden, stored.group_size, stored.dtype),
                       abi.neuron_sums_bytes(neurons, hidden, stored.group_size, stored.dtype))

    def faults(self, types: Types) -> Iterator[str]:
        """A value for each neuron."""
        yield from super().faults(types)
        yield from other_width("the FFN has neurons:", self.weight.shape[0], self.out)
        if self.mask:
            yield from other_width("a mask has words of 32 bits:", mask_width(self.weight.shape[0]), self.mask)
        if self.activation in PAIRED:
            yield f"{self.activation} is not a function of a gate alone, by which neurons live or die"
        if self.weight.shape[1] == 2 and self.activation not in VALUE_FUNCTIONS:
            yield f"{self.activation} wants a gate, which the FFN has not"
        if self.mask and self.threshold:
            yield "an FFN has either a mask or a threshold"


@dataclass(frozen=True, kw_only=True)
class NeuronDown(Op):
    """f D^T (+ bias) (+ residual), or norm(f) D^T, from an FFN stored neuron by neuron."""

    KERNELS = ("neuron_down_{stored.dtype}",)
    OVER = "residual"
    f: Tensor
    residual: Tensor | None
    weight: Weight
    bias: Weight | None = None
    activation: str
    """Activation of the gates, which decides whether there are inactive neurons."""
    dense: bool = False
    """True if their columns are read too."""
    f_norm: Weight | None = None
    """Weight of an RMS norm of f."""
    eps: float = 0.0
    """Epsilon of that norm."""
    ffn = True

    def reads(self, types: Types) -> tuple[Read, ...]:
        """Down columns: a part of each neuron; and the weight of a norm, which `NeuronGated` has read before."""
        return (*_parts(self, 1, types), *([Read.whole(self.f_norm, types)] if self.f_norm else []))

    def read_share(self, mode: str, density: float) -> float:
        """The columns of live neurons."""
        return density if mode in ("exact", "predict") else 1.0

    def operations(self) -> float:
        """Two for each weight of the columns."""
        return 2 * self.weight.shape[0] * self.weight.shape[2]

    def activation_values(self) -> float:
        """Read the same as the matrix that it replaces."""
        neurons, _, hidden = self.weight.shape
        return neurons + hidden

    def scratch(self, sizes: Sizes) -> Scratch:
        """Sums of a chunk of outputs; sums of columns by blocks of neurons, shared."""
        (neurons, _, hidden), stored = self.weight.shape, sizes.types[self.weight.name]
        return Scratch(abi.neuron_down_scratch_bytes(),
                       abi.neuron_sums_bytes(neurons, hidden, stored.group_size, stored.dtype))

    def faults(self, types: Types) -> Iterator[str]:
        """A value for each neuron comes in, a row of the residual stream goes out."""
        yield from other_width("the FFN has neurons:", self.weight.shape[0], self.f)
        yield from other_width("columns have", self.weight.shape[2], self.out)


def mask_width(neurons: int) -> int:
    """Return the words of 32 bits in a token's mask of neurons."""
    return abi.neuron_mask_bytes(neurons) // 4


def parameters(weight: Weight) -> int:
    """Parameters of a weight, without padding; a source that it has twice counts once."""
    return sum(math.prod(source.shape) for source in dict.fromkeys(weight.sources))


def row_type(stored: WeightType) -> RowType:
    """Return the type of rows that weights multiply."""
    return ("q8", stored.input_group) if stored.quantised else ("f32", 0)


def _parts(op: NeuronGated | NeuronDown, parts: int, types: Types) -> tuple[Read, ...]:
    """Return the reads of so many parts of an FFN stored neuron by neuron, and of the bias."""
    nbytes = types[op.weight.name].nbytes(op.weight.shape) // op.weight.shape[1] * parts
    return (Read(op.weight, nbytes, nbytes), *([Read.whole(op.bias, types)] if op.bias else []))


def _type(x: Tensor, stored: WeightType) -> Iterator[str]:
    """Quantised weights take q8 rows of their groups, others floats."""
    want = ("q8", stored.input_group) if stored.quantised else ("f32", x.group_size)
    if (x.dtype, x.group_size) != want:
        yield f"weights {stored} multiply {want[0]} in groups of {want[1]}, but the input is {x}"
