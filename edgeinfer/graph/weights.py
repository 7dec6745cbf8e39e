"""Stored weights, and the parts of a checkpoint's tensors that they are made of."""

from __future__ import annotations

from dataclasses import replace

from ..base.dataclass import dataclass
from ..errors import UnsupportedModelError
from .steps import Affine, Columns, Decay, Factors, RopeHalves, Rows, Sizes, Step, Tap, Transposed


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint, or a part of one, and the exact steps from it to (a part of) a weight.

    Each method returns a new source with one more step. Steps are taken in float32, in the order in which they were
    asked for, on blocks of rows: no step needs the whole tensor in memory.

    Raises
    ------
    UnsupportedModelError
        A step does not fit the tensor.
    """

    name: str
    """Name in the checkpoint."""
    stored: Sizes
    """Shape that the checkpoint must have."""
    index: Sizes = ()
    """Indices along the leading axes, for checkpoints that stack vectors or matrices."""
    steps: tuple[Step, ...] = ()
    shared: bool = False
    """True if other sources may use the same elements."""
    each: bool = False
    """A stack of matrices, such as those of experts: steps are taken with each item along the first axis. If the name
    has a pair of braces, each is a tensor of its own, with its number there."""

    @property
    def shape(self) -> Sizes:
        """Shape after all steps."""
        return (*self.stored[: int(self.each)], *self.part)

    @property
    def part(self) -> Sizes:
        """Shape that steps work on, after all of them: of a stack that of an item."""
        shape = self.stored[len(self.index) + self.each :]
        for step in self.steps:
            shape = step.shape(shape)
        return shape

    @property
    def items(self) -> tuple[Source, ...]:
        """The items of a stack, one by one."""
        n = self.stored[0]
        if "{}" in self.name:
            return tuple([Source(self.name.format(i), self.stored[1:], (), self.steps, self.shared) for i in range(n)])
        return tuple([replace(self, each=False, index=(i,)) for i in range(n)])

    @property
    def parts(self) -> tuple[Source, ...]:
        """This source, and those of the vectors that it is multiplied by."""
        return (self, *(part for step in self.steps if isinstance(step, Factors) for part in step.by.parts))

    def item(self, i: int) -> Source:
        """Item i along the first axis, before all other steps."""
        self._check(not self.steps and len(self.shape) > 1 and 0 <= i < self.shape[0], f"has no item {i}")
        return replace(self, index=(*self.index, i))

    def rows(self, start: int, stop: int) -> Source:
        """Rows start to stop; of a vector, elements."""
        self._check(0 <= start < stop <= self.part[0], f"has no rows {start} to {stop - 1}")
        return self._then(Rows(start, stop - start, stop - start, stop - start))

    def every(self, step: int, first: int = 0, run: int = 1) -> Source:
        """Rows first to first + run of each `step` rows, such as the queries of heads stored as q, k, v, q, k, v."""
        fits = 0 <= first < first + run <= step and self.part[0] % step == 0
        self._check(fits, f"has no rows {first} to {first + run - 1} in each {step}")
        return self._then(Rows(first, self.part[0] // step * run, run, step))

    def columns(self, start: int, stop: int) -> Source:
        """Columns start to stop of a matrix."""
        self._check(len(self.part) == 2 and 0 <= start < stop <= self.part[1], f"has no columns {start} to {stop - 1}")
        return self._then(Columns(start, stop - start))

    def transposed(self) -> Source:
        """Rows for columns, where a checkpoint has (in_features, out_features) as GPT-2's Conv1D."""
        self._check(len(self.part) == 2, "is not a matrix")
        return self._then(Transposed())

    def rope_halves(self, head_dim: int, turned: int = 0) -> Source:
        """Reorder the rows of each head from interleaved RoPE (pairs of neighbours turn) to ours (halves turn).

        Where not all of a head turns, the first `turned` rows are reordered.
        """
        fits = head_dim > 0 and head_dim % 2 == 0 and self.part[0] % head_dim == 0
        self._check(fits, f"has no heads of {head_dim} rows in pairs")
        self._check(0 <= turned <= head_dim and turned % 2 == 0, f"has heads of {head_dim} rows, not {turned} in pairs")
        return self._then(RopeHalves(head_dim, 0 if turned == head_dim else turned))

    def scaled(self, by: float | Source, axis: str = "rows") -> Source:
        """Multiply by a number, or each of the rows or columns by its element of a vector."""
        if not isinstance(by, Source):
            return self._then(Affine(scale=by))
        size = self.shape[0] if axis == "rows" else self.shape[-1]
        fits = axis == "rows" or (axis == "columns" and len(self.shape) == 2)
        self._check(fits and by.shape == (size,), f"has no {axis} for the {list(by.shape)} factors of {by.name}")
        return self._then(Factors(by, axis))

    def plus(self, number: float) -> Source:
        """Add a number, such as 1 to a norm that is stored as its difference from 1."""
        return self._then(Affine(plus=number))

    def tap(self, column: int) -> Source:
        """Column of a depthwise convolution's weight, (channels, 1, width), as a vector of the channels."""
        fits = len(self.part) == 3 and self.part[1] == 1 and 0 <= column < self.part[2]
        self._check(fits, f"is no convolution with a tap {column}")
        return replace(self, steps=(*self.steps, Tap(column)))

    def decay(self) -> Source:
        """-e^x of each element: a rate of decay of its logarithm, as checkpoints store it."""
        return self._then(Decay())

    def _then(self, step: Step) -> Source:
        self._check(len(self.part) in (1, 2), "is stacked: choose an item first")
        return replace(self, steps=(*self.steps, step))

    def _check(self, good: bool, what: str) -> None:
        if not good:
            part = "tensor" if self.shape == self.stored else f"part {list(self.shape)} of the tensor"
            raise UnsupportedModelError(f"The {part} {self.name} of shape {list(self.stored)} {what}; config.json and "
                                        "the architecture do not fit together.")


def as_source(given: str | Source, shape: Sizes, weight: str) -> Source:
    """Return the source of a whole tensor for a name; refuse a source of another shape than `weight` needs."""
    if isinstance(given, str):
        return Source(given, shape)
    source = given
    if source.shape != shape:
        raise UnsupportedModelError(f"The weight {weight} needs {list(shape)} of the tensor {source.name}, but its "
                                    f"source has {list(source.shape)}; mend the architecture's file.")
    return source


@dataclass(frozen=True)
class Weight:
    """One stored matrix or vector, and the parts of checkpoint tensors that it is made of."""

    name: str
    """Name in the bundle's tensor table, such as ``layers.0.qkv``."""
    shape: Sizes
    """Shape as stored: (rows, cols) = (out_features, in_features), (n,) for a vector, (intermediate_size, 3,
    hidden_size) for an FFN; 2 instead of 3 where it has no gate."""
    kind: str
    """``matrix`` (the layers' linear weights), ``experts`` (those of all experts), ``router`` (which scores them, f32),
    ``ffn`` (gate, up and down in one, neuron by neuron), ``embedding``, ``head``, ``rows`` (a table of which a token
    reads a row, which stays in the file), ``inputs`` (small matrices around it, stored as the embedding is) or
    ``vector`` (norms and biases, f32).
    """
    sources: tuple[Source, ...] = ()
    combine: str = "concat"
    """``concat`` along rows; ``interleave16``: rows padded to 16 per source, then alternating by tile of 16;
    ``neurons``: a row of each of the first sources, then a column of the last; ``stacked16`` and ``stacked_pairs16``:
    items of stacks one after the other, padded to 16 rows, those of two stacks alternating by tile of 16; ``folded16``:
    each row of the source, cut into 16 pieces, is a tile of 16 rows, the last ones perhaps short or empty."""
    pieces: int = 0
    """Experts whose matrices it has. Weights of as many that follow each other share an allocation, expert by expert,
    so that all of an expert is in one piece; 0: it is in one piece itself."""
    ordered: bool = False
    """True if column i multiplies not input i, but the one that the vector `order_name` says."""

    @property
    def order_name(self) -> str:
        """Name of the order of its columns, where it has one."""
        return f"{self.name}_order"

    @property
    def columns_name(self) -> str:
        """Name of the numbers of its outlier columns, where these are stored apart."""
        return f"{self.name}_columns"

    @property
    def outliers_name(self) -> str:
        """Name of the matrix that has them."""
        return f"{self.name}_outliers"
