"""Lowering of recurrent layers to ONNX: onnxruntime's operators keep a state of each slot beside its K and V.

A call of single tokens takes a range of slots, some of them idle. The operators write the state of all, so an idle
slot's is put back: its convolution takes the inputs from before, and its matrices neither decay nor get a new row.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from edgeinfer.graph import CausalConv, DeltaRule, GatedNorm, SelectiveScan, StateRule

from ...base.units import round_up
from . import weights
from .functions import function
from .lowering import MICROSOFT, Lowering, lower
from .positions import row_numbers
from .states import past, present

LENGTH_EPS = 1e-6
"""Added to the squares of a head's elements before it is divided by its length (delta rule)."""


def _columns(x: str, start: int, count: int, at: Lowering) -> str:
    return at.node("Slice", x, at.constant(start), at.constant(start + count), at.constant(-1))


def _active(axes: int, at: Lowering) -> str:
    """True for slots that are not idle, with this many axes after that of slots."""
    def made() -> str:
        running = at.once("active", lambda: at.node("Greater", "active", at.number((0,), "i32")))
        return at.node("Unsqueeze", running, at.constant(*range(1, axes + 1)))

    return at.once(("active", axes), made)


def _f32(x: str, at: Lowering) -> str:
    return x if at.dtype == "f32" else at.node("Cast", x, to="f32")


@lower.register
def _(op: CausalConv, at: Lowering) -> None:
    x, n = at.value(op.x), op.out.width
    u = _columns(x, op.start, n, at)
    if op.gate_in is not None:
        u = at.node("Mul", u, _columns(x, op.gate_in, n, at))
    kernel = at.store(weights.convolution(op.weight, op.width, at.dtype))
    kept, name = past(op, "inputs"), f"inputs.{op.layer}"
    y = at.node("VarlenCausalConvWithState", at.node("Reshape", u, at.constant(-1, n)), kernel,
                "cumulative_sequence_length", at.vector(op.bias) if op.bias else "", kept, domain=MICROSOFT,
                out=("", name), activation="silu" if op.silu else "none")
    at.node("Where", _active(2, at), name, kept, out=present(op, "inputs"))
    y = at.node("Gather", y, row_numbers(at), axis=0)
    if op.gate_out is not None:
        y = at.node("Mul", y, _columns(x, op.gate_out, n, at))
    at.set(op.out, _divided(y, op, at) if op.normed else y)


def _divided(y: str, op: CausalConv, at: Lowering) -> str:
    """Heads of queries and keys divided by their lengths, as a norm without the mean: queries also by sqrt(head)."""
    dim, half = op.head_dim, op.normed * op.head_dim // 2
    names = [f"{kind}.convolved.{op.layer}" for kind in ("queries", "keys", "values")]
    at.node("Split", y, at.constant(half, half, op.out.width - 2 * half), out=names, axis=-1)
    parts = []
    for name, power in ((names[0], 1.0), (names[1], 0.5)):
        scale = weights.computed(f"lengths.{dim}.{power}", at.dtype, (dim,), partial(np.full, dim, dim**-power))
        heads = at.node("Reshape", name, at.constant(*at.rows(op.normed // 2, dim)))
        heads = at.node("RMSNormalization", heads, at.store(scale), axis=-1, epsilon=LENGTH_EPS / dim)
        parts.append(at.node("Reshape", heads, at.constant(*at.rows(half))))
    return at.node("Concat", *parts, names[2], axis=-1)


def _rule(op: StateRule, at: Lowering, rows: tuple[str, str, str], gates: tuple[str, ...], rule: str) -> str:
    """Values of all heads after each token's change of the matrices; `rows` are queries, keys and values."""
    queries, keys = (at.node("Reshape", one, at.constant(*at.rows(op.key_heads, op.key_dim))) for one in rows[:2])
    values = at.node("Reshape", rows[2], at.constant(*at.rows(op.heads, op.value_dim)))
    beta = gates[1] if len(gates) > 1 else ""
    out = at.node("GatedDeltaNet", queries, keys, values, "", gates[0], beta, past(op, "matrices"), domain=MICROSOFT,
                  out=("", present(op, "matrices")), update_rule=rule, scale=1.0)
    return at.node("Reshape", out, at.constant(*at.rows(op.heads * op.value_dim)))


def _times(raw: str, op: StateRule, at: Lowering) -> str:
    """softplus(x + bias) in f32."""
    bias = at.store(weights.vector(op.dt_bias, "f32", name=f"{op.dt_bias.name}.f32"))
    return at.node("Softplus", at.node("Add", _f32(raw, at), bias))


def _decays(op: StateRule, at: Lowering) -> str:
    """The factor of each head's time: -exp(A_log)."""
    return at.store(weights.vector(op.a, "f32", name=f"{op.a.name}.f32"))


@lower.register
def _(op: DeltaRule, at: Lowering) -> None:
    """A plain rule's decay is a number of a head, that of DeltaRuleRows one of each of its rows."""
    x, gates, keys = at.value(op.x), at.value(op.gates), op.key_heads * op.key_dim
    (_, count), zero = op.journaled[1], at.number(0.0, "f32")
    by_row = op.dt_bias.shape[0] != op.heads
    beta = at.node("Sigmoid", _f32(_columns(gates, op.gate_start, op.heads, at), at))
    if op.beta_scale != 1:
        beta = at.node("Mul", beta, at.number(op.beta_scale, "f32"))
    first = op.gate_start + (round_up(op.heads, 16) if by_row else op.heads)
    times = _times(_columns(gates, first, op.gate_start + count - first, at), op, at)
    factors = _decays(op, at)
    if by_row:
        times = at.node("Reshape", times, at.constant(*at.rows(op.heads, op.key_dim)))
        factors = at.node("Unsqueeze", factors, at.constant(1))
    decay = at.node("Mul", times, factors)
    decay = at.node("Where", _active(3 if by_row else 2, at), decay, zero)
    beta = at.node("Where", _active(2, at), beta, zero)
    rows = _columns(x, 0, keys, at), _columns(x, keys, keys, at), _columns(x, 2 * keys, op.out.width, at)
    at.set(op.out, _rule(op, at, rows, (decay, beta), "gated_delta"))


@lower.register
def _(op: SelectiveScan, at: Lowering) -> None:
    """Keys are B, queries C, and values are multiplied by the time step."""
    x, n, keys = at.value(op.x), op.out.width, op.key_heads * op.key_dim
    times = _times(_columns(at.value(op.gates), op.gate_start, op.heads, at), op, at)
    low, high = op.limits
    if low > 0 or high < np.inf:
        times = at.node("Clip", times, at.number(low, "f32"), at.number(high, "f32") if high < np.inf else "")
    times = at.node("Where", _active(2, at), times, at.number(0.0, "f32"))
    decay = at.node("Mul", times, _decays(op, at))
    plain = _columns(x, 0, n, at)
    heads = at.node("Reshape", plain, at.constant(*at.rows(op.heads, op.value_dim)))
    factors = times if at.dtype == "f32" else at.node("Cast", times, to=at.dtype)
    values = at.node("Mul", heads, at.node("Unsqueeze", factors, at.constant(-1)))
    rows = _columns(x, n + keys, keys, at), _columns(x, n, keys, at), values
    skip = at.node("Mul", heads, at.node("Unsqueeze", at.vector(op.d), at.constant(1)))
    y = _rule(op, at, rows, (decay,), "gated")
    at.set(op.out, at.node("Add", y, at.node("Reshape", skip, at.constant(*at.rows(n)))))


@lower.register
def _(op: GatedNorm, at: Lowering) -> None:
    y, n = at.value(op.x), op.x.width
    gate = _columns(at.value(op.gate), op.start, n, at)
    gate = at.node("Sigmoid", gate) if op.function == "sigmoid" else function(gate, "silu", 1.0, at)
    if op.gated_first or not op.weight:
        y = at.node("Mul", y, gate)
    if op.weight:
        y = _grouped_norm(y, op, at)
        y = y if op.gated_first else at.node("Mul", y, gate)
    at.set(op.out, y)


def _grouped_norm(y: str, op: GatedNorm, at: Lowering) -> str:
    """Norm each group of a row; a weight of a whole row multiplies the groups that are normed without one."""
    assert op.weight
    n, shared = op.x.width, op.weight.shape[0] == op.group
    if n == op.group:
        return at.node("RMSNormalization", y, at.vector(op.weight), axis=-1, epsilon=op.eps)
    ones = weights.computed(f"ones.{op.group}", at.dtype, (op.group,), lambda: np.ones(op.group))
    y = at.node("Reshape", y, at.constant(*at.rows(n // op.group, op.group)))
    y = at.node("RMSNormalization", y, at.vector(op.weight) if shared else at.store(ones), axis=-1, epsilon=op.eps)
    y = at.node("Reshape", y, at.constant(*at.rows(n)))
    return y if shared else at.node("Mul", y, at.vector(op.weight))
