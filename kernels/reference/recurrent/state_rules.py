"""References of delta rule and selective scan: one token after the other, on whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import abi
from ...parameters import RULE
from ..expected import Expected
from ..tolerances import TOLERANCES
from ..view import InstructionView, float_of
from .causal_conv import sigmoid
from .sequences import Run, ring, runs

Doubles = NDArray[np.float64]


def delta_step(state: Doubles, q: Doubles, k: Doubles, v: Doubles, decay: Doubles, beta: Doubles) -> Doubles:
    """Change `state`, of shape (heads, key_dim, value_dim), by one token and return its query's result.

    Gated delta rule (arXiv 2412.06464, equation 10); q and k are (heads, key_dim), v is (heads, value_dim), decay is
    (heads,) or, of Kimi's delta attention (arXiv 2510.26692), (heads, key_dim).
    """
    state *= decay.reshape(len(decay), -1, 1)
    told = np.einsum("hkv,hk->hv", state, k)
    state += k[:, :, None] * (beta[:, None] * (v - told))[:, None]
    return np.einsum("hkv,hk->hv", state, q)


def scan_step(state: Doubles, c: Doubles, b: Doubles, x: Doubles, decay: Doubles, time: Doubles) -> Doubles:
    """Change `state` by one token of Mamba 2 (arXiv 2405.21060) and return S^T C, without the skip."""
    state *= decay[:, None, None]
    state += b[:, :, None] * (time[:, None] * x)[:, None]
    return np.einsum("hkv,hk->hv", state, c)


def rule_reference(delta: bool, by_row: bool = False) -> Callable[[InstructionView], list[Expected]]:
    """The reference of a delta rule or of ``selective_scan``: outputs, stored tiles and their positions."""
    def reference(view: InstructionView) -> list[Expected]:
        found: list[Expected] = []
        for run in runs(view):
            found += _Sequence(view, run, delta, by_row).expected()
        return found

    return reference


class _Sequence:
    """One sequence of the pass, with its part of the slot."""

    def __init__(self, view: InstructionView, run: Run, delta: bool, by_row: bool):
        p: Any = view.parameters(RULE)
        self.view, self.run, self.delta, self.by_row, self.p = view, run, delta, by_row, p
        columns = abi.STATE_TILE_COLUMNS
        self.parts = -(-p.value_dim // columns)
        self.tiles = view.array(6, np.float32, (p.heads, self.parts, p.key_dim, columns), None, run.slot)
        self.stamps = view.array(6, np.int64, (p.heads, self.parts), None, run.slot + p.stamps)
        width = -(-p.columns // 16) * 16
        row = abi.journal_row(p.columns, p.gate_columns)
        rows = ring(view, 6, run.slot + p.journal, abi.JOURNAL_TOKENS, row, row // 4).astype(np.float64)
        self.journal, self.gates = rows[:, : p.columns], rows[:, width : width + p.gate_columns]

    def expected(self) -> list[Expected]:
        p, run = self.p, self.run
        state, stamps = self._begin(), np.repeat(self.stamps, abi.STATE_TILE_COLUMNS, 1)[:, None, : p.value_dim]
        for position in range(int(stamps.min()) if run.base else 0, run.base):  # a cancelled pass has left tiles apart
            at, after = position % abi.JOURNAL_TOKENS, state.copy()
            self._step(after, self.journal[at], self.gates[at], np.zeros((p.heads, p.key_dim)))
            state = np.where(stamps <= position, after, state)
        x, out = self._x(), np.empty((run.tokens, p.heads, p.value_dim))
        raw = self.view.array(1, np.float32, (run.tokens, p.gate_columns), (p.gates_stride, 4),
                              run.first * p.gates_stride + 4 * p.gate_start).astype(np.float64)
        stored = state.copy()
        for t in range(run.tokens):
            c = x[t, p.queries :][: p.key_dim * (p.heads // p.group)].reshape(-1, p.key_dim)
            out[t] = self._step(state, x[t, p.first :], raw[t], np.repeat(c, p.group, 0))
            if t + 1 == run.stored:
                stored = state.copy()
        return self._compared(out, stored)

    def _begin(self) -> Doubles:
        p = self.p
        state = self.tiles.transpose(0, 2, 1, 3).reshape(p.heads, p.key_dim, -1)[..., : p.value_dim]
        return state.astype(np.float64) if self.run.base else np.zeros(state.shape)

    def _x(self) -> Doubles:
        p, run = self.p, self.run
        width = max(p.queries, p.first + max(p.keys, p.values)) + max(p.key_dim * (p.heads // p.group),
                                                                      p.heads * p.value_dim)
        width = min(width, p.x_stride // 4)
        return self.view.array(0, np.float32, (run.tokens, width), (p.x_stride, 4),
                               run.first * p.x_stride).astype(np.float64)

    def _step(self, state: Doubles, row: Doubles, gates: Doubles, query: Doubles) -> Doubles:
        """One token, from its journaled columns."""
        p, view = self.p, self.view
        k = np.repeat(row[p.keys :][: p.key_dim * (p.heads // p.group)].reshape(-1, p.key_dim), p.group, 0)
        v = row[p.values :][: p.heads * p.value_dim].reshape(p.heads, p.value_dim)
        decays = (p.heads, p.key_dim) if self.by_row else (p.heads,)
        a = view.array(3, np.float32, (p.heads,)).astype(np.float64)
        shift = view.array(4, np.float32, decays).astype(np.float64)
        if self.delta:
            beta = float_of(p.beta_scale) * sigmoid(gates[: p.heads])
            time = np.logaddexp(0.0, gates[-shift.size :].reshape(decays) + shift)
            return delta_step(state, query, k, v, np.exp((a * time.T).T), beta)
        time = np.clip(np.logaddexp(0.0, gates + shift), float_of(p.low), float_of(p.high))
        d = view.array(5, np.float32, (p.heads,)).astype(np.float64)
        return scan_step(state, query, k, v, np.exp(a * time), time) + d[:, None] * v

    def _compared(self, out: Doubles, stored: Doubles) -> list[Expected]:
        p, run = self.p, self.run
        where = self.view.array(2, np.float32, (run.tokens, p.heads, p.value_dim), (p.out_stride, 4 * p.value_dim, 4),
                                run.first * p.out_stride)
        tolerance = TOLERANCES["state"] * max(1.0, float(np.abs(out).max(initial=0)))
        found = [Expected("out", where, out, exact=False, tolerance=tolerance),
                 Expected("positions", self.stamps, np.full(self.stamps.shape, run.base + run.stored, np.int64))]
        slack = TOLERANCES["state"] * max(1.0, float(np.abs(stored).max(initial=0)))
        columns = abi.STATE_TILE_COLUMNS
        padded = np.zeros((p.heads, p.key_dim, self.parts * columns))
        padded[..., : p.value_dim] = stored
        tiles = padded.reshape(p.heads, p.key_dim, self.parts, columns).transpose(0, 2, 1, 3)
        return [*found, Expected("tiles", self.tiles, tiles, exact=False, tolerance=slack)]


def journal_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``state_journal``: copies."""
    p, found = view.parameters(RULE), []
    row, width = abi.journal_row(p.columns, p.gate_columns), -(-p.columns // 16) * 16
    for run in runs(view):
        rows = ring(view, 6, run.slot + p.journal, abi.JOURNAL_TOKENS, row, row // 4)
        for t in range(run.stored, run.tokens):
            kept = rows[(run.base + t) % abi.JOURNAL_TOKENS]
            x = view.array(0, np.float32, (p.columns,), None, (run.first + t) * p.x_stride + 4 * p.first)
            gates = view.array(1, np.float32, (p.gate_columns,), None,
                               (run.first + t) * p.gates_stride + 4 * p.gate_start)
            found += [Expected("journal", kept[: p.columns], x.copy()),
                      Expected("gates", kept[width : width + p.gate_columns], gates.copy())]
    return found
