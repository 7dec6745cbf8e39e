"""Masks of neurons on every instruction set: against their references, and each token's the same whoever runs with
it.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import NEURON_MASK, fill
from tests.helpers.kernel_bench import ISAS, Bench, token_tiles
from tests.kernels.test_matmul import activations

SHAPES = [(1, 6), (15, 33), (64, 64), (65, 172), (130, 1023), (700, 576)]


def masks_of(found: dict[str, np.ndarray], tokens: int) -> np.ndarray:
    return found["mask"].reshape(tokens, -1)


@pytest.mark.parametrize(("neurons", "width"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_scores_above_their_thresholds(neurons: int, width: int, tokens: int) -> None:
    rng = np.random.default_rng(neurons)
    bench, stride = Bench(), 64 * -(-neurons // 16)
    scores = np.full((tokens, stride // 4), np.nan, np.float32)
    scores[:, :neurons] = rng.integers(-3, 4, (tokens, neurons))
    thresholds = rng.integers(-3, 4, neurons).astype(np.float32)
    thresholds[::5] = -3e38
    out_stride = abi.neuron_mask_bytes(neurons) + 8
    operands = [bench.put("activations", scores), bench.put("constants", thresholds),
              bench.reserve("activations", tokens * out_stride), bench.scratch(64, 3)]
    roles = [abi.ROLE_DECODE if t != 1 else abi.ROLE_PROMPT for t in range(tokens)]
    parameters = fill(NEURON_MASK, neurons=neurons, rows=abi.COUNT_TOKENS, out_stride=out_stride, in_stride=stride)
    for isa in ISAS:
        bench.tokens([0] * tokens, roles=roles)
        for threads in (1, 3):
            found = bench.run(isa, "neuron_mask_scores", operands, parameters, threads=threads)
        bits = np.unpackbits(masks_of(found, sum(role == abi.ROLE_DECODE for role in roles)), axis=1,
                             bitorder="little")[:, :neurons]
        assert np.array_equal(bits[0], scores[0, :neurons] > thresholds)


@pytest.mark.parametrize(("neurons", "width"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 13])
def test_signs_that_agree(neurons: int, width: int, tokens: int) -> None:
    rng = np.random.default_rng(width)
    x = activations(rng.standard_normal((tokens, width)).astype(np.float32), 32)
    gate = rng.standard_normal((neurons, width))
    signs = np.packbits(np.pad(gate < 0, ((0, 0), (0, -width % 64))), axis=1, bitorder="little")
    thresholds = rng.integers(-width // 8, width // 8 + 1, neurons).astype(np.float32)
    own = 8 * -(-width // 64) + 64
    for isa in ISAS:
        alone: list[np.ndarray] = []
        for rows in [slice(t, t + 1) for t in range(tokens)] + [slice(0, tokens)]:
            bench, n = Bench(), len(range(tokens)[rows])
            stride, scales, offsets = x.layout()
            out_stride = abi.neuron_mask_bytes(neurons)
            operands = [bench.put("activations", x.memory(isa, rows)), bench.put("constants", thresholds),
                      bench.reserve("activations", n * out_stride), bench.scratch(own, 2), bench.put("weights", signs)]
            bench.tokens([0] * n, roles=[abi.ROLE_DECODE] * n)
            parameters = fill(NEURON_MASK, neurons=neurons, rows=abi.COUNT_TOKENS, out_stride=out_stride,
                              in_stride=stride, width=width, scratch=own, x_scales=scales, x_offsets=offsets, group=32,
                              token_tiles=abi.pack_token_tiles(token_tiles(isa)))
            found = bench.run(isa, "neuron_mask_signs", operands, parameters, threads=2)
            alone.append(masks_of(found, n))
        assert np.array_equal(np.concatenate(alone[:-1]), alone[-1])
