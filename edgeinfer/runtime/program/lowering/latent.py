"""Lowering of latent attention: the operations of graph/ops/latent.py as instructions."""

from __future__ import annotations

from edgeinfer.graph import HeadLinear, QuantizeHeads, StoreLatent
from edgeinfer.kernels import LATENT, LINEAR, ROWS, abi, fill

from ..program import Instruction
from .base import CHUNK_BYTES, Lowering, Operand, lower, rows


@lower.register
def _(op: QuantizeHeads, at: Lowering) -> list[Instruction]:
    _, scales, offsets = abi.q8_row_bytes(op.out.width, op.out.group_size)
    parameters = fill(ROWS, width=op.out.width, in_stride=at.stride(op.x), out_stride=at.stride(op.out),
                      rows=rows(op.out), scales=scales, offsets=offsets, group=op.out.group_size,
                      token_tiles=at.token_tiles, heads=op.out.times, head_out=at.head_bytes(op.out))
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], [at.at(op.x), at.at(op.out)], parameters)]


@lower.register
def _(op: HeadLinear, at: Lowering) -> list[Instruction]:
    """Tiles are claimed in chunks that end where heads do."""
    stored, cols = at.types[op.weight.name], op.weight.shape[1]
    size, units = stored.tile_bytes(cols), op.rows // 16
    most = max(1, min(CHUNK_BYTES // size, op.heads * units // (4 * at.threads)))
    more = {"head_x": 4 * cols}
    if op.x.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(cols, op.x.group_size)
        more = {"x_scales": scales, "x_offsets": offsets, "group": op.x.group_size, "head_x": at.head_bytes(op.x)}
    parameters = fill(
        LINEAR, tiles=op.heads * units, tile_bytes=size, records=stored.tile_records(cols), x_stride=at.stride(op.x),
        out_stride=at.stride(op.out), rows=rows(op.out), token_tiles=at.token_tiles, head_tiles=units,
        chunk=max(n for n in range(1, units + 1) if units % n == 0 and n <= most), head_gap=4 * (op.step - op.rows),
        scratch=at.plan.thread_scratch_bytes, **more)
    operands = [at.at(op.weight), at.at(op.x), at.at(op.out), at.at(None), at.scratch, at.at(None), at.at(None)]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: StoreLatent, at: Lowering) -> list[Instruction]:
    plan, layer, turned = at.plan, at.layer(op), at.graph.config.table_rows(at.plan.request.ctx)
    parameters = fill(
        LATENT, stride=at.stride(op.out), q_stride=at.stride(op.q), q_first=op.q_first, c_first=op.first,
        c_stride=at.stride(op.compressed), heads=op.heads, rank=op.rank, rotary=op.rotary, rows=rows(op.out),
        table_stride=plan.rope_row_bytes, block_bytes=abi.kv_block_bytes(at.kv, op.rank + op.rotary),
        eps=op.eps, blocks=at.pool(op), recent=at.recent(op), still=int(turned == 1))
    operands = [at.at(op.out), at.at(op.q), at.at(op.compressed),
                Operand("constants", 0, turned * plan.rope_row_bytes),
                Operand(layer.region, layer.offset, layer.nbytes), at.at(op.norm)]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters)]
