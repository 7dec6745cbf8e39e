"""Lowering of operations on rows of activations."""

from __future__ import annotations

from edgeinfer.graph import (
    Activate,
    AddPositions,
    Embed,
    GatherOutputs,
    GivenRows,
    LayerNorm,
    NormedSum,
    NormPart,
    Op,
    Quantize,
    RmsNorm,
    Sample,
    Tensor,
    TokenRows,
)
from edgeinfer.kernels import POSITIONS, ROWS, SAMPLE, VALUE_FUNCTIONS, VALUES, abi, fill

from ..program import Instruction
from .base import NOTHING, Lowering, Operand, lower, rows


def _rows(op: Op, at: Lowering, x: Tensor, operands: list[Operand], flags: int = 0,
          **more: int | float) -> list[Instruction]:
    """The instruction of an operation on rows, whose output may be quantised."""
    if op.out.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(op.out.width, op.out.group_size)
        more |= {"scales": scales, "offsets": offsets, "group": op.out.group_size, "token_tiles": at.token_tiles}
    parameters = fill(ROWS, width=op.out.width, in_stride=at.stride(x), out_stride=at.stride(op.out),
                      rows=rows(op.out), **more)
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


@lower.register
def _(op: Embed, at: Lowering) -> list[Instruction]:
    return _rows(op, at, op.out, [at.at(op.table), at.at(op.out)],
                 tile_bytes=at.types[op.table.name].tile_bytes(op.out.width))


@lower.register
def _(op: GivenRows, at: Lowering) -> list[Instruction]:
    return []


@lower.register
def _(op: TokenRows, at: Lowering) -> list[Instruction]:
    piece = op.table.shape[1]
    return _rows(op, at, op.out, [at.at(op.table), at.at(op.out)], piece=piece,
                 tile_bytes=at.types[op.table.name].tile_bytes(piece))


@lower.register
def _(op: RmsNorm, at: Lowering) -> list[Instruction]:
    operands = [at.at(op.x), at.at(op.out), at.at(op.weight), at.scratch]
    return _rows(op, at, op.x, operands, eps=op.eps, scratch=at.plan.thread_scratch_bytes)


@lower.register
def _(op: LayerNorm, at: Lowering) -> list[Instruction]:
    operands = [at.at(op.x), at.at(op.out), at.at(op.weight), at.scratch, at.at(op.bias)]
    flags = abi.FLAG_CENTRED | (abi.FLAG_BIAS if op.bias else 0)
    return _rows(op, at, op.x, operands, flags, eps=op.eps, scratch=at.plan.thread_scratch_bytes)


@lower.register
def _(op: NormedSum, at: Lowering) -> list[Instruction]:
    parameters = fill(ROWS, width=op.weight.shape[0], in_stride=at.stride(op.h), out_stride=at.stride(op.out),
                      rows=rows(op.out), eps=op.eps, parts=op.parts)
    operands = [at.at(op.h), at.at(op.out), at.at(op.weight), NOTHING, NOTHING, at.at(op.scalar)]
    flags = abi.FLAG_RESIDUAL | (abi.FLAG_SCALED if op.scalar else 0)
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


@lower.register
def _(op: NormPart, at: Lowering) -> list[Instruction]:
    part = at.at(op.out).shifted(4 * op.start)
    parameters = fill(ROWS, width=op.weight.shape[0], in_stride=at.stride(op.x), out_stride=at.stride(op.out),
                      rows=rows(op.out), eps=op.eps, parts=op.pieces)
    flags = (abi.FLAG_CENTRED if op.centred else 0) | (abi.FLAG_BIAS if op.bias else 0)
    operands = [part, part, at.at(op.weight), NOTHING, at.at(op.bias)]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


@lower.register
def _(op: Activate, at: Lowering) -> list[Instruction]:
    parameters = fill(VALUES, width=op.out.width, stride=at.stride(op.out), rows=rows(op.out),
                      function=VALUE_FUNCTIONS[op.function], factor=op.factor,
                      by_stride=at.stride(op.by) if op.by else 0)
    by = at.at(op.by).shifted(4 * op.start) if op.by else at.at(op.columns)  # all rows take the columns' factors
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], [at.at(op.out), by], parameters,
                      abi.FLAG_TIMES if op.by or op.columns else 0)]


@lower.register
def _(op: AddPositions, at: Lowering) -> list[Instruction]:
    parameters = fill(POSITIONS, width=op.out.width, stride=at.stride(op.out), rows=rows(op.out), offset=op.offset,
                      tile_bytes=at.types[op.table.name].tile_bytes(op.out.width))
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], [at.at(op.out), at.at(op.table)], parameters)]


@lower.register
def _(op: Quantize, at: Lowering) -> list[Instruction]:
    if op.order is None and op.left_out is None:
        return _rows(op, at, op.x, [at.at(op.x), at.at(op.out)])
    operands = [at.at(op.x), at.at(op.out), at.at(op.order or op.left_out), at.scratch]
    return _rows(op, at, op.x, operands, ordered=int(op.order is not None), scratch=at.plan.thread_scratch_bytes,
                 left_out=op.left_out.shape[0] if op.left_out else 0)


@lower.register
def _(op: GatherOutputs, at: Lowering) -> list[Instruction]:
    return _rows(op, at, op.x, [at.at(op.x), at.at(op.out)])


@lower.register
def _(op: Sample, at: Lowering) -> list[Instruction]:
    _, sums, candidates = abi.sample_row(op.logits.width)
    parameters = fill(SAMPLE, vocab_size=op.logits.width, logits_stride=at.stride(op.logits), sums=sums,
                      work_stride=at.stride(op.out), candidates=candidates)
    operands = [at.at(op.logits), at.at(op.out)]
    labels = ("", "  maxima", "  choice")
    return [at.instruction(op, kernel, operands, parameters, predicates=(abi.COUNT_SAMPLES,), step=step,
                           label=labels[step])
            for step, kernel in enumerate(op.kernels(at.types, at.kv))]
