"""Activations by lifetimes: a buffer is free again after its last reader, so a few buffers serve all layers."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.graph import Graph, Tensor, round_up
from edgeinfer.kernels import abi

SLACK_BYTES = 64
"""After each buffer: kernels load whole vectors, so the last row may be read this far past its end."""


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies in its region."""

    offset: int
    """Bytes from the region's base; a multiple of 64."""
    stride: int
    """Bytes from row to row."""
    nbytes: int
    """All rows and the slack after them."""


def row_stride(tensor: Tensor) -> int:
    """Bytes of one row: whole vectors of 16 floats, or int8 values with their scales and sums."""
    if tensor.dtype == "q8":
        return abi.q8_row_bytes(tensor.width, tensor.group_size)[0]
    return 4 * round_up(tensor.width, 16)


def place_activations(graph: Graph, n_tokens: int, n_outputs: int) -> tuple[dict[str, Placement], int]:
    """Lay out all activations but the logits.

    Each tensor lives from the operation that writes it to the last that reads it (an operation in place extends the
    life of its input). Largest first, each is put at the lowest offset where no tensor of an overlapping life lies.

    Parameters
    ----------
    graph : Graph
    n_tokens, n_outputs : int
        Most rows of the two kinds.

    Returns
    -------
    placements : dict of str to Placement
    arena_bytes : int
    """
    births: dict[str, int] = {}
    deaths: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    made_from: dict[str, tuple[Tensor, ...]] = {}
    for step, op in enumerate(graph.ops):
        for source in (s for tensor in op.inputs if tensor.dtype == "q8" for s in made_from.get(tensor.name, ())):
            deaths[source.name] = step  # products of one token quantise their input themselves, a step later
        made_from[op.outputs[0].name] = op.inputs
        for tensor in (*op.inputs, *op.outputs):
            if tensor.name != graph.logits.name:
                births.setdefault(tensor.name, step)
                deaths[tensor.name] = step
                tensors[tensor.name] = tensor
    placed: dict[str, Placement] = {}
    alive: list[list[Placement]] = [[] for _ in graph.ops]
    for name in sorted(tensors, key=lambda n: (-_bytes(tensors[n], n_tokens, n_outputs), births[n])):
        size = _bytes(tensors[name], n_tokens, n_outputs)
        life = range(births[name], deaths[name] + 1)
        neighbours = sorted({(p.offset, p.offset + p.nbytes) for step in life for p in alive[step]})
        offset = 0
        for start, end in neighbours:
            if offset + size <= start:
                break
            offset = max(offset, end)
        placed[name] = Placement(offset, row_stride(tensors[name]), size)
        for step in life:
            alive[step].append(placed[name])
    return placed, max((p.offset + p.nbytes for p in placed.values()), default=0)


def _bytes(tensor: Tensor, n_tokens: int, n_outputs: int) -> int:
    rows = n_outputs if tensor.rows == "outputs" else n_tokens
    return round_up(rows * row_stride(tensor) + SLACK_BYTES, 64)
