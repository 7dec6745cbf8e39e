"""A decode step of several sequences: all is bound once, so that CUDA can record it as a graph and replay it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .flavour import ON_CPU
from .sessions import Sessions
from .topk_sampling import RETURNED_LOGITS


def step_outputs(vocab_size: int) -> dict[str, tuple[int, type[Any]]]:
    """Return the outputs of a step for each sequence: length of a row and its type, by name."""
    best = min(RETURNED_LOGITS, vocab_size)
    return {"logits": (vocab_size, np.float32), "top_logits": (best, np.float32), "top_ids": (best, np.int64)}


def step_size(sequences: int, most: int) -> int:
    """Return how many sequences the step has that runs this many: 1, 2, 3, 4, 6, 8, 12, 16, ..., or `most`.

    Steps are recorded once for each size, so that few graphs serve all numbers and at most a third of a step is idle.
    """
    power = 1 << (sequences - 1).bit_length()
    half = 3 * power // 4
    return min(half if sequences <= half and power > 2 else power, most)


def step_sizes(most: int) -> list[int]:
    """Return all sizes of steps of up to `most` sequences."""
    return sorted({step_size(sequences, most) for sequences in range(1, most + 1)})


class Step:
    """One token of each of several sequences.

    A graph replays the same addresses and counts, so inputs are written into buffers that stay, and logits come for all
    sequences: the best of each row, and all of them where these are not enough; outputs that are not requested stay on
    the device. The first run of a graph runs the model several times, which does no harm: the rows written to the cache
    are the same each time.

    Parameters
    ----------
    sessions : Sessions
    inputs : mapping of str to array
        All inputs but those of the KV cache, with the sizes of every step.
    outputs : mapping of str to onnxruntime.OrtValue
        Destination of the outputs that `step_outputs` names, with a row for each of `output_rows`: once read, the
        next step may overwrite them.
    graph : int
        A number of its own, from 1 on.
    """

    def __init__(self, sessions: Sessions, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, Any], graph: int):
        from onnxruntime import OrtValue

        memory = sessions.provider.memory
        self.graph, self._outputs = graph, outputs
        self.binding = sessions.model.io_binding()
        self._inputs = {name: OrtValue.ortvalue_from_numpy(values, "cpu" if name in ON_CPU else memory, 0)
                        for name, values in inputs.items()}
        self.bind_inputs()
        for name, value in self._outputs.items():
            self.binding.bind_ortvalue_output(name, value)

    def bind_inputs(self) -> None:
        """Bind the inputs as they are now."""
        for name, value in self._inputs.items():
            self.binding.bind_ortvalue_input(name, value)

    def write(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Write the inputs that differ from step to step."""
        for name, values in inputs.items():
            self._inputs[name].update_inplace(values)

    def logits(self) -> NDArray[np.float32]:
        """Return those of the step, a row for each sequence."""
        return np.asarray(self._outputs["logits"].numpy())

    def best(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the largest logits of each row and their tokens, (rows, best) both; NaN where some are not finite."""
        return np.asarray(self._outputs["top_logits"].numpy()), np.asarray(self._outputs["top_ids"].numpy())
