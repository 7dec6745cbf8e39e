"""The sizes of a model that is lowered to ONNX, which plans of all contexts share."""

from __future__ import annotations

from typing import NamedTuple

from edgeinfer.base.units import round_up

from .cpu_memory import CpuMemory
from .data import data_bytes
from .lowering import Lowering

FAST_GROUP, FAST_ROWS = 32, {4: 64, 8: 32}
"""Matrices for CUDA's fast matmuls: elements of a group, and the multiple of their rows, by bits."""
READ_TOKENS, READ_MULTIPLE = {4: 16, 8: 5}, 8
"""Tokens for which its other matmuls read a matrix of this many bits as it is, if its sides are such multiples."""


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
    codes: int
    scales: int
    """Number of scales in f16."""
    more: int
    """Bytes by which matrices are larger than in the bundle."""
    matmuls: frozenset[Matmul]
    cpu: CpuMemory
    """Memory of the CPU provider."""

    @classmethod
    def of(cls, graph: Lowering) -> Sizes:
        """Add up the stored bytes of a graph."""
        stored = list(graph.stored.values())
        return cls(
            data_bytes(stored), max(one.nbytes for one in stored),
            sum(one.nbytes for one in stored if one.kind == "u8"),
            sum(one.nbytes for one in stored if one.kind == "f16" and one.name.endswith(".scales")),
            sum(now - before for found in graph.remarks.values() for before, now in found),
            frozenset(Matmul(*(int(node.attributes[name]) for name in ("N", "K", "bits", "block_size")))
                      for node in graph.nodes if node.kind == "MatMulNBits"),
            CpuMemory.of(graph))


def written_out(matmul: Matmul, tokens: int, fast_matmuls: bool) -> int:
    """Return the bytes of a matmul's matrix as f16 if CUDA writes it out for this many tokens, else 0; see
    docs/explanation/onnx.md.
    """
    rows, columns, bits, group = matmul
    fast = fast_matmuls and group == FAST_GROUP and rows % FAST_ROWS[bits] == 0
    read = tokens <= READ_TOKENS[bits] and rows % READ_MULTIPLE == columns % READ_MULTIPLE == 0
    return 0 if fast or read else rows * round_up(columns, group) * 2
