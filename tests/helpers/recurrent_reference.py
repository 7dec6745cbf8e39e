"""The oracle's recurrent operations: a token at a time, with one state that is carried along."""

from __future__ import annotations

from typing import Any

import numpy as np


def causal_conv(state: Any, op: Any, x: np.ndarray) -> np.ndarray:
    """Each channel's weighted sum of its last inputs; before the first token there are zeros."""
    n, channels = len(x), op.out.width
    u = x[:, op.start : op.start + channels]
    if op.gate_in is not None:
        u = u * x[:, op.gate_in : op.gate_in + channels]
    weights = state.whole(op.weight).reshape(op.width, channels)
    padded = np.concatenate([np.zeros((op.width - 1, channels), state.dtype), u])
    y = np.stack([(padded[t : t + op.width] * weights).sum(axis=0) for t in range(n)])
    y = y + state.whole(op.bias) if op.bias else y
    y = silu(y) if op.silu else y
    if op.gate_out is not None:
        y = y * x[:, op.gate_out : op.gate_out + channels]
    if op.normed:
        heads = y[:, : op.normed * op.head_dim].reshape(n, op.normed, op.head_dim)
        heads = heads / np.sqrt((heads * heads).sum(axis=2, keepdims=True) + 1e-6)
        heads[:, : op.normed // 2] /= np.sqrt(op.head_dim)
        y = np.concatenate([heads.reshape(n, -1), y[:, op.normed * op.head_dim :]], axis=1)
    return y


def delta_rule(state: Any, op: Any, x: np.ndarray, gates: np.ndarray) -> np.ndarray:
    """One matrix of keys by values for each head; a head's key is that of its group."""
    keys = op.key_heads * op.key_dim
    q, k = (_shared(part, op) for part in (x[:, :keys], x[:, keys : 2 * keys]))
    v = x[:, 2 * keys :].reshape(len(x), op.heads, op.value_dim)
    (first, columns), shift = op.journaled[1], state.whole(op.dt_bias)
    own = gates[:, first : first + columns]
    beta = op.beta_scale / (1 + np.exp(-own[:, : op.heads]))
    times = softplus(own[:, -len(shift) :] + shift).reshape(len(x), op.heads, -1)
    decay = np.exp(state.whole(op.a)[:, None] * times)
    s, out = np.zeros((op.heads, op.key_dim, op.value_dim), state.dtype), np.empty_like(v)
    for t in range(len(x)):
        s *= decay[t, :, :, None]
        change = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", s, k[t]))
        s += k[t, :, :, None] * change[:, None]
        out[t] = np.einsum("hkv,hk->hv", s, q[t])
    return out.reshape(len(x), -1)


def delta_rule_rows(state: Any, op: Any, x: np.ndarray, gates: np.ndarray) -> np.ndarray:
    """The same; decays are those of each row."""
    return delta_rule(state, op, x, gates)


def selective_scan(state: Any, op: Any, x: np.ndarray, gates: np.ndarray) -> np.ndarray:
    """One matrix of B by values for each head; heads of a group share B and C."""
    width, keys = op.heads * op.value_dim, op.key_heads * op.key_dim
    v = x[:, :width].reshape(len(x), op.heads, op.value_dim)
    b, c = (_shared(part, op) for part in (x[:, width : width + keys], x[:, width + keys :]))
    steps = softplus(gates[:, op.gate_start : op.gate_start + op.heads] + state.whole(op.dt_bias))
    steps = np.clip(steps, *op.limits)
    decay, skip = np.exp(state.whole(op.a) * steps), state.whole(op.d)[:, None]
    s, out = np.zeros((op.heads, op.key_dim, op.value_dim), state.dtype), np.empty_like(v)
    for t in range(len(x)):
        s = s * decay[t, :, None, None] + b[t, :, :, None] * (steps[t, :, None] * v[t])[:, None]
        out[t] = np.einsum("hkv,hk->hv", s, c[t]) + skip * v[t]
    return out.reshape(len(x), -1)


def gated_norm(state: Any, op: Any, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """The norm of each group of a row and a function of the gate, in one order or the other."""
    gate = gate[:, op.start : op.start + x.shape[1]]
    factor = silu(gate) if op.function == "silu" else 1 / (1 + np.exp(-gate))
    if not op.weight:
        return x * factor
    groups = (x * factor if op.gated_first else x).reshape(len(x), -1, op.group)
    groups = groups / np.sqrt((groups * groups).mean(axis=2, keepdims=True) + op.eps)
    weight = state.whole(op.weight)
    y = (groups * weight.reshape(-1, op.group)).reshape(x.shape)
    return y if op.gated_first else y * factor


def silu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.tanh(x / 2))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


def _shared(x: np.ndarray, op: Any) -> np.ndarray:
    """Keys of all heads, of which groups share one."""
    return np.repeat(x.reshape(len(x), op.key_heads, op.key_dim), op.heads // op.key_heads, axis=1)
