"""Lowering: each operation of the graph becomes one or two records, with the places that the plan gave its operands.

`lower` is open: a technique registers how its own operation becomes records, and touches nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import (
    INSTEAD,
    Activate,
    AddPositions,
    Attention,
    Draw,
    Embed,
    Gated,
    GatherOutputs,
    Graph,
    LayerNorm,
    Linear,
    NeuronDown,
    NeuronGated,
    NormedSum,
    NormPart,
    Op,
    Product,
    Quantize,
    RmsNorm,
    RopeStore,
    ScoreMask,
    Screen,
    ScreenedHead,
    SelectedAttention,
    SignMask,
    Tensor,
    Weight,
    least_score,
)
from edgeinfer.kernels import (
    ACTIVATIONS,
    ATTENTION,
    DRAW,
    LINEAR,
    NEURON_DOWN,
    NEURON_GATED,
    NEURON_MASK,
    NEURON_RESOLVE,
    POSITIONS,
    RELEASE,
    ROPE,
    ROWS,
    SCREEN,
    VALUE_FUNCTIONS,
    VALUES,
    abi,
    fill,
)
from edgeinfer.memory_planner import READ_BYTES, MemoryPlan, Placement, scratch, sizes_of
from edgeinfer.sizes import round_up

from .program import Program, Record
from .slots import RESOLVE_KERNEL
from .stream import RELEASE_KERNEL

CHUNK_BYTES = 64 << 10
"""Weights of a claimed chunk: long enough to stream, short enough to balance."""


class Operand(NamedTuple):
    """Memory that a record works on."""

    region: str
    offset: int
    nbytes: int
    """How far it reaches; `Program.check` proves that this lies inside its region."""

    def behind(self, skipped: int) -> Operand:
        """Return what of it lies behind so many bytes."""
        return Operand(self.region, self.offset + skipped, self.nbytes - skipped)


NEURON_BEHIND = 30
"""Bytes that kernels of layout neuron read behind an FFN; the writer ends weights.bin with zeros."""
MERGE_KERNEL = "attention_merge"
NOTHING = Operand("activations", 0, 0)
"""An operand that a kernel does not use."""


class Lowering:
    """Where everything lies that records name.

    Parameters
    ----------
    graph : Graph
    plan : MemoryPlan
    token_tiles : tuple of int
        Tokens of the blocks that the instruction set works in (Isa.token_tiles).
    cold_units : tuple of int
        Where each layer's clusters begin in their file, in units of abi.STREAM_UNIT; where the plan has cold neurons.
    """

    def __init__(self, graph: Graph, plan: MemoryPlan, token_tiles: tuple[int, ...], cold_units: tuple[int, ...] = ()):
        self.graph, self.plan, self.token_tiles = graph, plan, abi.pack_token_tiles(token_tiles)
        self.types, self.kv, self.threads = graph.types, plan.request.kv, plan.request.threads
        self.sizes = sizes_of(graph.types, plan.splits, plan.request)
        self._shared_bytes = scratch(graph.ops, self.sizes)[1]
        self.cold_units: tuple[int, ...] = cold_units
        self._parts = {name: part for part, names in enumerate(plan.parts) for name in names}

    def program(self) -> Program:
        """Lower all operations, in their order; behind the last that reads a streamed part its buffer is released."""
        records: list[Record] = []
        last = {part: i for i, op in enumerate(self.graph.ops) if (part := self.part(op)) is not None}
        early = self._early()
        for i, op in enumerate(self.graph.ops):
            if op.layer in early:
                records.append(_resolve(early.pop(op.layer), self, early=True))
            records += lower(op, self)
            if (part := self.part(op)) is not None and last[part] == i:
                records.append(Record(RELEASE_KERNEL, f"release {', '.join(self.plan.parts[part])}",
                                      parameters=tuple(fill(RELEASE, part=part)), ticket=part))
        return Program(tuple(records))

    def _early(self) -> dict[int | None, NeuronGated]:
        """FFNs with cold neurons, by their layers: a prompt has them read from the layer's beginning on."""
        return {op.layer: op for op in self.graph.ops if isinstance(op, NeuronGated) and self.n_cold(op)}

    def part(self, op: Op) -> int | None:
        """Return the number of the streamed part whose weights an operation reads, or None."""
        return next((self._parts[weight.name] for weight in op.weights if weight.name in self._parts), None)

    def at(self, what: Tensor | Weight | None) -> Operand:
        """Return the operand of a tensor or a weight; for None one that is not used."""
        if what is None:
            return NOTHING
        place = self.plan.places[what.name]  # vectors of weights are read in whole lines of 64 bytes
        return Operand(place.region, place.offset, round_up(place.nbytes, 64))

    def stride(self, tensor: Tensor) -> int:
        """Bytes from one row to the next."""
        return self.plan.places[tensor.name].stride

    def layer(self, op: RopeStore | Attention) -> Placement:
        """K and V of the operation's layer."""
        return self.plan.kv_layers[op.layer or 0]

    def cold(self, offset: int, nbytes: int) -> Operand:
        """Return a part of the region of cold neurons."""
        return Operand("cold", offset, nbytes)

    def n_cold(self, op: NeuronGated | NeuronDown) -> int:
        """Count the neurons of an FFN that are not resident."""
        plan = self.plan.cold
        return plan.neurons - plan.hot[op.layer or 0] if plan else 0

    @property
    def scratch(self) -> Operand:
        """Scratch of all threads, each with its own share."""
        return Operand("scratch", 0, self.threads * self.plan.thread_scratch_bytes)

    @property
    def shared(self) -> Operand:
        """Scratch that threads share: partial attention, sums of neurons."""
        return Operand("scratch", self.plan.shared_scratch_offset, self._shared_bytes)

    def record(self, op: Op, kernel: str, operands: Sequence[Operand], parameters: Sequence[int], flags: int = 0,
               predicates: tuple[int, ...] = (), step: int = 0, label: str = "", ticket: int | None = None) -> Record:
        """Make a record; it is skipped where the operation has no rows, or one of the predicates' counts is 0."""
        if op.drawn:
            predicates = (abi.COUNT_DRAWS, *predicates)
        elif op.out.rows == "outputs":
            predicates = (abi.COUNT_OUTPUTS, *predicates)
        if op.decoded:
            predicates = (abi.COUNT_DECODED, *predicates)
        if op.several:
            predicates = (abi.COUNT_SEVERAL, *predicates)
        nbytes = 0 if step else sum(read.walk for read in op.reads(self.types))
        where = tuple((o.region, o.offset) for o in operands)
        return Record(kernel, label or op.label, where, tuple(parameters), flags, predicates, nbytes,
                      tuple(o.nbytes for o in operands), op, step, self.part(op) if ticket is None else ticket)


def rows(tensor: Tensor) -> int:
    """Which count gives the rows of a tensor."""
    return abi.COUNT_OUTPUTS if tensor.rows == "outputs" else abi.COUNT_TOKENS


@singledispatch
def lower(op: Op, at: Lowering) -> list[Record]:
    """Turn an operation into records. Raises `UnsupportedModelError`: nobody has registered how."""
    raise UnsupportedModelError(f"The operation {op.label} has no lowering to a kernel, so edgeinfer cannot run it.")


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(op: Op, at: Lowering, x: Tensor, operands: list[Operand], flags: int = 0,
          **more: int | float) -> list[Record]:
    """The record of an operation on rows, whose output may be quantised."""
    if op.out.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(op.out.width, op.out.group_size)
        more |= {"scales": scales, "offsets": offsets, "group": op.out.group_size, "token_tiles": at.token_tiles}
    parameters = fill(ROWS, width=op.out.width, in_stride=at.stride(x), out_stride=at.stride(op.out),
                      rows=rows(op.out), **more)
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


@lower.register
def _(op: Embed, at: Lowering) -> list[Record]:
    return _rows(op, at, op.out, [at.at(op.table), at.at(op.out)],
                 tile_bytes=at.types[op.table.name].tile_bytes(op.out.width))


@lower.register
def _(op: RmsNorm, at: Lowering) -> list[Record]:
    operands = [at.at(op.x), at.at(op.out), at.at(op.weight), at.scratch]
    return _rows(op, at, op.x, operands, eps=op.eps, scratch=at.plan.thread_scratch_bytes)


@lower.register
def _(op: LayerNorm, at: Lowering) -> list[Record]:
    operands = [at.at(op.x), at.at(op.out), at.at(op.weight), at.scratch, at.at(op.bias)]
    flags = abi.FLAG_CENTRED | (abi.FLAG_BIAS if op.bias else 0)
    return _rows(op, at, op.x, operands, flags, eps=op.eps, scratch=at.plan.thread_scratch_bytes)


@lower.register
def _(op: NormedSum, at: Lowering) -> list[Record]:
    return _rows(op, at, op.h, [at.at(op.h), at.at(op.out), at.at(op.weight)], abi.FLAG_RESIDUAL, eps=op.eps)


@lower.register
def _(op: NormPart, at: Lowering) -> list[Record]:
    part = at.at(op.out).behind(4 * op.start)
    parameters = fill(ROWS, width=op.weight.shape[0], in_stride=at.stride(op.x), out_stride=at.stride(op.out),
                      rows=rows(op.out), eps=op.eps)
    return [at.record(op, op.kernels(at.types, at.kv)[0], [part, part, at.at(op.weight)], parameters)]


@lower.register
def _(op: Activate, at: Lowering) -> list[Record]:
    parameters = fill(VALUES, width=op.out.width, stride=at.stride(op.out), rows=rows(op.out),
                      function=VALUE_FUNCTIONS[op.function], factor=op.factor)
    return [at.record(op, op.kernels(at.types, at.kv)[0], [at.at(op.out)], parameters)]


@lower.register
def _(op: AddPositions, at: Lowering) -> list[Record]:
    parameters = fill(POSITIONS, width=op.out.width, stride=at.stride(op.out), rows=rows(op.out), offset=op.offset,
                      tile_bytes=at.types[op.table.name].tile_bytes(op.out.width))
    return [at.record(op, op.kernels(at.types, at.kv)[0], [at.at(op.out), at.at(op.table)], parameters)]


@lower.register(Quantize)
@lower.register(GatherOutputs)
def _(op: Quantize | GatherOutputs, at: Lowering) -> list[Record]:
    return _rows(op, at, op.x, [at.at(op.x), at.at(op.out)])


@lower.register
def _(op: Draw, at: Lowering) -> list[Record]:
    _, sums, candidates = abi.draw_row(op.logits.width)
    parameters = fill(DRAW, vocab_size=op.logits.width, logits_stride=at.stride(op.logits), sums=sums,
                      work_stride=at.stride(op.out), candidates=candidates)
    operands = [at.at(op.logits), at.at(op.out)]
    labels = ("", "  maxima", "  choice")
    return [at.record(op, kernel, operands, parameters, predicates=(abi.COUNT_DRAWS,), step=step, label=labels[step])
            for step, kernel in enumerate(op.kernels(at.types, at.kv))]


# -- matrices ----------------------------------------------------------------------------------------------------------


def _input(op: Product, at: Lowering) -> dict[str, int | float]:
    """Parameters of a product's input, and of how a single token's is made from the source."""
    more: dict[str, int | float] = {"x_stride": at.stride(op.x), "rows": rows(op.x)}
    if op.x.dtype == "q8":
        _, scales, offsets = abi.q8_row_bytes(op.x.width, op.x.group_size)
        more |= {"x_scales": scales, "x_offsets": offsets, "group": op.x.group_size}
    if op.source:
        kind = abi.FUSED_NORM if op.norm else abi.FUSED_QUANTISE
        more |= {"fused": kind, "width": op.x.width, "eps": op.eps or 0.0}
    return more | {"out_stride": at.stride(op.out), "scratch": at.plan.thread_scratch_bytes}


def _product(op: Linear | Gated, at: Lowering, units: int, unit_tiles: int, **more: int | float) -> list[Record]:
    """Units of so many tiles of 16 rows are claimed in chunks."""
    stored, cols = at.types[op.weight.name], op.weight.shape[1]
    size = stored.tile_bytes(cols)
    chunk = max(1, min(CHUNK_BYTES // (unit_tiles * size), units // (4 * at.threads)))
    together = 4 // unit_tiles if units >= 16 * at.threads else 2  # most that go through as one block
    chunk += -chunk % together
    parameters = fill(LINEAR, tiles=units, tile_bytes=size, records=stored.tile_records(cols), chunk=chunk,
                      token_tiles=at.token_tiles, **_input(op, at), **more)
    operands = [at.at(op.weight), at.at(op.x), at.at(op.out), at.at(op.bias), at.scratch, at.at(op.source),
                at.at(op.norm)]
    flags = (abi.FLAG_BIAS if op.bias else 0) | (abi.FLAG_RESIDUAL if op.over else 0)
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


@lower.register
def _(op: Linear, at: Lowering) -> list[Record]:
    return _product(op, at, -(-op.weight.shape[0] // 16), 1)


@lower.register
def _(op: Gated, at: Lowering) -> list[Record]:
    return _product(op, at, op.weight.shape[0] // 32, 2, activation=ACTIVATIONS[op.activation], limit=op.limit)


def _neurons(op: NeuronGated | NeuronDown, at: Lowering) -> tuple[dict[str, int], tuple[int, int]]:
    """Parameters that both halves of an FFN have, and the lengths of their chunks."""
    stored, (neurons, _, hidden) = at.types[op.weight.name], op.weight.shape
    part, lines = stored.part_bytes(hidden), abi.neuron_lines(hidden, stored.group_size, stored.dtype)
    cold = {}
    if at.n_cold(op) and at.plan.cold:
        cold = {"cold": at.n_cold(op), "shift": at.plan.cold.shift, "cluster_bytes": at.plan.cold.cluster_bytes}
    return {"neurons": neurons, "part_bytes": part, "group": stored.group_size,
            "groups": -(-hidden // stored.group_size), "block": abi.neuron_block(neurons), **cold}, \
        abi.neuron_chunks(neurons, part, lines, at.threads)


def _slots(op: NeuronGated | NeuronDown, at: Lowering) -> list[Operand]:
    """Slot of each of the layer's clusters, and the slots."""
    if not at.n_cold(op) or not (plan := at.plan.cold):
        return [NOTHING, NOTHING]
    return [at.cold(plan.table + 4 * plan.clusters * (op.layer or 0), 4 * plan.clusters),
            at.cold(0, plan.slots * plan.cluster_bytes)]


def _resolve(op: NeuronGated, at: Lowering, early: bool = False) -> Record:
    """The record that finds a layer's cold neurons, and has those read that are missing; an `early` one for prompts."""
    plan, layer, stride = at.plan.cold, op.layer or 0, at.stride(op.mask) if op.mask else 0
    assert plan
    parameters = fill(NEURON_RESOLVE, neurons=plan.neurons, hot=plan.hot[layer], shift=plan.shift,
                      cluster_bytes=plan.cluster_bytes, slots=plan.slots, base=plan.clusters * layer,
                      unit=at.cold_units[layer], most=max(1, READ_BYTES // plan.cluster_bytes),
                      part=abi.COLD_PARTS * layer, rows=rows(op.out), mask_stride=stride,
                      span=plan.part_neurons(layer))
    operands = [at.at(op.mask), *_slots(op, at), at.cold(plan.owners, 4 * plan.slots),
                at.cold(plan.uses, 4 * plan.slots), at.cold(plan.stamps, 8 * plan.slots),
                at.cold(plan.words, abi.COLD_BYTES)]
    flags, when, verb = (abi.FLAG_EARLY, (abi.COUNT_SEVERAL,), "ask for") if early else (0, (), "find")
    return at.record(op, RESOLVE_KERNEL, operands, parameters, flags, when, 1, f"{verb} {op.weight.name}")


def _ffn(op: NeuronGated | NeuronDown, at: Lowering) -> Operand:
    region, offset, nbytes = at.at(op.weight)
    return Operand(region, offset, nbytes + NEURON_BEHIND)


@lower.register
def _(op: NeuronGated, at: Lowering) -> list[Record]:
    more, (chunk, _) = _neurons(op, at)
    given: dict[str, int | float] = {
        **_input(op, at), **more, "chunk": chunk, "activation": ACTIVATIONS[op.activation], "limit": op.limit,
        "token_tiles": at.token_tiles, "mask_stride": at.stride(op.mask) if op.mask else 0}
    operands = [_ffn(op, at), at.at(op.x), at.at(op.out), at.at(op.mask or op.threshold), at.scratch, at.at(op.bias),
                at.shared, at.at(op.source), at.at(op.norm), *_slots(op, at)]
    flags = (abi.FLAG_BIAS if op.bias else 0) | (abi.FLAG_DENSE if op.dense else 0) \
        | (abi.FLAG_MASK if op.mask else 0) | (abi.FLAG_THRESHOLD if op.threshold else 0)

    def gated(step: int, label: str = "", ticket: int | None = None, **part: int) -> Record:
        return at.record(op, op.kernels(at.types, at.kv)[0], operands, fill(NEURON_GATED, **given, **part), flags,
                         step=step, label=label, ticket=ticket)

    if not at.n_cold(op) or not at.plan.cold:
        return [gated(0)]
    layer, neurons = op.layer or 0, op.weight.shape[0]
    hot, span = at.plan.cold.hot[layer], at.plan.cold.part_neurons(layer)
    found = [_resolve(op, at), *([gated(0, behind=neurons - hot)] if hot else [])]
    for part, first in enumerate(range(hot, neurons, span)):
        n = min(span, neurons - first)
        found.append(gated(2 if first else 0, f"  {n} cold neurons", abi.COLD_PARTS * layer + part, before=first,
                           behind=neurons - first - n))
    return found


@lower.register
def _(op: ScoreMask, at: Lowering) -> list[Record]:
    parameters = fill(NEURON_MASK, neurons=op.x.width, rows=rows(op.out), out_stride=at.stride(op.out),
                      in_stride=at.stride(op.x))
    operands = [at.at(op.x), at.at(op.thresholds), at.at(op.out), at.scratch]
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: SignMask, at: Lowering) -> list[Record]:
    _, scales, offsets = abi.q8_row_bytes(op.x.width, op.x.group_size)
    parameters = fill(NEURON_MASK, neurons=op.thresholds.shape[0], rows=rows(op.out), out_stride=at.stride(op.out),
                      in_stride=at.stride(op.x), width=op.x.width, scratch=at.plan.thread_scratch_bytes,
                      token_tiles=at.token_tiles, x_scales=scales, x_offsets=offsets, group=op.x.group_size)
    operands = [at.at(op.x), at.at(op.thresholds), at.at(op.out), at.scratch, at.at(op.signs)]
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters)]


@lower.register
def _(op: NeuronDown, at: Lowering) -> list[Record]:
    more, (_, chunk) = _neurons(op, at)
    parameters = fill(NEURON_DOWN, **more, x_stride=at.stride(op.f), out_stride=at.stride(op.out), rows=rows(op.f),
                      chunk=chunk, width=op.weight.shape[2], scratch=at.plan.thread_scratch_bytes)
    operands = [_ffn(op, at), at.at(op.f), at.at(op.out), at.scratch, at.at(op.bias), at.shared, *_slots(op, at)]
    flags = abi.FLAG_RESIDUAL | (abi.FLAG_BIAS if op.bias else 0) | (abi.FLAG_DENSE if op.dense else 0)
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters, flags)]


@lower.register(Screen)
@lower.register(ScreenedHead)
def _(op: Screen | ScreenedHead, at: Lowering) -> list[Record]:
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
    return [at.record(op, kernel, operands, parameters, step=step, label=labels[step])
            for step, kernel in enumerate(op.kernels(at.types, at.kv))]


# -- attention ---------------------------------------------------------------------------------------------------------


def _heads(op: RopeStore | Attention, at: Lowering) -> dict[str, int]:
    """Parameters of heads and KV blocks."""
    return {"heads": op.heads, "kv_heads": op.kv_heads, "head_dim": op.head_dim, "blocks": at.plan.kv_blocks,
            "block_bytes": abi.kv_block_bytes(at.kv, op.head_dim), "rows": rows(op.out)}


def _holes(op: Attention, at: Lowering) -> Operand:
    """What a layer behind a boundary lacks of prompts' tokens."""
    holes, lazy = at.plan.holes, at.plan.request.lazy
    stage = lazy.stage(op.layer or 0) if lazy else 0
    if not holes or not stage:
        return NOTHING
    return Operand(holes.region, holes.offset + (stage - 1) * holes.stride, holes.stride)


def _blocks(op: RopeStore | Attention, at: Lowering) -> Operand:
    layer = at.layer(op)
    return Operand(layer.region, layer.offset, layer.nbytes)


@lower.register
def _(op: RopeStore, at: Lowering) -> list[Record]:
    plan = at.plan
    parameters = fill(ROPE, stride=at.stride(op.out), table_stride=plan.rope_row_bytes, eps=op.eps,
                      rotary=op.rotary, **_heads(op, at))
    nbytes = plan.request.ctx * plan.rope_row_bytes
    table = Operand("constants", op.table * nbytes, nbytes) if op.rotary else NOTHING
    operands = [at.at(op.out), table, _blocks(op, at), at.at(op.q_norm), at.at(op.k_norm)]
    return [at.record(op, op.kernels(at.types, at.kv)[0], operands, parameters, abi.FLAG_HEAD_NORM if op.q_norm else 0)]


def _attend(op: Attention, at: Lowering, kernels: Sequence[str], labels: Sequence[str], operands: Sequence[Operand],
            count: int, **chosen: int | float) -> list[Record]:
    """Records of attention of the tokens that a count says; of the walk's last ones where V is `chosen`."""
    parameters = fill(
        ATTENTION, q_stride=at.stride(op.qkv), out_stride=at.stride(op.out), window=op.window,
        scale=op.scale, cap=op.cap, scratch=at.plan.thread_scratch_bytes, splits=at.plan.splits,
        tokens=max(1, 32 * op.kv_heads // op.heads), **{**_heads(op, at), "rows": count}, **chosen)
    flags = (0 if operands[6] is NOTHING else abi.FLAG_HOLES) | (abi.FLAG_LAST if chosen else 0)
    records = []
    for step, (kernel, label) in enumerate(zip(kernels, labels, strict=True), 2 if chosen else 0):
        some = [count] if count != abi.COUNT_TOKENS else []
        some += [abi.COUNT_MERGE] if kernel == MERGE_KERNEL and not chosen else []
        records.append(at.record(op, kernel, operands, parameters, flags, tuple(some), step, label))
    return records


def _attention_operands(op: Attention, at: Lowering) -> list[Operand]:
    return [at.at(op.qkv), at.at(op.out), _blocks(op, at), at.scratch, at.shared, NOTHING, _holes(op, at)]


@lower.register
def _(op: Attention, at: Lowering) -> list[Record]:
    kernels = op.kernels(at.types, at.kv)
    return _attend(op, at, kernels, ("", "  merge splits"), _attention_operands(op, at), abi.COUNT_TOKENS)


@lower.register
def _(op: SelectedAttention, at: Lowering) -> list[Record]:
    operands, kernels = _attention_operands(op, at), op.kernels(at.types, at.kv)
    plain = _attend(op, at, kernels[:2], ("", "  merge splits"), operands, abi.COUNT_PROMPTED)
    partial, scores, means = op.parts(at.sizes)
    region, offset, _ = at.shared
    operands[5] = Operand(region, offset + partial, scores)
    operands.append(Operand(region, offset + partial + scores, means))
    labels = ("  scores of decoded tokens", "  choice of V", "  chosen V", "  merge splits")
    return plain + _attend(op, at, kernels[2:], labels, operands, abi.COUNT_DECODED, most=op.top,
                           least=least_score(op.eps), instead=INSTEAD[op.instead])
