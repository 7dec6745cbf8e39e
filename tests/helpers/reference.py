"""The oracle: a decoder's forward pass in plain NumPy, read off the graph and checked against transformers.

It knows the meaning of each operation and nothing of how edgeinfer computes it: no blocks, no tiles, no quantisation,
no cache. It imports NumPy alone; of a graph it only reads the instructions. Recurrent layers are in
recurrent_reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import recurrent_reference as recurrent


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
        """By the architecture's name, or what the checkpoint calls it where that differs."""
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
    y = _normalised(x - x.mean(axis=-1, keepdims=True), op.eps) * state.whole(op.weight)
    return y + state.whole(op.bias) if op.bias else y


def normed_sum(state: _State, op: Any, h: np.ndarray, x: np.ndarray) -> np.ndarray:
    parts = (len(h), op.parts, -1)
    y = x + (_normalised(h.reshape(parts), op.eps) * state.whole(op.weight)).reshape(x.shape)
    return y * state.whole(op.scalar) if op.scalar else y


def norm_part(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    y, n = x.copy(), op.weight.shape[0]
    for start in range(op.start, op.start + op.pieces * n, n):
        part = x[:, start : start + n]
        part = part - part.mean(axis=-1, keepdims=True) if op.centred else part
        y[:, start : start + n] = _normalised(part, op.eps) * state.whole(op.weight)
        if op.bias:
            y[:, start : start + n] += state.whole(op.bias)
    return y


def gather_outputs(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    return x


def quantize(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    return x


def rms_norm(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    return _normalised(x, op.eps) * state.whole(op.weights[0])


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
    return _gated(op, gate, up)


def _gated(op: Any, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if op.activation == "drelu":
        return np.maximum(gate, 0) * np.maximum(up, 0)
    if op.activation == "swiglu_oai":
        gate, up = np.minimum(gate, op.limit), np.clip(up, -op.limit, op.limit)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate)).astype(gate.dtype)
    if op.activation == "fatrelu":
        return np.where(gate > op.limit, gate, 0).astype(gate.dtype) * up
    return ACTIVATIONS[op.activation](gate) * up


def neuron_gated(state: _State, op: Any, x: np.ndarray, *source: np.ndarray) -> np.ndarray:
    *inner, _ = state.parts(op.weight)
    biases = np.split(state.whole(op.bias), len(inner)) if op.bias else (0, 0)
    values = [x @ part.T + bias for part, bias in zip(inner, biases, strict=False)]
    return _gated(op, *values) if len(values) == 2 else ACTIVATIONS[op.activation](values[0])


def neuron_down(state: _State, op: Any, f: np.ndarray, *residual: np.ndarray) -> np.ndarray:
    y = f @ state.parts(op.weight)[-1].T
    y = y + state.whole(op.bias) if op.bias else y
    return residual[0] + y if residual else y


def route(state: _State, op: Any, logits: np.ndarray) -> np.ndarray:
    """Experts of each token, ascending, and what their outputs are multiplied by."""
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = e / e.sum(axis=1, keepdims=True) if op.scores == "softmax" else 1 / (1 + np.exp(-logits))
    values = scores + state.whole(op.bias) if op.bias else scores
    groups = values.reshape(len(values), op.groups, -1)
    worth = np.sort(groups, axis=2)[..., -op.group_best :].sum(axis=2)
    closed = np.argsort(-worth, axis=1, kind="stable")[:, op.active_groups :]
    for token, out in enumerate(closed):
        groups[token, out] = -np.inf
    ids = np.sort(np.argsort(-groups.reshape(values.shape), axis=1, kind="stable")[:, : op.active], axis=1)
    weights = np.take_along_axis(scores, ids, axis=1)
    if op.normalise:
        weights = weights / weights.sum(axis=1, keepdims=True)
    if op.factors:
        weights = weights * state.whole(op.factors)[ids]
    state.chosen[op.layer] = ids, (weights * np.array(op.scale, state.dtype))
    return np.zeros((len(logits), op.out.width), state.dtype)


def sort_routes(state: _State, op: Any, routes: np.ndarray) -> np.ndarray:
    return np.zeros((len(routes), op.out.width), state.dtype)


def experts_input(state: _State, op: Any, x: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """A row for each token and expert, here token by token."""
    return x if len(x) > len(listed) else np.repeat(x, op.active, axis=0)


def experts_gated(state: _State, op: Any, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    gates, ups = state.stacks(op.weight)
    experts = state.chosen[op.layer][0].reshape(-1)
    inner, outer = state.stacks(op.bias) if op.bias else np.zeros((2, len(gates), 1), state.dtype)
    return np.stack([_gated(op, gates[e] @ row + inner[e], ups[e] @ row + outer[e])
                     for e, row in zip(experts, x, strict=True)])


def experts_down(state: _State, op: Any, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    (downs,), (experts, weights) = state.stacks(op.weight), state.chosen[op.layer]
    biases = state.stacks(op.bias)[0] if op.bias else np.zeros((len(downs), 1), state.dtype)
    y = np.stack([downs[e] @ row + biases[e] for e, row in zip(experts.reshape(-1), x, strict=True)])
    y = (y.reshape(*experts.shape, -1) * weights[..., None]).sum(axis=1)
    return rest[-1] + y if op.residual else y


def sigmoid_gate(state: _State, op: Any, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-gate))


def rope_store(state: _State, op: Any, qkv: np.ndarray) -> np.ndarray:
    """Rotate q and k; element i of a head turns with element i + head_dim / 2."""
    widths = np.cumsum([op.heads * op.head_dim, op.kv_heads * op.head_dim, op.kv_heads * op.head_dim])
    *parts, beside = np.split(qkv, widths, axis=1)
    q, k, v = (part.reshape(len(qkv), -1, op.head_dim) for part in parts)
    if op.keys_as_values:
        v = k
    if op.value_norm:
        v = _normalised(v, op.eps)
    if op.weights:
        q, k = (_normalised(x, op.eps) * state.whole(w) for x, w in zip((q, k), op.weights, strict=True))
    q, k = (_turned(state, op, x) for x in (q, k))
    state.stored[op.layer] = k, v
    return np.concatenate([*(x.reshape(len(qkv), -1) for x in (q, k, v)), beside], axis=1)


def rotate_queries(state: _State, op: Any, q: np.ndarray) -> np.ndarray:
    """The same of queries alone, or of those that stand beside keys and values."""
    q, beside = np.split(q, [op.heads * op.head_dim], axis=1)
    heads = q.reshape(len(q), -1, op.head_dim)
    heads = _normalised(heads, op.eps) * state.whole(op.q_norm) if op.q_norm else heads
    return np.concatenate([_turned(state, op, heads).reshape(q.shape), beside], axis=1)


def _turned(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    """Heads whose pairs have turned; of a proportional rotation (Gemma 4) most pairs of whole heads stand still."""
    if not op.rotary:
        return x
    rope, n = state.config.local_rope if op.table else state.config.rope, op.rotary
    if rope.kind == "query_scale":
        spans = np.floor(np.arange(len(x)) / rope.original_max_position_embeddings)
        return (x * (1 + rope.factor * np.log(1 + spans))[:, None, None]).astype(state.dtype)
    if rope.kind == "proportional":
        turning, n = op.rotary // 2, rope.span
        still = [0.0] * (n // 2 - turning)
        rates = np.array([rope.theta ** (-2 * i / n) / rope.factor for i in range(turning)] + still)
    else:
        rates = frequencies(rope, n, state.context)
    angles = np.arange(len(x))[:, None, None] * rates
    cos, sin = (f(angles) * rope.attention_factor for f in (np.cos, np.sin))
    return np.concatenate([_rotated(x[..., :n], cos, sin), x[..., n:]], axis=-1).astype(state.dtype)


def attention(state: _State, op: Any, qkv: np.ndarray) -> np.ndarray:
    """Softmax of q k^T / sqrt(head_dim) over the tokens that a query may see."""
    c, group = state.config, op.heads // op.kv_heads
    k, v = (np.repeat(x, group, axis=1) for x in state.stored[op.layer if op.kv_layer is None else op.kv_layer])
    q = qkv[:, : op.heads * op.head_dim].reshape(len(qkv), op.heads, op.head_dim)
    scores = np.einsum("qhd,khd->hqk", q, k) * state.dtype(c.attention_scale or 1 / math.sqrt(op.head_dim))
    if c.attention_softcap:
        scores = state.dtype(c.attention_softcap) * np.tanh(scores / state.dtype(c.attention_softcap))
    distance = np.arange(len(q))[:, None] - np.arange(len(q))
    if c.alibi:
        scores = scores + _alibi(c, len(q), distance).astype(state.dtype)
    window = op.window or len(q)
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    if op.sinks:
        sinks = np.broadcast_to(state.whole(op.sinks)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, sinks], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = (weights / weights.sum(axis=-1, keepdims=True))[..., : len(q)]
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def _alibi(c: Any, n: int, distance: np.ndarray) -> np.ndarray:
    """Slope x distance of each head; Falcon's has slope, position and product in bfloat16."""
    below = 2 ** int(math.log2(c.num_attention_heads))
    slopes = [2.0 ** (-c.alibi.max_bias * (i + 1) / below) for i in range(below)]
    slopes += [2.0 ** (-c.alibi.max_bias * (i + 0.5) / below) for i in range(c.num_attention_heads - below)]
    if not c.alibi.bfloat16:
        return -np.array(slopes)[:, None, None] * distance
    keys = _to_bfloat16(_to_bfloat16(np.array(slopes))[:, None] * _to_bfloat16(np.arange(n)))
    return keys[:, None] * (c.attention_scale or c.head_dim**-0.5)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Eight bits of each number, ties to even."""
    bits, power = np.frexp(x)
    return np.ldexp(np.rint(256 * bits) / 256, power)


def quantize_heads(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    """The pieces of all heads, each with a row for each token."""
    heads, width = op.out.times, op.out.width
    return x[:, : heads * width].reshape(len(x), heads, width).swapaxes(0, 1).reshape(-1, width)


def head_linear(state: _State, op: Any, x: np.ndarray) -> np.ndarray:
    """Each head's piece times its own matrix, each to its columns; others are nobody's yet."""
    matrices = state.whole(op.weight)
    matrices = matrices.reshape(op.heads, -1, matrices.shape[1])
    if x.shape[1] == matrices.shape[2]:
        pieces = x.reshape(op.heads, -1, x.shape[1]).swapaxes(0, 1)
    else:
        pieces = x[:, : op.heads * matrices.shape[2]].reshape(len(x), op.heads, -1)
    out = np.full((len(pieces), op.out.width), np.nan, state.dtype)
    for head, matrix in enumerate(matrices):
        out[:, head * op.step : head * op.step + len(matrix)] = pieces[:, head] @ matrix.T
    return out


def store_latent(state: _State, op: Any, queries: np.ndarray, q: np.ndarray, compressed: np.ndarray) -> np.ndarray:
    """Queries with their rotated parts, then the key: the normed latent and its rotated part."""
    width, n = op.rank + op.rotary, len(q)
    angles = np.arange(n)[:, None, None] * frequencies(state.config.rope, op.rotary, state.context)
    cos, sin = (f(angles) * state.config.rope.attention_factor for f in (np.cos, np.sin))
    latent = compressed[:, op.first : op.first + op.rank]
    key = compressed[:, None, op.first + op.rank : op.first + width]
    turned = q[:, op.q_first : op.q_first + op.heads * op.rotary].reshape(n, op.heads, op.rotary)
    rows = queries.reshape(n, op.heads + 1, width).copy()
    rows[..., op.rank :] = _rotated(np.concatenate([turned, key], axis=1), cos, sin)
    rows[:, -1, : op.rank] = _normalised(latent, op.eps) * state.whole(op.norm)
    state.stored[op.layer] = rows[:, -1], rows[:, -1, : op.rank]
    return rows.reshape(n, -1)


def latent_attention(state: _State, op: Any, queries: np.ndarray) -> np.ndarray:
    """All heads over the one stored key; V is its beginning."""
    (k, v), n = state.stored[op.layer], len(queries)
    q = queries.reshape(n, -1, op.head_dim)[:, : op.heads]
    scores = np.einsum("qhd,kd->hqk", q, k) * state.dtype(op.scale)
    scores = np.where(np.arange(n)[:, None] >= np.arange(n), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,kd->qhd", weights, v).reshape(n, -1)


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


def _normalised(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.array(eps, x.dtype))


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _gelu(x: np.ndarray) -> np.ndarray:
    return (x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))).astype(x.dtype)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {
    "silu": lambda x: x * 0.5 * (1 + np.tanh(x / 2)),  # x sigmoid(x), without overflow
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


def frequencies(rope: Any, head_dim: int, context: int = 0) -> np.ndarray:
    """Radians per position of each pair of dimensions, one pair at a time as the papers have it."""
    pairs = head_dim // 2
    plain = [rope.theta ** (-2 * i / head_dim) for i in range(pairs)]
    if rope.kind == "none":
        plain = [0.0] * pairs
    elif rope.kind == "linear":
        plain = [f / rope.factor for f in plain]
    elif rope.kind == "dynamic" and context > rope.original_max_position_embeddings:
        stretch = rope.factor * context / rope.original_max_position_embeddings - (rope.factor - 1)
        theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
        plain = [theta ** (-2 * i / head_dim) for i in range(pairs)]
    elif rope.kind == "llama3":
        plain = [_llama3(rope, f) for f in plain]
    elif rope.kind == "longrope":
        far = context > rope.original_max_position_embeddings
        plain = [f / factor for f, factor in zip(plain, rope.long_factors if far else rope.short_factors, strict=True)]
    elif rope.kind == "yarn":
        low, high = _yarn_range(rope, head_dim)
        ramps = [min(max((i - low) / (high - low), 0), 1) for i in range(pairs)]
        plain = [(1 - r) * f + r * f / rope.factor for f, r in zip(plain, ramps, strict=True)]
    return np.array(plain)


def _llama3(rope: Any, frequency: float) -> float:
    wavelength = 2 * math.pi / frequency
    original = rope.original_max_position_embeddings
    if wavelength < original / rope.high_freq_factor:
        return frequency
    if wavelength > original / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn_range(rope: Any, head_dim: int) -> tuple[float, float]:
    """Pairs between which YaRN blends: those that turn beta_fast and beta_slow times over the training context."""
    low, high = (
        head_dim * math.log(rope.original_max_position_embeddings / (beta * 2 * math.pi)) / (2 * math.log(rope.theta))
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high
