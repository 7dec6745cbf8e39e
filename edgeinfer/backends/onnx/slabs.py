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


def block_bytes(layers: Mapping[int, Heads], positions: int, kv: str) -> int:
    """Bytes of a slot or a page in all layers."""
    width = sum(heads.kv * heads.stored_dim for heads in layers.values())
    return 2 * width * positions * np.dtype(FLOATS[kv]).itemsize


class Slabs:
    """Memory of K and V: one slab of blocks (slots or pages) for each layer that has its own.

    A range of blocks is a stretch of it, so that it can be bound as it is there.

    Parameters
    ----------
    layout : Layout
    layers : mapping of int to Heads
        Heads of each of these layers.
    blocks, positions : how many, and of how many positions each
    kv : {"f16", "f32"}
    provider : Provider
    """

    def __init__(self, layout: Layout, layers: Mapping[int, Heads], blocks: int, positions: int, kv: str,
                 provider: Provider):
        self.dtype, self.memory = FLOATS[kv], provider.memory
        self.paged = layout.attention == "paged"
        self.positions = positions
        self.blocks = blocks
        self.names = layout.names(layers)
        self.shapes = [layout.sizes(positions, heads) for heads in layers.values() for _ in range(2)]
        if self.memory != "cpu":
            take_as_asked()
        self._kept = [self._zeros(shape) for shape in self.shapes]

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        """Memory without NaNs: a weight of 0 times NaN is NaN."""
        zeros = np.zeros((self.blocks, *shape), self.dtype)
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
        slab = self._kept[number]
        start = slab.ctypes.data if self.memory == "cpu" else slab.data_ptr()
        return int(start) + block * int(np.prod(self.shapes[number])) * np.dtype(self.dtype).itemsize

    def bind(self, binding: Any, first: int = 0, count: int | None = None) -> None:
        """Bind a range of blocks, all of them by default, as a model's inputs and outputs."""
        for number, (past, present) in enumerate(self.names):
            self._bind(binding, number, past, first, present, first, self.blocks if count is None else count)

    def bind_copy(self, binding: Any, source: int, target: int) -> None:
        """Bind a block as the source of a copy, and another as its destination."""
        for number, (name, _) in enumerate(self.names):
            self._bind(binding, number, FROM + name, source, TO + name, target, 1)

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
        for number, (name, _) in enumerate(self.names):
            outer, inner, elements = self.shapes[number]
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
        like = self.memory, 0, self.dtype, [count, *self.shapes[number]]
        binding.bind_input(read, *like, self._address(number, source))
        binding.bind_output(written, *like, self._address(number, target))

    def heads_apart(self, numbers: Items[int]) -> int:
        """Return how many heads of these slabs are copied one after the other: those of slots."""
        return 1 if self.paged else max(self.shapes[number][0] for number in numbers)

    def close(self) -> None:
        """Free the memory."""
        self._kept = []
