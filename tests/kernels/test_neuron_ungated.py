"""Neurons without a gate, of a row and a column, on every instruction set: against the references, and what is not
read.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi
from edgeinfer.kernels.reference import REFERENCES
from edgeinfer.quant import layouts
from tests.helpers.kernel_bench import ISAS
from tests.kernels.test_matmul import activations
from tests.kernels.test_neuron import NEURONS, WEIGHTS, Ffn, random_ffn, random_neurons, sparse, unchecked


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
@pytest.mark.parametrize(("dtype", "group"), WEIGHTS)
def test_both_halves_agree_with_their_references(dtype: str, group: int, activation: str) -> None:
    for width in (6, 33, 288, 1023):
        rng, neurons = np.random.default_rng(width + group), NEURONS[width]
        bias = rng.standard_normal(max(neurons, width + 16)).astype(np.float32)
        for tokens in (1, 2, 5):
            ffn = random_ffn(rng, dtype, group, neurons, width, tokens, parts=2, bias=bias)
            residual = rng.standard_normal((tokens, 16 * -(-width // 16))).astype(np.float32)
            for isa in ISAS:
                f = ffn.gated(isa, activation, keep=True)
                ffn.down(isa, f if tokens == 1 else sparse(rng, f.shape, 0.5), residual=residual)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["q4", "int8"])
def test_the_same_bits_for_any_tokens_threads_masks_and_dead_neurons(dtype: str, isa: str) -> None:
    rng = np.random.default_rng(4)
    neurons, width, tokens = 150, 288, 7  # three blocks
    x = activations(rng.standard_normal((tokens, width)).astype(np.float32), 32)
    weights = random_neurons(rng, dtype, 32, neurons, width, 2)
    masks = rng.random((tokens, neurons)) < np.array([0, 1, 0.02, 0.1, 0.3, 0.9, 0.5])[:, None]
    dense, some = (Ffn(dtype, 32, weights, neurons, width, x, given, parts=2) for given in (None, masks))
    f = dense.gated(isa) * masks
    assert f.any() and not f[0].any()
    np.testing.assert_array_equal(some.gated(isa, threads=2), f)
    whole = some.outputs(isa)
    np.testing.assert_array_equal(whole, dense.down(isa, f))
    for first, n in ((0, 1), (1, 1), (3, 1), (5, 1), (1, 2), (2, 4)):
        for threads, chunk in ((1, 2), (3, 9)):
            for flags in (0, abi.FLAG_DENSE):
                some.flags = abi.FLAG_MASK | flags
                np.testing.assert_array_equal(some.outputs(isa, "relu", first, n, threads, chunk),
                                              whole[first : first + n])


@pytest.mark.parametrize("dtype", ["q4", "int8"])
def test_columns_of_dead_neurons_are_not_read(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that are NaN in the columns of dead neurons change nothing, unless all are computed."""
    rng, group, neurons, width = np.random.default_rng(5), 32, 40, 288
    low, high = (-8, 8) if dtype == "q4" else (-127, 128)
    codes = rng.integers(low, high, (neurons, 2, width), dtype=np.int8)
    scales = (rng.random((neurons, 2, width // group)) / high).astype(np.float16)
    packed = layouts.pack_neuron(codes, dtype, group, scales)
    for isa in ISAS:
        for tokens in (1, 2):
            x = activations(np.repeat(rng.standard_normal((1, width)).astype(np.float32), tokens, axis=0), group)
            ffn = Ffn(dtype, group, packed, neurons, width, x, parts=2)
            want, dead = ffn.outputs(isa, tokens=tokens), ffn.gated(isa)[0] == 0
            assert 0 < dead.sum() < neurons
            damaged = scales.copy()
            damaged[dead, 1] = np.nan
            ffn.bench.array(ffn.weights, np.uint8, packed.shape)[:] = layouts.pack_neuron(codes, dtype, group, damaged)
            with monkeypatch.context() as patch, np.errstate(invalid="ignore"):
                for name in ("gated", "down"):  # references multiply with all weights
                    patch.setitem(REFERENCES, f"neuron_{name}_{dtype}", unchecked(REFERENCES[f"neuron_{name}_{dtype}"]))
                np.testing.assert_array_equal(ffn.outputs(isa, tokens=tokens), want)
                if isa != "generic":  # whose conversion of halves knows finite numbers alone
                    ffn.flags |= abi.FLAG_DENSE
                    assert np.isnan(ffn.outputs(isa, tokens=tokens)).all()
