"""Operations on rows of activations; matmul.py has those with matrices, attention.py those with K and V."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.kernels import VALUE_FUNCTIONS, abi

from ...base.dataclass import dataclass
from ...base.units import round_up
from ..tensors import Tensor, Types
from ..weight_types import ORDER
from ..weights import Weight
from .base import RowOp, other_width
from .costs import OnDemand, Read, Scratch, Sizes


@dataclass(frozen=True, kw_only=True)
class Embed(RowOp):
    """Row of each token in a table."""

    KERNELS = ("embed_{stored.suffix}",)
    table: Weight

    def reads(self, types: Types) -> tuple[Read, ...]:
        """One row a token, which is left out beside the matrices."""
        return ()

    def faults(self, types: Types) -> Iterator[str]:
        """The table's rows are the output's."""
        yield from other_width("the table has rows of", self.table.shape[1], self.out)


@dataclass(frozen=True, kw_only=True)
class TokenRows(RowOp):
    """Row of each token in a large table, each row of which is a tile by itself (Weight.combine ``folded16``)."""

    KERNELS = ("embed_{stored.suffix}",)
    table: Weight

    def reads(self, types: Types) -> tuple[Read, ...]:
        """One row a token, and of a forward pass."""
        row = types[self.table.name].tile_bytes(self.table.shape[1])
        return (Read(self.table, row, row),)

    def memory(self, types: Types) -> OnDemand | None:
        """Rows of the table, each a tile."""
        row = types[self.table.name].tile_bytes(self.table.shape[1])
        return OnDemand("rows", self.layer or 0, self.table, self.table.shape[0] // 16, row)

    def faults(self, types: Types) -> Iterator[str]:
        """The table's rows are the output's."""
        yield from other_width("the table has rows of", self.table.sources[0].shape[1], self.out)


@dataclass(frozen=True, kw_only=True)
class GivenRows(RowOp):
    """Rows that the caller writes before each forward pass, such as those of another program."""

    KERNELS = ()
    given = True


@dataclass(frozen=True, kw_only=True)
class RmsNorm(RowOp):
    """Root-mean-square norm (arXiv 1910.07467), quantised on the way out where its readers want that."""

    KERNELS = ("rms_norm_{out.dtype}",)
    quantises = True
    x: Tensor
    weight: Weight
    eps: float

    def scratch(self, sizes: Sizes) -> Scratch:
        """A row of floats before it is quantised."""
        return Scratch(4 * round_up(self.x.width, 16) if self.out.dtype == "q8" else 0)

    def faults(self, types: Types) -> Iterator[str]:
        """All rows are as wide as the weight."""
        yield from other_width("the norm's weight has", self.weight.shape[0], self.x)
        yield from other_width("the norm's weight has", self.weight.shape[0], self.out)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(RowOp):
    """Layer norm (arXiv 1607.06450): subtracts the mean, and adds a bias if there is one."""

    KERNELS = ("norm_{out.dtype}",)
    quantises = True
    x: Tensor
    weight: Weight
    bias: Weight | None = None
    eps: float

    def scratch(self, sizes: Sizes) -> Scratch:
        """A row of floats before it is quantised."""
        return Scratch(4 * round_up(self.x.width, 16) if self.out.dtype == "q8" else 0)

    def faults(self, types: Types) -> Iterator[str]:
        """All rows are as wide as weight and bias."""
        for vector in (self.weight, self.bias or self.weight):
            yield from other_width("the norm's weight or bias has", vector.shape[0], self.x)
        yield from other_width("the norm's weight has", self.weight.shape[0], self.out)


@dataclass(frozen=True, kw_only=True)
class NormedSum(RowOp):
    """x + norm(h): an RMS norm of the branch that is added to the residual stream (Gemma 2, arXiv 2408.00118)."""

    KERNELS = ("norm_f32",)
    OVER = "x"
    h: Tensor
    x: Tensor
    weight: Weight
    scalar: Weight | None = None
    """A number by which the sum is multiplied (Gemma 4)."""
    eps: float
    parts: int = 1
    """Parts of a row that are normed one by one, all with the same weight."""

    def faults(self, types: Types) -> Iterator[str]:
        """All rows are as wide as the weight, once for each part."""
        have = self.weight.shape[0] * self.parts
        yield from other_width("the norm's weight has, for all parts,", have, self.h)
        yield from other_width("the norm's weight has, for all parts,", have, self.out)


@dataclass(frozen=True, kw_only=True)
class NormPart(RowOp):
    """Norm of a part of each row, in place: all heads of q, or k, as one (OLMo 2, arXiv 2501.00656), or one by one."""

    KERNELS = ("norm_f32",)
    OVER = "x"
    x: Tensor
    weight: Weight
    bias: Weight | None = None
    start: int
    """First element of the part."""
    pieces: int = 1
    """Pieces of the part that are normed one by one, each as wide as the weight."""
    centred: bool = False
    """True if the mean is taken off first (layer norm)."""
    eps: float

    def faults(self, types: Types) -> Iterator[str]:
        """The part is within the row."""
        if (end := self.start + self.pieces * self.weight.shape[0]) > self.x.width:
            yield f"the part ends at {end}, but {self.x} is {self.x.width} wide"


@dataclass(frozen=True, kw_only=True)
class Activate(RowOp):
    """A function of each value of rows, in place: an activation without a gate, a scale, a soft cap."""

    KERNELS = ("activate",)
    OVER = "x"
    x: Tensor
    function: str
    """See kernels.VALUE_FUNCTIONS."""
    factor: float = 0.0
    """Factor, or the cap."""
    in_ffn: bool = False
    by: Tensor | None = None
    """Tensor to multiply the values by afterwards: as many of each row, from `start` on."""
    start: int = 0
    columns: Weight | None = None
    """Factors of the columns, instead of `by`."""

    @property
    def ffn(self) -> bool:
        """True if the builder marked it so."""
        return self.in_ffn

    def faults(self, types: Types) -> Iterator[str]:
        """The function is known."""
        if self.function not in VALUE_FUNCTIONS:
            yield f"there is no function {self.function!r} of values"
        if self.columns:
            yield from other_width("the factors of columns are", self.columns.shape[0], self.x)
        if self.by and self.start + self.x.width > self.by.width:
            yield f"the factors end at {self.start + self.x.width}, but {self.by} is {self.by.width} wide"


@dataclass(frozen=True, kw_only=True)
class AddPositions(RowOp):
    """Add to each token's row that of its position in a table (GPT-2)."""

    KERNELS = ("add_positions",)
    OVER = "x"
    x: Tensor
    table: Weight
    offset: int = 0
    """Row of the table that position 0 has."""

    def reads(self, types: Types) -> tuple[Read, ...]:
        """One row a token, which is left out beside the matrices."""
        return ()

    def faults(self, types: Types) -> Iterator[str]:
        """The table's rows are the input's."""
        yield from other_width("the table has rows of", self.table.shape[1], self.x)


@dataclass(frozen=True, kw_only=True)
class Quantize(RowOp):
    """Rows, or their beginnings, to int8 with a scale for each group."""

    KERNELS = ("quantize",)
    x: Tensor
    order: Weight | None = None
    """Permutation of the elements, for a matrix whose columns are in another order (act-order of GPTQ)."""
    left_out: Weight | None = None
    """Elements that are outliers: zeros are quantised instead, and they follow as floats."""

    def scratch(self, sizes: Sizes) -> Scratch:
        """A row in its order, or with zeros, before it is quantised."""
        return Scratch(4 * round_up(self.x.width, 16) if self.order or self.left_out else 0)

    def faults(self, types: Types) -> Iterator[str]:
        """Rows get no longer, and were floats; an order is one of all of them."""
        if self.out.dtype != "q8":
            yield f"{self.out} is not quantised"
        if self.order and types[self.order.name] != ORDER:
            yield f"the order {self.order.name} is stored as {types[self.order.name]}"
        for tensor in (self.x, self.out) if self.order else ():
            yield from other_width("the order has", self.order.shape[0], tensor)  # type: ignore[union-attr]
        if self.out.width > self.x.width:
            yield from other_width("the input has rows of", self.x.width, self.out)
        if self.x.dtype != "f32":
            yield f"{self.x} is quantised already"
        if self.left_out and types[self.left_out.name] != ORDER:
            yield f"the columns {self.left_out.name} are stored as {types[self.left_out.name]}"
        if self.out.apart != (self.left_out.shape[0] if self.left_out else 0):
            yield f"{self.out} has {self.out.apart} elements apart"


@dataclass(frozen=True, kw_only=True)
class GatherOutputs(RowOp):
    """The rows whose logits are wanted."""

    KERNELS = ("gather_outputs",)
    x: Tensor

    def faults(self, types: Types) -> Iterator[str]:
        """Rows keep their width."""
        yield from other_width("the input has rows of", self.x.width, self.out)


@dataclass(frozen=True, kw_only=True)
class Sample(RowOp):
    """The next token of each row of logits for which a sample is listed; the output is scratch of the kernels."""

    KERNELS = ("sample_edit", "sample_blocks", "sample_choose")
    logits: Tensor

    def faults(self, types: Types) -> Iterator[str]:
        """A row of work is as long as the vocabulary needs."""
        yield from other_width("the work takes", abi.sample_row(self.logits.width)[0] // 4, self.out)
