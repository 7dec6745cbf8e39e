"""The memory of a KV cache on a device: slabs of slots or pages, bound where they are, which never move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import EdgeInferError

from .copying import FROM, TO
from .devices import Provider, one_line, raised_by_onnxruntime, take_as_asked
from .flavour import Heads
from .states import State

STATE_BLOCKS = 2
"""Blocks of states besides those of slots."""
FLOATS: dict[str, type[np.floating[Any]]] = {"f16": np.float16, "f32": np.float32}


class Layout(NamedTuple):
    """Memory layout of K and V of all layers."""

    attention: str
    """Attention of the model's flavour."""
    past: tuple[str, str]
    """Inputs of a model for K and V, but for the number of the layer."""
    present: tuple[str, str]
    """Names of the outputs, likewise."""
    sizes: Callable[[int, Heads], tuple[int, int, int]]
    """Computes the division of a block from its number of positions."""

    def names(self, layers: Iterable[int]) -> list[tuple[str, str]]:
        """Return names of inputs and outputs, one pair for each slab."""
        return [(past.format(layer), present.format(layer)) for layer in layers
                for past, present in zip(self.past, self.present, strict=True)]


class Slab(NamedTuple):
    """The blocks of one tensor."""

    past: str
    present: str
    shape: tuple[int, ...]
    """Of a block."""
    dtype: type[np.floating[Any]]
    blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def block_bytes(layers: Mapping[int, Heads], positions: int, kv: str) -> int:
    """Bytes of a slot or a page in all layers."""
    width = sum(heads.kv * heads.stored_dim for heads in layers.values())
    return 2 * width * positions * np.dtype(FLOATS[kv]).itemsize


class Slabs:
    """Memory of K and V: one slab of blocks (slots or pages) for each layer that has its own.

    A range of blocks is a stretch of it, so that it can be bound as it is there. Slots of recurrent models have slabs
    of states besides, with two more blocks: one that a chunk of a prompt writes its states to, from where they are
    copied when it is complete, and one of zeros, with which each sequence begins.

    Parameters
    ----------
    layout : Layout
    layers : mapping of int to Heads
        Heads of each of these layers.
    blocks, positions : how many, and of how many positions each
    kv : {"f16", "f32"}
    provider : Provider
    states : sequence of State
    """

    def __init__(self, layout: Layout, layers: Mapping[int, Heads], blocks: int, positions: int, kv: str,
                 provider: Provider, states: Items[State] = ()):
        self.dtype, self.memory = FLOATS[kv], provider.memory
        self.paged = layout.attention == "paged"
        self.positions, self.blocks, self.recurrent = positions, blocks, bool(states)
        shapes = [layout.sizes(positions, heads) for heads in layers.values() for _ in range(2)]
        self._kv = len(shapes)
        self.slabs = [Slab(*names, shape, self.dtype, blocks)
                      for names, shape in zip(layout.names(layers), shapes, strict=True)]
        self.slabs += [Slab(state.past, state.present, state.shape, FLOATS[state.kind], blocks + STATE_BLOCKS)
                       for state in states]
        if self.memory != "cpu":
            take_as_asked()
        self._kept = [self._zeros(slab) for slab in self.slabs]

    @property
    def copied(self) -> list[tuple[str, str, int]]:
        """Name, type and axes of all slabs."""
        kinds = {dtype: kind for kind, dtype in FLOATS.items()}
        return [(slab.past, kinds[slab.dtype], 1 + len(slab.shape)) for slab in self.slabs]

    def _zeros(self, slab: Slab) -> Any:
        """Memory without NaNs (a weight of 0 times NaN is NaN), touched now so that no run lacks it later."""
        zeros = np.empty((slab.blocks, *slab.shape), slab.dtype)
        zeros.fill(0)
        if self.memory == "cpu":
            return zeros
        import onnxruntime

        try:
            return onnxruntime.OrtValue.ortvalue_from_numpy(zeros, self.memory, 0)
        except Exception as error:
            if not raised_by_onnxruntime(error):
                raise
            raise EdgeInferError(f"onnxruntime cannot take {zeros.nbytes} bytes of {self.memory}'s memory for a part "
                                 f"of the KV cache: {one_line(error)} Lower --ctx or --samples, or see which program "
                                 "holds memory there.") from None

    def _address(self, number: int, block: int) -> int:
        """Return the address of a block in the slab of this number."""
        kept = self._kept[number]
        start = kept.ctypes.data if self.memory == "cpu" else kept.data_ptr()
        return int(start) + block * self.slabs[number].block_bytes

    @property
    def unfinished(self) -> int:
        """Block that takes the states of a chunk that is running."""
        return self.blocks

    @property
    def empty(self) -> int:
        """Block of the states of a sequence without tokens."""
        return self.blocks + 1

    def bind(self, binding: Any, first: int = 0, count: int | None = None) -> None:
        """Bind a range of blocks, all of them by default, as a model's inputs and outputs."""
        for number, slab in enumerate(self.slabs):
            self._bind(binding, number, slab.past, first, slab.present, first, self.blocks if count is None else count)

    def bind_states(self, binding: Any, source: int, target: int) -> None:
        """Bind a block of the states as a model's inputs, and another as its outputs."""
        for number, slab in enumerate(self.slabs[self._kv :], self._kv):
            self._bind(binding, number, slab.past, source, slab.present, target, 1)

    def bind_copy(self, binding: Any, source: int, target: int, states_alone: bool = False) -> None:
        """Bind a block as the source of a copy, and another as its destination; or only its states, and nothing of K
        and V."""
        for number, slab in enumerate(self.slabs):
            count = 0 if states_alone and number < self._kv else 1
            ends = (source, target) if count else (0, 0)
            self._bind(binding, number, FROM + slab.past, ends[0], TO + slab.past, ends[1], count)

    def bind_read(self, binding: Any, block: int, first: int, end: int, head: int, numbers: Items[int]
                  ) -> dict[int, NDArray[Any]]:
        """Bind rows of a block as the source of a copy to the memory of this process.

        The copying model has inputs for all slabs, so the others are bound without rows.

        Parameters
        ----------
        binding : onnxruntime.IOBinding
        block : int
        first, end : int
            Positions within it.
        head : int
            Of slots, where the rows of a head follow each other, the only head that is copied.
        numbers : sequence of int
            Slabs that are copied.

        Returns
        -------
        dict of int to arrays of shape (KV heads, rows, elements)
            Where the rows of each of these slabs go; slots that have no such head are missing.
        """
        found = {}
        for number, slab in enumerate(self.slabs):
            name, (outer, inner, elements) = slab.past, slab.shape
            copied = number in numbers and (self.paged or head < outer)
            at, n = (first * inner if self.paged else head * inner + first, end - first) if copied else (0, 0)
            shape = [1, n, inner, elements] if self.paged else [1, 1, n, elements]
            rows = np.empty(shape, self.dtype)
            binding.bind_input(FROM + name, self.memory, 0, self.dtype, shape,
                               self._address(number, block) + at * elements * rows.itemsize)
            binding.bind_output(TO + name, "cpu", 0, self.dtype, shape, rows.ctypes.data)
            if copied:
                found[number] = rows[0].swapaxes(0, 1) if self.paged else rows[0]
        return found

    def _bind(self, binding: Any, number: int, read: str, source: int, written: str, target: int, count: int) -> None:
        slab = self.slabs[number]
        like = self.memory, 0, slab.dtype, [count, *slab.shape]
        binding.bind_input(read, *like, self._address(number, source))
        binding.bind_output(written, *like, self._address(number, target))

    def heads_apart(self, numbers: Items[int]) -> int:
        """Return how many heads of these slabs are copied one after the other: those of slots."""
        return 1 if self.paged else max(self.slabs[number].shape[0] for number in numbers)

    def close(self) -> None:
        """Free the memory."""
        self._kept = []
