"""Activation hooks: a model's own program, stopped after chosen operations so that NumPy may read, or change, their
outputs.

Calibrations and measurements get activations from here: all threads, the kernels that run the
model, no second implementation of it. A pass goes through the program in ranges of instructions, each of which ends
after a hooked operation; there the rows of its output and of its inputs still are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.graph import Op, Tensor
from edgeinfer.kernels import abi, reference
from edgeinfer.runner import DECODE, Cancellation, Runner, Segment, plain_segments
from edgeinfer.runner import Sequence as Tokens

from ..base.progress import OnStageProgress
from ..runtime import Session

Floats = NDArray[np.float32]


class View:
    """The activations of a forward pass that stands still; valid until its hook returns."""

    def __init__(self, session: Session, tokens: int):
        self.tokens = tokens
        """Tokens of the forward pass."""
        self._session = session

    def floats(self, tensor: Tensor) -> Floats:
        """Return f32 rows in place, of shape (tokens, width), or more of a tensor with several rows for each token: the
        model continues with the values written there.
        """
        if tensor.dtype != "f32":
            raise UsageError(f"The tensor {tensor} is not stored in f32, so it cannot be changed in place.")
        rows = self.tokens * tensor.times
        memory = self._memory(tensor)[: rows * self._session.plan.allocations[tensor.name].stride]
        return memory.view(np.float32).reshape(rows, -1)[:, : tensor.width]

    def words(self, tensor: Tensor, count: int) -> NDArray[np.int32]:
        """Return the first words of a tensor that is a list, such as that of tokens by expert."""
        return self._memory(tensor)[: 4 * count].view(np.int32)

    def _memory(self, tensor: Tensor) -> NDArray[np.uint8]:
        """Return the memory from a tensor on."""
        allocation = self._session.plan.allocations[tensor.name]
        return self._session.executor.regions[allocation.region][allocation.offset :]

    def values(self, tensor: Tensor) -> Floats:
        """Return a copy of the rows, of shape (tokens, width); quantised ones as the matmuls see them."""
        if tensor.dtype == "f32":
            return self.floats(tensor).copy()
        allocation, group = self._session.plan.allocations[tensor.name], tensor.group_size
        address = self._session.executor.regions[allocation.region].ctypes.data + allocation.offset
        _, padded, offsets = abi.q8_row_bytes(tensor.width, group)
        tiles = self._session.executor.kernels.isa.token_tiles
        blocks = reference.q8_blocks(address, self.tokens, allocation.stride, padded, offsets, group, tiles)
        codes, scales = reference.read_q8(blocks)
        values = codes.reshape(self.tokens, -1, group) * scales[:, :, None]
        return np.ascontiguousarray(values.reshape(self.tokens, -1)[:, : tensor.width], np.float32)


Hook = Callable[[View], None]
"""Called where a forward pass is after a hooked operation."""


class HookedRunner(Runner):
    """A runner whose forward passes, of one sequence at a time, stop for hooks.

    Parameters
    ----------
    session : Session
        With a recipe that leaves no operation out where a forward pass has one token; see `open_plain`.
    hooks : mapping of Op to a sequence of Visit
        Hooks by the operations of the session's graph after which they are called.
    role : int, optional
        Of all tokens: statistics of decoding are those of tokens in decode role, however many a forward pass has.
    whole : bool
        Whether the instructions after the last hook run too; without them a forward pass's logits mean nothing.
    """

    def __init__(self, session: Session, hooks: Mapping[Op, Sequence[Hook]], role: int = DECODE, whole: bool = True):
        if any(op.several for op in session.graph.ops):
            raise UsageError(f"The recipe {session.config.recipe} leaves operations out where a forward pass has one "
                             "token, so "
                             "their activations cannot be read; take the recipe none.")
        self.model, self.config, self.plan = session.model, session.config, session.plan
        self._session, self._role = session, role
        last = {instruction.op: i + 1 for i, instruction in enumerate(session.program.instructions)
                if instruction.op is not None and instruction.op in hooks}
        if missing := [op.label for op in hooks if op not in last]:
            raise UsageError(f"The program has no operation {missing[0]}, which was to be hooked.")
        self._stages = [(stop, tuple(hooks[op])) for op, stop in last.items() if hooks[op]]
        if whole:
            self._stages.append((len(session.program.instructions), ()))

    def forward(self, segments: Sequence[Segment], cancel: Cancellation | None = None) -> Floats:
        """Run one segment as `Runner.forward` does, calling the hooks on the way."""
        segments = plain_segments(segments)
        if len(segments) != 1:
            raise RequestError(f"{len(segments)} sequences are run together; hooks take one at a time.")
        segment = segments[0]._replace(role=self._role)
        view, start, logits = View(self._session, len(segment.ids)), 0, np.zeros((0, 0), np.float32)
        self._session.reserve(segment.sequence, len(segment.ids))
        try:
            for stop, hooks in self._stages:
                logits = self._session.forward_range(segment, start, stop, 0, cancel)
                start = stop
                for hook in hooks:
                    hook(view)
        except BaseException:
            self._session.truncate(segment.sequence, len(segment.sequence))
            raise
        self._session.append(segment.sequence, segment.ids)
        return logits

    def new_sequence(self) -> Tokens:
        """Return an empty sequence."""
        return self._session.new_sequence()

    def fork(self, sequence: Tokens) -> Tokens:
        """Return a copy that goes its own way."""
        return self._session.fork(sequence)

    def truncate(self, sequence: Tokens, n_tokens: int) -> None:
        """Forget all tokens but the first n."""
        self._session.truncate(sequence, n_tokens)

    def can_truncate(self, sequence: Tokens, n_tokens: int) -> int:
        """Return how many of the first n tokens can be kept."""
        return self._session.can_truncate(sequence, n_tokens)

    def close(self) -> None:
        """Close the session."""
        self._session.close()


def open_plain(path: str | Path, window: int, threads: int | None = None, *, host: Session | None = None,
               outputs: int = 1, chunk: int = 256, kv: str = "int8", loading: OnStageProgress | None = None,
               progress: OnStageProgress | None = None) -> Session:
    """Open a bundle in a session whose activations can all be read: no pass has changed its graph.

    Parameters
    ----------
    window : longest sequence
    host : lends its threads
    outputs : rows of logits of a forward pass, 1 if only activations are wanted
    chunk : tokens of a forward pass
    """
    config = RuntimeConfig(ctx=window, kv=kv, threads=threads, outputs=outputs, prefill_chunk=min(chunk, window),
                           recipe=Recipe(()))
    return Session(Bundle.open(path), config, progress, loading, host)
