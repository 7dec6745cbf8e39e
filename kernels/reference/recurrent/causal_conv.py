"""Reference of the causal convolution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...abi import FLAG_BIAS, conv_rows
from ...parameters import CONV
from ..expected import Expected
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView
from .sequences import Run, ring, runs

Doubles = NDArray[np.float64]


def sigmoid(x: Doubles) -> Doubles:
    """1 / (1 + e^-x), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def causal_conv_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``causal_conv``: outputs of all tokens, and the last rows of each sequence's ring."""
    found: list[Expected] = []
    for run in runs(view):
        found += _sequence(view, run)
    return found


def _sequence(view: InstructionView, run: Run) -> list[Expected]:
    p = view.parameters(CONV)
    rows, columns = conv_rows(p.width), -(-p.channels // 16) * 16
    kept = ring(view, 4, run.slot, rows, 4 * columns, p.channels)
    u = _columns(view, run, p.start)
    exact = u.astype(np.float32)
    if p.gate_in >= 0:
        exact = exact * _columns(view, run, p.gate_in).astype(np.float32)
        u = exact.astype(np.float64)
    before = [kept[q % rows].astype(np.float64) if q >= 0 else np.zeros(p.channels)
              for q in range(run.base - p.width + 1, run.base)]
    inputs = np.concatenate([np.array(before).reshape(-1, p.channels), u])
    weights = view.array(2, np.float32, (p.width, p.channels)).astype(np.float64)
    windows = np.stack([inputs[j : j + run.tokens] for j in range(p.width)])
    total = (windows * weights[:, None]).sum(0)
    size = np.abs(windows * weights[:, None]).sum(0)
    if view.flags & FLAG_BIAS:
        bias = view.array(3, np.float32, (p.channels,)).astype(np.float64)
        total, size = total + bias, size + np.abs(bias)
    slack = TOLERANCES["conv"] * size + TINY
    if p.silu:
        total = total * sigmoid(total)
        slack = 1.1 * slack + TOLERANCES["activation"] * np.abs(total)
    total, slack = _finished(view, run, total, slack)
    out = view.array(1, np.float32, (run.tokens, p.channels), (p.out_stride, 4), run.first * p.out_stride)
    last = range(max(0, run.tokens - rows), run.tokens)
    return [Expected("out", out, total, exact=False, tolerance=slack),
            *(Expected(f"row {run.base + t} of the ring", kept[(run.base + t) % rows], exact[t]) for t in last)]


def _finished(view: InstructionView, run: Run, total: Doubles, slack: Doubles) -> tuple[Doubles, Doubles]:
    """Gate the sums, and divide heads by their lengths."""
    p = view.parameters(CONV)
    if p.gate_out >= 0:
        by = _columns(view, run, p.gate_out)
        total, slack = total * by, slack * np.abs(by) + 1e-7 * np.abs(total * by)
    if p.normed:
        n = p.normed * p.block
        heads = total[:, :n].reshape(len(total), p.normed, p.block)
        scale = 1 / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-6)
        scale[:, : p.normed // 2] /= np.sqrt(p.block)
        loose = slack[:, :n].reshape(heads.shape)
        loose = (loose + loose.max(-1, keepdims=True)) * scale + TOLERANCES["rms_norm"] * np.abs(heads * scale)
        total[:, :n], slack[:, :n] = (heads * scale).reshape(len(total), n), loose.reshape(len(total), n)
    return total, slack + TINY


def _columns(view: InstructionView, run: Run, start: int) -> Doubles:
    p = view.parameters(CONV)
    rows = view.array(0, np.float32, (run.tokens, p.channels), (p.x_stride, 4), run.first * p.x_stride + 4 * start)
    return rows.astype(np.float64)
