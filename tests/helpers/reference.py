"""The oracle: a decoder's forward pass in plain NumPy, read off the graph and checked against transformers.

It knows the meaning of each operation and nothing of how edgeinfer computes it: no blocks, no tiles, no quantisation,
no cache. It imports NumPy alone; of a graph it only reads the instructions. Attention, experts and recurrent layers
have files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import recurrent_reference as recurrent
from .reference_attention import (
    attention,
    head_linear,
    latent_attention,
    quantize_heads,
    rope_store,
    rotate_queries,
    store_latent,
)
from .reference_experts import experts_down, experts_gated, experts_input, route, sort_routes
from .reference_parts import ACTIVATIONS, gated_values, normalised


def forward(
    graph: Any, tensors: Mapping[str, np.ndarray], ids: Sequence[int]
) -> np.ndarray:
    """Logits of one sequence, after every token.

    Parameters
    ----------
    graph : edgeinfer.graph.Graph
        Of any weight types; quantisation is ignored.
    tensors : mapping of str to array
        The checkpoint, by Hugging Face's names.
    ids : sequence of int, length T

    Returns
    -------
    float64 array of shape (T, vocab_size)
        All arithmetic is in float64: in float32, logits would depend on the order in which a processor's BLAS adds.
    """
    values: dict[str, np.ndarray] = {}
    state = _State(graph.config, tensors, np.asarray(ids))
    for op in graph.ops:
        inputs = [values[tensor.name] for tensor in op.inputs]
        result = OPS[op.name](state, op, *inputs)
        assert result.shape == (len(ids) * op.out.times, op.out.width), (op.label, result.shape)
        assert result.dtype == np.float64, op.label
        values[op.out.name] = result
    return values[graph.logits.name]


class _State:
    """State shared by the operations: the model, its tensors, the tokens, and the keys and values of each layer."""

    def __init__(self, config: Any, tensors: Mapping[str, np.ndarray], ids: np.ndarray):
        self.config, self.ids, self.dtype, self.context = config, ids, np.float64, len(ids)
        self._tensors = tensors
        self.stored: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.chosen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def parts(self, weight: Any) -> list[np.ndarray]:
        """The checkpoint tensors of a weight, in order."""
        return [self._part(source) for source in weight.sources]

    def _part(self, source: Any) -> np.ndarray:
        """A part of a checkpoint tensor: steps backwards over all its origins, then forwards over the values."""
        whole = self._tensor(source)[source.index].astype(self.dtype)
        whole = whole.reshape(-1) if source.name.endswith("A_log") else whole
        assert whole.shape == source.stored[len(source.index) :], source.name
        origins = [(np.arange(source.shape[0]), np.arange(math.prod(source.shape[1:])))]
        for step in reversed(source.steps):
            origins.append(step.origin(*origins[-1]))
        rows, columns = origins.pop()
        values = whole.reshape(len(whole), -1)[rows][:, columns]
        for step in source.steps:
            values = step.apply(values, *origins.pop(), lambda by, which: self._part(by)[which])
        return values.reshape(source.shape)

    def _tensor(self, source: Any) -> np.ndarray:
        """Readers by the architecture's name, or the checkpoint's where that differs."""
        name = source.name
        routers = (name.replace(".mlp.gate.", other) for other in (
            ".block_sparse_moe.router.", ".mlp.router.", ".router.proj.", ".feed_forward.gate.", ".mixer.gate."))
        biases = (name.replace(".mlp.gate.e_score_correction_bias", ".feed_forward.expert_bias"),
                  name.replace(".self_attn.", ".self_attn.forget_gate."))
        if ".mlp." in name and "_proj" in name and name not in self._tensors and "granite" in self.config.model_type:
            layer, part = name.replace("mlp.shared_experts.", "mlp.").split("mlp.")
            if part.startswith("down"):
                return self._tensors[layer + "shared_mlp.output_linear.weight"]
            return np.split(self._tensors[layer + "shared_mlp.input_linear.weight"], 2)[part.startswith("up")]
        names = (name, name.replace("model.", "model.language_model.", 1), name.replace("embed_out", "lm_head"),
                 name.replace("model.", "backbone.", 1),
                 *routers, *biases)
        return next(self._tensors[one] for one in names if one in self._tensors)

    def stacks(self, weight: Any) -> list[np.ndarray]:
        """Matrices of all experts for each source, as transformers 5 keeps them: gate and up in one tensor."""
        module = weight.sources[0].name.partition(".{}.")[0]
        if module + ".down_proj" not in self._tensors:
            blocks = (".block_sparse_moe.", ".", ".feed_forward.", ".mixer.")
            others = (*(module.replace(".mlp.", other) for other in blocks),
                      module.replace("model.", "model.language_model.", 1))
            module = next(other for other in others if other + ".down_proj" in self._tensors)
        if module + ".down_proj_bias" in self._tensors:
            return self._stacks_in_turns(weight, module)
        if len(weight.sources) == 1:
            return [self._tensors[module + ".down_proj"].astype(self.dtype)]
        if module + ".gate_up_proj" not in self._tensors:
            return [self._tensors[module + ".up_proj"].astype(self.dtype)] * 2
        return np.split(self._tensors[module + ".gate_up_proj"].astype(self.dtype), 2, axis=1)

    def _stacks_in_turns(self, weight: Any, module: str) -> list[np.ndarray]:
        """gpt-oss's: inputs are rows, and gates and ups take turns; biases by expert."""
        both, bias = len(weight.sources) == 2, "_bias" if weight.kind == "vector" else ""
        stack = self._tensors[f"{module}.{'gate_up' if both else 'down'}_proj{bias}"].astype(self.dtype)
        stack = stack if bias else stack.swapaxes(1, 2)
        return [stack[:, 0::2], stack[:, 1::2]] if both else [stack]

    def whole(self, weight: Any) -> np.ndarray:
        """The checkpoint tensors of a weight, one below the other."""
        return np.concatenate(self.parts(weight))


def embed(state: _State, op: Any) -> np.ndarray:
    return state.whole(op.weights[0])[state.ids]


def token_rows(state: _State, op: Any) -> np.ndarray:
    return state.whole(op.table)[state.ids]


def add_positions(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    return x + state.whole(op.table)[op.offset : op.offset + len(x)]


def activate(state: _State, op: Any, x: np.ndarray, *by: np.ndarray) -> np.ndarray:
    if op.columns:
        assert op.function == "scale"
        return x * state.dtype(op.factor) * state.whole(op.columns)
    if by:
        return ACTIVATIONS[op.function](x) * by[0][:, op.start : op.start + x.shape[1]]
    if op.function == "scale":
        return x * state.dtype(op.factor)
    if op.function == "soft_cap":
        return (op.factor * np.tanh(x / op.factor)).astype(state.dtype)
    return ACTIVATIONS[op.function](x)


def layer_norm(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    y = normalised(x - x.mean(axis=-1, keepdims=True), op.eps) * state.whole(op.weight)
    return y + state.whole(op.bias) if op.bias else y


def normed_sum(state: _State, op: Any, h: np.ndarray, x: np.ndarray) -> np.ndarray:
    parts = (len(h), op.parts, -1)
    y = x + (normalised(h.reshape(parts), op.eps) * state.whole(op.weight)).reshape(x.shape)
    return y * state.whole(op.scalar) if op.scalar else y


def norm_part(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    y, n = x.copy(), op.weight.shape[0]
    for start in range(op.start, op.start + op.pieces * n, n):
        part = x[:, start : start + n]
        part = part - part.mean(axis=-1, keepdims=True) if op.centred else part
        y[:, start : start + n] = normalised(part, op.eps) * state.whole(op.weight)
        if op.bias:
            y[:, start : start + n] += state.whole(op.bias)
    return y


def gather_outputs(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    return x


def quantize(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    return x


def rms_norm(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    return normalised(x, op.eps) * state.whole(op.weights[0])


def linear(state: _State, op: Any, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    """`rest` is the source that x was made from, and the residual stream, as far as there are any."""
    y = x @ state.whole(op.weight).T
    if op.bias:
        y = y + state.whole(op.bias)
    return rest[-1] + y if op.residual else y


def linear_part(state: _State, op: Any, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    """The product in its columns of the output; the others as they were."""
    y = rest[-1].copy() if op.onto else np.zeros((len(x), op.out.width), state.dtype)
    y[:, op.first : op.first + op.weight.shape[0]] = x @ state.whole(op.weight).T
    return y


def gated(state: _State, op: Any, x: np.ndarray, *source: np.ndarray) -> np.ndarray:
    gate, up = (x @ part.T for part in state.parts(op.weight))
    if op.bias:
        gate_bias, up_bias = state.parts(op.bias)
        gate, up = gate + gate_bias, up + up_bias
    return gated_values(op, gate, up)


def neuron_gated(state: _State, op: Any, x: np.ndarray, *source: np.ndarray) -> np.ndarray:
    *inner, _ = state.parts(op.weight)
    biases = np.split(state.whole(op.bias), len(inner)) if op.bias else (0, 0)
    values = [x @ part.T + bias for part, bias in zip(inner, biases, strict=False)]
    return gated_values(op, *values) if len(values) == 2 else ACTIVATIONS[op.activation](values[0])


def neuron_down(state: _State, op: Any, f: np.ndarray, *residual: np.ndarray) -> np.ndarray:
    f = normalised(f, op.eps) * state.whole(op.f_norm) if op.f_norm else f
    y = f @ state.parts(op.weight)[-1].T
    y = y + state.whole(op.bias) if op.bias else y
    return residual[0] + y if residual else y


def sigmoid_gate(state: _State, op: Any, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-gate))


def sample(state: _State, op: Any, logits: np.ndarray) -> np.ndarray:
    """Nothing here: tests of the sampler have an oracle of their own."""
    return np.zeros((len(logits), op.out.width), logits.dtype)


OPS = {f.__name__: f for f in (embed, token_rows, add_positions, activate, layer_norm, normed_sum, norm_part,
                               gather_outputs, quantize, rms_norm, linear, linear_part, gated, neuron_gated,
                               neuron_down, route, sort_routes, experts_input, experts_gated, experts_down,
                               sigmoid_gate, rope_store, rotate_queries, attention, quantize_heads, head_linear,
                               store_latent, latent_attention, sample, recurrent.causal_conv,
                               recurrent.delta_rule, recurrent.delta_rule_rows, recurrent.selective_scan,
                               recurrent.gated_norm)}
