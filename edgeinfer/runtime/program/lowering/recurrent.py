"""Lowering of recurrent layers; a layer's part of a sequence's slot is at the same place in all slots."""

from __future__ import annotations

from edgeinfer.graph import CausalConv, DeltaRule, GatedNorm, SelectiveScan, StateRule
from edgeinfer.kernels import CONV, GATED_NORM, RULE, abi, fill

from ..program import Instruction
from .base import Lowering, Operand, lower, rows

CONV_CHANNELS = 512
"""Channels of a unit of work, about as many: their rows are long enough for prefetchers to follow."""


def _state(op: CausalConv | StateRule, at: Lowering) -> Operand:
    """Return the operation's part of the first slot; kernels add the offset of a sequence's own."""
    state = at.plan.state
    assert state
    return Operand("state", state.offsets[op.label], op.state_bytes)


@lower.register
def _(op: CausalConv, at: Lowering) -> list[Instruction]:
    parameters = fill(CONV, channels=op.out.width, width=op.width, x_stride=at.stride(op.x),
                      out_stride=at.stride(op.out), start=op.start, silu=int(op.silu), normed=op.normed,
                      gate_in=-1 if op.gate_in is None else op.gate_in,
                      gate_out=-1 if op.gate_out is None else op.gate_out,
                      block=op.head_dim if op.normed else CONV_CHANNELS,
                      span=max(1, CONV_CHANNELS // op.head_dim) if op.normed else 1)
    operands = [at.at(op.x), at.at(op.out), at.at(op.weight), at.at(op.bias), _state(op, at)]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters, abi.FLAG_BIAS if op.bias else 0)]


@lower.register(DeltaRule)
@lower.register(SelectiveScan)
def _(op: DeltaRule | SelectiveScan, at: Lowering) -> list[Instruction]:
    keys, values = op.key_heads * op.key_dim, op.heads * op.value_dim
    (first, columns), (_, gate_columns) = op.journaled
    own: dict[str, int | float] = {"keys": 0, "values": keys, "queries": 0}
    d = None
    if isinstance(op, DeltaRule):
        own["beta_scale"] = op.beta_scale
    else:
        own = {"keys": values, "values": 0, "queries": values + keys, "low": op.limits[0], "high": op.limits[1]}
        d = op.d
    sizes = (op.heads, op.key_dim, op.value_dim)
    parameters = fill(RULE, heads=op.heads, group=op.heads // op.key_heads, key_dim=op.key_dim,
                      value_dim=op.value_dim, x_stride=at.stride(op.x), out_stride=at.stride(op.out),
                      gates_stride=at.stride(op.gates), gate_start=op.gate_start, first=first, columns=columns,
                      gate_columns=gate_columns, stamps=abi.rule_stamps(*sizes), journal=abi.rule_journal(*sizes),
                      scratch=at.plan.thread_scratch_bytes, **own)
    operands = [at.at(op.x), at.at(op.gates), at.at(op.out), at.at(op.a), at.at(op.dt_bias), at.at(d), _state(op, at),
                at.scratch]
    labels = ("", "  journal")
    return [at.instruction(op, kernel, operands, parameters, step=step, label=labels[step])
            for step, kernel in enumerate(op.kernels(at.types, at.kv))]


@lower.register
def _(op: GatedNorm, at: Lowering) -> list[Instruction]:
    normed = 0 if op.weight is None else 1 if op.weight.shape[0] == op.x.width else 2
    parameters = fill(GATED_NORM, width=op.x.width, group=op.group, x_stride=at.stride(op.x),
                      gate_stride=at.stride(op.gate), out_stride=at.stride(op.out), start=op.start, rows=rows(op.out),
                      eps=op.eps, normed=normed, gated_first=int(op.gated_first), sigmoid=int(op.function == "sigmoid"))
    operands = [at.at(op.x), at.at(op.gate), at.at(op.out), at.at(op.weight)]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters)]
