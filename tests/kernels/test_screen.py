"""The screened output head on every instruction set: references, who is screened, and the bits of the whole head."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Sampler
from edgeinfer.kernels import SCREEN, abi, fill
from edgeinfer.kernels.parameters import LINEAR
from edgeinfer.kernels.reference import reach
from tests.helpers.kernel_bench import ISAS, Bench, isas, token_tiles, weight_types
from tests.kernels.test_matmul import activations, random_weights

KERNELS = ("screen_maxima", "screen_least_{}", "head_{}")
SIZES = [(5, 31), (65, 33), (1040, 64), (2100, 172)]


class Head:
    """A head with estimates that are off by less than their bounds; `chosen` rows are screened."""

    def __init__(self, dtype: str, group: int, vocab: int, width: int, rows: int, chosen: list[bool], loose: float):
        rng, self.bench, self.rows, self.vocab = np.random.default_rng(vocab), Bench(), rows, vocab
        weights = random_weights(rng, dtype, group, vocab, width)
        self.x = activations(rng.standard_normal((rows, width)).astype(np.float32), group)
        tiles, (self.x_stride, scales, offsets) = -(-vocab // 16), self.x.layout()
        self.stride, self.low_stride, work = 64 * tiles, 4 * (-(-width // 16) * 16), abi.screen_row(vocab)
        self.name = f"{dtype}_g{group}"
        low = rng.standard_normal((rows, self.low_stride // 4)).astype(np.float32)
        self.weights, self.low = weights, low
        bounds = np.full(vocab, loose, np.float32)
        self.parameters = fill(
            SCREEN, tiles=tiles, tile_bytes=weights.size // tiles, records=-(-width // (2 * group)),
            x_stride=self.x_stride, x_scales=scales, x_offsets=offsets, out_stride=self.stride, group=group,
            rows=abi.COUNT_OUTPUTS, chunk=2, scratch=abi.GATED_SCRATCH_BYTES, vocab_size=vocab, work_stride=work,
            low_stride=self.low_stride, width=width, rank=min(33, width))
        bench = self.bench
        self.operands = [bench.put("weights", weights), bench.reserve("activations", rows * self.x_stride),
                       bench.reserve("logits", rows * self.stride), bench.reserve("activations", rows * self.stride),
                       bench.put("constants", bounds), bench.reserve("activations", rows * work),
                       bench.put("activations", low), bench.scratch(abi.GATED_SCRATCH_BYTES, 3)]
        bench.tokens([7] * (rows + 1), roles=[abi.ROLE_PROMPT] + [abi.ROLE_DECODE] * rows)
        bench.outputs = np.arange(1, rows + 1)
        self.samplers = [Sampler(GenerationConfig(logprobs=None if one else 1), vocab, 1) for one in chosen]
        bench.sample_specs = np.array([one.address for one in self.samplers])
        bench.counts[abi.COUNT_OUTPUTS] = rows

    def load(self, isa: str) -> np.ndarray:
        """Lay the input out for an instruction set, make estimates, and return the whole head's logits."""
        memory = self.x.memory(isa, slice(0, self.rows))
        self.bench.array(self.operands[1], np.uint8, memory.shape)[:] = memory
        self.parameters[SCREEN.token_tiles] = abi.pack_token_tiles(token_tiles(isa))
        self.bench.counts[abi.COUNT_SAMPLES] = 0
        out = self.bench.run(isa, KERNELS[2].format(self.name), self.operands, self.parameters)["out"]
        logits = out.copy().reshape(self.rows, -1)
        noise = np.random.default_rng(1).uniform(-1, 1, logits.shape) * 0.9
        noise *= np.array([reach(row[: self.parameters[SCREEN.width]], self.parameters[SCREEN.rank])
                           for row in self.low])[:, None]
        bounds = self.bench.array(self.operands[4], np.float32, (self.vocab,))
        estimates = logits.copy()
        estimates[:, : self.vocab] += (noise[:, : self.vocab] * bounds).astype(np.float32)
        self.bench.array(self.operands[3], np.float32, logits.shape)[:] = estimates
        return logits

    def run(self, isa: str, threads: int = 1) -> np.ndarray:
        """All three kernels."""
        self.bench.counts[abi.COUNT_SAMPLES] = self.rows
        for name in KERNELS:
            found = self.bench.run(isa, name.format(self.name), self.operands, self.parameters, threads=threads,
                                   keep=True)
        return found["out"].reshape(self.rows, -1).copy()


def test_matmuls_read_the_same_parameters() -> None:
    assert SCREEN._fields[:9] == LINEAR._fields[:9]


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize(("dtype", "group", "isa"), weight_types([
    (dtype, group, isa) for dtype, group in (("int8", 32), ("q4", 64), ("int8", 128))
    for isa in isas(f"head_{dtype}_g{group}")], "head"))
@pytest.mark.parametrize(("vocab", "width"), SIZES)
def test_the_largest_logit_has_the_bits_of_the_whole_head(isa: str, dtype: str, group: int, vocab: int, width: int) \
        -> None:
    for rows in (1, 3, 9):
        head = Head(dtype, group, vocab, width, rows, [r != 1 for r in range(rows)], 0.02)
        head.samplers[2 % rows].set_mask(np.zeros(0, np.int32) if rows > 1 else None)
        whole = head.load(isa)
        found = [head.run(isa, threads) for threads in (1, 3)]
        assert np.array_equal(*found)
        for r in range(rows):
            want, have = whole[r, :vocab], found[0][r, :vocab]
            assert have.argmax() == want.argmax() and have.max() == want.max()
            if r in (1, 2):  # its log-probabilities are wanted, or a mask forbids tokens
                assert np.array_equal(have, want)
            elif vocab > 1000:
                assert np.count_nonzero(have != want) > vocab / 2


@pytest.mark.parametrize("isa", ISAS)
def test_bounds_too_wide_compute_every_row(isa: str) -> None:
    head = Head("int8", 32, 1040, 64, 2, [True, True], 1e6)
    whole = head.load(isa)
    assert np.array_equal(head.run(isa), whole)


def test_a_row_of_not_a_number_is_computed() -> None:
    head = Head("int8", 32, 1040, 64, 1, [True], 0.02)
    whole = head.load(ISAS[-1])
    head.bench.array(head.operands[3], np.float32, whole.shape)[:] = np.nan
    head.bench.counts[abi.COUNT_SAMPLES] = 1
    for name in KERNELS:
        head.bench.run(ISAS[-1], name.format(head.name), head.operands, head.parameters, keep=True)
    assert np.array_equal(head.bench.array(head.operands[2], np.float32, whole.shape), whole)
