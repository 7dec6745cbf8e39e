"""Random FFNs that fire as sparse models do, in layout neuron: for measurements of speed, not of quality.

A model gets a ReLU and biases in its FFN. The normed input of a gate has a mean square of 1, so that a random gate row
gives about the normal distribution over tokens; the bias shifts it until the neuron fires for its share of the tokens.
Neurons are in order of heat, as `edgeinfer sparsify` stores them. A predictor has the cost of a real one, and its
thresholds let it choose the share of neurons requested:

* ``lowrank``: gates are the rounded product of its two matrices, so that its scores are the gates' outputs; chosen
  neurons fire. That is the dearest case: of those that do not fire only the gate is read.
* ``sign``: signs of the stored gates. They say less of a random gate, so that few of the chosen neurons fire.

The embedding is so large (`APART`) that tokens stay apart in all layers. Else the average over the context, which
attention adds, would soon be most of every token, nearly the same neurons would fire for all of them, and a cache of
neurons would hit where that of a real model does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import PREDICTOR_TYPE, Predictor, Statistics
from edgeinfer.errors import UsageError
from edgeinfer.graph import ModelConfig, Weight, family_of
from edgeinfer.quant import SUPER_COLUMNS, WeightType, layouts, packed

from ..checkpoint.sources import BLOCK_WEIGHTS

Codes = tuple[NDArray[np.int8], NDArray[np.float16]]
Floats = NDArray[np.float32]
NORMAL = NormalDist()
DEVIATION = {2: 0.82, 4: 4.6, 8: 73.5}
"""Approximate standard deviation of uniform codes, by their bits: scales are divided by it."""
SAMPLED_SIZE = 1.05
"""Deviation of the weights that `random_codes` samples, times sqrt(columns)."""
STATISTICS_TOKENS = 1 << 20
"""Tokens that the firing rates are counted of."""
APART = 8.0
"""Root mean square of an embedding's values; a layer adds values of 1 at most."""
GRID = 1024
"""Points of the normal distribution at which skew is integrated."""


@dataclass(frozen=True)
class Sparsity:
    """Sparsity of a random bundle's FFNs.

    Raises
    ------
    UsageError
        A value is out of range, or the predictor is not one that random models can have.
    """

    density: float
    """Share of the neurons that fire for a token."""
    skew: float = 0.5
    """Share of all activations in the more active half of the neurons: 0.5 if all are alike."""
    predictor: str = ""
    """'lowrank', 'sign' or, for none, ''."""
    rank: int = 0
    """Rank of a low-rank predictor, and of the gates."""
    mask: float | None = None
    """Share of the neurons that the predictor chooses for a token; None: the density."""

    def __post_init__(self) -> None:
        for name, value, least, most in (("density", self.density, 0.001, 0.9), ("skew", self.skew, 0.5, 0.99),
                                         ("mask", self.chosen, 0.001, 0.9)):
            if not least <= value <= most:
                raise UsageError(f"{name} is {value}; it must be from {least} to {most}.")
        if self.predictor not in ("", "lowrank", "sign"):
            raise UsageError(f"Random models have no predictor {self.predictor!r}; choose lowrank or sign.")
        if (self.predictor == "lowrank") != (self.rank > 0):
            raise UsageError(f"rank is {self.rank}; a low-rank predictor has one of 1 or more, and no other has any.")
        if self.mask is not None and not self.predictor:
            raise UsageError("mask is the share that a predictor chooses; name one, or leave mask out.")

    @property
    def chosen(self) -> float:
        """Share of the neurons in a mask."""
        return self.density if self.mask is None else self.mask

    def config(self, config: ModelConfig, ffn_layout: str = "neuron") -> ModelConfig:
        """Return the shape with a ReLU and biases in its FFN; raises `UsageError` if it cannot have them."""
        if ffn_layout != "neuron":
            raise UsageError(f"Sparse random models are stored neuron by neuron, not as {ffn_layout}.")
        if not family_of(config.model_type).ffn_biases:
            raise UsageError(f"Sparse random models need biases in their FFN, which {config.model_type} does not have; "
                             "choose the shape of a llama, or OPT's.")
        if self.rank > config.hidden_size:
            raise UsageError(f"rank is {self.rank}; hidden_size is {config.hidden_size}.")
        return replace(config, hidden_act="relu", mlp_bias=True)


def heats(share: float, skew: float, neurons: int) -> Floats:
    """Return how far each neuron's gate is shifted, in deviations, from the most active to the least.

    The shifts are normally distributed themselves: for a deviation t and a mean m sqrt(1 + t^2), a share Phi(m) of all
    gates is above 0, and t decides which part of these belongs to the upper half of the shifts.
    """
    def shifts(t: float, n: int) -> list[float]:
        middle = NORMAL.inv_cdf(share) * math.hypot(1, t)
        return [middle - t * NORMAL.inv_cdf((i + 0.5) / n) for i in range(n)]

    low, high = 0.0, 20.0
    for _ in range(30):
        t = (low + high) / 2
        rates = [NORMAL.cdf(x) for x in shifts(t, GRID)]
        low, high = (t, high) if sum(rates[: GRID // 2]) < skew * sum(rates) else (low, t)
    return np.array(shifts(low, neurons), np.float32)


class Neurons:
    """Stored bytes of random FFNs in layout neuron, layer by layer, and the parts that go with them.

    Parameters
    ----------
    rng : numpy Generator
    config : ModelConfig
        As `Sparsity.config` returns it, if there is a sparsity.
    sparsity : Sparsity, optional
        By default neurons fire, or not, as their random gates say.
    """

    def __init__(self, rng: np.random.Generator, config: ModelConfig, sparsity: Sparsity | None = None):
        self._rng, self._sparsity, self.sparse = rng, sparsity, sparsity is not None
        neurons = config.intermediate_size
        self._shifts = heats(sparsity.density, sparsity.skew, neurons) if sparsity else np.zeros(0, np.float32)
        self._limits = -heats(sparsity.chosen, sparsity.skew, neurons) if sparsity else np.zeros(0, np.float32)
        self._layers = config.num_hidden_layers
        self._made: list[Predictor] = []

    def ffn(self, weight: Weight, stored: WeightType) -> Iterator[NDArray[np.uint8]]:
        """Yield a layer's gates, then pairs; down columns are as large as intermediate_size asks for."""
        n, parts, hidden = weight.shape
        step = max(1, BLOCK_WEIGHTS // (2 * hidden))
        for codes, scales in self._gates(n, hidden, step, stored):
            yield layouts.pack_parts(codes, stored.dtype, stored.group_size, scales)
        for start in range(0, n, step):
            codes, scales = random_codes(self._rng, ((parts - 1) * min(step, n - start), hidden), stored)
            scales[parts - 2 :: parts - 1] *= np.float16(np.sqrt(hidden / n))
            yield layouts.pack_parts(codes, stored.dtype, stored.group_size, scales)

    def bias(self, parts: int) -> NDArray[np.uint8]:
        """Return a layer's biases, those of the gates, then, of neurons of three parts, those of the ups."""
        if self._sparsity is None:
            raise UsageError("Biases that decide which neurons fire belong to a sparsity.")
        size = SAMPLED_SIZE ** (2 if self._sparsity.predictor == "lowrank" else 1)
        ups = 0.02 * self._rng.standard_normal(len(self._shifts) * (parts - 2), np.float32)
        return np.concatenate([size * self._shifts, ups]).astype("<f4").view(np.uint8)

    def predictor(self) -> Predictor | None:
        """Return the predictor of all layers whose FFNs were made."""
        if not self._made:
            return None
        joined = {name: tuple(array for one in self._made for array in getattr(one, name))
                  for name in ("signs", "inner", "outer", "thresholds")}
        return Predictor(self._made[0].kind, self._made[0].rank, **joined)

    def statistics(self) -> Statistics:
        """Return the rates at which neurons were made to fire; how much they give at most is not known, and 1."""
        rates = np.array([NORMAL.cdf(float(x)) for x in self._shifts])
        n, layers = len(rates), self._layers
        chosen = () if not (self._sparsity and self._sparsity.predictor) else \
            (np.array([round(self._sparsity.chosen * n * STATISTICS_TOKENS)]),) * layers
        return Statistics(STATISTICS_TOKENS, (np.rint(rates * STATISTICS_TOKENS).astype(np.int64),) * layers,
                          (np.ones(n, np.float32),) * layers, (np.arange(n, dtype=np.int32),) * layers, chosen)

    def _gates(self, n: int, hidden: int, step: int, stored: WeightType) -> Iterator[Codes]:
        """Codes and scales of the gates, and on the way the layer's predictor."""
        kind, signs = self._sparsity.predictor if self._sparsity else "", []
        factors = self._factors(n, hidden) if kind == "lowrank" else None
        for start in range(0, n, step):
            stop = min(start + step, n)
            codes, scales = random_codes(self._rng, (stop - start, hidden), stored) if factors is None else \
                rounded_codes(factors[0][start:stop] @ factors[1], stored)
            if kind == "sign":
                signs.append(packed_signs(codes, scales, stored.group_size))
            yield codes, scales
        if kind == "sign":
            self._made.append(Predictor(kind, 0, (np.concatenate(signs),),
                                        thresholds=(np.float32(math.sqrt(hidden)) * self._limits,)))

    def _factors(self, n: int, hidden: int) -> tuple[Floats, Floats]:
        """Outer and inner matrix of a layer, which are its predictor."""
        assert self._sparsity is not None
        rank, data, values = self._sparsity.rank, [], []
        for shape in ((n, rank), (rank, hidden)):
            codes, scales = random_codes(self._rng, shape, PREDICTOR_TYPE)
            data.append(layouts.pack_tile16(codes, PREDICTOR_TYPE.dtype, PREDICTOR_TYPE.group_size, scales))
            values.append(layouts.dequantise(codes, scales, PREDICTOR_TYPE.group_size))
        self._made.append(Predictor("lowrank", rank, inner=(data[1],), outer=(data[0],),
                                    thresholds=(np.float32(SAMPLED_SIZE**2) * self._limits,)))
        return values[0], values[1]


def random_codes(rng: np.random.Generator, shape: tuple[int, int], stored: WeightType) -> Codes:
    """Codes of even distribution and scales of either sign (their mean is zero), for weights of about 1/sqrt(cols)."""
    rows, cols = shape
    raw = np.frombuffer(rng.bytes(rows * cols), np.uint8).reshape(shape)
    lowest, bits = np.int8(stored.storage.grid[0]), stored.storage.bits
    if bits == 2:  # ternary, as models have them: the fourth code is left out
        codes = (raw % 3).view(np.int8) + lowest
    else:
        codes = (raw & 15).view(np.int8) + lowest if bits == 4 else np.maximum(raw.view(np.int8), lowest)
    size = rng.uniform(0.5, 1.5, (rows, -(-cols // stored.group_size))) / (DEVIATION[bits] * np.sqrt(cols))
    return codes, (size * rng.choice((-1, 1), size.shape)).astype(np.float16)


def random_packed(rng: np.random.Generator, shape: tuple[int, int], stored: WeightType) -> NDArray[np.uint8]:
    """Bytes of a matrix as `random_codes`, of a type that has more than codes and fp16 scales."""
    (rows, cols), row = shape, stored.storage
    codes = rng.integers(0, 1 << row.bits, shape, np.uint8).view(np.int8) - np.int8(row.offset)
    levels = np.array(stored.table or range(row.grid[0], row.grid[1] + 1), np.float64)
    middle = levels.mean() if row.minimum else 0.0
    size = 1 / (np.sqrt(np.square(levels - middle).mean()) * np.sqrt(cols))
    scales = size * rng.uniform(0.5, 1.5, (rows, -(-cols // stored.group_size)))
    if not row.minimum:  # levels of a table do not balance each other
        scales *= rng.choice((-1, 1), scales.shape)
    if not row.nested:
        minima = (-middle * scales).astype(np.float16) if row.minimum else None
        return packed.pack(codes, stored, packed.Factors(scales.astype(np.float16), minima))
    inner = np.rint(scales / size * 60).astype(np.uint8 if row.scale == "u8*f16" else np.int8)
    outer = np.full((rows, cols // SUPER_COLUMNS), size / 60, np.float16)
    if not row.minimum:
        return packed.pack(codes, stored, packed.Factors(inner, None, outer))
    return packed.pack(codes, stored, packed.Factors(inner, inner, outer, (-middle * outer).astype(np.float16)))


def rounded_codes(weights: Floats, stored: WeightType) -> Codes:
    """The nearest codes, with scales by the largest of each group: quicker than `quantise`, and good enough here."""
    rows, cols = weights.shape
    groups = -(-cols // stored.group_size)
    padded = np.zeros((rows, groups * stored.group_size), np.float32)
    padded[:, :cols] = weights
    grouped = padded.reshape(rows, groups, -1)
    scales = (np.maximum(grouped.max(2), -grouped.min(2)) / stored.storage.grid[1]).astype(np.float16)
    grouped *= 1 / np.maximum(scales.astype(np.float32), np.float32(6e-8))[:, :, None]
    lowest, highest = stored.storage.grid
    return np.clip(np.rint(padded[:, :cols]), lowest, highest).astype(np.int8), scales


def packed_signs(codes: NDArray[np.int8], scales: NDArray[np.float16], group_size: int) -> NDArray[np.uint64]:
    """Return bit masks of the negative weights, 64 columns a word."""
    rows, cols = codes.shape
    negative = np.repeat(scales < 0, group_size, axis=1)[:, :cols]
    padded = np.zeros((rows, -(-cols // 64) * 64), bool)
    padded[:, :cols] = ((codes < 0) ^ negative) & (codes != 0)
    return np.packbits(padded, axis=1, bitorder="little").view("<u8")
