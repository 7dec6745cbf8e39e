"""Lowering of operations on rows to ONNX: embeddings, norms, functions of values, outputs."""

from __future__ import annotations

import math

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import (
    Activate,
    AddPositions,
    Embed,
    GatherOutputs,
    LayerNorm,
    MatMul,
    NormedSum,
    NormPart,
    Quantize,
    RmsNorm,
    Sample,
    SigmoidGate,
    TokenRows,
    Weight,
)

from . import weights
from .functions import function
from .lowering import MICROSOFT, Lowering, Value, lower
from .positions import positions
from .weights import Part, Quantised


@lower.register
def _(op: Embed, at: Lowering) -> None:
    at.set(op.out, table_rows(at.whole(op.table), at.inputs[0].name, at))


@lower.register
def _(op: AddPositions, at: Lowering) -> None:
    ids = positions(at)
    if op.offset:
        ids = at.once(("positions", op.offset), lambda: at.node("Add", ids, at.constant(op.offset)))
    at.set(op.out, (at.value(op.x), table_rows(at.whole(op.table), ids, at)))


def table_rows(table: Part, ids: str, at: Lowering) -> str:
    """Rows of a table. A quantised one is the matrix of a tied head: (rows, groups, bytes), gathered along the rows."""
    order = tuple((i + 1) % (at.axes + 1) for i in range(at.axes + 1))
    if not table.stored.quantised:
        return _dense_rows(table, ids, order, at)
    matrix = at.codes(weights.quantised(table, at.dtype))
    found = gathered(matrix, ids, at)
    groups = matrix.codes.shape[1]
    if matrix.offsets:
        offsets = at.node("Transpose", at.node("Gather", matrix.offsets.name, ids, axis=1), perm=order)
        found = at.node("Add", found, at.node("Unsqueeze", offsets, at.constant(-1)))
    padded = groups * matrix.group_size
    row = at.node("Reshape", found, at.constant(*at.rows(padded)))
    if padded == table.columns:
        return row
    return at.node("Slice", row, at.constant(0), at.constant(table.columns), at.constant(-1))


def _dense_rows(table: Part, ids: str, order: tuple[int, ...], at: Lowering) -> str:
    """Rows of floats; a table that is the matrix of a tied head as well has them as columns."""
    name = table.name
    if not any(weight.name == name for op in at.graph.ops if isinstance(op, MatMul) for weight in op.weights):
        return at.node("Gather", at.store(weights.dense_rows(table, at.dtype, name, table.weight.shape)), ids, axis=0)
    found = at.node("Gather", at.store(weights.dense(table, at.dtype)), ids, axis=1)
    found = at.node("Transpose", found, perm=order)
    # onnxruntime 1.32 fuses a Transpose with the Cast and MatMul after it and ends in a segmentation fault
    return at.node("Reshape", found, at.constant(*at.rows(table.columns)))


def gathered(matrix: Quantised, ids: str, at: Lowering) -> str:
    """Rows of codes times scales: (..., groups, group_size)."""
    scales = at.node("Unsqueeze", matrix.scales.name, at.constant(2))
    return at.node("GatherBlockQuantized", matrix.codes.name, ids, scales, domain=MICROSOFT, bits=matrix.bits,
                   block_size=matrix.group_size, gather_axis=0, quantize_axis=2)


@lower.register
def _(op: TokenRows, at: Lowering) -> None:
    """Each row of the table is a tile, whose 16 rows are pieces of it."""
    ids, stored, (rows, width) = at.inputs[0].name, at.graph.types[op.table.name], op.table.shape
    table = rows // 16
    if stored.quantised:
        matrix = weights.folded(at.whole(op.table), at.dtype)
        found = gathered(at.codes(matrix), ids, at)
        if matrix.offsets:
            more = at.node("Gather", matrix.offsets.name, ids, axis=0)
            found = at.node("Add", found, at.node("Unsqueeze", more, at.constant(-1)))
        padded = matrix.codes.shape[1] // 16 * matrix.group_size
        found = at.node("Reshape", found, at.constant(*at.rows(16, padded)))
        found = at.node("Slice", found, at.constant(0), at.constant(width), at.constant(-1))
        found = at.node("Reshape", found, at.constant(*at.rows(16 * width)))
    else:
        whole = weights.dense_rows(at.whole(op.table), at.dtype, op.table.name, (table, 16 * width))
        found = at.node("Gather", at.store(whole), ids, axis=0)
    at.set(op.out, at.node("Slice", found, at.constant(0), at.constant(op.out.width), at.constant(-1)))


@lower.register
def _(op: RmsNorm, at: Lowering) -> None:
    at.set(op.out, at.norm(op.x, op.weight, op.eps))


@lower.register
def _(op: LayerNorm, at: Lowering) -> None:
    at.set(op.out, _layer_norm(at.value(op.x), op.weight, op.bias, op.eps, at))


def _layer_norm(x: str, weight: Weight, bias: Weight | None, eps: float, at: Lowering) -> str:
    more = [at.vector(bias)] if bias else []
    return at.node("LayerNormalization", x, at.vector(weight), *more, axis=-1, epsilon=eps)


@lower.register
def _(op: NormedSum, at: Lowering) -> None:
    h = at.value(op.h)
    if op.parts > 1:
        h = at.node("Reshape", h, at.constant(*at.rows(op.parts, op.weight.shape[0])))
    h = at.node("RMSNormalization", h, at.vector(op.weight), axis=-1, epsilon=op.eps)
    if op.parts > 1:
        h = at.node("Reshape", h, at.constant(*at.rows(op.out.width)))
    if not op.scalar:
        return at.set(op.out, (at.value(op.x), h))
    at.set(op.out, at.node("Mul", at.node("Add", at.value(op.x), h), at.vector(op.scalar)))


@lower.register
def _(op: NormPart, at: Lowering) -> None:
    """Replace the part of a row between its unchanged ends."""
    width, n = op.pieces * op.weight.shape[0], op.weight.shape[0]
    sizes = [op.start, width, op.x.width - op.start - width]
    names = [f"part.{len(at.nodes)}.{i}" for i in range(3)]
    kept = [name for name, size in zip(names, sizes, strict=True) if size]
    x = at.value(op.x)
    if len(kept) > 1:
        at.node("Split", x, at.constant(*filter(None, sizes)), out=kept, axis=-1)
    part = names[1] if len(kept) > 1 else x
    if op.pieces > 1:
        part = at.node("Reshape", part, at.constant(*at.rows(op.pieces, n)))
    if op.centred:
        part = _layer_norm(part, op.weight, op.bias, op.eps, at)
    else:
        part = at.node("RMSNormalization", part, at.vector(op.weight), axis=-1, epsilon=op.eps)
        part = at.biased(part, at.vector(op.bias)) if op.bias else part
    if op.pieces > 1:
        part = at.node("Reshape", part, at.constant(*at.rows(width)))
    names[1] = part
    parts = [name for name, size in zip(names, sizes, strict=True) if size]
    at.set(op.out, at.node("Concat", *parts, axis=-1) if len(parts) > 1 else part)


@lower.register
def _(op: Activate, at: Lowering) -> None:
    y = function(at.value(op.x), op.function, op.factor, at)
    if op.columns:
        y = at.node("Mul", y, at.vector(op.columns))
    elif op.by:
        by = at.value(op.by)
        if op.start or op.by.width != op.x.width:
            by = at.node("Slice", by, at.constant(op.start), at.constant(op.start + op.x.width), at.constant(-1))
        y = at.node("Mul", y, by)
    at.set(op.out, y)


@lower.register
def _(op: SigmoidGate, at: Lowering) -> None:
    gate = at.node("Sigmoid", at.value(op.gate))  # f32, as routers are
    at.set(op.out, at.node("Mul", at.value(op.x), gate if at.dtype == "f32" else at.node("Cast", gate, to=at.dtype)))


@lower.register
def _(op: Quantize, at: Lowering) -> None:
    if op.left_out:
        raise UnsupportedModelError(f"The columns of outliers of {op.left_out.name.removesuffix('_columns')} are "
                                    "stored apart, which is not exported to ONNX; convert the model without "
                                    "--outliers.")
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
        values = _largest(top, width, at)
        total = at.node("ReduceSum", "logits", at.constant(-1))  # TopK of a NaN is undefined
        at.node("Add", values, at.node("Sub", total, total), out="top_logits")


def _largest(top: int, width: int, at: Lowering) -> str:
    """The largest logits and their ids, exactly: those of each block of a row, then those of all blocks.

    CUDA's TopK of more than 32 gives a row to one block of threads. Blocks of a row are as long as the rest for the
    second step, so that both take the square root of the time.
    """
    block = 1 << math.ceil(math.log2(top * width) / 2)
    if width <= 2 * block:
        return at.node("TopK", "logits", at.constant(top), axis=-1, out=("", "top_ids"))
    blocks, rows = -(-width // block), "logits"
    if short := blocks * block - width:
        rows = at.node("Pad", rows, at.constant(0, short), at.number(-math.inf, "f32"), at.constant(-1))
    rows = at.node("Reshape", rows, at.constant(0, blocks, block))
    values = at.node("TopK", rows, at.constant(top), axis=-1, out=("", "ids.blocks"))
    values, ids = (at.node("Reshape", x, at.constant(0, blocks * top)) for x in (values, "ids.blocks"))
    values = at.node("TopK", values, at.constant(top), axis=-1, out=("", "candidates"))
    ids = at.node("GatherElements", ids, "candidates", axis=1)
    begins = at.node("Mul", at.node("Div", "candidates", at.constant(top)), at.constant(block))
    at.node("Add", ids, begins, out="top_ids")
    return values
