"""Scores of attention by themselves: their reference, and the same bits however they come about."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import ATTENTION
from tests.helpers.attention_layer import GROUPS, KV, Layer, Sequence, chain_of
from tests.helpers.kernel_bench import ISAS


class Scored(Layer):
    """A layer whose last tokens' scores are wanted."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.row_bytes = abi.score_row_bytes(self.splits)
        self.operands.append(self.bench.reserve("scratch", len(self.positions) * self.heads * self.row_bytes))

    def scores(self, isa: str, wanted: int, threads: int = 1) -> list[np.ndarray]:
        """Scores and sums of the last `wanted` tokens, token after token."""
        self.bench.counts[abi.COUNT_DECODED] = wanted
        parameters = self.parameters()
        parameters[ATTENTION.rows] = abi.COUNT_DECODED
        name = f"attention_scores_{self.kv}"
        found = self.bench.run(isa, name, self.operands, parameters, self.attention_flags, threads)
        rows: dict[str, list[np.ndarray]] = {}
        for name, values in found.items():
            token = name.partition(",")[0]
            rows.setdefault(token, []).append(values.reshape(-1))
        return [np.concatenate(rows[f"token {t}"]) for t in range(len(self.positions) - wanted, len(self.positions))]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("past", [0, 14, 255, 256, 700])
@pytest.mark.parametrize("kv", KV)
def test_scores_have_the_bits_of_each_token_alone(kv: str, past: int) -> None:
    """Of all tokens or the last ones, on one to three threads, several at once or one by one; GQA 1, 3, 4, 8."""
    number = KV.index(kv) + past
    heads, window = GROUPS[number % 4], (0, 5, 300)[number // 4 % 3]
    tree = Sequence(past, 7, [-1, 0, 0, 1, -1, 4, 4])
    for sequences in (chain_of(9, past), [Sequence(300, 3), Sequence(past, 1), Sequence(33, 4), tree]):
        layer = Scored(kv, heads, sequences, window)
        n = len(layer.positions)
        for isa in ISAS:
            layer.store(isa)
            whole = layer.scores(isa, n)
            for wanted, threads in ((n, 3), (5, 2), (1, 1)):
                for mine, all_ in zip(layer.scores(isa, wanted, threads), whole[n - wanted :], strict=True):
                    np.testing.assert_array_equal(mine, all_)
        layer.only(n // 2)
        np.testing.assert_array_equal(layer.scores(ISAS[-1], 1)[0], whole[n // 2])


@pytest.mark.parametrize("kv", KV)
def test_the_last_token_of_a_chunk_alone(kv: str) -> None:
    """A prompt's last token after many others, whose scores nobody wants."""
    layer = Scored(kv, (6, 2, 40), chain_of(70, past=480))
    for isa in ISAS:
        layer.store(isa)
        (mine,) = layer.scores(isa, 1)
        assert mine.size == 6 * (-(-550 // 16) * 16 + (16 + 2) * 3)  # whole blocks; their largest, sums of splits


@pytest.mark.parametrize("kv", KV)
def test_scores_are_those_of_attention(kv: str) -> None:
    """The largest of each split has the bits of the partial results that attention leaves; of a block it is a score."""
    layer = Scored(kv, (8, 2, 16), chain_of(3, past=515))
    for isa in ISAS:
        layer.store(isa)
        layer.bench.counts[abi.COUNT_MERGE] = 3
        parts = layer.bench.run(isa, f"attention_{kv}", layer.operands, layer.parameters())
        mine = layer.scores(isa, 3)
        n = -(-518 // 16) * 16 + 3 * 16
        for t in range(3):
            rows = mine[t].reshape(8, n + 6)
            for head in range(8):
                largest = [float(parts[f"split {split} of token {t}, head {head}: m"][0]) for split in range(3)]
                assert rows[head, n::2].tolist() == largest
                assert rows[head, n - 48 : n - 15].tolist() == rows[head, : n - 48].reshape(-1, 16).max(axis=1).tolist()
