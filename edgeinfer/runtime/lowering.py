"""Lowering: each operation of the graph becomes one or two records, with the places that the plan gave its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from edgeinfer.graph import Graph, Op, Tensor, Weight, WeightType, round_up
from edgeinfer.kernels import ACTIVATIONS, ATTENTION, LINEAR, NEURON_DOWN, NEURON_GATED, ROPE, ROWS, abi, fill
from edgeinfer.memory_planner import MemoryPlan

from .program import Program, Record

CHUNK_BYTES = 64 << 10
"""Weights of a claimed chunk: long enough to stream, short enough to balance."""

Place = tuple[str, int]


class Lowering:
    """Turns the operations of a graph into records.

    Parameters
    ----------
    graph : Graph
    plan : MemoryPlan
    offsets : mapping of str to int
        Byte offset of each weight in weights.bin.
    heights : tuple of int
        Heights of the blocks of tokens that the instruction set works in (Isa.heights).
    """

    def __init__(self, graph: Graph, plan: MemoryPlan, offsets: Mapping[str, int], heights: tuple[int, int]):
        self.graph, self.plan, self.offsets, self.heights = graph, plan, offsets, abi.pack_heights(heights)
        self._producers = {op.outputs[0].name: op for op in graph.ops if not op.in_place}

    def program(self) -> Program:
        """All records."""
        emit: dict[str, Callable[[Op], list[Record]]] = {
            "embed": self._embed, "rms_norm": self._rms_norm, "quantize": self._quantize, "linear": self._linear,
            "gated": self._linear, "rope_store": self._rope_store, "attention": self._attention,
            "gather_outputs": self._gather, "neuron_gated": self._neuron_gated, "neuron_down": self._neuron_down,
        }
        return Program(tuple(record for op in self.graph.ops for record in emit[op.kind](op)))

    # -- operands --------------------------------------------------------------------------------------------------

    def _at(self, tensor: Tensor) -> Place:
        if tensor.name == self.graph.logits.name:
            return "logits", 0
        return "activations", self.plan.activations[tensor.name].offset

    def _stride(self, tensor: Tensor) -> int:
        if tensor.name == self.graph.logits.name:
            return self.plan.logits_stride
        return self.plan.activations[tensor.name].stride

    def _weight(self, weight: Weight) -> Place:
        return "weights", self.offsets[weight.name]

    def _scratch(self) -> Place:
        return "scratch", 0

    def _is_own_input(self, x: Tensor) -> bool:
        """Whether a product's threads quantise x for themselves when there is one token: the operation that makes x
        stands directly before its only reader."""
        if x.dtype != "q8" or x.rows != "tokens":
            return False
        at = self.graph.ops.index(self._producers[x.name])
        readers = [i for i, op in enumerate(self.graph.ops) if any(t.name == x.name for t in op.inputs)]
        return readers == [at + 1]

    def _row_parameters(self, op: Op, x: Tensor, out: Tensor, **more: int | float) -> tuple[int, ...]:
        if out.dtype == "q8":
            _, scales, sums = abi.q8_row_bytes(out.width, out.group_size)
            more |= {"scales": scales, "sums": sums, "group": out.group_size, "padded": scales,
                     "heights": self.heights}
        return tuple(fill(ROWS, width=out.width, in_stride=self._stride(x), out_stride=self._stride(out),
                          rows=_rows(out), **more))

    # -- operations ------------------------------------------------------------------------------------------------

    def _embed(self, op: Op) -> list[Record]:
        table, out = op.weights[0], op.outputs[0]
        stored = self.graph.types[table.name]
        parameters = fill(ROWS, width=out.width, out_stride=self._stride(out), rows=abi.COUNT_TOKENS,
                          tile_bytes=tile_bytes(stored, out.width)[0])
        return [Record(f"embed_{_suffix(stored)}", _text(op), (self._weight(table), self._at(out)), tuple(parameters))]

    def _rms_norm(self, op: Op) -> list[Record]:
        (x,), (out,), (weight,) = op.inputs, op.outputs, op.weights
        places = (self._at(x), self._at(out), self._weight(weight), self._scratch())
        more = {"eps": op.attributes["eps"], "scratch": self.plan.thread_scratch_bytes}
        quantised = out.dtype == "q8"
        return [Record(f"rms_norm_{out.dtype}", _text(op), places, self._row_parameters(op, x, out, **more),
                       abi.FLAG_NORM if quantised else 0, abi.COUNT_MANY if self._is_own_input(out) else None,
                       4 * weight.shape[0])]

    def _quantize(self, op: Op) -> list[Record]:
        (x,), (out,) = op.inputs, op.outputs
        return [Record("quantize", _text(op), (self._at(x), self._at(out)), self._row_parameters(op, x, out),
                       predicate=abi.COUNT_MANY if self._is_own_input(out) else None)]

    def _gather(self, op: Op) -> list[Record]:
        (x,), (out,) = op.inputs, op.outputs
        return [Record("gather_outputs", _text(op), (self._at(x), self._at(out)), self._row_parameters(op, x, out),
                       predicate=abi.COUNT_OUTPUTS)]

    def _linear(self, op: Op) -> list[Record]:
        x, out, weight = op.inputs[0], op.outputs[0], op.weights[0]
        stored = self.graph.types[weight.name]
        size, records = tile_bytes(stored, weight.shape[1])
        tiles = -(-weight.shape[0] // 16)
        gated = op.kind == "gated"
        units, unit_bytes = (tiles // 2, 2 * size) if gated else (tiles, size)
        chunk = max(1, min(CHUNK_BYTES // unit_bytes, units // (4 * self.plan.request.threads)))
        chunk += chunk % 2  # blocks of two row tiles
        _, scales, sums = abi.q8_row_bytes(x.width, x.group_size) if x.dtype == "q8" else (0, 0, 0)
        more = {"activation": ACTIVATIONS[op.attributes["activation"]]} if gated else {}
        parameters = fill(LINEAR, tiles=units, tile_bytes=size, records=records, x_stride=self._stride(x),
                          x_scales=scales, x_sums=sums, out_stride=self._stride(out), rows=_rows(x), chunk=chunk,
                          scratch=self.plan.thread_scratch_bytes, heights=self.heights, **more)
        bias = self._weight(op.weights[1]) if len(op.weights) > 1 else ("weights", 0)
        flags = (abi.FLAG_BIAS if len(op.weights) > 1 else 0) | (abi.FLAG_RESIDUAL if op.in_place else 0)
        flags |= abi.FLAG_OWN_INPUT if self._is_own_input(x) else 0
        places = (self._weight(weight), self._at(x), self._at(out), bias, self._scratch())
        return [Record(f"{op.kind}_{_suffix(stored)}", _text(op), places, tuple(parameters), flags,
                       abi.COUNT_OUTPUTS if x.rows == "outputs" else None, tiles * size)]

    def _neuron_gated(self, op: Op) -> list[Record]:
        (x,), (out,), weight = op.inputs, op.outputs, op.weights[0]
        parameters = fill(
            NEURON_GATED, **self._neurons(weight, x), x_stride=self._stride(x), out_stride=self._stride(out),
            chunk=self._neuron_chunks(weight)[0], activation=ACTIVATIONS[op.attributes["activation"]],
            heights=self.heights)
        flags = abi.FLAG_OWN_INPUT if self._is_own_input(x) else 0
        return [self._neuron_record(op, x, out, parameters, flags, 2)]

    def _neuron_down(self, op: Op) -> list[Record]:
        f, out, weight = op.inputs[0], op.outputs[0], op.weights[0]
        parameters = fill(
            NEURON_DOWN, **self._neurons(weight, f), x_stride=self._stride(f), out_stride=self._stride(out),
            chunk=self._neuron_chunks(weight)[1], width=weight.shape[2])
        return [self._neuron_record(op, f, out, parameters, abi.FLAG_RESIDUAL, 1)]

    def _neurons(self, weight: Weight, x: Tensor) -> dict[str, int]:
        """Parameters that both halves of an FFN have."""
        stored, (neurons, _, hidden) = self.graph.types[weight.name], weight.shape
        return {"neurons": neurons, "part_bytes": part_bytes(stored, weight), "group": stored.group_size,
                "groups": -(-hidden // stored.group_size), "block": abi.neuron_block(neurons), "rows": _rows(x),
                "scratch": self.plan.thread_scratch_bytes}

    def _neuron_chunks(self, weight: Weight) -> tuple[int, int]:
        stored, (neurons, _, hidden) = self.graph.types[weight.name], weight.shape
        lines = abi.neuron_lines(hidden, stored.group_size, stored.dtype)
        return abi.neuron_chunks(neurons, part_bytes(stored, weight), lines, self.plan.request.threads)

    def _neuron_record(self, op: Op, x: Tensor, out: Tensor, parameters: list[int], flags: int, parts: int) -> Record:
        """A record of either half; bytes of `parts` thirds of the FFN, as if all neurons were alive."""
        weight = op.weights[0]
        stored = self.graph.types[weight.name]
        bias = self._weight(op.weights[1]) if len(op.weights) > 1 else ("weights", 0)
        flags |= abi.FLAG_BIAS if len(op.weights) > 1 else 0
        places = (self._weight(weight), self._at(x), self._at(out), ("weights", 0), self._scratch(), bias,
                  ("scratch", self.plan.shared_scratch_offset))
        return Record(f"{op.kind}_{stored.dtype}", _text(op), places, tuple(parameters), flags,
                      bytes_read=parts * weight.shape[0] * part_bytes(stored, weight))

    def _rope_store(self, op: Op) -> list[Record]:
        c, plan, qkv = self.graph.config, self.plan, op.outputs[0]
        parameters = fill(ROPE, stride=self._stride(qkv), heads=c.num_attention_heads, kv_heads=c.num_key_value_heads,
                          head_dim=c.head_dim, table_stride=plan.rope_row_bytes, block_bytes=plan.kv_block_bytes,
                          head_bytes=abi.kv_head_bytes(plan.request.kv, c.head_dim), eps=op.attributes["eps"])
        norms = tuple(self._weight(w) for w in op.weights)
        places = (self._at(qkv), ("constants", 0), ("kv", plan.layer_offset(op.attributes["layer"])), *norms)
        flags = abi.FLAG_NORM if norms else 0
        return [Record(f"rope_store_{plan.request.kv}", _text(op), places, tuple(parameters), flags)]

    def _attention(self, op: Op) -> list[Record]:
        c, plan, (qkv,), (out,) = self.graph.config, self.plan, op.inputs, op.outputs
        group = c.num_attention_heads // c.num_key_value_heads
        parameters = tuple(fill(
            ATTENTION, q_stride=self._stride(qkv), out_stride=self._stride(out), heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads, head_dim=c.head_dim, block_bytes=plan.kv_block_bytes,
            head_bytes=abi.kv_head_bytes(plan.request.kv, c.head_dim), window=op.attributes["window"],
            scale=1.0 / math.sqrt(c.head_dim), scratch=plan.thread_scratch_bytes, splits=plan.splits,
            tokens=max(1, 32 // group)))
        places = (self._at(qkv), self._at(out), ("kv", plan.layer_offset(op.attributes["layer"])), self._scratch(),
                  ("scratch", plan.shared_scratch_offset))
        return [Record(f"attention_{plan.request.kv}", _text(op), places, parameters),
                Record("attention_merge", "  merge splits", places, parameters, predicate=abi.COUNT_MERGE)]


def tile_bytes(stored: WeightType, cols: int) -> tuple[int, int]:
    """Bytes of a tile of 16 rows and the records in it (kernels/layouts.py)."""
    if stored.dtype == "f32":
        return 64 * cols, cols
    if stored.dtype == "f16":
        return 64 * -(-cols // 2), -(-cols // 2)
    records = -(-cols // (2 * stored.group_size))
    return records * ((16 if stored.dtype == "q4" else 32) * stored.group_size + 64), records


def part_bytes(stored: WeightType, weight: Weight) -> int:
    """Bytes of a gate row, an up row or a down column in layout neuron."""
    groups = -(-weight.shape[2] // stored.group_size)
    codes = stored.group_size // (2 if stored.dtype == "q4" else 1)
    return round_up(groups * (codes + 2), 64)


def _suffix(stored: WeightType) -> str:
    """Kernel name's end: type, and group where there is one."""
    return f"{stored.dtype}_g{stored.group_size}" if stored.quantised else stored.dtype


def _rows(tensor: Tensor) -> int:
    return abi.COUNT_OUTPUTS if tensor.rows == "outputs" else abi.COUNT_TOKENS


def _text(op: Op) -> str:
    weights = f" {op.weights[0].name}" if op.weights else ""
    layer = f" layer {op.attributes['layer']}" if "layer" in op.attributes else ""
    return f"{op.kind}{weights}{layer}"
