"""Lowering: each operation of the graph becomes one or two instructions, with the addresses that the plan gave its
operands.

Operations on rows are in rows.py, what all share in base.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.graph import (
    INSTEAD,
    Attention,
    GatedLinear,
    LatentAttention,
    Linear,
    LinearPart,
    MatMul,
    NeuronDown,
    NeuronGated,
    RopeStore,
    RotateQueries,
    ScoreMask,
    Screen,
    ScreenedHead,
    SelectedAttention,
    SignMask,
    least_score,
)
from edgeinfer.kernels import (
    ACTIVATIONS,
    ATTENTION,
    LINEAR,
    NEURON_DOWN,
    NEURON_GATED,
    NEURON_MASK,
    ROPE,
    SCREEN,
    abi,
    fill,
)

from ..program import Instruction
from . import experts as lowering_experts  # noqa: F401 (they register their operations)
from . import latent as lowering_latent  # noqa: F401
from . import recurrent as lowering_recurrent  # noqa: F401
from . import rows as lowering_rows  # noqa: F401
from .base import (
    CHUNK_BYTES,
    NOTHING,
    Lowering,
    Operand,
    lower,
    matmul_chunk,
    resolve_instruction,
    rows,
    slots_of,
)

__all__ = ["Lowering", "Operand", "lower", "rows"]

NEURON_BEHIND = 30
"""Bytes that kernels of layout neuron read after an FFN; the writer ends weights.bin with zeros."""
MERGE_KERNEL = "attention_merge"


# -- matrices ----------------------------------------------------------------------------------------------------------


def _input(op: MatMul, at: Lowering) -> dict[str, int | float]:
    """Parameters of a matmul's input, and of how a single token's is made from the source."""
    more: dict[str, int | float] = {"x_stride": at.stride(op.x), "rows": rows(op.x)}
    if op.x.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(op.x.width, op.x.group_size)
        more |= {"x_scales": scales, "x_offsets": offsets, "group": op.x.group_size}
    if op.source:
        kind = abi.FUSED_NORM if op.norm else abi.FUSED_ORDERED if op.order else \
            abi.FUSED_LEFT_OUT if op.left_out else abi.FUSED_QUANTISE
        more |= {"fused": kind, "width": op.x.width, "eps": op.eps or 0.0}
        more |= {"left_out": op.left_out.shape[0]} if op.left_out else {}
    return more | {"out_stride": at.stride(op.out), "scratch": at.plan.thread_scratch_bytes}


def _matmul(op: Linear | GatedLinear, at: Lowering, units: int, unit_tiles: int, **more: int
            | float) -> list[Instruction]:
    """Units of this many tiles of 16 rows are claimed in chunks."""
    stored, cols = at.types[op.weight.name], op.weight.shape[1]
    size = stored.tile_bytes(cols)
    chunk = matmul_chunk(unit_tiles * size, unit_tiles, units, at.threads)
    parameters = fill(LINEAR, tiles=units, tile_bytes=size, records=stored.tile_records(cols), chunk=chunk,
                      token_tiles=at.token_tiles, **_input(op, at), **more)
    onto = op.onto if isinstance(op, GatedLinear) else None
    operands = [at.at(op.weight), at.at(op.x), _columns(op, at), at.at(onto or op.bias), at.scratch, at.at(op.source),
                at.at(op.norm or op.order or op.left_out)]
    adds = isinstance(op, Linear) and op.residual
    flags = (abi.FLAG_BIAS if op.bias or onto else 0) | (abi.FLAG_RESIDUAL if adds else 0)
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


def _columns(op: Linear | GatedLinear, at: Lowering) -> Operand:
    """Return the output of a matmul, or the columns of it that a part writes."""
    whole, skipped = at.at(op.out), 4 * op.first if isinstance(op, LinearPart) else 0
    return Operand(whole.region, whole.offset + skipped, whole.nbytes - skipped)


@lower.register
def _(op: Linear, at: Lowering) -> list[Instruction]:
    return _matmul(op, at, -(-op.weight.shape[0] // 16), 1)


@lower.register
def _(op: GatedLinear, at: Lowering) -> list[Instruction]:
    return _matmul(op, at, op.weight.shape[0] // 32, 2, activation=ACTIVATIONS[op.activation], limit=op.limit,
                   bias_stride=at.stride(op.onto) if op.onto else 0)


def _neurons(op: NeuronGated | NeuronDown, at: Lowering) -> tuple[dict[str, int], tuple[int, int]]:
    """Parameters that both halves of an FFN have, and the lengths of their chunks."""
    stored, (neurons, of_one, hidden) = at.types[op.weight.name], op.weight.shape
    part, lines = stored.part_bytes(hidden), abi.neuron_lines(hidden, stored.group_size, stored.dtype)
    cold = {}
    if at.n_cold(op) and at.plan.cold:
        cold = {"cold": at.n_cold(op), "shift": at.plan.cold.shift, "cluster_bytes": at.plan.cold.cluster_bytes}
    return {"neurons": neurons, "part_bytes": part, "group": stored.group_size,
            "groups": -(-hidden // stored.group_size), "block": abi.neuron_block(neurons),
            "ungated": 3 - of_one, **cold}, \
        abi.neuron_chunks(neurons, part, lines, at.threads)


def _ffn(op: NeuronGated | NeuronDown, at: Lowering) -> Operand:
    region, offset, nbytes = at.at(op.weight)
    return Operand(region, offset, nbytes + NEURON_BEHIND)


@lower.register
def _(op: NeuronGated, at: Lowering) -> list[Instruction]:
    more, (chunk, _) = _neurons(op, at)
    given: dict[str, int | float] = {
        **_input(op, at), **more, "chunk": chunk, "activation": ACTIVATIONS[op.activation], "limit": op.limit,
        "token_tiles": at.token_tiles, "mask_stride": at.stride(op.mask) if op.mask else 0}
    operands = [_ffn(op, at), at.at(op.x), at.at(op.out), at.at(op.mask or op.threshold), at.scratch, at.at(op.bias),
                at.shared, at.at(op.source), at.at(op.norm), *slots_of(op, at)]
    flags = (abi.FLAG_BIAS if op.bias else 0) | (abi.FLAG_DENSE if op.dense else 0) \
        | (abi.FLAG_MASK if op.mask else 0) | (abi.FLAG_THRESHOLD if op.threshold else 0)

    def gated(step: int, label: str = "", event: int | None = None, **part: int) -> Instruction:
        return at.instruction(op, op.kernels(at.types, at.kv)[0], operands, fill(NEURON_GATED, **given, **part), flags,
                         step=step, label=label, event=event)

    if not at.n_cold(op) or not at.plan.cold:
        return [gated(0)]
    layer, neurons = op.layer or 0, op.weight.shape[0]
    hot, span = at.plan.cold.hot[layer], at.plan.cold.part_neurons(layer)
    found = [resolve_instruction(op, at), *([gated(0, behind=neurons - hot)] if hot else [])]
    for part, first in enumerate(range(hot, neurons, span)):
        n = min(span, neurons - first)
        found.append(gated(2 if first else 0, f"  {n} cold neurons", abi.COLD_PARTS * layer + part, before=first,
                           behind=neurons - first - n))
    return found


@lower.register
def _(op: ScoreMask, at: Lowering) -> list[Instruction]:
    parameters = fill(NEURON_MASK, neurons=op.x.width, rows=rows(op.out), out_stride=at.stride(op.out),
                      in_stride=at.stride(op.x))
    operands = [at.at(op.x), at.at(op.thresholds), at.at(op.out), at.scratch]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: SignMask, at: Lowering) -> list[Instruction]:
    _, scales, offsets = abi.q8_row_bytes(op.x.width, op.x.group_size)
    parameters = fill(NEURON_MASK, neurons=op.thresholds.shape[0], rows=rows(op.out), out_stride=at.stride(op.out),
                      in_stride=at.stride(op.x), width=op.x.width, scratch=at.plan.thread_scratch_bytes,
                      token_tiles=at.token_tiles, x_scales=scales, x_offsets=offsets, group=op.x.group_size)
    operands = [at.at(op.x), at.at(op.thresholds), at.at(op.out), at.scratch, at.at(op.signs)]
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: NeuronDown, at: Lowering) -> list[Instruction]:
    more, (_, chunk) = _neurons(op, at)
    parameters = fill(NEURON_DOWN, **more, x_stride=at.stride(op.f), out_stride=at.stride(op.out), rows=rows(op.f),
                      chunk=chunk, width=op.weight.shape[2], scratch=at.plan.thread_scratch_bytes)
    operands = [_ffn(op, at), at.at(op.f), at.at(op.out), at.scratch, at.at(op.bias), at.shared, *slots_of(op, at)]
    flags = (abi.FLAG_RESIDUAL if op.residual else 0) | (abi.FLAG_BIAS if op.bias else 0) \
        | (abi.FLAG_DENSE if op.dense else 0)
    return [at.instruction(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


@lower.register(Screen)
@lower.register(ScreenedHead)
def _(op: Screen | ScreenedHead, at: Lowering) -> list[Instruction]:
    stored, (vocab, cols) = at.types[op.weight.name], op.weight.shape
    head = isinstance(op, ScreenedHead)
    work, bounds = (op.work, op.bounds) if isinstance(op, ScreenedHead) else (op.out, None)
    size, tiles = stored.tile_bytes(cols), -(-vocab // 16)
    _, scales, offsets = abi.q8_row_bytes(op.x.width, op.x.group_size)
    parameters = fill(
        SCREEN, tiles=tiles, tile_bytes=size, records=stored.tile_records(cols), x_stride=at.stride(op.x),
        x_scales=scales, x_offsets=offsets, out_stride=at.stride(op.estimates), rows=rows(op.x), group=op.x.group_size,
        chunk=max(1, min(4 * CHUNK_BYTES // size, tiles // (4 * at.threads))), token_tiles=at.token_tiles,
        scratch=at.plan.thread_scratch_bytes, vocab_size=vocab, work_stride=at.stride(work),
        low_stride=at.stride(op.low), width=op.low.width, rank=0 if head else op.rank)  # type: ignore[union-attr]
    operands = [at.at(op.weight), at.at(op.x), at.at(op.out if head else None), at.at(op.estimates), at.at(bounds),
                at.at(work), at.at(op.low), at.scratch]
    labels = ("", "  what can matter")
    return [at.instruction(op, kernel, operands, parameters, step=step, label=labels[step])
            for step, kernel in enumerate(op.kernels(at.types, at.kv))]


# -- attention ---------------------------------------------------------------------------------------------------------


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
