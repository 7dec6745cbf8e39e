"""Forward passes as calls of an ONNX model: chunks of a prompt, and decoding steps whose tensors are bound once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runner import Segment, Sequence

from .caller import NO_GRAPH
from .sessions import Sessions
from .slabs import Slabs
from .step import Step, step_outputs
from .topk_sampling import choose

Inputs = dict[str, NDArray[Any]]


class Call(NamedTuple):
    """A run of the model that is ready."""

    binding: Any
    graph: int
    targets: list[int]
    """Rows of the forward pass whose logits it gives."""
    logits: Callable[[], NDArray[np.float32]]
    """Returns these rows, once it ran; NaN, in one column, where the tokens of all of them were chosen instead."""
    changes: tuple[Sequence, ...] = ()
    """Sequences whose recurrent states it changes."""
    commit: Callable[[], None] | None = None
    """Moves these states to their slot, once it ran; None: they are changed there while it runs."""

    @property
    def in_place(self) -> bool:
        """True if it cannot be undone, nor cancelled."""
        return bool(self.changes) and not self.commit


class Calls(abc.ABC):
    """Calls of onnxruntime in a forward pass.

    Parameters
    ----------
    sessions : Sessions
    slabs : Slabs
    outputs, vocab_size : maximum number of logits rows of a forward pass, and their length
    """

    def __init__(self, sessions: Sessions, slabs: Slabs, outputs: int, vocab_size: int):
        self.sessions, self.slabs = sessions, slabs
        self._staged = np.zeros((max(outputs, 1), vocab_size), np.float32)
        self._bound: dict[int, Any] = {}
        self._steps: dict[tuple[int, int], Step] = {}
        self._outputs: dict[int, dict[str, Any]] = {}
        """Outputs of steps by number of sequences; steps with the same number share them."""
        self._given: Inputs = {}

    @abc.abstractmethod
    def of(self, segments: Items[Segment]) -> Iterator[Call]:
        """Yield the calls of a pass, each to be run before the next; its sequences have room for their tokens."""

    def _several(self, inputs: Inputs, rows: list[int], targets: list[int], first: int = 0,
                 count: int | None = None) -> Call:
        """A call whose inputs have sizes of their own, over a range of blocks.

        `rows` are those of its tokens whose logits become rows `targets` of the forward pass.
        """
        rows = rows or [inputs["input_ids"].size - 1]  # none at all would be a matmul without rows
        binding = self._bound.get(first)
        if binding is None:
            binding = self._bound[first] = self.sessions.model.io_binding()
            self.slabs.bind(binding, first, count)
        elif self.sessions.provider.partial:
            self.slabs.bind(binding, first, count)
        self._given = {**inputs, "output_rows": np.array(rows, np.int64)}  # kept until they were read
        for name, values in self._given.items():
            binding.bind_cpu_input(name, values)
        binding.bind_output("logits", "cpu", 0, np.float32, [len(rows), self._staged.shape[1]],
                            self._staged.ctypes.data)
        return Call(binding, NO_GRAPH, targets, lambda: self._staged[: len(targets)])

    def _one_each(self, key: tuple[int, int], inputs: Inputs, rows: list[int], targets: list[int],
                  sample_specs: list[tuple[int, int]], bound: Callable[[], Inputs], first: int = 0,
                  count: int | None = None) -> Call:
        """A step, one token of each of several sequences, whose inputs have the sizes of all steps of this key.

        `inputs` differ from step to step; `bound` gives all of them when the first step is bound.
        `sample_specs` are those of the rows, as `sampled` returns them.
        """
        step = self._steps.get(key)
        if step is None:
            given = bound()
            step = Step(self.sessions, given, self._outputs_of(len(given["output_rows"])), len(self._steps) + 1)
            self.slabs.bind(step.binding, first, count)
            self._steps[key] = step
        step.write(inputs)
        if self.sessions.provider.partial:  # onnxruntime copies arrays that are elsewhere when they are bound
            step.bind_inputs()
            self.slabs.bind(step.binding, first, count)
        return Call(step.binding, step.graph, targets, lambda: _rows_of(step, rows, sample_specs))

    def _outputs_of(self, count: int) -> dict[str, Any]:
        """Memory of the device for the outputs of steps of this many sequences."""
        from onnxruntime import OrtValue

        if count not in self._outputs:
            make, memory = OrtValue.ortvalue_from_shape_and_type, self.sessions.provider.memory
            self._outputs[count] = {name: make([count, width], kind, memory, 0)
                                    for name, (width, kind) in step_outputs(self._staged.shape[1]).items()}
        return self._outputs[count]

    def close(self) -> None:
        """Release the bound arrays."""
        self._bound.clear()
        self._steps.clear()
        self._outputs.clear()
        self._staged = self._staged[:0]


def _rows_of(step: Step, rows: list[int], sample_specs: list[tuple[int, int]]) -> NDArray[np.float32]:
    """Return rows of a step, unless their tokens can be chosen without."""
    addresses, positions = zip(*sample_specs, strict=True)
    if any(addresses):
        values, ids = step.best()
        if choose(addresses, values[rows], ids[rows], np.array(positions)):
            return np.full((len(rows), 1), np.nan, np.float32)
    return step.logits()[rows]
