"""Lowering to ONNX: each operation of the graph becomes some nodes; `lower` is open, as that of the runtime.

Rows are the last axis throughout; before it are (B, S) with attention gqa and (T,) with paged. Effects of the pass of
the CPU quantises stays as it is: matmuls here take floats. Nothing in this module needs the package onnx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Graph, Op, Rotation, Tensor, Weight
from edgeinfer.quant import WeightType

from . import weights
from .flavour import Flavour
from .nibbles import nibbles
from .weights import Part, Quantised, Stored

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""
WIDER = "have codes of 5 or 6 bits or of levels in a table, which onnxruntime's operators have as 8 bits"
BY_COLUMN = ("are down matrices of FFNs stored by neuron, grouped along their outputs, which no matmul of onnxruntime "
             "has; they are {dtype} (convert with --ffn-layout tile16 to keep their codes)")
BY_HEAD = "are matrices of each head of latent attention, multiplied as {dtype}"
"""Why matrices take more bytes than in a bundle."""


class Node(NamedTuple):
    """One ONNX node; inputs that are left out are empty names."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    domain: str
    attributes: dict[str, Any]


class Value(NamedTuple):
    """An input or output of the model: dimensions that vary have names."""

    name: str
    kind: str
    """f16, f32, i32 or i64."""
    shape: tuple[int | str, ...]


class Lowering:
    """The ONNX graph in the making: nodes, initializers, inputs and outputs."""

    def __init__(self, graph: Graph, flavour: Flavour):
        self.graph, self.flavour, self.dtype = graph, flavour, flavour.dtype
        self.nodes: list[Node] = []
        self.ends: list[int] = []
        """Number of nodes after each operation of the graph."""
        self.stored: dict[str, Stored] = {}
        self.integers: dict[str, tuple[int, ...]] = {}
        """Small constants (shapes, axes), which are in the model itself."""
        self.numbers: dict[str, tuple[str, float | tuple[int, ...]]] = {}
        """Numbers of other types, likewise."""
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.ropes: dict[int | None, Rotation] = {}
        """Processing of q and k before each layer's attention."""
        self.scaled: dict[int | None, int] = {}
        """Rotation whose cosines are factors of a layer's queries."""
        self.routes: dict[str, str] = {}
        """Weights of all experts, 0 of those that were not chosen, by the tensor of routes."""
        self.kept: dict[int, tuple[str, ...]] = {}
        """K and V, and the cache after them, of layers that others read."""
        self.remarks: dict[str, list[tuple[int, int]]] = {}
        """Matrices that could not stay as they were, by reason: bytes in the bundle, and in the model."""
        self.notes: dict[str, None] = {}
        """Sentences on differences of a model from edgeinfer's kernels."""
        self._made: dict[Any, str] = {}
        self._values: dict[str, str | tuple[str, str]] = {}
        self._matrices: dict[str, Quantised] = {}

    # -- nodes -----------------------------------------------------------------------------------------------------

    def node(self, kind: str, *inputs: str, out: str | Sequence[str] = "", domain: str = "", **attributes: Any) -> str:
        """Add a node and return its first output, which gets a name of its own unless `out` gives some."""
        outputs = (out,) if isinstance(out, str) else tuple(out)
        if not outputs[0]:
            outputs = (f"{kind}.{len(self.nodes)}", *outputs[1:])
        self.nodes.append(Node(kind, inputs, outputs, domain, attributes))
        return outputs[0]

    def constant(self, *numbers: int) -> str:
        """Return the name of a constant vector of int64."""
        name = "i64." + "_".join(map(str, numbers))
        self.integers[name] = numbers
        return name

    def number(self, value: float | tuple[int, ...], kind: str = "") -> str:
        """Return the name of a constant number of the model's type, or of another; of a vector for a tuple."""
        kind = kind or self.dtype
        name = f"number.{kind}.{value!r}"
        self.numbers[name] = kind, value
        return name

    def once(self, key: Any, make: Callable[[], str]) -> str:
        """Return a value that several operations need, made by the first."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def store(self, stored: Stored) -> str:
        """Add an initializer unless it is there, and return its name."""
        found = self.stored.setdefault(stored.name, stored)
        if found[:3] != stored[:3]:
            raise ValueError(f"Two tensors of the model have the name {stored.name}: {found[1:3]} and {stored[1:3]}.")
        return stored.name

    def vector(self, weight: Weight) -> str:
        """Return the initializer of a norm or bias."""
        return self.store(weights.vector(weight, self.dtype))

    def rows(self, *last: int, axes: int = 0) -> tuple[int, ...]:
        """Return the shape for Reshape that keeps the axes of tokens and splits a row."""
        return (*(0,) * (axes or self.axes), *last)

    @property
    def axes(self) -> int:
        """Number of the axes of tokens."""
        return 2 if self.flavour.attention == "gqa" else 1

    def axes_of(self, tensor: Tensor) -> int:
        """Number of the axes of a tensor's rows: those whose logits are wanted are one list."""
        return 1 if tensor.rows == "outputs" and self.flavour.target != "genai" else self.axes

    # -- tensors of the graph --------------------------------------------------------------------------------------

    def set(self, tensor: Tensor, value: str | tuple[str, str]) -> None:
        """Say which value a tensor of the graph has become, or which two it is the sum of."""
        self._values[tensor.name] = value

    def same(self, tensor: Tensor, as_: Tensor) -> None:
        """Make a tensor an alias of another: work that only the CPU's kernels need is left out."""
        self._values[tensor.name] = self._values[as_.name]

    def value(self, tensor: Tensor) -> str:
        """Return the value of a tensor; a sum that was not fused into a norm is added now."""
        found = self._values[tensor.name]
        if isinstance(found, tuple):
            found = self._values[tensor.name] = self.node("Add", *found)
        return found

    def norm(self, x: Tensor, weight: Weight, eps: float) -> str:
        """Add a norm, with the sum before it in one node where x is one."""
        found, scale = self._values[x.name], self.vector(weight)
        if isinstance(found, str):
            return self.node("RMSNormalization", found, scale, axis=-1, epsilon=eps)
        total = f"sum.{len(self.nodes)}"
        self._values[x.name] = total
        return self.node("SkipSimplifiedLayerNormalization", *found, scale, domain=MICROSOFT, epsilon=eps,
                         out=("", f"mean.{total}", f"variance.{total}", total))

    # -- matrices --------------------------------------------------------------------------------------------------

    def codes(self, matrix: Quantised) -> Quantised:
        """Add the initializers of a quantised matrix."""
        for stored in (matrix.codes, matrix.scales, *([matrix.offsets] if matrix.offsets else [])):
            self.store(stored)
        return self._matrices.setdefault(matrix.codes.name, matrix)

    def quantised(self, x: str, matrix: Quantised, columns: int, axes: int = 0) -> str:
        """Multiply by a quantised matrix; its offsets add the product of sums of blocks with them."""
        if self.flavour.nibbles and matrix.bits == 8:
            high, low, zeros = nibbles(matrix, self.dtype)
            y = self.node("Add", self._product(x, high, columns), self._product(x, low, columns, self.store(zeros)))
        else:
            y = self._product(x, self.codes(matrix), columns)
        if not matrix.offsets:
            return y
        sums = self.once(("sums", x, matrix.group_size),
                         lambda: self._block_sums(x, columns, matrix.group_size, axes))
        return self.node("Add", y, self.node("MatMul", sums, self.store(matrix.offsets)))

    def _product(self, x: str, matrix: Quantised, columns: int, *zeros: str) -> str:
        """Multiply by codes and scales."""
        return self.node("MatMulNBits", x, self.store(matrix.codes), self.store(matrix.scales), *zeros,
                         domain=MICROSOFT, K=columns, N=matrix.codes.shape[0], bits=matrix.bits,
                         block_size=matrix.group_size)

    def _block_sums(self, x: str, columns: int, group: int, axes: int) -> str:
        """Sums of each block of a row: (..., groups)."""
        if short := -columns % group:
            x = self.node("Pad", x, self.constant(0, short), "", self.constant(-1))
        split = self.node("Reshape", x, self.constant(*self.rows(-(-columns // group), group, axes=axes)))
        return self.node("ReduceSum", split, self.constant(-1), keepdims=0)

    def matmul(self, x: str, part: Part, axes: int = 0) -> str:
        """Multiply by a matrix in tiles, whatever its type."""
        if part.stored.quantised:
            return self.quantised(x, self.kept_codes(part.stored, weights.quantised(part, self.dtype)), part.columns,
                                  axes)
        return self.node("MatMul", x, self.store(weights.dense(part, self.dtype)))

    def kept_codes(self, stored: WeightType, matrix: Quantised) -> Quantised:
        """Remember a matrix whose codes need more bits here than in the bundle."""
        if matrix.bits > stored.storage.bits:
            rows, groups, _ = matrix.codes.shape
            nbytes = matrix.codes.nbytes + matrix.scales.nbytes + (matrix.offsets.nbytes if matrix.offsets else 0)
            self.remark(WIDER, stored.bytes_of(rows * groups * matrix.group_size), nbytes)
        return matrix

    def remark(self, reason: str, before: int, now: int) -> None:
        """Remember that a matrix takes other bytes than in the bundle."""
        self.remarks.setdefault(reason, []).append((before, now))

    def biased(self, x: str, bias: str) -> str:
        """Add a bias; matmuls of 4 bits with one of their own are slow on CUDA."""
        return self.node("Add", x, bias)

    def whole(self, weight: Weight) -> Part:
        """Return all rows of a matrix that is not interleaved."""
        return Part(weight, self.graph.types[weight.name], weight.shape[0], weight.name)


@singledispatch
def lower(op: Op, at: Lowering) -> None:
    """Turn an operation into nodes. Raises `UnsupportedModelError` if no lowering is registered for it."""
    raise UnsupportedModelError(f"The operation {op.label} has no equivalent in ONNX, so it cannot be exported; leave "
                                "out the pass that puts it into the graph, or run the model with --device cpu.")
