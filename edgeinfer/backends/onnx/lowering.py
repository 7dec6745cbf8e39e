"""Lowering to ONNX: each operation of the graph becomes some nodes; `lower` is open, as that of the runtime.

Rows are the last axis throughout; before it are (B, S) with attention gqa and (T,) with paged. What the pass of the CPU
quantises stays as it is: matmuls here take floats. Nothing in this module needs the package onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Embed, GatherOutputs, Graph, Op, Quantize, RmsNorm, RopeStore, Sample, Tensor, Weight
from edgeinfer.quant import TYPES, requestable

from . import weights
from .flavour import Flavour
from .weights import Part, Quantised, Stored

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""


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
        self.stored: dict[str, Stored] = {}
        self.integers: dict[str, tuple[int, ...]] = {}
        """Small constants (shapes, axes), which are in the model itself."""
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.ropes: dict[int | None, RopeStore] = {}
        """Processing of q and k before each layer's attention."""
        self.rounded: list[str] = []
        """Matrices that could not keep their codes."""
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

    def store(self, stored: Stored) -> str:
        """Add an initializer unless it is there, and return its name."""
        return self.stored.setdefault(stored.name, stored).name

    def vector(self, weight: Weight) -> str:
        """Return the initializer of a norm or bias."""
        return self.store(weights.vector(weight, self.dtype))

    def rows(self, *last: int) -> tuple[int, ...]:
        """Return the shape for Reshape that keeps the axes of tokens and splits a row."""
        return (*((0, 0) if self.flavour.attention == "gqa" else (0,)), *last)

    # -- tensors of the graph --------------------------------------------------------------------------------------

    def set(self, tensor: Tensor, value: str | tuple[str, str]) -> None:
        """Say which value a tensor of the graph has become, or which two it is the sum of."""
        self._values[tensor.name] = value

    def same(self, tensor: Tensor, as_: Tensor) -> None:
        """Say that a tensor is another one: what only the CPU's kernels need is left out."""
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
        self.store(matrix.codes)
        self.store(matrix.scales)
        return self._matrices.setdefault(matrix.codes.name, matrix)

    def quantised(self, x: str, matrix: Quantised, columns: int) -> str:
        """Multiply by a quantised matrix."""
        found = self.codes(matrix)
        return self.node("MatMulNBits", x, found.codes.name, found.scales.name, domain=MICROSOFT, K=columns,
                         N=found.codes.shape[0], bits=found.bits, block_size=found.group_size)

    def matmul(self, x: str, part: Part) -> str:
        """Multiply by a matrix in tiles, whatever its type."""
        if part.stored.quantised:
            return self.quantised(x, weights.quantised(part, self.dtype), part.columns)
        return self.node("MatMul", x, self.store(weights.dense(part, self.dtype)))

    def biased(self, x: str, bias: str) -> str:
        """Add a bias; matmuls of 4 bits with one of their own are slow on CUDA."""
        return self.node("Add", x, bias)

    def whole(self, weight: Weight) -> Part:
        """Return all rows of a matrix that is not interleaved."""
        return Part(weight, self.graph.types[weight.name], weight.shape[0], weight.name)


def check_types(graph: Graph) -> None:
    """Raise `UnsupportedModelError` if weights are in codes that no operator of ONNX reads."""
    if taken := sorted({kind.dtype for kind in graph.types.values() if kind.quantised and not kind.storage.simple}):
        known = [name for name in requestable() if not TYPES[name].quantised or TYPES[name].simple]
        raise UnsupportedModelError(f"The weights are in {', '.join(taken)}, which ONNX has no operator for; convert "
                                    f"the model's source with --weights {known[0]} (or {', '.join(known[1:])}), or run "
                                    "it with --device cpu.")


@singledispatch
def lower(op: Op, at: Lowering) -> None:
    """Turn an operation into nodes. Raises `UnsupportedModelError` if no lowering is registered for it."""
    raise UnsupportedModelError(f"The operation {op.label} has no equivalent in ONNX, so it cannot be exported; leave "
                                "out the pass that puts it into the graph, or run the model with --device cpu.")


# -- rows --------------------------------------------------------------------------------------------------------------


@lower.register
def _(op: Embed, at: Lowering) -> None:
    """A quantised table is the matrix of a tied head: (rows, groups, bytes), gathered along the rows."""
    stored, ids = at.graph.types[op.table.name], at.inputs[0].name
    if not stored.quantised:  # (columns, rows), as matmuls take it
        found = at.node("Gather", at.store(weights.dense(at.whole(op.table), at.dtype)), ids, axis=1)
        order = (1, 2, 0) if at.flavour.attention == "gqa" else (1, 0)
        return at.set(op.out, at.node("Transpose", found, perm=order))
    matrix = at.codes(weights.quantised(at.whole(op.table), at.dtype))
    scales = at.node("Unsqueeze", matrix.scales.name, at.constant(2))
    found = at.node("GatherBlockQuantized", matrix.codes.name, ids, scales, domain=MICROSOFT, bits=matrix.bits,
                    block_size=matrix.group_size, gather_axis=0, quantize_axis=2)
    padded = matrix.codes.shape[1] * matrix.group_size
    row = at.node("Reshape", found, at.constant(*at.rows(padded)))
    if padded != op.out.width:
        row = at.node("Slice", row, at.constant(0), at.constant(op.out.width), at.constant(-1))
    at.set(op.out, row)


@lower.register
def _(op: RmsNorm, at: Lowering) -> None:
    at.set(op.out, at.norm(op.x, op.weight, op.eps))


@lower.register
def _(op: Quantize, at: Lowering) -> None:
    if op.order is None:
        return at.same(op.out, op.x)
    at.set(op.out, at.node("Gather", at.value(op.x), at.store(weights.order(op.order)), axis=-1))


@lower.register
def _(op: GatherOutputs, at: Lowering) -> None:
    if at.flavour.target == "genai":
        return at.same(op.out, op.x)
    flat = x = at.value(op.x)
    if at.flavour.attention == "gqa":
        flat = at.node("Reshape", x, at.constant(-1, op.x.width))
    at.set(op.out, at.node("Gather", flat, "output_rows", axis=0))


@lower.register
def _(op: Sample, at: Lowering) -> None:
    """Declare the model's outputs: the caller samples tokens."""
    logits, width, top = at.value(op.logits), op.logits.width, at.flavour.top_k
    if at.flavour.target == "genai":
        at.outputs.insert(0, Value("logits", at.dtype, ("batch", "tokens", width)))
        at.node("Identity", logits, out="logits")
        return
    at.outputs.insert(0, Value("logits", "f32", ("rows", width)))
    at.node("Cast", logits, out="logits", to="f32")
    if top:
        at.outputs[1:1] = [Value("top_logits", "f32", ("rows", top)), Value("top_ids", "i64", ("rows", top))]
        values = at.node("TopK", "logits", at.constant(top), axis=-1, out=("", "top_ids"))
        total = at.node("ReduceSum", "logits", at.constant(-1))  # TopK of a NaN is undefined
        at.node("Add", values, at.node("Sub", total, total), out="top_logits")
