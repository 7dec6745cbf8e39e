"""Memory that onnxruntime's CPU provider takes for the initializers of a model, beyond their file.

It maps each initializer alone. What is packed for matmuls is read once and then released; all else stays mapped as far
as it is read. Observed with onnxruntime 1.32.0 on x86 (docs/measurements/memory.md).
"""

from __future__ import annotations

from typing import NamedTuple

from edgeinfer.base.units import round_up

from .lowering import Lowering, Node
from .weights import KINDS, Stored

READ_AROUND = 2 << 20
"""Most bytes that Linux maps around a page of a file that is read: 64 KiB, or more where it keeps larger pieces, as of
a file that was just written (all 65 MB of a table after 256 tokens)."""
NODE_BYTES, INITIALIZER_BYTES = 6_000, 11_000
"""Bytes that describe an operator, and a tensor besides its values, with the package onnx that lowered them (5.5 and
10.4 kB measured; 3.2 and 12.9 in later runs)."""
_PANEL = 16
"""Rows to which packed matrices of floats are padded."""


class CpuMemory(NamedTuple):
    """Bytes by kind."""

    mapped: int
    """Initializers that are read where they are mapped, as a whole."""
    rows: tuple[tuple[int, int, bool], ...]
    """Initializers of which rows are read: bytes, bytes of a row, and whether rows are read in order."""
    packed: int
    """Copies of matrices as matmuls read them, and values that are computed when the model is opened."""
    opening: int
    """Beyond all of the above while the model is opened: matrices in f16 become f32 before they are packed."""
    summed: int
    """Most values of a token in a product that is the sum of two, but for logits."""
    described: int
    """Descriptions of operators and tensors, which is much of a model with many small layers."""

    @classmethod
    def of(cls, graph: Lowering) -> CpuMemory:
        """Return what the provider takes for a graph."""
        readers: dict[str, list[tuple[Node, int]]] = {}
        for node in graph.nodes:
            for place, name in enumerate(node.inputs):
                if name in graph.stored:
                    readers.setdefault(name, []).append((node, place))
        mapped, packed, rows = 0, 0, list[tuple[int, int, bool]]()
        dense = [0]
        for stored in graph.stored.values():
            kinds = {_use(node, place) for node, place in readers.get(stored.name, [])}
            whole = sum(copied(stored, kind) for kind in kinds)
            packed += whole
            if "dense" in kinds and stored.kind == "f16":
                dense.append(copied(stored, "dense"))
            if kinds <= {"rows", "positions"} and kinds:
                rows.append((stored.nbytes, stored.nbytes // stored.shape[0], "positions" in kinds))
            elif not kinds <= {"codes", "dense", "constant"} or len(kinds) > 1:
                mapped += stored.nbytes
        parts = {node.outputs[0]: int(node.attributes["N"]) for node in graph.nodes if node.kind == "MatMulNBits"}
        sums = {parts.get(node.inputs[0], 0) for node in graph.nodes if node.kind == "Add"}
        summed = max(sums - {graph.graph.config.vocab_size}, default=0)
        described = NODE_BYTES * len(graph.nodes) + INITIALIZER_BYTES * len(graph.stored)
        return cls(mapped, tuple(rows), packed, 2 * max(dense), summed, described)

    def read(self, positions: int) -> int:
        """Return the bytes of the file that stay mapped when so many tokens were read."""
        apart = [row if in_order else round_up(row, READ_AROUND) for _, row, in_order in self.rows]
        return self.mapped + sum(min(nbytes, READ_AROUND + positions * row)
                                 for (nbytes, _, _), row in zip(self.rows, apart, strict=True))


def _use(node: Node, place: int) -> str:
    """Return what a node does with an initializer: one of the kinds that `of` tells apart, or its operator."""
    match node.kind, place:
        case "MatMulNBits", 1:
            return "codes"
        case "MatMulNBits", 2:
            return "scales"
        case "MatMul", 1:
            return "dense"
        case "GatherBlockQuantized", 0:
            return "rows"
        case "Gather", 0:
            return "columns" if node.attributes.get("axis") else "rows"
        case "GroupQueryAttention", 7 | 8:
            return "positions"
        case "RotaryEmbedding", 2 | 3:
            return "positions"
        case "Unsqueeze", 0:
            return "constant"
    return node.kind


def copied(stored: Stored, kind: str) -> int:
    """Return the bytes of the provider's own copy of an initializer for a kind of use."""
    if kind == "codes" or kind == "constant":
        return stored.nbytes
    if kind == "scales" and stored.kind == "f16":
        return 2 * stored.nbytes
    if kind == "dense" and len(stored.shape) == 2:
        return 4 * stored.shape[0] * round_up(stored.shape[1], _PANEL)
    if kind == "dense" and stored.kind == "f16":  # a batch of matrices is not packed
        return stored.nbytes // KINDS[stored.kind].itemsize * 4
    return 0
