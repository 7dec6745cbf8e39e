"""Lowering of mixtures of experts: the operations of graph/ops/experts.py as instructions."""

from __future__ import annotations

from edgeinfer.graph import SCORES, ExpertsDown, ExpertsGated, ExpertsInput, Route, SigmoidGate, SortRoutes
from edgeinfer.kernels import ACTIVATIONS, EXPERTS_INPUT, EXPERTS_RESOLVE, LINEAR, ROUTE, ROWS, abi, fill, routes
from edgeinfer.memory_planner import MAX_READ_BYTES, MIN_READ_BYTES, READERS

from ..program import Instruction
from .base import EXPERTS_KERNEL, Lowering, Operand, lower, matmul_chunk, rows


@lower.register
def _(op: Route, at: Lowering) -> list[Instruction]:
    parameters = fill(ROUTE, experts=op.experts, active=op.active, in_stride=at.stride(op.logits),
                      out_stride=at.stride(op.out), rows=rows(op.out), scores=SCORES[op.scores],
                      normalise=int(op.normalise), scale=float(op.scale), groups=op.groups,
                      active_groups=op.active_groups, group_best=op.group_best, scratch=at.plan.thread_scratch_bytes)
    operands = [at.at(op.logits), at.at(op.out), at.at(op.bias), at.scratch, at.at(op.factors)]
    flags = (abi.FLAG_BIAS if op.bias else 0) | (abi.FLAG_SCALED if op.factors else 0)
    found = [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]
    return [*found, _resolve(op, at)] if at.plan.experts else found


def _resolve(op: Route, at: Lowering) -> Instruction:
    """The instruction that finds the experts that were chosen, and has those read that are missing."""
    plan = at.plan.experts
    assert plan
    number = plan.number(op.layer or 0)
    own = plan.layers[number]
    parameters = fill(
        EXPERTS_RESOLVE, experts=op.experts, active=op.active, in_stride=at.stride(op.out), rows=rows(op.out),
        slots=plan.slots, slot_bytes=plan.slot_bytes, base=number * plan.experts,
        gate_up_bytes=own.gate_up_bytes, expert_bytes=own.nbytes, unit=own.offset // routes.LINE,
        event=2 * routes.EXPERT_PARTS * number, span=plan.span, readers=READERS,
        least=MIN_READ_BYTES, most=MAX_READ_BYTES, total=plan.total)
    operands = [at.at(op.out), _locations(number, at), _slots(at), _in_region(plan.owners, 4 * plan.slots),
                _in_region(plan.counts + 4 * number * plan.experts, 4 * (plan.total - number * plan.experts)),
                _in_region(plan.stamps, 8 * plan.slots),
                _in_region(plan.words, abi.COLD_BYTES), _in_region(plan.wanted, 4 * plan.experts)]
    return at.instruction(op, EXPERTS_KERNEL, operands, parameters, step=1,
                          label=f"find experts of layer {op.layer or 0}")


def _in_region(offset: int, nbytes: int) -> Operand:
    return Operand("experts", offset, nbytes)


def _slots(at: Lowering) -> Operand:
    assert at.plan.experts
    return _in_region(0, at.plan.experts.slots * at.plan.experts.slot_bytes)


def _locations(number: int, at: Lowering) -> Operand:
    """Return the table of the addresses of one layer's experts."""
    plan = at.plan.experts
    assert plan
    nbytes = routes.LOCATION_BYTES * plan.experts
    return _in_region(plan.table + number * nbytes, nbytes)


@lower.register
def _(op: SortRoutes, at: Lowering) -> list[Instruction]:
    parameters = fill(ROUTE, experts=op.experts, active=op.active, in_stride=at.stride(op.routes), rows=rows(op.out),
                      scratch=at.plan.thread_scratch_bytes)
    operands = [at.at(op.routes), at.at(op.out), at.at(None), at.scratch]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: ExpertsInput, at: Lowering) -> list[Instruction]:
    more = {}
    if op.out.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(op.out.width, op.out.group_size)
        more = {"scales": scales, "offsets": offsets, "group": op.out.group_size, "token_tiles": at.token_tiles}
    parameters = fill(EXPERTS_INPUT, width=op.out.width, in_stride=at.stride(op.x), out_stride=at.stride(op.out),
                      rows=rows(op.out), active=op.active, gather=int(op.gather), **more)
    operands = [at.at(op.x), at.at(op.out), at.at(op.listed)]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: SigmoidGate, at: Lowering) -> list[Instruction]:
    parameters = fill(ROWS, width=op.x.width, in_stride=at.stride(op.gate), out_stride=at.stride(op.out),
                      rows=rows(op.out))
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], [at.at(op.gate), at.at(op.out)], parameters)]


@lower.register(ExpertsGated)
@lower.register(ExpertsDown)
def _(op: ExpertsGated | ExpertsDown, at: Lowering) -> list[Instruction]:
    """Units of an expert (pairs of tiles, or tiles) are claimed in chunks."""
    assert op.source
    stored, cols, allocation = at.types[op.weight.name], op.weight.shape[1], at.plan.allocations[op.weight.name]
    size, units, nbytes = stored.tile_bytes(cols), op.rows // 16, allocation.nbytes // op.experts
    stride = allocation.stride or nbytes  # of a head that drafts, one matrix after the other
    working = units * (op.active if op.TILES == 2 else 1)  # of a token
    chunk = matmul_chunk(op.TILES * size, op.TILES, working, at.threads)
    more: dict[str, int | float] = {}
    if op.x.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(op.x.width, op.x.group_size)
        more = {"x_scales": scales, "x_offsets": offsets, "group": op.x.group_size, "fused": abi.FUSED_QUANTISE}
    if isinstance(op, ExpertsGated):
        more |= {"activation": ACTIVATIONS[op.activation], "limit": op.limit}
    parameters = fill(
        LINEAR, tiles=units, tile_bytes=size, records=stored.tile_records(cols), x_stride=at.stride(op.x),
        out_stride=at.stride(op.out), rows=rows(op.routes), chunk=chunk,
        scratch=at.plan.thread_scratch_bytes, token_tiles=at.token_tiles, width=op.x.width, active=op.active,
        source_stride=0 if op.source.times == 1 else at.stride(op.source),
        expert_bytes=stride, **more)
    matrices = Operand(allocation.region, allocation.offset, (op.experts - 1) * stride + nbytes)
    operands = [matrices, at.at(op.x), at.at(op.out), at.at(op.bias), at.scratch, at.at(op.source),
                at.at(op.routes), at.at(op.listed)]
    kernel, flags = op.kernels(at.types, at.kv)[0], abi.FLAG_BIAS if op.bias else 0
    if isinstance(op, ExpertsDown) and op.residual:
        flags |= abi.FLAG_RESIDUAL
    if at.plan.experts:
        return _from_slots(op, at, kernel, operands, parameters, flags)
    return [at.instruction(op, kernel, operands, parameters, flags)]


def _from_slots(op: ExpertsGated | ExpertsDown, at: Lowering, kernel: str, operands: list[Operand],
                parameters: list[int], flags: int) -> list[Instruction]:
    """An instruction for each part of the experts, which waits until they are there."""
    plan = at.plan.experts
    assert plan
    number = plan.number(op.layer or 0)
    event = routes.EXPERT_PARTS * (2 * number + isinstance(op, ExpertsDown))
    found = []
    for part, since in enumerate(range(0, plan.experts, plan.span)):
        own = parameters.copy()
        own[LINEAR.since], own[LINEAR.until] = since, min(since + plan.span, plan.experts)
        onto = abi.FLAG_RESIDUAL if part and isinstance(op, ExpertsDown) else 0  # the parts before
        found.append(at.instruction(op, kernel, [_slots(at), *operands[1:], _locations(number, at)], own,
                               flags | routes.FLAG_SLOTS | onto, step=part, event=event + part,
                               label=f"{op.label}, experts {since} to {own[LINEAR.until] - 1}"))
    return found
