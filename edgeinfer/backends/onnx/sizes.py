"""The sizes of a model that is lowered to ONNX, which plans of all contexts share, and what a token reads of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from edgeinfer.base.units import round_up
from edgeinfer.graph import FFN, HEAD, PARTS

from .cpu_memory import CpuMemory
from .data import data_bytes
from .flavour import kv_layers, layers_read
from .lowering import Lowering, Node
from .states import states_of
from .weights import KINDS

if TYPE_CHECKING:
    from edgeinfer.devices import Traffic
    from edgeinfer.graph import Op

FAST_GROUP, FAST_ROWS = 32, {4: 64, 8: 32}
"""Matrices for CUDA's fast matmuls: elements of a group, and the multiple of their rows, by bits."""
READ_TOKENS, READ_MULTIPLE = {4: 16, 8: 5}, 8
"""Tokens for which its other matmuls read a matrix of this many bits as it is, if its sides are such multiples."""

MATMUL = "MatMulNBits"
BY_ROW = ("Gather", "GatherBlockQuantized", "GroupQueryAttention", "PagedAttention", "RotaryEmbedding", "Unsqueeze")
"""Operators that read a few rows of a table: of the embedding, its scales, cosines and sines."""


class Matmul(NamedTuple):
    """The sides of a quantised matrix, the bits of its codes, and the columns of a group."""

    rows: int
    columns: int
    bits: int
    group: int


class Sizes(NamedTuple):
    """The sizes of a model that is lowered to ONNX, in bytes."""

    data: int
    """All tensors, as a file has them."""
    largest: int
    matmuls: frozenset[Matmul]
    read: int
    """Weights that a token reads: whole matrices, those of all experts included, and of tables nothing."""
    operations: float
    """Multiplications and additions of the matrices for one token."""
    head_operations: float
    """Part of them that belongs to the head."""
    kv_bytes: int
    """K and V of a position that a token reads, in the layers that see all positions."""
    window_kv_bytes: int
    """The same in the layers with a window."""
    kv_width: int
    """Elements of K of a position in all layers that have their own, as many as of V."""
    widest_kv: int
    """The same in the largest of these layers."""
    copied_kv: int
    """Elements of K and V of a position that attention copies in a layer that reads those of another."""
    state_bytes: int
    """Recurrent state of a slot."""
    largest_state: int
    """The same of the largest layer."""
    matrix_state_bytes: int = 0
    """Part of `state_bytes` that is matrices; the rest is inputs of convolutions."""
    codes: int = 0
    scales: int = 0
    """Number of scales in f16."""
    more: int = 0
    """Bytes by which matrices are larger than in the bundle."""
    parts: tuple[tuple[str, tuple[int, float]], ...] = ()
    """Bytes that a token reads, and its operations, by `Op.part`."""
    notes: tuple[str, ...] = ()
    """Sentences on what onnxruntime does otherwise than edgeinfer's kernels."""
    cpu: CpuMemory | None = None
    """Memory of the CPU provider."""

    @classmethod
    def of(cls, graph: Lowering) -> Sizes:
        """Add up the stored bytes of a graph."""
        stored, parts, element = list(graph.stored.values()), _parts(graph), KINDS[graph.dtype].itemsize
        layers, states = kv_layers(graph.graph), states_of(graph.graph, graph.dtype)
        width = {layer: heads.kv * heads.stored_dim for layer, heads in layers.items()}
        return cls(
            data=data_bytes(stored), largest=max(one.nbytes for one in stored),
            matmuls=frozenset(_matmul(node) for node in graph.nodes if node.kind == MATMUL),
            read=sum(nbytes for nbytes, _ in parts.values()),
            operations=sum(operations for _, operations in parts.values()), head_operations=parts[HEAD][1],
            kv_bytes=element * _kv_read(graph, width, False), window_kv_bytes=element * _kv_read(graph, width, True),
            kv_width=sum(width.values()), widest_kv=max(width.values(), default=0),
            copied_kv=2 * max((width[layer] for layer in layers_read(graph.graph.config)), default=0),
            state_bytes=sum(one.nbytes for one in states),
            largest_state=max((one.nbytes for one in states), default=0),
            matrix_state_bytes=sum(one.nbytes for one in states if one.is_matrix),
            codes=sum(one.nbytes for one in stored if one.kind == "u8"),
            scales=sum(one.nbytes for one in stored if one.kind == "f16" and one.name.endswith(".scales")),
            more=sum(now - before for found in graph.remarks.values() for before, now in found),
            parts=tuple(parts.items()), notes=tuple(graph.notes), cpu=CpuMemory.of(graph))

    def traffic(self, bundle: Traffic, dtype: str) -> Traffic:
        """Return the traffic of a model as onnxruntime runs it, from that of its bundle; `dtype` is that of KV."""
        return replace(
            bundle, weight_bytes=self.read, prefill_weight_bytes=self.read, operations=self.operations,
            head_operations=self.head_operations, ffn_bytes=dict(self.parts).get(FFN, (0,))[0],
            kv_bytes=self.kv_bytes, window_kv_bytes=self.window_kv_bytes, pure_kv_bits={"f16": 16, "f32": 32}[dtype])


def _matmul(node: Node) -> Matmul:
    return Matmul(*(int(node.attributes[name]) for name in ("N", "K", "bits", "block_size")))


def _parts(graph: Lowering) -> dict[str, tuple[int, float]]:
    """Return the bytes that a token reads and its operations by part of the model."""
    found: dict[str, tuple[int, float]] = dict.fromkeys(PARTS, (0, 0.0))
    for op, (first, last) in zip(graph.graph.ops, pairwise((0, *graph.ends)), strict=True):
        nbytes, operations = found[op.part]
        found[op.part] = (nbytes + sum(_reads(graph.nodes[first:last], graph)),
                          operations + op.operations() * _experts(op, graph))
    return found


def _reads(nodes: list[Node], graph: Lowering) -> Iterator[int]:
    """Yield the bytes of the tensors that nodes read whole, and of matrices that a single token has written out, which
    are written and read."""
    for node in nodes:
        if node.kind not in BY_ROW:
            yield from (graph.stored[name].nbytes for name in node.inputs if name in graph.stored)
        if node.kind == MATMUL:
            yield 2 * written_out(_matmul(node), 1, False)


def _experts(op: Op, graph: Lowering) -> float:
    """Return how many times more experts a token is multiplied by here than it chooses; 1 for other operations."""
    reads = op.reads(graph.graph.types)
    chosen = sum(read.token for read in reads)
    return sum(read.batch for read in reads) / chosen if chosen else 1.0


def _kv_read(graph: Lowering, width: Mapping[int, int], windowed: bool) -> int:
    """Return the elements of K and V of a position that a token reads in layers with or without a window."""
    return sum(2 * width[op.kv.layer] for op in graph.graph.ops
               if op.kv and not op.kv.stores and bool(op.kv.window) == windowed)


def written_out(matmul: Matmul, tokens: int, fast_matmuls: bool) -> int:
    """Return the bytes of a matmul's matrix as f16 if CUDA writes it out for this many tokens, else 0; see
    docs/explanation/onnx.md.
    """
    rows, columns, bits, group = matmul
    fast = fast_matmuls and group == FAST_GROUP and rows % FAST_ROWS[bits] == 0
    read = tokens <= READ_TOKENS[bits] and rows % READ_MULTIPLE == columns % READ_MULTIPLE == 0
    return 0 if fast or read else rows * round_up(columns, group) * 2
