"""Activations by lifetimes: a buffer is free again after its last reader, so a few buffers serve all layers."""

from __future__ import annotations

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.units import round_up
from edgeinfer.graph import Graph, Tensor
from edgeinfer.kernels import abi

SLACK_BYTES = 64
"""Bytes after each buffer: kernels load whole vectors, so the last row may be read this far past its end."""


@dataclass(frozen=True)
class Placement:
    """Position of a tensor or a weight in memory."""

    region: str
    offset: int
    """Bytes from the region's base; a multiple of 64."""
    nbytes: int
    """All of it: rows and the slack after them, or stored bytes."""
    stride: int = 0
    """Bytes from row to row of an activation; of experts' matrices that share an allocation from one's to the
    next's."""


def row_stride(tensor: Tensor) -> int:
    """Bytes of one row: whole vectors of 16 floats, or int8 values with their scales and offsets."""
    if tensor.dtype == "q8":
        return abi.q8_row_bytes(tensor.width, tensor.group_size, tensor.apart)[0]
    return 4 * round_up(tensor.width, 16)


def place_activations(graph: Graph, n_tokens: int, n_outputs: int) -> tuple[dict[str, Placement], int]:
    """Lay out all activations but the logits.

    Each tensor lives from the operation that writes it to the last that reads it; one that is written over another is
    where that one is, and prolongs its life. Largest first, each is put at the lowest offset where no tensor of an
    overlapping life is.

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
    buffers = graph.buffers()
    births: dict[str, int] = {}
    deaths: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for step, op in enumerate(graph.ops):
        for tensor in (*op.inputs, op.out):
            buffer = buffers[tensor.name]
            if buffer != buffers[graph.logits.name]:
                births.setdefault(buffer, step)
                deaths[buffer] = step
                tensors.setdefault(buffer, tensor)
    placed: dict[str, Placement] = {}
    alive: list[list[Placement]] = [[] for _ in graph.ops]
    sizes = {name: _bytes(tensor, n_tokens, n_outputs) for name, tensor in tensors.items()}
    for name in sorted(tensors, key=lambda n: (-sizes[n], births[n])):
        size = sizes[name]
        life = range(births[name], deaths[name] + 1)
        neighbours = sorted({(p.offset, p.offset + p.nbytes) for step in life for p in alive[step]})
        offset = 0
        for start, end in neighbours:
            if offset + size <= start:
                break
            offset = max(offset, end)
        placed[name] = Placement("activations", offset, size, row_stride(tensors[name]))
        for step in life:
            alive[step].append(placed[name])
    arena = max((p.offset + p.nbytes for p in placed.values()), default=0)
    return {name: placed[buffer] for name, buffer in buffers.items() if buffer in placed}, arena


def _bytes(tensor: Tensor, n_tokens: int, n_outputs: int) -> int:
    rows = tensor.times * (n_outputs if tensor.rows == "outputs" else n_tokens)
    return round_up(rows * row_stride(tensor) + SLACK_BYTES, 64)
