"""A decode step over a range of slots: all is bound once, so that CUDA can record it as a graph and replay it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .devices import Provider
from .slots import Slabs

PAST, PRESENT = "past_key_values.", "present."


def run_options(provider: Provider, graph: int = -1) -> Any:
    """Return options of a run: of the graph with this number where the provider has graphs, else of none."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # what goes wrong is raised, and said once
    if provider.graphs:
        options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


class Step:
    """One token of each of several slots that lie side by side.

    A graph replays the same addresses and counts, so ids and lengths are written into buffers that stay, and logits
    come for all slots. The first run of a graph runs the model several times, which does no harm: what is written to
    the cache is the same each time.

    Parameters
    ----------
    session : onnxruntime.InferenceSession
    provider : Provider
    slabs : Slabs
    first, count : of the slots
    vocab_size : int
    graph : int
        A number of its own, from 1 on.
    """

    def __init__(self, session: Any, provider: Provider, slabs: Slabs, first: int, count: int, vocab_size: int,
                 graph: int):
        from onnxruntime import OrtValue

        def kept(values: NDArray[Any], memory: str = provider.memory) -> Any:
            return OrtValue.ortvalue_from_numpy(values, memory, 0)

        self.options = run_options(provider, graph)
        self.binding = session.io_binding()
        slabs.bind(self.binding, first, count, PAST, PRESENT)
        self._ids, self._ends = kept(np.zeros((count, 1), np.int64)), kept(np.zeros(count, np.int32))
        self._longest = kept(np.array([slabs.shape[2]], np.int32), "cpu")
        self._logits = OrtValue.ortvalue_from_shape_and_type([count, vocab_size], np.float32, provider.memory, 0)
        self._fixed = provider.graphs
        inputs = {"input_ids": self._ids, "seqlens_k": self._ends, "total_sequence_length": self._longest,
                  "output_rows": kept(np.arange(count))}
        for name, value in inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        self.binding.bind_ortvalue_output("logits", self._logits)

    def write(self, ids: NDArray[np.int64], ends: NDArray[np.int32]) -> None:
        """Write the tokens of a step, (count, 1), and the positions of each slot, these included, (count,)."""
        self._ids.update_inplace(ids)
        self._ends.update_inplace(ends - 1)
        if not self._fixed:  # a graph was recorded with the slots' length, which gives the same and costs more here
            self._longest.update_inplace(ends.max(keepdims=True))

    def logits(self) -> NDArray[np.float32]:
        """Return those of the step: (count, vocab_size)."""
        return np.asarray(self._logits.numpy())
