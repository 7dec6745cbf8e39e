"""The estimator: worked examples, every term by itself, bands, and refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from edgeinfer.devices import (
    Curve,
    DeviceProfile,
    Traffic,
    break_even,
    classes,
    constants_of,
    crossover,
    estimate,
    load_profile,
    profiles,
    smallest_row,
)
from edgeinfer.errors import UsageError
from edgeinfer.graph.topn_cost import TopNCost

LLAMA = Traffic(  # Llama-2-7B, pure 4 bits, int8 keys and values: 6.738 G weights
    weight_bytes=3.369e9, layers=32, operations=13.214e9, head_operations=0.262e9, kv_bytes=2 * 32 * 128 * 32,
    attention_operations=4 * 32 * 128 * 32, parameters=6.738e9, kv_values=2 * 32 * 128 * 32,
)
PLAIN = DeviceProfile(
    "plain", "Plain", "local", 1 << 34, bandwidth_gbs=42.0, effective_gbs=None, cores=4, isa="generic",
    int8_peak_gops=1000.0, constants={"f_w": 1.0, "f_kv": 0.5, "t0_ms": 0.0, "mfu": 0.5, "mfu_attention": 0.25,
               "activation_cost": 0.0},
)


def test_llama_2_7b_in_pure_4_bits():
    assert LLAMA.weight_bytes == pytest.approx(3.37e9, rel=1e-3)
    assert LLAMA.kv_values * 8192 == 2 * 2**30
    assert LLAMA.kv_values * 32768 == 8 * 2**30
    phone = load_profile("phone-lpddr5x-8533")
    assert estimate(phone, LLAMA, depth=8192).ceiling_tok_per_s == pytest.approx(10.5, abs=0.05)


def test_dense_7b_in_int8_at_42_gbs():
    assert estimate(PLAIN, Traffic(7e9, 32)).decode_tok_per_s == pytest.approx(6.0)


@pytest.mark.parametrize(("efficiency", "milliseconds"), [(1.0, 77.14), (0.5, 99.52), (0.2, 166.67), (0.1, 278.57)])
def test_sparse_7b_costs_attention_and_scattered_rows(efficiency, milliseconds):
    """Attention 2.3 GB + 20 % of 4.7 GB of FFN: t = 2.3/42 + 0.94/(42*e); at e = 0.2 it is the dense one's 7/42."""
    sparse = Traffic(7e9, 32, ffn_bytes=4.7e9, active_share=0.2, row_bytes=4096)
    device = replace(PLAIN, memory_random=Curve(((64, 42.0 * efficiency), (1 << 20, 42.0 * efficiency))))
    outcome = estimate(device, sparse)
    assert 1000 / outcome.decode_tok_per_s == pytest.approx(milliseconds, abs=0.01)
    assert outcome.terms["weights"] == pytest.approx(1000 * 2.3 / 42)
    assert outcome.terms["sparse_ffn"] == pytest.approx(1000 * 0.94 / (42 * efficiency))
    assert outcome.bytes_per_token == pytest.approx(3.24e9)
    assert break_even(device, 4096).relative_time(0.8) == pytest.approx(0.2 / efficiency)
    assert (outcome.decode_tok_per_s > 6.0001) == (efficiency > 0.2)


def test_break_even_follows_the_curve():
    device = replace(PLAIN, memory_random=Curve(((64, 4.2), (1024, 21.0), (4096, 42.0), (1 << 20, 50.0))))
    assert [round(break_even(device, size).sparsity, 6) for size in (64, 1024, 4096, 1 << 20)] == [0.9, 0.5, 0.0, 0.0]
    assert smallest_row(device, 0.6) == 1024
    assert smallest_row(device, 0.95) == 64
    assert smallest_row(device, 0.0) is None


def test_streamed_layers_cost_what_computing_does_not_hide():
    device = replace(PLAIN, storage_sequential_gbs=2.0)
    alone = 1000 / estimate(device, LLAMA, depth=1000).decode_tok_per_s
    for nbytes in (1e6, 1e9, 4e9):
        found = estimate(device, replace(LLAMA, streamed_bytes=nbytes), depth=1000)
        assert 1000 / found.decode_tok_per_s == pytest.approx(max(alone, nbytes / 2e6))
    with pytest.raises(UsageError, match="does long reads from storage is not known"):
        estimate(PLAIN, replace(LLAMA, streamed_bytes=1e6))


def test_every_term_by_itself():
    outcome = estimate(replace(PLAIN, storage_random=Curve(((4096, 0.5), (65536, 2.0)))),
                       replace(LLAMA, layers=16, flash_bytes=1e8, flash_chunk_bytes=65536), depth=1000, prompt=100)
    assert outcome.terms["overhead"] == 0
    assert outcome.terms["weights"] == pytest.approx(1000 * 3.369 / 42)
    assert outcome.terms["kv"] == pytest.approx(1000 * 0.262144 / 21)
    assert outcome.terms["flash"] == pytest.approx(50.0)
    assert outcome.terms["prefill_attention"] == pytest.approx(1000 * 524288 * (100 * 1000 + 5050) / 250e9)
    assert outcome.terms["prefill_matrices"] == pytest.approx(1000 * (12.952 * 100 + 0.262) / 500)
    assert outcome.ttft_ms == pytest.approx(sum(v for k, v in outcome.terms.items() if k.startswith("prefill")))
    assert outcome.prefill_tok_per_s == pytest.approx(1000 * 100 / outcome.ttft_ms)


def test_values_between_the_matrices_cost_prompts_of_narrow_models_more():
    costly = replace(PLAIN, constants={**PLAIN.constants, "activation_cost": 200.0})
    narrow = estimate(costly, replace(LLAMA, activation_values=1e6), prompt=100)
    assert narrow.terms["prefill_activations"] == pytest.approx(1000 * 200 * 1e6 * 100 / 1e12)
    assert estimate(PLAIN, replace(LLAMA, activation_values=1e6)).terms["prefill_activations"] == 0


def test_fixed_time_grows_with_layers_and_acceptance_divides():
    slow = replace(PLAIN, constants={**PLAIN.constants, "t0_ms": 8.0})
    assert estimate(slow, replace(LLAMA, layers=8)).terms["overhead"] == pytest.approx(2.0)
    once, twice = (estimate(slow, LLAMA, accepted=n, draft_cost=0).decode_tok_per_s for n in (1, 2))
    assert twice == pytest.approx(2 * once)
    drafted = estimate(slow, LLAMA, accepted=2, draft_cost=0.5)
    assert drafted.decode_tok_per_s == pytest.approx(2 / 1.5 * once)
    assert drafted.terms["draft"] == pytest.approx(500 / once)
    assert estimate(slow, LLAMA, accepted=2).decode_tok_per_s == pytest.approx(2 / 1.1 * once)
    with pytest.raises(UsageError, match=r"A draft cost of -1 is impossible; it is a share of a token's time"):
        estimate(slow, LLAMA, draft_cost=-1)


def test_a_short_prompt_waits_for_the_weights():
    outcome = estimate(PLAIN, LLAMA, prompt=1)
    assert outcome.terms["prefill_matrices"] == pytest.approx(1000 * 3.369 / 42)


def test_a_sliding_window_limits_keys_and_values():
    traffic = Traffic(1e9, 26, kv_bytes=100, window_kv_bytes=500, window=512, attention_operations=1,
                      window_attention_operations=10)
    assert traffic.kv_bytes_at(100) == 60_000
    assert traffic.kv_bytes_at(10_000) == 1_000_000 + 256_000
    assert traffic.attention_operations_of(3, 0) == 6 + 60
    assert traffic.attention_operations_of(4, 510) == sum(510 + i + 10 * min(510 + i, 512) for i in range(1, 5))


def test_bands_say_where_they_come_from():
    of_class = estimate(replace(PLAIN, device_class="x86-laptop", constants={}), LLAMA)
    assert of_class.basis == "class x86-laptop"
    assert of_class.low == pytest.approx(of_class.decode_tok_per_s * (1 - classes()["x86-laptop"]["error"]))
    board = replace(PLAIN, device_class="arm-sbc", constants={})
    assert estimate(replace(board, effective_gbs=30.0), LLAMA).error == 0.25 < estimate(board, LLAMA).error
    fitted = replace(PLAIN, measured="2026-05-01T12:00:00", sources={"f_w": "probe and 12 runs of this machine"})
    calibrated = estimate(fitted, LLAMA)
    assert (calibrated.basis, calibrated.error) == ("this machine, calibrated", 0.10)
    assert "12 runs" in calibrated.error_source
    shaky = replace(fitted, figures={"decode_error": 0.1, "prompt_error": 5.0})
    assert estimate(shaky, LLAMA).error == pytest.approx(0.19)
    assert constants_of(shaky).prefill_error == 0.6
    unknown = estimate(replace(PLAIN, device_class="abacus"), LLAMA)
    assert unknown.basis == "unknown"
    assert unknown.error > of_class.error > calibrated.error


def test_constants_of_a_profile_come_before_those_of_its_class():
    board = replace(PLAIN, device_class="arm-sbc", constants={})
    assert constants_of(board).f_w == classes()["arm-sbc"]["f_w"]
    assert constants_of(replace(board, effective_gbs=21.0)).f_w == pytest.approx(0.5)
    assert constants_of(replace(board, effective_gbs=21.0, constants={"f_w": 0.7})).f_w == 0.7


def test_every_known_device_has_an_estimate_within_its_ceiling():
    for name, profile in profiles().items():
        outcome = estimate(profile, LLAMA, depth=512)
        assert 0 < outcome.low < outcome.decode_tok_per_s < outcome.high, name
        assert outcome.decode_tok_per_s <= outcome.ceiling_tok_per_s, name
        assert outcome.basis == f"class {profile.device_class}", name


@pytest.mark.parametrize(("change", "words"), [
    ({"weight_bytes": -1.0}, "weight_bytes is -1.0; it must be a finite number of 0 or more"),
    ({"weight_bytes": float("nan")}, "weight_bytes is nan"),
    ({"layers": 0}, "layers is 0; it must be 1 or more"),
    ({"active_share": 1.5}, "active_share is 1.5; it must be from 0 to 1"),
    ({"ffn_bytes": 1e12}, "ffn_bytes is 1000000000000.0; it must be at most weight_bytes"),
    ({"head_operations": 1e12}, "head_operations is 1000000000000.0; it must be at most operations"),
    ({"active_share": 0.5}, "row_bytes is 0.0; it must be above 0 where active_share is below 1"),
])
def test_impossible_traffic_is_refused(change, words):
    with pytest.raises(UsageError) as caught:
        replace(LLAMA, **change)
    assert words in str(caught.value)


@pytest.mark.parametrize("change", [{"depth": -1}, {"prompt": 0}, {"accepted": 0.5}, {"accepted": float("nan")}])
def test_impossible_questions_are_refused(change):
    with pytest.raises(UsageError, match="the depth is 0 or more, the prompt at least 1 token"):
        estimate(PLAIN, LLAMA, **change)


def test_unknown_random_reads_are_refused():
    with pytest.raises(UsageError, match=r"plain reads scattered rows is not known.*devices --probe"):
        estimate(PLAIN, replace(LLAMA, ffn_bytes=1e9, active_share=0.1, row_bytes=2048))
    with pytest.raises(UsageError, match=r"plain does scattered reads from storage is not known"):
        estimate(PLAIN, replace(LLAMA, flash_bytes=1e6, flash_chunk_bytes=4096))
    with pytest.raises(UsageError, match=r"plain does long reads from storage is not known"):
        estimate(PLAIN, replace(LLAMA, flash_bytes=1e6))
    with pytest.raises(UsageError, match="Rows of 0 bytes are impossible"):
        break_even(replace(PLAIN, memory_random=Curve(((64, 1.0),))), 0)
    with pytest.raises(UsageError, match=r"A sparsity of 1\.5 is impossible"):
        break_even(replace(PLAIN, memory_random=Curve(((64, 1.0),))), 64).relative_time(1.5)


def test_nothing_heavy_is_imported():
    code = "import sys, edgeinfer.devices; print([m for m in ('numpy', 'numba', 'llvmlite') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_multiplying_with_the_cache_takes_time_beside_reading_it():
    probed = replace(PLAIN, constants={**PLAIN.constants, "attention_ms": 5.0})
    more = estimate(probed, LLAMA, depth=8192).terms["kv"] - estimate(PLAIN, LLAMA, depth=8192).terms["kv"]
    assert more == pytest.approx(5.0 * LLAMA.attention_operations_of(1, 8192) / 1e9)


CHOSEN = replace(LLAMA, value_bytes=32 * 128 * 32, topn=TopNCost(0.01, 0, 1), score_bytes=8 * 32 * 32)
"""V of which decoded tokens read what weighs a hundredth of the largest, in 32 layers of 4096 bytes."""


def test_chosen_rows_of_v_are_left_out_and_choosing_has_its_price():
    whole, chosen = (estimate(PLAIN, traffic, depth=4096) for traffic in (LLAMA, CHOSEN))
    left_out = 32 * 128 * 32 * (4096 - TopNCost(0.01, 0, 1).rows(4096))
    assert CHOSEN.left_out_at(4096) == left_out and CHOSEN.left_out_at(0) == LLAMA.left_out_at(4096) == 0
    assert CHOSEN.left_out_at(400) == 0  # all rows are read
    assert whole.bytes_per_token - chosen.bytes_per_token == pytest.approx(left_out)
    assert whole.terms["kv"] - chosen.terms["kv"] == pytest.approx(left_out / 21e6)
    assert "choosing" not in whole.terms and chosen.terms["choosing"] > 0


def test_a_pruned_prompt_takes_the_share_of_what_its_layers_take():
    whole, half = (estimate(PLAIN, LLAMA, prompt=4096, computed=share) for share in (1.0, 0.5))
    assert 0.5 < half.ttft_ms / whole.ttft_ms < 0.51
    assert half.terms["prefill_attention"] == pytest.approx(whole.terms["prefill_attention"] / 2)
    for share in (0, 1.5):
        with pytest.raises(UsageError, match=r"^A share of .* of a prompt cannot be computed; it is above 0"):
            estimate(PLAIN, LLAMA, computed=share)


def test_where_choosing_begins_to_pay():
    point = crossover(PLAIN, CHOSEN, 1 << 20)
    assert point is not None

    def pays(depth):
        return estimate(PLAIN, CHOSEN, depth=depth).decode_tok_per_s > estimate(PLAIN, LLAMA, depth).decode_tok_per_s

    assert pays(point) and pays(4 * point) and not pays(point - 1)
    assert crossover(PLAIN, CHOSEN, point - 1) is None
    assert crossover(PLAIN, replace(CHOSEN, topn=TopNCost(0.0, 0, 1)), 1 << 20) is None


def test_sequences_of_a_mixture_of_experts_read_more_experts():
    """So that eight of them are not as fast as one; those of a dense model are, without arithmetic and keys."""
    dense = Traffic(weight_bytes=2e9, layers=32, ffn_bytes=1.5e9)
    mixture = replace(dense, prefill_weight_bytes=12.5e9)
    assert dense.of_several(8) == dense and mixture.of_several(1) == mixture
    assert mixture.of_several(8).weight_bytes == pytest.approx(0.5e9 + 12e9 * (1 - (1 - 1 / 8) ** 8))
    speeds = [[estimate(PLAIN, one, sequences=n).decode_tok_per_s for n in (1, 8)] for one in (dense, mixture)]
    assert speeds[0][0] == speeds[1][0] and speeds[0][1] == pytest.approx(8 * speeds[0][0])
    assert speeds[0][1] > 3 * speeds[1][1]
