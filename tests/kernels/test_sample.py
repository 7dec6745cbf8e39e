"""The sample kernels on every instruction set: each against its reference, and the three against the sampler in
NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Sampler
from edgeinfer.engine.sampler import EMPTY
from edgeinfer.errors import KernelError
from edgeinfer.kernels import SAMPLE, abi, fill
from tests.helpers.kernel_bench import ISAS, Bench

SIZES = (1, 7, 31, 33, 127, 129, 1023, 4096, 65_537)
DEFAULT: dict[str, Any] = {}
SETTINGS: tuple[dict[str, Any], ...] = (
    DEFAULT, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 128}, {"top_k": 129}, {"top_k": 0}, {"min_p": 0.0},
    {"top_k": 0, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0, "top_p": 1.0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.5},
    {"top_k": 3000, "top_p": 0.98, "min_p": 1e-4}, {"top_k": 1000, "top_p": 1.0, "min_p": 0.0, "temperature": 2.0},
    {"top_k": 0, "top_p": 0.9999, "min_p": 0.0, "temperature": 0.6}, {"top_k": 0, "top_p": 1.0, "min_p": 1e-5},
    {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 5e-324}, {"temperature": 1e6, "min_p": 0.0, "top_p": 1.0},
    {"repetition_penalty": 1.3}, {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 0.0},
    {"logit_bias": {0: 5.0}}, {"repetition_penalty": 1e-300}, {"repetition_penalty": 0.7, "logit_bias": {0: -np.inf}},
)  # fmt: skip
POSITION = 11


def random_logits(size: int, seed: int = 0, spread: float = 4.0, ties: bool = False) -> np.ndarray:
    logits = np.random.default_rng(seed).standard_normal(size) * spread
    return (np.round(logits) if ties else logits).astype(np.float32)


def sampler(size: int, seed: int = 1, **options: Any) -> Sampler:
    """A sampler that has seen POSITION tokens, of which the second half was generated."""
    chain = Sampler(GenerationConfig(**options), size, seed)
    history = np.random.default_rng(9).integers(0, size, POSITION).tolist()
    chain.prompt(history[:5])
    for token_id in history[5:]:
        chain.accept(token_id)
    return chain


class Samples:
    """Rows of logits and a sample for each but those that are None."""

    def __init__(self, rows: list[np.ndarray], chains: list[Sampler | None]):
        self.bench, self.chains, size = Bench(), chains, len(rows[0])
        stride = 4 * (-(-size // 16) * 16)
        table = np.full((len(rows), stride // 4), np.nan, np.float32)
        for row, values in zip(table, rows, strict=True):
            row[:size] = values
        length, sums, candidates = abi.sample_row(size)
        self.operands = [self.bench.put("logits", table), self.bench.reserve("activations", len(rows) * length)]
        self.parameters = fill(SAMPLE, vocab_size=size, logits_stride=stride, work_stride=length, sums=sums,
                               candidates=candidates)
        self.bench.tokens([POSITION - 1] * (len(rows) + 1))
        self.bench.outputs = np.arange(1, len(rows) + 1)
        self.bench.sample_specs = np.array([chain.address if chain else 0 for chain in chains])
        self.bench.counts[abi.COUNT_SAMPLES] = len(rows)
        self.logits = self.bench.array(self.operands[0], np.float32, (len(rows), size), (stride, 4))

    def run(self, isa: str, threads: int = 1) -> None:
        """All three kernels, each compared with its reference; the logits must be the model's own in the end."""
        before = self.logits.copy()
        for name in ("sample_edit", "sample_blocks", "sample_choose"):
            self.bench.run(isa, name, self.operands, self.parameters, threads=threads, keep=True)
        assert self.logits.tobytes() == before.tobytes()

    def tokens(self) -> list[int | None]:
        """Return the sampled token of each row, -1 for those that are left to NumPy."""
        return [chain._spec[0] if chain else None for chain in self.chains]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_kernels_choose_what_the_sampler_chooses(isa: str, size: int) -> None:
    """All settings in one forward pass, each with the logits of another seed."""
    rows = [random_logits(size, seed, ties=seed % 3 == 0) for seed in range(len(SETTINGS))]
    rows[5] /= 100  # nearly flat
    chains = [None if size == 1 and "logit_bias" in options and options["logit_bias"][0] < 0 else
              sampler(size, **options) for options in SETTINGS]
    sample_specs = Samples(rows, chains)
    for threads in (1, 3):
        sample_specs.run(isa, threads)
        for options, row, token, chain in zip(SETTINGS, rows, sample_specs.tokens(), chains, strict=True):
            if chain is None:
                continue
            want = sampler(size, **options).sample(row).token_id
            assert token == want, options
            assert chain.sample(row).token_id == want  # takes the token, or looks at the row


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_many_samples_of_a_row_are_those_of_numpy(isa: str) -> None:
    """A thousand seeds: exponentials, logarithms and sums agree to the bit, or some of these tokens would differ."""
    row = random_logits(4096, spread=2.0)
    for options in (DEFAULT, {"top_k": 0, "min_p": 0.0, "top_p": 0.3}, {"temperature": 3.0},
                    {"top_k": 4096, "min_p": 0.0, "top_p": 0.97},
                    {"top_k": 0, "min_p": 0.0, "top_p": 1.0, "temperature": 2.0},
                    {"top_k": 500, "min_p": 0.0, "top_p": 0.9, "temperature": 2.0}):
        chains: list[Sampler | None] = [sampler(4096, seed, **options) for seed in range(300)]
        sample_specs = Samples([row] * 300, chains)
        sample_specs.run(isa, 2)
        want = [sampler(4096, seed, **options).sample(row).token_id for seed in range(300)]
        assert sample_specs.tokens() == want and len(set(want)) > 5


@pytest.mark.parametrize("top_k", [40, 0])
@pytest.mark.parametrize("isa", ISAS)
def test_damaged_rows_are_left_to_numpy_which_says_so(isa: str, top_k: int) -> None:
    rows = [random_logits(200, seed) for seed in range(6)]
    for row, value in zip(rows, (np.nan, -np.nan, np.inf, -np.inf), strict=False):
        row[150] = value
    rows[4][:] = -np.inf
    sample_specs = Samples(rows, [sampler(200, top_k=top_k) for _ in rows])
    sample_specs.run(isa)
    assert [token == -1 for token in sample_specs.tokens()] == [True, True, True, False, True, False]


@pytest.mark.parametrize("isa", ISAS)
def test_greedy_takes_the_lowest_id_of_equals(isa: str) -> None:
    rows = [np.array([-0.0, 0.0, -0.0], np.float32), np.zeros(3000, np.float32)]
    for row, best in zip(rows, (0, 1700), strict=True):
        row[best:] += np.float32(0) if len(row) == 3 else np.float32(1)
        sample_specs = Samples([row], [sampler(len(row), temperature=0.0)])
        sample_specs.run(isa)
        assert sample_specs.tokens() == [best]


@pytest.mark.parametrize("isa", ISAS)
def test_numbers_at_the_ends_of_float32(isa: str) -> None:
    """Overflowing values are clipped or forbidden, alike in kernels and NumPy, without warnings."""
    row = np.where(np.arange(2000) % 3, np.float32(3.4e38), np.float32(-3.4e38))
    for options in ({"top_k": 0}, {"repetition_penalty": 1e-300}, {"logit_bias": {1: -1e300}}):
        sample_specs = Samples([row], [sampler(2000, **options)])
        sample_specs.run(isa)
        assert sample_specs.tokens() == [sampler(2000, **options).sample(row).token_id]


# -- masks -------------------------------------------------------------------------------------------------------------


def mask_of(allowed: np.ndarray) -> np.ndarray:
    """Words with a bit for each of these tokens, all of whose other bits are set: no token stands for them."""
    bits = np.ones(-(-len(allowed) // 32) * 32, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def masks(size: int) -> list[np.ndarray]:
    """Masks that allow all tokens, most, some, few, one of a vector's edge, and none."""
    rng = np.random.default_rng(size)
    shares = [rng.random(size) < share for share in (1.0, 0.97, 0.5, 0.01, 200 / max(size, 200))]
    return [mask_of(allowed) for allowed in (*shares, np.arange(size) == size // 32 * 32 - 1,
                                             np.arange(size) == size - 1, np.zeros(size, bool))]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_masked_kernels_choose_what_the_masked_sampler_chooses(isa: str, size: int) -> None:
    """All settings with each mask; what leaves nothing is left to the sampler, which says so."""
    rows = [random_logits(size, seed, ties=seed % 3 == 0) for seed in range(len(SETTINGS))]
    rows[5] /= 100
    for mask in masks(size):
        chains, wanted = list[Sampler | None](), list[Sampler]()
        for options in SETTINGS:
            options = {"temperature": 1.0} if size == 1 else options  # one of them forbids the only token
            chains.append(sampler(size, **options))
            wanted.append(sampler(size, **options))
            for chain in (chains[-1], wanted[-1]):
                chain.set_mask(mask)
        specs = Samples(rows, chains)
        specs.run(isa, 2)
        for row, token, chain, other in zip(rows, specs.tokens(), chains, wanted, strict=True):
            want = other.sample(row).token_id
            assert token == (-1 if want == EMPTY else want)
            assert chain and chain.sample(row).token_id == want
            allowed = np.unpackbits(mask.view(np.uint8), count=size, bitorder="little")
            assert allowed[want] if want != EMPTY else not (allowed * np.isfinite(chain.edited(row))).any()


@pytest.mark.parametrize("isa", ISAS)
def test_a_mask_hides_no_damage(isa: str) -> None:
    """NaN and +inf are found where they are forbidden too."""
    rows = [random_logits(200, seed) for seed in range(4)]
    for row, value in zip(rows, (np.nan, np.inf, -np.inf, 3.4e38), strict=True):
        row[150] = value
    chains = [sampler(200) for _ in rows]
    for chain in chains:
        chain.set_mask(mask_of(np.arange(200) != 150))
    specs = Samples(rows, list(chains))
    specs.run(isa)
    assert [token == -1 for token in specs.tokens()] == [True, True, False, False]
    for chain, row in zip(chains[:2], rows, strict=False):
        with pytest.raises(KernelError, match="as its largest logit"):
            chain.sample(row)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_with_and_without_masks_share_a_pass(isa: str) -> None:
    row = random_logits(4096)
    chains = [sampler(4096, seed, top_k=0, min_p=0.0) for seed in range(40)]
    alone = [sampler(4096, seed, top_k=0, min_p=0.0) for seed in range(40)]
    for number in range(0, 40, 2):
        for one in (chains, alone):
            one[number].set_mask(masks(4096)[number % 5])
    specs = Samples([row] * 40, list(chains))
    specs.run(isa, 3)
    assert specs.tokens() == [chain.sample(row).token_id for chain in alone]
