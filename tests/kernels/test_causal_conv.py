"""Causal convolution on every instruction set: widths, gates, normed heads, and the ring of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import CONV, fill
from tests.helpers.kernel_bench import ISAS, Bench

OPTIONS: tuple[dict[str, Any], ...] = (
    {"width": 4, "channels": 33},
    {"width": 2, "channels": 7, "silu": 1},
    {"width": 3, "channels": 50, "gate_in": 50, "gate_out": 100, "start": 150},  # LFM2
    {"width": 8, "channels": 17, "bias": True, "silu": 1},
    {"width": 4, "channels": 16, "bias": True, "gate_in": 16},
    {"width": 2, "channels": 600, "block": 512, "start": 3, "gate_out": 605},
    {"width": 4, "channels": 4 * 32 + 45, "silu": 1, "block": 32, "span": 2, "normed": 4},  # delta rule
    {"width": 3, "channels": 2 * 11 + 5, "block": 11, "normed": 2},
)
SPANS = ([(0, 1)], [(0, 5), (19, 1), (3, 40)], [(1, 2), (0, 40), (100, 17), (2, 1)], [(7, 7), (0, 2)])
"""Tokens that each sequence has before a pass, and in it."""


class Texts:
    """A bench with rows of some texts and a slot of each; a pass takes runs of texts: number, tokens before, tokens."""

    def __init__(self, rng: np.random.Generator, spans: Sequence[tuple[int, int]], columns: int, slot_bytes: int,
                 scale: float = 1.0):
        self.bench, self.spans = Bench(), spans
        """First position and tokens of each text."""
        self.texts = [rng.standard_normal((tokens, columns)).astype(np.float32) * np.float32(scale)
                      for _, tokens in spans]
        self.stride = row_bytes(columns)
        self.x = self.bench.reserve("activations", sum(tokens for _, tokens in spans) * self.stride)
        slots = [self.bench.reserve("state", slot_bytes) for _ in spans]
        self.state = slots[0]
        self.slots = [slot - self.state for slot in slots]

    @property
    def whole(self) -> list[tuple[int, int, int]]:
        """All texts in one pass."""
        return [(number, *span) for number, span in enumerate(self.spans)]

    def begin(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """Put the rows of a pass where kernels read them, NaN after each, and its tables."""
        rows = np.concatenate([self.texts[number][base - self.spans[number][0] :][:tokens]
                               for number, base, tokens in runs])
        x = self.bench.array(self.x, np.float32, (len(rows), self.stride // 4))
        x[:], x[:, : rows.shape[1]] = np.nan, rows
        sequences = [i for i, (_, _, tokens) in enumerate(runs) for _ in range(tokens)]
        self.bench.tokens([0] * len(rows), sequences=sequences, bases=[runs[i][1] for i in sequences])
        self.bench.state_slots = [self.slots[number] for number, _, _ in runs]


class Conv(Texts):
    """Texts with the ring of each."""

    def __init__(self, rng: np.random.Generator, spans: Sequence[tuple[int, int]], scale: float = 1.0, width: int = 4,
                 channels: int = 33, bias: bool = False, **options: int):
        self.options = {"start": 0, "gate_in": -1, "gate_out": -1, "block": 32, "span": 1, **options}
        used = max(self.options[name] for name in ("start", "gate_in", "gate_out")) + channels
        super().__init__(rng, spans, used, abi.conv_state_bytes(channels, width), scale)
        self.channels, self.width, self.flags = channels, width, abi.FLAG_BIAS if bias else 0
        self.out = self.bench.reserve("activations", sum(map(len, self.texts)) * row_bytes(channels))
        self.constants = [self.bench.put("constants", rng.standard_normal(n).astype(np.float32))
                          for n in (width * channels, channels)]
        for number, (base, _) in enumerate(spans):  # rows before a first token are NaN
            ring = self.ring(number)
            for position in range(max(0, base - len(ring)), base):
                ring[position % len(ring)] = rng.standard_normal(channels)

    def ring(self, number: int) -> np.ndarray:
        """Rows of a text's ring."""
        columns = -(-self.channels // 16) * 16
        shape = (abi.conv_rows(self.width), columns)
        return self.bench.array(self.state + self.slots[number], np.float32, shape)[:, : self.channels]

    def run(self, isa: str, runs: Sequence[tuple[int, int, int]], threads: int = 1, keep: bool = False) -> np.ndarray:
        """Convolve; gives the outputs of all tokens."""
        self.begin(runs)
        parameters = fill(CONV, channels=self.channels, width=self.width, x_stride=self.stride,
                          out_stride=row_bytes(self.channels), **self.options)
        operands = [self.x, self.out, *self.constants, self.state]
        return self.bench.run(isa, "causal_conv", operands, parameters, self.flags, threads, keep)["out"]


def row_bytes(columns: int) -> int:
    """A row's stride: more than its columns."""
    return 4 * (-(-columns // 16) * 16) + 64


def label(value: Any) -> str:
    """Name of a parameter of a test."""
    if isinstance(value, dict):
        return f"{value['channels']}of{value['width']}"
    return "-".join(f"{base}+{tokens}" for base, tokens in value)


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("spans", SPANS, ids=label)
@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_convolution(options: dict[str, Any], spans: list[tuple[int, int]]) -> None:
    """Reference and bits: any threads, one sequence alone or among others."""
    for isa in ISAS:
        conv = Conv(np.random.default_rng(5), spans, **options)
        whole, first = conv.run(isa, conv.whole), 0
        np.testing.assert_array_equal(whole, conv.run(isa, conv.whole, threads=3))
        for run in conv.whole:
            np.testing.assert_array_equal(whole[first : first + run[2]], conv.run(isa, [run]))
            first += run[2]


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_passes_do_not_change_bits(options: dict[str, Any]) -> None:
    """A text at once, and in passes of any size beside another sequence; the rings end up the same."""
    n = 45
    for isa in ISAS:
        found = []
        for passes in ([n], [1] * n, [17, 1, 27], [2, 3, 40]):
            conv, base, outs = Conv(np.random.default_rng(6), [(0, n), (0, 2)], **options), 0, []
            for tokens in passes:
                outs.append(conv.run(isa, [(0, base, tokens), (1, 0, min(2, tokens))], keep=True)[:tokens])
                base += tokens
            found.append((np.concatenate(outs), conv.ring(0).copy()))
        for out, ring in found[1:]:
            np.testing.assert_array_equal(found[0][0], out)
            np.testing.assert_array_equal(found[0][1], ring)


def test_rejected_tokens_are_overwritten() -> None:
    """Of 16 drafted tokens 3 stay, again and again: what the ring holds of the others is never read."""
    for isa in ISAS:
        conv = Conv(np.random.default_rng(7), [(0, 60)])
        outs = [conv.run(isa, [(0, base, 16)], keep=True)[:3] for base in range(0, 42, 3)]
        whole = Conv(np.random.default_rng(7), [(0, 60)]).run(isa, [(0, 0, 60)])
        np.testing.assert_array_equal(np.concatenate(outs), whole[:42])


@pytest.mark.parametrize("options", OPTIONS[:-2], ids=label)
def test_large_inputs(options: dict[str, Any]) -> None:
    """SiLU of a large number is the number, or 0."""
    for isa in ISAS:
        conv = Conv(np.random.default_rng(8), [(0, 9)], 50.0, **options)
        out = conv.run(isa, conv.whole)
        assert np.isfinite(out).all() and np.abs(out).max() > 100


def test_heads_of_zeros_stay_zeros() -> None:
    for isa in ISAS:
        conv = Conv(np.random.default_rng(9), [(0, 3)], 0.0, **OPTIONS[-1])
        np.testing.assert_array_equal(conv.run(isa, conv.whole), np.zeros((3, conv.channels), np.float32))
