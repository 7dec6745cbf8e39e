"""K and V of a prompt as KV blocks of our own kernels, for a process that continues with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import RequestError
from edgeinfer.graph import Graph, RopeStore
from edgeinfer.kernels import abi
from edgeinfer.runner import BlockForm, Sequence
from edgeinfer.runner.prompt_parts import ALL, WINDOW, blocks_of_tokens, encoded, ranges

from ...quant import KV_TYPES
from ...quant import kv as layouts
from .attention import rotated_inside
from .flavour import Heads, kv_layers
from .sessions import Sessions
from .slabs import Slabs

Rows = NDArray[np.floating[Any]]


class PromptBlocks:
    """Reads the K and V of sequences from slabs.

    Parameters
    ----------
    graph : Graph
        Of the model, without passes.
    slabs : Slabs
    sessions : Sessions
    """

    def __init__(self, graph: Graph, slabs: Slabs, sessions: Sessions):
        self._slabs, self._sessions = slabs, sessions
        self._layers: Mapping[int, Heads] = kv_layers(graph)
        stores = {op.layer: op for op in graph.ops if isinstance(op, RopeStore)}
        self._halves = {layer for layer, heads in self._layers.items()
                        if layer in stores and heads.padded and rotated_inside(heads.dim, stores[layer])}
        """Layers whose keys are padded in both halves of a head."""

    def read(self, sequence: Sequence, first: int, complete: bool, form: BlockForm) -> Iterator[bytes]:
        """Yield the parts of a sequence from block `first` on; see `Runner.read_blocks`.

        Raises `RequestError` if the KV type does not hold a value, or if the sequence was cut between two parts.
        """
        n = len(sequence)
        end = blocks_of_tokens(n, complete)
        windowed = set(form.windowed)
        layers = {kind: [one for one in self._layers if (one in windowed) == (kind == WINDOW)]
                  for kind in (ALL, WINDOW)}
        sizes = {kind: sum(self._layers[one].kv * abi.kv_head_bytes(form.kv, self._layers[one].dim) for one in alike)
                 for kind, alike in layers.items()}
        parts = ranges(ALL, first, end, sizes[ALL]) or [(ALL, end, end)] * complete
        header = form.header
        if form.windows:
            header["gone"] = gone = max(0, n - form.window + 1) // abi.BLOCK_TOKENS
            if complete:
                parts += ranges(WINDOW, gone, end, sizes[WINDOW])
        for number, (kind, begin, stop) in enumerate(parts):
            if len(sequence) < n:
                raise RequestError("The prompt was cut while its K and V were read; read it again from its beginning.")
            planes = list[NDArray[np.uint8]]()
            if begin < stop and layers[kind]:
                found = self._rows(sequence, layers[kind], begin * abi.BLOCK_TOKENS, min(stop * abi.BLOCK_TOKENS, n))
                for layer, stored in zip(layers[kind], found, strict=True):
                    planes += self._planes(layer, stored, stop - begin, form.kv)
            yield encoded(header | {"kind": kind, "first": begin, "end": stop,
                                    "last": complete and number == len(parts) - 1}, planes)

    def _planes(self, layer: int, found: tuple[Rows, Rows], n_blocks: int, kv: str) -> list[NDArray[np.uint8]]:
        """Return the planes of a layer in some blocks."""
        heads, rows = self._layers[layer], []
        for which, stored in enumerate(found):
            if not which and layer in self._halves:
                stored = stored.reshape(*stored.shape[:2], 2, -1)[..., : heads.dim // 2].reshape(*stored.shape[:2], -1)
            whole = np.zeros((heads.kv, n_blocks * abi.BLOCK_TOKENS, abi.padded_head_dim(heads.dim)), np.float32)
            whole[:, : stored.shape[1], : heads.dim] = stored[..., : heads.dim]
            _check_held(whole, kv)
            rows.append(whole.reshape(heads.kv, n_blocks, abi.BLOCK_TOKENS, -1))
        return layouts.packed_blocks(rows[0], rows[1], KV_TYPES[kv])

    def _rows(self, sequence: Sequence, layers: list[int], first: int, end: int) -> list[tuple[Rows, Rows]]:
        """Return K and V of some layers for the tokens from `first` to `end`: (heads, tokens, stored elements)."""
        size, found = self._slabs.positions, list[list[Rows]]()
        numbers = [2 * place + which for place, one in enumerate(self._layers) if one in layers for which in range(2)]
        for number in range(first // size, -(-end // size)):  # a slot has all of a sequence
            start = number * size
            found.append(self._sessions.read(self._slabs, sequence.blocks[number], max(first - start, 0),
                                             min(end - start, size), numbers))
        rows = [np.concatenate(one, axis=1) for one in zip(*found, strict=True)]
        return list(zip(rows[::2], rows[1::2], strict=True))


def _check_held(rows: NDArray[np.float32], kv: str) -> None:
    """Refuse values that a KV type has as inf or NaN."""
    largest, limit = float(np.abs(rows).max(initial=0)), layouts.largest_value(KV_TYPES[kv])
    if not largest <= limit:  # NaN is not
        remedy = "choose --kv f32" if np.isfinite(largest) else "compute it without --prefill-device"
        raise RequestError(f"A value of {largest:.3g} in K or V of this prompt exceeds {limit:.3g}, the largest of KV "
                           f"type {kv}; {remedy}.")
