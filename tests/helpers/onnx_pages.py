"""A provider with attention over pages, where no GPU is: ONNX's reference evaluator behind onnxruntime's bindings.

It stands in where providers open models. Pages lie in memory that the runner took, and are read and written there;
models without such attention, which copy pages or have slots, run on
onnxruntime's own CPU provider.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import Provider
from tests.helpers.onnx_operators import OPERATORS

onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
ReferenceEvaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
PAGE = 16


class Binding:
    """Result of `InferenceSession.io_binding`."""

    def __init__(self) -> None:
        self.read: dict[str, Callable[[], np.ndarray]] = {}
        self.write: dict[str, Callable[[np.ndarray], None]] = {}

    def bind_input(self, name: str, memory: str, device: int, dtype: Any, shape: list[int], address: int) -> None:
        values = at(address, dtype, shape)
        self.read[name] = lambda: values

    def bind_output(self, name: str, memory: str, device: int, dtype: Any, shape: list[int], address: int) -> None:
        values = at(address, dtype, shape)

        def write(found: np.ndarray) -> None:
            assert found.dtype == values.dtype and found.shape == values.shape, name
            values[...] = found

        self.write[name] = write

    def bind_cpu_input(self, name: str, values: np.ndarray) -> None:
        self.read[name] = lambda: values

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.read[name] = value.numpy

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.write[name] = value.update_inplace


def at(address: int, dtype: Any, shape: list[int]) -> np.ndarray:
    """Return the array at an address."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


class ReferenceSession:
    """Substitute of `InferenceSession` for a runner; as strict as the CUDA provider about graphs and bounds."""

    def __init__(self, model: str):
        proto = onnx.load(model)
        self._inputs = {value.name: value.type.tensor_type for value in proto.graph.input}
        self._outputs = [value.name for value in proto.graph.output]
        self._run = ReferenceEvaluator(proto, new_ops=OPERATORS).run
        self.calls: list[dict[str, np.ndarray]] = []
        """Inputs of each run, except for the pages."""
        self.threads: set[threading.Thread] = set()
        """Threads that called run."""
        self.recorded: dict[str, tuple[Binding, dict[str, tuple[int, ...]]]] = {}

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        self.threads.add(threading.current_thread())
        if options.terminate:
            raise RuntimeError("Exiting due to terminate flag being set to true.")
        given = {name: read() for name, read in binding.read.items()}
        assert given.keys() == self._inputs.keys()
        assert set(self._outputs) - binding.write.keys() <= {"top_logits", "top_ids"}, "steps alone ask for these"
        self._check(given)
        self.calls.append({name: values.copy() for name, values in given.items() if "_cache." not in name})
        for _ in range(self._times(binding, options, {name: values.shape for name, values in given.items()})):
            found = dict(zip(self._outputs, self._run(self._outputs, given), strict=True))
            for name, write in binding.write.items():
                write(np.ascontiguousarray(found[name]))

    def _check(self, given: dict[str, np.ndarray]) -> None:
        """Check the preconditions of kernels: types, ranks, bounds, and pages that exist."""
        for name, values in given.items():
            declared = self._inputs[name]
            assert values.dtype == onnx.helper.tensor_dtype_to_np_dtype(declared.elem_type), name
            assert values.ndim == len(declared.shape.dim), name
        ends, past, table = (given[name] for name in ("cumulative_sequence_length", "past_seqlens", "block_table"))
        new, (tokens, most, least) = np.diff(ends), given["attention_metadata"]
        assert ends[0] == 0 and ends[-1] == len(given["input_ids"]) and (new > 0).all()
        assert len(past) == len(table) == len(new)
        assert new.max() <= tokens and least <= (past + new).max() <= min(most, PAGE * table.shape[1])
        assert table.min() >= 0 and table.max() < len(given["key_cache.0"])
        spare = len(given["key_cache.0"]) - 1  # idle rows of a step write there, all the same
        written = [page for row, start, count in zip(table, past, new, strict=True)
                   for page in set(row[start // PAGE : (start + count - 1) // PAGE + 1].tolist()) - {spare}]
        assert len(written) == len(set(written)), "two sequences write to one page"

    def _times(self, binding: Binding, options: Any, shapes: dict[str, tuple[int, ...]]) -> int:
        """Return how often a run executes the model: three times when a graph is recorded, which then holds its inputs.
        """
        try:
            graph = options.get_run_config_entry("gpu_graph_id")
        except RuntimeError:  # a provider without graphs
            return 1
        if graph == "-1":
            return 1
        assert graph in self.recorded or all(binding is not other for other, _ in self.recorded.values())
        first = graph not in self.recorded
        assert self.recorded.setdefault(graph, (binding, shapes)) == (binding, shapes), "another graph's number"
        return 3 if first else 1


class PagedProvider(Provider):
    """onnxruntime's CPU provider, if it had attention over pages; with graphs."""

    def open(self, model: str, threads: int) -> Any:
        nodes = onnx.load(model, load_external_data=False).graph.node
        paged = any(node.op_type == "PagedAttention" for node in nodes)
        return ReferenceSession(model) if paged else super().open(model, threads)


PAGED = PagedProvider("onnx-cpu", "CPUExecutionProvider", "cpu", {}, {}, ("f32",), True, PAGE)
