"""Rotary embedding, KV storage and attention on every instruction set, chained as a layer chains them."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.kernels import abi
from tests.helpers.attention_layer import GROUPS, HEADS, KV, Layer, Sequence, chain_of
from tests.helpers.kernel_bench import ISAS


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv", KV)
def test_rope_store_agrees_with_its_reference(kv: str, heads: tuple[int, int, int], norm: bool) -> None:
    for tokens in (1, 2, 3, 7, 9, 33):
        layer = Layer(kv, heads, chain_of(tokens, past=13), norm=norm)
        for isa in ISAS:
            whole = layer.store(isa, keep=False)
            shared = layer.store(isa, keep=False, threads=2)
            for name, values in whole.items():
                np.testing.assert_array_equal(values, shared[name], err_msg=name)


@pytest.mark.parametrize("flags", [abi.FLAG_VALUE_NORM, abi.FLAG_KEYS_AS_VALUES,
                                   abi.FLAG_VALUE_NORM | abi.FLAG_KEYS_AS_VALUES])
@pytest.mark.parametrize("kv", KV)
def test_values_are_normed_or_made_of_keys(kv: str, flags: int) -> None:
    """v is what k is before norm and rotation; pairs lie half of the head apart, of which some turn."""
    layer = Layer(kv, (4, 2, 22), chain_of(9, past=13), norm=True)
    layer.flags, layer.rotary, layer.apart = layer.flags | flags, 10, 11
    for isa in ISAS:
        whole, shared = layer.store(isa, keep=False), layer.store(isa, keep=False, threads=3)
        for name, values in whole.items():
            np.testing.assert_array_equal(values, shared[name], err_msg=name)


def test_queries_alone_store_nothing() -> None:
    layer = Layer("int8", (4, 2, 22), chain_of(9, past=13), norm=True)
    layer.flags |= abi.FLAG_QUERIES
    for isa in ISAS:
        assert list(layer.store(isa)) == ["q and k"]


@pytest.mark.parametrize("kv", KV)
def test_heads_of_512(kv: str) -> None:
    """Gemma 4's, in layers without a window."""
    for tokens, past in ((1, 300), (5, 250)):
        layer = Layer(kv, (4, 1, 512), chain_of(tokens, past))
        for isa in ISAS:
            layer.attend_in_splits(isa, threads=2)
            layer.attend(isa)


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv", KV)
def test_attention_agrees_with_its_reference(kv: str, heads: tuple[int, int, int]) -> None:
    for tokens, past in ((1, 0), (2, 14), (3, 30), (7, 250), (9, 0), (33, 245)):
        layer = Layer(kv, heads, chain_of(tokens, past))
        for isa in ISAS:
            layer.attend(isa)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 256, 300])
@pytest.mark.parametrize("kv", KV)
def test_sliding_windows(kv: str, window: int) -> None:
    layer = Layer(kv, (4, 2, 10), chain_of(40, past=505), window=window)
    alone = Layer(kv, (4, 2, 10), chain_of(1, past=530), window=window)
    for isa in ISAS:
        layer.attend(isa, tile=8 if window % 2 else 3)
        alone.attend(isa)
        layer.attend_in_splits(isa)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [(4, 2, 10), (8, 1, 64), (3, 3, 128)])
@pytest.mark.parametrize("kv", KV)
def test_a_row_has_the_same_bits_however_it_is_computed(kv: str, heads: tuple[int, int, int], isa: str) -> None:
    """One token or many, any tile, splits or none, any number of threads, with a window or without."""
    for window in (0, 37):
        layer = Layer(kv, heads, chain_of(33, past=507), window=window, tile=4)  # the last split begins in the pass
        layer.store(isa)
        whole = layer.attend(isa)
        np.testing.assert_array_equal(layer.attend(isa, tile=1), whole)
        np.testing.assert_array_equal(layer.attend(isa, tile=3, threads=3), whole)
        np.testing.assert_array_equal(layer.attend_in_splits(isa, threads=2), whole)
        layer.only(20)
        np.testing.assert_array_equal(layer.attend(isa), whole[20:21])
        np.testing.assert_array_equal(layer.attend_in_splits(isa), whole[20:21])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
def test_storing_has_the_same_bits_for_any_number_of_tokens(kv: str, isa: str) -> None:
    layer = Layer(kv, (6, 2, 10), chain_of(33, past=5), norm=True)
    whole = layer.store(isa, keep=False)
    layer.only(17)
    alone = layer.store(isa, keep=False)
    np.testing.assert_array_equal(alone["q and k"], whole["q and k"][17:18])
    for part in ("K", "V"):
        np.testing.assert_array_equal(alone[f"{part} of token 0"], whole[f"{part} of token 17"])


@pytest.mark.parametrize("kv", KV)
def test_no_tokens_write_nothing(kv: str) -> None:
    layer = Layer(kv, (4, 2, 10), chain_of(3))
    layer.bench.tokens([])
    layer.positions = []
    for isa in ISAS:
        assert not layer.store(isa)["q and k"].size
        assert not layer.attend(isa).size


@pytest.mark.parametrize("kv", KV)
def test_several_sequences_in_one_pass(kv: str) -> None:
    sequences = [Sequence(0, 5), Sequence(270, 1), Sequence(31, 1), Sequence(7, 9), Sequence(600, 3)]
    layer = Layer(kv, (4, 2, 10), sequences, tile=6)
    for isa in ISAS:
        layer.store(isa)
        whole = layer.attend(isa)
        np.testing.assert_array_equal(layer.attend_in_splits(isa, threads=2), whole)
        np.testing.assert_array_equal(layer.attend(isa, threads=2, tile=1), whole)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("past", [0, 14, 15, 16, 17, 254, 255, 256, 257, 2040])
@pytest.mark.parametrize("kv", KV)
def test_few_tokens_have_the_bits_of_each_alone(kv: str, past: int) -> None:
    """2 to 16 tokens of one sequence or of several: in splits on one to three threads, whole, and one by one."""
    number = KV.index(kv) + past
    heads, window = GROUPS[number % 4], (0, 5, 40, 300)[number // 4 % 4]
    n = (2, 3, 5, 6, 8, 11, 16)[number % 7]
    several = [Sequence(past, 1), Sequence(33, n // 2), Sequence(past // 2, 1), Sequence(300, 3)]
    for sequences in (chain_of(n, past), several):
        layer = Layer(kv, heads, sequences, window)
        for isa in ISAS:
            layer.store(isa)
            whole = layer.attend_in_splits(isa)
            for threads in (2, 3):
                np.testing.assert_array_equal(layer.attend_in_splits(isa, threads), whole)
            np.testing.assert_array_equal(layer.attend(isa), whole)
        layer.only(len(layer.positions) - 2)
        np.testing.assert_array_equal(layer.attend_in_splits(ISAS[-1]), whole[-2:-1])


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("past", [0, 15, 255, 256, 1020])
@pytest.mark.parametrize("kv", KV)
def test_the_last_tokens_of_a_pass_are_split_beside_a_prompt(kv: str, past: int) -> None:
    """With the bits of a pass that splits none: decoded tokens, draft tokens and a tree, after a prompt's chunk."""
    number = KV.index(kv) + past
    heads, window = GROUPS[number % 4], (0, 5, 40, 300)[number // 4 % 4]
    layer = Layer(kv, heads, [Sequence(past // 3, 21), Sequence(past, 1), Sequence(33, 1), Sequence(past + 300, 4),
                              Sequence(past, 5, [-1, 0, 0, 2, -1])], window)
    for isa in ISAS:
        layer.store(isa)
        whole = layer.attend(isa)
        for tile, threads in ((1, 1), (3, 2), (10, 3)):
            np.testing.assert_array_equal(layer.attend(isa, threads, tile, prompted=21), whole)
            np.testing.assert_array_equal(layer.attend(isa, threads, tile, prompted=0), whole)
        for last in (1, 5, 9, 11):
            for threads in (1, 3):
                np.testing.assert_array_equal(layer.attend_in_splits(isa, threads, last, prompted=21), whole)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("heads", [(40, 1, 6), (130, 1, 6), (24, 2, 40)])
def test_large_groups_are_parted(heads: tuple[int, int, int]) -> None:
    """More rows of a KV head than a thread keeps queries for: of few tokens, or even of one."""
    layer = Layer("int8", heads, chain_of(5, past=254))
    for isa in ISAS:
        layer.store(isa)
        whole = layer.attend(isa)
        for threads in (1, 3):
            np.testing.assert_array_equal(layer.attend_in_splits(isa, threads), whole)


@pytest.mark.parametrize("kv", KV)
def test_instruction_sets_agree(kv: str) -> None:
    """int8 scores are exact integers, so only the rounding of floats is left to differ."""
    layer = Layer(kv, (8, 1, 64), chain_of(7, past=300))
    first = layer.attend(ISAS[0])
    for isa in ISAS[1:]:
        np.testing.assert_allclose(layer.attend(isa), first, rtol=0, atol=2e-5 * np.abs(first).max())


@pytest.mark.parametrize("isa", ISAS)
def test_a_dominant_key_is_attended_alone(isa: str) -> None:
    """Scores far apart: all but the largest get weight 0, wherever it stands."""
    for winner in (0, 17, 255, 256, 299):
        sequence = Sequence(299, 1)
        layer = Layer("f32", (1, 1, 16), [sequence])
        for i, block in enumerate(sequence.blocks):
            k = layer.bench.array(layer.part(0, 0, block), np.float32, (16, 16))  # (dimension, token)
            k[:] = 0
            k[0, :] = [400.0 if 16 * i + j == winner else -400.0 for j in range(16)]
        layer.bench.array(layer.operands[0], np.float32, (16,))[:] = [4.0] + [0.0] * 15
        v = layer.part(1, 0, sequence.blocks[winner // 16])
        row = layer.bench.array(v, np.float32, (16, 16))[winner % 16]
        np.testing.assert_array_equal(layer.attend(isa)[0], row)


@pytest.mark.parametrize("isa", ISAS)
def test_narrowing_to_fp16_rounds_to_nearest_even(isa: str) -> None:
    """Every finite fp16, the middle to its neighbour, and a float to each side of it; V is stored as it comes."""
    f16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    f16 = np.sort(f16[np.isfinite(f16)])
    middles = ((f16[1:] + f16[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (np.inf, -np.inf)]
    extremes = np.array([65519.99, 65520, 1e6, -1e6, 2.0**-25, 2.0**-25 * 1.001, 1e-30, -1e-30], np.float32)
    points = np.concatenate([f16.astype(np.float32), middles, *beside, extremes])
    tokens, n = 64, 1024
    points = np.resize(points, (-(-len(points) // (tokens * n)), tokens, n))
    layer = Layer("f16", (1, 1, n), chain_of(tokens))
    rows = layer.bench.array(layer.operands[0], np.float32, (tokens, 3, n), (layer.q_stride, 4 * n, 4))
    rows[:, :2] = 1
    for v in points:
        rows[:, 2] = v
        stored = layer.store(isa, keep=False)
        got = np.stack([stored[f"V of token {t}"][0] for t in range(tokens)])
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got.view(np.uint16), v.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("isa", ISAS)
def test_a_head_of_zeros_is_stored_as_zeros(isa: str) -> None:
    layer = Layer("int8", (2, 1, 8), chain_of(3))
    layer.bench.array(layer.operands[0], np.float32, (3, 32), (layer.q_stride, 4))[1] = 0
    stored = layer.store(isa)
    assert not stored["K of token 1"].any()
    assert not stored["K of token 1 scales"].any()
    assert np.isfinite(layer.attend(isa)).all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv", KV)
def test_a_part_of_a_head_turns(kv: str, heads: tuple[int, int, int]) -> None:
    """The first dimensions, and none at all."""
    for rotary in {0, 2, heads[2] // 4 * 2}:
        layer = Layer(kv, heads, chain_of(7, past=13), norm=bool(rotary))
        layer.rotary = rotary
        for isa in ISAS:
            whole = layer.store(isa, keep=False)
            shared = layer.store(isa, keep=False, threads=2)
            for name, values in whole.items():
                np.testing.assert_array_equal(values, shared[name], err_msg=name)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("kv", KV)
def test_capped_scores(kv: str, window: int) -> None:
    """Scores that mostly lie beyond the cap; the same bits in any tile, in splits or whole."""
    for tokens, past in ((1, 300), (33, 505)):
        layer = Layer(kv, (4, 2, 40), chain_of(tokens, past), window=window)
        layer.cap = 1.5
        for isa in ISAS:
            whole = layer.attend(isa)
            np.testing.assert_array_equal(layer.attend(isa, tile=1, threads=2), whole)
            np.testing.assert_array_equal(layer.attend_in_splits(isa), whole)
        layer.cap = 0.0
        assert np.abs(layer.attend(ISAS[-1]) - whole).max() > 0.05


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("kv", KV)
def test_sinks_take_weight_and_have_no_value(kv: str, window: int) -> None:
    """Below, among and above the scores; the same bits in any tile, in splits or whole."""
    sinks = np.array([-40, 0.5, 3, 60], np.float32)
    for sequences in (chain_of(1, 300), chain_of(9, 505), chain_of(33, 505), [Sequence(20, 6, [-1, 0, 0, 1, 2, 2])]):
        layer = Layer(kv, (4, 2, 40), sequences, window=window)
        tokens = len(layer.positions)
        without = layer.attend(ISAS[-1])
        layer.attention_flags = abi.FLAG_SINKS
        layer.operands += [0, 0, 0, layer.bench.put("constants", sinks)]
        for isa in ISAS:
            whole = layer.attend(isa)
            np.testing.assert_array_equal(layer.attend(isa, tile=1, threads=2), whole)
            np.testing.assert_array_equal(layer.attend_in_splits(isa, threads=2), whole)
        share = np.abs(whole).reshape(tokens, 4, 40).max(axis=(0, 2)) / np.abs(without).reshape(tokens, 4, 40).max(
            axis=(0, 2))
        assert share[0] > 0.999 and share[1] < 1 and share[3] < 1e-6


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("rounded", "window"), [(False, 0), (False, 37), (True, 0)])
@pytest.mark.parametrize("kv", KV)
def test_scores_fall_with_the_distance(kv: str, rounded: bool, window: int) -> None:
    """ALiBi; the same bits in any tile, in splits or whole, and of a tree's path as of a chain."""
    slopes = np.array([0.75, 2.0**-3, 0.0108642578125, 2.0**-8], np.float32)  # all of them bfloat16
    for sequences in (chain_of(1, 300), chain_of(9, 505), chain_of(33, 505), [Sequence(20, 6, [-1, 0, 0, 1, 2, 2])]):
        layer = Layer(kv, (4, 2, 40), sequences, window=window)
        without = layer.attend(ISAS[-1])
        layer.attention_flags = abi.FLAG_ALIBI | abi.FLAG_ALIBI_BF16 * rounded
        layer.operands += [0, 0, 0, 0, layer.bench.put("constants", slopes)]
        for isa in ISAS:
            whole = layer.attend(isa)
            np.testing.assert_array_equal(layer.attend(isa, tile=1, threads=2), whole)
            np.testing.assert_array_equal(layer.attend_in_splits(isa, threads=2), whole)
        assert np.abs(whole - without).max() > 0.05
