"""ONNX models run by onnxruntime's CPU provider or by ONNX's own evaluator, and the tensors that a bundle means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from edgeinfer.backends import Flavour, import_onnxruntime
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe
from edgeinfer.graph import Graph, build_graph, expected_types
from edgeinfer.quant import layouts
from tests.helpers import reference
from tests.helpers.bundles import tensor_bytes

FLOATS = {"f16": np.float16, "f32": np.float32}
CLOSE = 0.002
"""Change of a router's logits by rounding to f16, as a share of the largest."""


def graph_of(bundle: Bundle) -> Graph:
    """The graph that is exported."""
    return build_graph(bundle.config, expected_types(bundle.types), Recipe(()))


class _Stored(reference._State):
    """The oracle's state, whose weights are those that a bundle's codes and scales stand for."""

    bundle: Bundle
    vectors: Any = np.float32
    """Floats that norms, biases and factors are rounded to."""

    def parts(self, weight: Any) -> list[np.ndarray]:
        """Matrices or vectors of a weight that are not side by side, without padding."""
        stored, data = self.bundle.types[weight.name], tensor_bytes(self.bundle, weight.name)
        shapes = [source.shape for source in weight.sources]
        if stored.layout == "neuron":
            values = layouts.unpack_neuron(data, stored.dtype, stored.group_size, weight.shape).astype(self.dtype)
            return [*(values[:, i] for i in range(values.shape[1] - 1)), values[:, -1].T]
        whole = data.view(np.float32).astype(self.vectors) if stored.layout == "plain" else layouts.unpack_tile16(
            data, stored.dtype, stored.group_size, weight.shape, stored.levels)
        whole = whole.astype(self.dtype)
        if weight.combine == "folded16":
            return [whole.reshape(-1, 16 * whole.shape[1])[:, : shapes[0][1]]]
        if weight.combine == "interleave16":
            tiles = whole.reshape(-1, 2, 16, *whole.shape[1:])
            return [tiles[:, i].reshape(-1, *whole.shape[1:])[: shapes[i][0]] for i in range(2)]
        return np.split(whole, np.cumsum([shape[0] for shape in shapes])[:-1])

    def stacks(self, weight: Any) -> list[np.ndarray]:
        """Matrices or biases of all experts, without padding."""
        stored, n = self.bundle.types[weight.name], len(weight.sources)
        data, (experts, rows) = tensor_bytes(self.bundle, weight.name), weight.sources[0].shape[:2]
        whole = data.view(np.float32).astype(self.vectors) if stored.layout == "plain" else layouts.unpack_tile16(
            data, stored.dtype, stored.group_size, weight.shape, stored.levels)
        tiles = whole.astype(self.dtype).reshape(experts, -1, n, 16, *whole.shape[1:])
        return [tiles[:, :, i].reshape(experts, -1, *whole.shape[1:])[:, :rows] for i in range(n)]


def expected(bundle: Bundle, ids: Sequence[int], vectors: Any = np.float32) -> np.ndarray:
    """The oracle's logits after every token, with the weights that the bundle's codes stand for."""
    with mock.patch.object(reference, "_State", type("_OfBundle", (_Stored,), {"bundle": bundle, "vectors": vectors})):
        return reference.forward(graph_of(bundle), {}, ids)


def expected_surely(bundle: Bundle, ids: Sequence[int], close: float = CLOSE) -> tuple[np.ndarray, int]:
    """As `expected`, and the number of tokens before the first whose experts would be others if the logits of a router
    changed by so much, as a share of the largest: rounding may choose those, and then nothing can be compared.
    """
    rng, sure, original = np.random.default_rng(1), np.ones(len(ids) + 1, bool), reference.OPS["route"]

    def route(state: Any, op: Any, logits: np.ndarray) -> np.ndarray:
        size = close * np.abs(logits).max()
        changed = list[np.ndarray]()
        for _ in range(16):
            original(state, op, logits + size * rng.choice((-1.0, 1.0), logits.shape))
            changed.append(state.chosen[op.layer][0])
        result = original(state, op, logits)
        sure[:-1] &= np.all(np.array(changed) == state.chosen[op.layer][0], axis=(0, 2))
        return result

    with mock.patch.dict(reference.OPS, route=route):
        logits = expected(bundle, ids)
    sure[-1] = False
    return logits, int(np.argmin(sure))


def expected_in_f16(bundle: Bundle, ids: Sequence[int], kind: Any = np.float16) -> np.ndarray:
    """As `expected`, but vectors and what each operation leaves are rounded to f16, or another kind of floats, and
    everything within it is exact.
    """

    def rounded(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def run(state: Any, op: Any, *inputs: np.ndarray) -> np.ndarray:
            result = operation(state, op, *inputs).astype(kind).astype(state.dtype)
            if op.layer in state.stored:
                state.stored[op.layer] = tuple(x.astype(kind).astype(x.dtype) for x in state.stored[op.layer])
            return result
        return run

    with mock.patch.dict(reference.OPS, {name: rounded(operation) for name, operation in reference.OPS.items()}):
        return expected(bundle, ids, kind)


def data_of(model: Path) -> Path:
    """The one file of data beside a model."""
    (data,) = model.parent.glob(f"{model.stem}.*.data")
    return data


def difference(logits: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest logit."""
    assert logits.shape == want.shape
    return float(np.abs(logits - want).max() / np.abs(want).max())


def cpu_session(model: Path) -> Any:
    """Open a model on onnxruntime's CPU provider."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


class Slots:
    """A model of attention gqa with KV and states of some sequences; `feed` runs it over new tokens of some of them."""

    def __init__(self, model: Path, flavour: Flavour, slots: int = 1):
        self._session, self.lengths = cpu_session(model), [0] * slots
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._past = {value.name: self._zeros(value, flavour, slots) for value in self._session.get_inputs()
                      if value.name.startswith("past_")}

    @staticmethod
    def _zeros(value: Any, flavour: Flavour, slots: int) -> np.ndarray:
        shape = [flavour.ctx if size == "slot" else size for size in value.shape[1:]]
        return np.zeros((slots, *shape), FLOATS[{"tensor(float16)": "f16", "tensor(float)": "f32"}[value.type]])

    def feed(self, tokens: Sequence[Sequence[int]], slots: Sequence[int] | None = None,
             idle: Sequence[int] = ()) -> list[np.ndarray]:
        """All outputs for every new token: several of one slot, or one each of several; `idle` slots stay as they are.
        """
        chosen = list(slots if slots is not None else range(len(tokens)))
        ids = np.array(tokens, np.int64)
        ends = np.array([self.lengths[slot] for slot in chosen]) + ids.shape[1]
        given = {"input_ids": ids, "seqlens_k": (ends - 1).astype(np.int32),
                 "total_sequence_length": np.array([ends.max()], np.int32), "output_rows": np.arange(ids.size),
                 "cumulative_sequence_length": ids.shape[1] * np.arange(len(ids) + 1, dtype=np.int32),
                 "active": np.array([slot not in idle for slot in chosen], np.int32)}
        names = [value.name for value in self._session.get_outputs()]
        past = {name: values[chosen] for name, values in self._past.items()}
        given = {name: values for name, values in given.items() if name in self._inputs}
        found = dict(zip(names, self._session.run(names, given | past), strict=True))
        for name, values in self._past.items():
            values[chosen] = found[name.replace("past_key_values", "present").replace("past", "present")]
        for slot, end in zip(chosen, ends, strict=True):
            self.lengths[slot] = int(end) - (slot in idle)
        return [found[name] for name in names if not name.startswith("present")]

    def chunks(self, ids: Sequence[int], size: int, slot: int = 0) -> np.ndarray:
        """Logits after every token of a prompt that goes through in chunks, from the slot's beginning."""
        self.lengths[slot] = 0
        for name, values in self._past.items():
            values[slot] = values[slot] if name.startswith("past_key_values") else 0
        return np.concatenate([self.feed([ids[i : i + size]], [slot])[0] for i in range(0, len(ids), size)])
