"""Gated norms on every instruction set: groups, shared weights, and the gate before the norm or after it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import GATED_NORM, fill
from tests.helpers.kernel_bench import ISAS, Bench
from tests.kernels.test_causal_conv import row_bytes

SHAPES = ((32, 32), (33, 11), (7, 7), (5 * 127, 127), (128, 16), (1023, 1023), (3 * 128, 128))
"""Elements of a row, and of a group."""
KINDS = tuple(itertools.product((0, 1, 2), (0, 1), (0, 1)))
"""No norm, a weight for the row or one for all groups; the gate after or before the norm; SiLU or a sigmoid."""
START = 5


class Gated:
    """A bench with rows and their gates, each followed by NaN."""

    def __init__(self, x: np.ndarray, gate: np.ndarray, weight: np.ndarray):
        self.bench, (self.tokens, self.width) = Bench(), x.shape
        self.operands = [self.put(x, 0), self.put(gate, START), 0, self.bench.put("constants", weight)]
        self.operands[2] = self.bench.reserve("activations", self.tokens * row_bytes(self.width))

    def put(self, rows: np.ndarray, start: int) -> int:
        wide = np.full((self.tokens, row_bytes(self.width + start) // 4), np.nan, np.float32)
        wide[:, start : start + self.width] = rows
        return self.bench.put("activations", wide)

    def run(self, isa: str, group: int, kind: tuple[int, int, int], threads: int = 1, first: int = 0,
            tokens: int | None = None, eps: float = 1e-6) -> np.ndarray:
        """Run over some rows; gives what they become."""
        normed, gated_first, sigmoid = kind
        strides = {"x_stride": row_bytes(self.width), "gate_stride": row_bytes(self.width + START),
                   "out_stride": row_bytes(self.width)}
        self.bench.tokens([0] * (self.tokens - first if tokens is None else tokens))
        parameters = fill(GATED_NORM, width=self.width, group=group, start=START, rows=abi.COUNT_TOKENS, eps=eps,
                          normed=normed, gated_first=gated_first, sigmoid=sigmoid, **strides)
        operands = [at + first * stride for at, stride in zip(self.operands, strides.values(), strict=False)]
        return self.bench.run(isa, "gated_norm", [*operands, self.operands[3]], parameters, threads=threads)["out"]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("width", "group"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gated_norm(kind: tuple[int, int, int], width: int, group: int) -> None:
    """Reference and bits: any threads, a row alone or among others; gates from -100 to 100."""
    rng = np.random.default_rng(width)
    weight = rng.standard_normal(group if kind[0] == 2 else width).astype(np.float32)
    for tokens, scale in ((1, 1.0), (2, 1e-3), (21, 100.0)):
        x = (rng.standard_normal((tokens, width)) * scale).astype(np.float32)
        gate = rng.uniform(-100, 100, (tokens, width)).astype(np.float32)
        gate[:, ::2] /= 50
        rows = Gated(x, gate, weight)
        for isa in ISAS:
            whole = rows.run(isa, group, kind)
            assert np.isfinite(whole).all()
            np.testing.assert_array_equal(whole, rows.run(isa, group, kind, threads=3))
            for t in {0, tokens - 1}:
                np.testing.assert_array_equal(rows.run(isa, group, kind, first=t, tokens=1)[0], whole[t])


def test_rows_of_zeros_stay_zeros() -> None:
    zeros = np.zeros((2, 48), np.float32)
    for isa, kind in itertools.product(ISAS, KINDS):
        rows = Gated(zeros, zeros + 1, np.ones(48, np.float32))
        assert not rows.run(isa, 16, kind).any()
