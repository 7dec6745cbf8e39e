"""The KV cache in slots, one for each sequence: who holds which, and their memory, which never moves."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from edgeinfer.checks import shown
from edgeinfer.errors import RequestError
from edgeinfer.runner import Sequence

from .devices import Provider
from .flavour import Heads

FLOATS: dict[str, type[np.floating[Any]]] = {"f16": np.float16, "f32": np.float32}


class Pool:
    """Which slot belongs to which sequence; a sequence without tokens holds none."""

    def __init__(self, slots: int):
        self._owners: list[weakref.ref[Sequence] | None] = [None] * slots
        self._living: weakref.WeakSet[Sequence] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._owners)

    def new(self) -> Sequence:
        """Return an empty sequence."""
        sequence = Sequence()
        self._living.add(sequence)
        return sequence

    def check_own(self, sequence: Sequence) -> None:
        """Refuse a sequence of another runner: its slot means nothing here."""
        if sequence not in self._living:
            raise RequestError("The sequence belongs to another model that is open; a sequence is used where it was "
                               "made (new_sequence, fork, load).")

    def owner(self, slot: int) -> Sequence | None:
        """Who holds a slot."""
        found = self._owners[slot]
        return found() if found else None

    @property
    def n_free(self) -> int:
        """Slots that nobody holds, also those of sequences that are no more."""
        return sum(self.owner(slot) is None for slot in range(len(self)))

    def hold(self, sequence: Sequence) -> int:
        """Return the sequence's slot, the lowest free one where it has none yet; raises `RequestError` if all are held.
        """
        if not sequence.blocks:
            free = next((slot for slot in range(len(self)) if self.owner(slot) is None), None)
            if free is None:
                raise RequestError(f"All {len(self)} slots for sequences are held; release one, or open the model with "
                                   "a larger max_sequences.")
            self._owners[free] = weakref.ref(sequence)
            sequence.blocks.append(free)
        return sequence.blocks[0]

    def trim(self, sequence: Sequence) -> None:
        """Give the slot of a sequence without tokens back."""
        if not sequence.tokens and sequence.blocks:
            self._owners[sequence.blocks[0]] = None
            sequence.blocks.clear()

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n."""
        self.check_own(sequence)
        if not 0 <= n_tokens <= len(sequence.tokens):
            raise RequestError(f"Cannot cut a sequence of {len(sequence.tokens)} tokens to {shown(n_tokens)}.")
        del sequence.tokens[n_tokens:]
        if sequence.decoded is not None and sequence.decoded >= n_tokens:
            sequence.decoded = None
        self.trim(sequence)


def slot_bytes(layers: int, heads: Heads, ctx: int, kv: str) -> int:
    """Bytes of one slot in all layers."""
    return 2 * layers * heads.kv * ctx * heads.stored_dim * np.dtype(FLOATS[kv]).itemsize


class Slabs:
    """The memory of all slots: for K and V of each layer one slab of (slots, KV heads, context, elements of a head).

    A range of slots is a stretch of it, so that it can be bound as it lies there.
    """

    def __init__(self, layers: int, heads: Heads, slots: int, ctx: int, kv: str, provider: Provider):
        self.dtype, self.memory = FLOATS[kv], provider.memory
        self.shape = (slots, heads.kv, ctx, heads.stored_dim)
        self.names = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
        self._kept = [self._zeros() for _ in self.names]
        self._stride = heads.kv * ctx * heads.stored_dim * np.dtype(self.dtype).itemsize

    def _zeros(self) -> Any:
        """Memory without NaNs: a weight of 0 times NaN is NaN."""
        zeros = np.zeros(self.shape, self.dtype)
        if self.memory == "cpu":
            return zeros
        import onnxruntime

        return onnxruntime.OrtValue.ortvalue_from_numpy(zeros, self.memory, 0)

    def address(self, number: int, slot: int) -> int:
        """Where a slot begins in the slab of this number."""
        slab = self._kept[number]
        start = slab.ctypes.data if self.memory == "cpu" else slab.data_ptr()
        return int(start) + slot * self._stride

    def bind(self, binding: Any, first: int, count: int, inputs: str, outputs: str, target: int | None = None) -> None:
        """Bind slots as inputs and as outputs; `target`, where given, is the first of the slots that are written."""
        shape = [count, *self.shape[1:]]
        for number, name in enumerate(self.names):
            binding.bind_input(inputs + name, self.memory, 0, self.dtype, shape, self.address(number, first))
            binding.bind_output(outputs + name, self.memory, 0, self.dtype, shape,
                                self.address(number, first if target is None else target))

    def close(self) -> None:
        """Let go of the memory."""
        self._kept = []
