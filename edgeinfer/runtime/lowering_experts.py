"""Lowering of mixtures of experts: the operations of graph/experts.py as records."""

from __future__ import annotations

from edgeinfer.graph import SCORES, ExpertsDown, ExpertsGated, ExpertsInput, Route, SigmoidGate, SortRoutes
from edgeinfer.kernels import ACTIVATIONS, EXPERTS_INPUT, LINEAR, ROUTE, ROWS, abi, fill

from .lowering_base import CHUNK_BYTES, Lowering, lower, rows
from .program import Record


@lower.register
def _(op: Route, at: Lowering) -> list[Record]:
    parameters = fill(ROUTE, experts=op.experts, active=op.active, in_stride=at.stride(op.logits),
                      out_stride=at.stride(op.out), rows=rows(op.out), scores=SCORES[op.scores],
                      normalise=int(op.normalise), scale=float(op.scale), groups=op.groups,
                      active_groups=op.active_groups, group_best=op.group_best, scratch=at.plan.thread_scratch_bytes)
    operands = [at.at(op.logits), at.at(op.out), at.at(op.bias), at.scratch]
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters, abi.FLAG_BIAS if op.bias else 0)]


@lower.register
def _(op: SortRoutes, at: Lowering) -> list[Record]:
    parameters = fill(ROUTE, experts=op.experts, active=op.active, in_stride=at.stride(op.routes), rows=rows(op.out),
                      scratch=at.plan.thread_scratch_bytes)
    operands = [at.at(op.routes), at.at(op.out), at.at(None), at.scratch]
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: ExpertsInput, at: Lowering) -> list[Record]:
    more = {}
    if op.out.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(op.out.width, op.out.group_size)
        more = {"scales": scales, "offsets": offsets, "group": op.out.group_size, "token_tiles": at.token_tiles}
    parameters = fill(EXPERTS_INPUT, width=op.out.width, in_stride=at.stride(op.x), out_stride=at.stride(op.out),
                      rows=rows(op.out), active=op.active, gather=int(op.gather), **more)
    operands = [at.at(op.x), at.at(op.out), at.at(op.listed)]
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: SigmoidGate, at: Lowering) -> list[Record]:
    parameters = fill(ROWS, width=op.x.width, in_stride=at.stride(op.gate), out_stride=at.stride(op.out),
                      rows=rows(op.out))
    return [at.record(op, op.kernels(at.types, at.kv)[0], [at.at(op.gate), at.at(op.out)], parameters)]


@lower.register(ExpertsGated)
@lower.register(ExpertsDown)
def _(op: ExpertsGated | ExpertsDown, at: Lowering) -> list[Record]:
    """Units of an expert (pairs of tiles, or tiles) are claimed in chunks."""
    assert op.source
    stored, cols = at.types[op.weight.name], op.weight.shape[1]
    size, units = stored.tile_bytes(cols), op.rows // 16
    working = units * (op.active if op.TILES == 2 else 1)  # of a token
    chunk = max(1, min(CHUNK_BYTES // (op.TILES * size), working // (4 * at.threads)))
    together = 4 // op.TILES if working >= 16 * at.threads else 2  # most that go through as one block
    more: dict[str, int | float] = {}
    if op.x.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(op.x.width, op.x.group_size)
        more = {"x_scales": scales, "x_offsets": offsets, "group": op.x.group_size, "fused": abi.FUSED_QUANTISE}
    if isinstance(op, ExpertsGated):
        more |= {"activation": ACTIVATIONS[op.activation], "limit": op.limit}
    parameters = fill(
        LINEAR, tiles=units, tile_bytes=size, records=stored.tile_records(cols), x_stride=at.stride(op.x),
        out_stride=at.stride(op.out), rows=rows(op.routes), chunk=chunk + -chunk % together,
        scratch=at.plan.thread_scratch_bytes, token_tiles=at.token_tiles, width=op.x.width, active=op.active,
        source_stride=0 if op.source.times == 1 else at.stride(op.source), **more)
    operands = [at.at(op.weight), at.at(op.x), at.at(op.out), at.at(op.bias), at.scratch, at.at(op.source),
                at.at(op.routes), at.at(op.listed)]
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters, abi.FLAG_BIAS if op.bias else 0)]
