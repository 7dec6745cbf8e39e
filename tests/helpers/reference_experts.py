"""Experts of the oracle (reference.py): routing, and each token's matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from .reference_parts import gated_values


def route(state: Any, op: Any, logits: np.ndarray) -> np.ndarray:
    """Experts of each token, ascending, and the weights of their outputs."""
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


def sort_routes(state: Any, op: Any, routes: np.ndarray) -> np.ndarray:
    return np.zeros((len(routes), op.out.width), state.dtype)


def experts_input(state: Any, op: Any, x: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """A row for each token and expert, here token by token."""
    return x if len(x) > len(listed) else np.repeat(x, op.active, axis=0)


def experts_gated(state: Any, op: Any, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    gates, ups = state.stacks(op.weight)
    experts = state.chosen[op.layer][0].reshape(-1)
    inner, outer = state.stacks(op.bias) if op.bias else np.zeros((2, len(gates), 1), state.dtype)
    return np.stack([gated_values(op, gates[e] @ row + inner[e], ups[e] @ row + outer[e])
                     for e, row in zip(experts, x, strict=True)])


def experts_down(state: Any, op: Any, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    (downs,), (experts, weights) = state.stacks(op.weight), state.chosen[op.layer]
    biases = state.stacks(op.bias)[0] if op.bias else np.zeros((len(downs), 1), state.dtype)
    y = np.stack([downs[e] @ row + biases[e] for e, row in zip(experts.reshape(-1), x, strict=True)])
    y = (y.reshape(*experts.shape, -1) * weights[..., None]).sum(axis=1)
    return rest[-1] + y if op.residual else y
