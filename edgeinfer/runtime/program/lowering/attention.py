"""Lowering of attention, and of the rotation and storage of its keys."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.graph import (
    INSTEAD,
    Attention,
    LatentAttention,
    RopeStore,
    RotateQueries,
    SelectedAttention,
    least_score,
)
from edgeinfer.kernels import ATTENTION, ROPE, abi, fill

from ..program import Instruction
from .base import NOTHING, Lowering, Operand, lower, rows

MERGE_KERNEL = "attention_merge"


def _heads(op: RopeStore | RotateQueries | Attention, at: Lowering) -> dict[str, int]:
    """Parameters of heads and KV blocks."""
    latent = {"values": op.values, "turned": op.turned} if isinstance(op, LatentAttention) else {}
    return {**latent, "heads": op.heads, "kv_heads": op.kv_heads, "head_dim": op.head_dim,
            "blocks": at.pool(op), "block_bytes": abi.kv_block_bytes(at.kv, op.head_dim),
            "rows": rows(op.out), "recent": at.recent(op)}


def _pruned_mask(op: Attention, at: Lowering) -> Operand:
    """Return the flags of prompt tokens that a layer after a boundary lacks."""
    pruned = at.plan.pruned
    stage = sum(boundary <= (op.layer or 0) for boundary in at.plan.boundaries)
    if not pruned or not stage:
        return NOTHING
    return Operand(pruned.region, pruned.offset + (stage - 1) * pruned.stride, pruned.stride)


def _blocks(op: RopeStore | Attention, at: Lowering) -> Operand:
    layer = at.layer(op)
    return Operand(layer.region, layer.offset, layer.nbytes)


@lower.register(RopeStore)
@lower.register(RotateQueries)
def _(op: RopeStore | RotateQueries, at: Lowering) -> list[Instruction]:
    plan = at.plan
    parameters = fill(ROPE, stride=at.stride(op.out), table_stride=plan.rope_row_bytes, eps=op.eps,
                      rotary=op.rotary, apart=op.apart or op.rotary // 2, **_heads(op, at))
    nbytes = plan.request.ctx * plan.rope_row_bytes
    table = Operand("constants", op.table * nbytes, nbytes) if op.rotary else NOTHING
    operands, flags = [at.at(op.out), table, NOTHING, at.at(op.q_norm)], abi.FLAG_HEAD_NORM if op.q_norm else 0
    if isinstance(op, RotateQueries):
        flags |= abi.FLAG_QUERIES
    else:
        operands[2:] = [_blocks(op, at), at.at(op.q_norm), at.at(op.k_norm)]
        flags |= (abi.FLAG_VALUE_NORM if op.value_norm else 0) | (abi.FLAG_KEYS_AS_VALUES if op.keys_as_values else 0)
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


def _attend(op: Attention, at: Lowering, kernels: Sequence[str], labels: Sequence[str], operands: Sequence[Operand],
            count: int, **chosen: int | float) -> list[Instruction]:
    """Instructions of attention of the tokens that a count says; of the forward pass's last ones where V is `chosen`.
    """
    parameters = fill(
        ATTENTION, q_stride=at.stride(op.qkv), out_stride=at.stride(op.out), window=op.window,
        scale=op.scale, cap=op.cap,
        edits=int(bool(op.cap or op.alibi)), scratch=at.plan.thread_scratch_bytes, splits=at.plan.splits,
        tokens=max(1, 32 * op.kv_heads // op.heads), **{**_heads(op, at), "rows": count}, **chosen)
    flags = (0 if operands[6] is NOTHING else abi.FLAG_PRUNED) | (abi.FLAG_LAST if chosen else 0)
    flags |= abi.FLAG_SINKS if op.sinks else 0
    if op.alibi:
        flags |= abi.FLAG_ALIBI | (abi.FLAG_ALIBI_BF16 if op.alibi.bfloat16 else 0)
    instructions = []
    for step, (kernel, label) in enumerate(zip(kernels, labels, strict=True), 2 if chosen else 0):
        some = [count] if count != abi.COUNT_TOKENS else []
        some += [abi.COUNT_MERGE] if kernel == MERGE_KERNEL and not chosen else []
        instructions.append(at.instruction(op, kernel, operands, parameters, flags, tuple(some), step, label))
    return instructions


def _attention_operands(op: Attention, at: Lowering) -> list[Operand]:
    slopes = NOTHING
    if op.alibi:  # after the tables of rotations
        tables = len(at.graph.config.rotations) * at.plan.request.ctx * at.plan.rope_row_bytes
        slopes = Operand("constants", tables, 4 * op.heads)
    return [at.at(op.qkv), at.at(op.out), _blocks(op, at), at.scratch, at.shared, NOTHING, _pruned_mask(op, at),
            NOTHING,
            at.at(op.sinks), slopes]


@lower.register
def _(op: Attention, at: Lowering) -> list[Instruction]:
    kernels = op.kernels(at.types, at.kv)
    return _attend(op, at, kernels, ("", "  merge splits"), _attention_operands(op, at), abi.COUNT_TOKENS)


@lower.register
def _(op: SelectedAttention, at: Lowering) -> list[Instruction]:
    operands, kernels = _attention_operands(op, at), op.kernels(at.types, at.kv)
    plain = _attend(op, at, kernels[:2], ("", "  merge splits"), operands, abi.COUNT_PROMPTED)
    partial, scores, means = op.parts(at.sizes)
    region, offset, _ = at.shared
    operands[5] = Operand(region, offset + partial, scores)
    operands[7] = Operand(region, offset + partial + scores, means)
    labels = ("  scores of decoded tokens", "  choice of V", "  chosen V", "  merge splits")
    return plain + _attend(op, at, kernels[2:], labels, operands, abi.COUNT_DECODED, most=op.top,
                           least=least_score(op.eps), instead=INSTEAD[op.instead])
