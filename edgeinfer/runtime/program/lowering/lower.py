"""Lowering: each operation of the graph becomes one or two instructions, with the addresses that the plan gave its
operands.

Matmuls and FFNs are here, the other families of operations in modules of their names, common code in base.py.
"""

from __future__ import annotations

from edgeinfer.graph import (
    GatedLinear,
    Linear,
    LinearPart,
    MatMul,
    NeuronDown,
    NeuronGated,
    ScoreMask,
    Screen,
    ScreenedHead,
    SignMask,
)
from edgeinfer.kernels import (
    ACTIVATIONS,
    LINEAR,
    NEURON_DOWN,
    NEURON_GATED,
    NEURON_MASK,
    SCREEN,
    abi,
    fill,
    halves_streams,
)

from ..program import Instruction
from . import attention as lowering_attention  # noqa: F401 (they register their operations)
from . import experts as lowering_experts  # noqa: F401
from . import latent as lowering_latent  # noqa: F401
from . import recurrent as lowering_recurrent  # noqa: F401
from . import rows as lowering_rows  # noqa: F401
from .base import (
    CHUNK_BYTES,
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
                      token_tiles=at.token_tiles, halved=int(halves_streams()), **_input(op, at), **more)
    operands = [at.at(op.weight), at.at(op.x), _columns(op, at), at.at(op.bias), at.scratch, at.at(op.source),
                at.at(op.norm or op.order or op.left_out), at.at(op.outliers)]
    adds = isinstance(op, Linear) and op.residual
    flags = (abi.FLAG_BIAS if op.bias else 0) | (abi.FLAG_RESIDUAL if adds else 0) \
        | (abi.FLAG_APART if op.outliers else 0)
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
    return _matmul(op, at, op.weight.shape[0] // 32, 2, activation=ACTIVATIONS[op.activation], limit=op.limit)


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
        abi.neuron_chunks(neurons, part, lines, at.threads, stored.dtype)


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
                at.shared, at.at(op.source), at.at(op.norm), *slots_of(op, at), at.at(op.f_norm)]
    flags = (abi.FLAG_BIAS if op.bias else 0) | (abi.FLAG_DENSE if op.dense else 0) \
        | (abi.FLAG_MASK if op.mask else 0) | (abi.FLAG_THRESHOLD if op.threshold else 0) \
        | (abi.FLAG_NORM_OF_F if op.f_norm else 0)

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
                      chunk=chunk, width=op.weight.shape[2], scratch=at.plan.thread_scratch_bytes, eps=op.eps)
    operands = [_ffn(op, at), at.at(op.f), at.at(op.out), at.scratch, at.at(op.bias), at.shared, *slots_of(op, at),
                at.at(op.f_norm)]
    flags = (abi.FLAG_RESIDUAL if op.residual else 0) | (abi.FLAG_BIAS if op.bias else 0) \
        | (abi.FLAG_DENSE if op.dense else 0) | (abi.FLAG_NORM_OF_F if op.f_norm else 0)
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
