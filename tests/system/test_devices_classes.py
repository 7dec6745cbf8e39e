"""Constants of devices without measurements: two limits, dies, generations, kinds of cores, and experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeinfer.devices import DeviceProfile, Traffic, classes, constants_of, estimate
from edgeinfer.devices.cores import core_kinds, cores_gbs

LLAMA = Traffic(weight_bytes=3.369e9, layers=32, operations=13.214e9)
PLAIN = DeviceProfile("plain", "Plain", "local", 1 << 34, bandwidth_gbs=42.0, effective_gbs=None, cores=4,
                      isa="generic", int8_peak_gops=1000.0)


def test_memory_and_multiprocessors_both_limit_a_gpu():
    a100 = replace(PLAIN, device_class="cuda-datacentre", bandwidth_gbs=2039.0, cores=108, constants={},
                   figures={"clock_ghz": 1.41})
    table = classes()["cuda-datacentre"]
    asked, delivered = table["issue_bytes_per_clock"] * 108 * 1.41 / 2039, table["f_w"]
    assert constants_of(a100).f_w == pytest.approx((asked**-4 + delivered**-4) ** -0.25)
    without = constants_of(replace(a100, int8_peak_gops=None)).f_w
    assert without == pytest.approx(((asked / 2) ** -4 + delivered**-4) ** -0.25)
    assert constants_of(replace(a100, figures={})).f_w == delivered
    inline = replace(a100, figures={"ecc_share": 0.9375})
    assert constants_of(inline).f_w == pytest.approx(0.9375 * delivered)


def test_two_dies_and_a_processor_beside_the_gpu_leave_less_of_the_memory():
    for device_class, figure, value, key in (("apple-gpu", "dies", 2, "joined"), ("radeon", "shared", 1, "shared")):
        alone = replace(PLAIN, device_class=device_class, constants={}, figures={})
        assert constants_of(alone).f_w == classes()[device_class]["f_w"]
        less = constants_of(replace(alone, figures={figure: value})).f_w
        assert less == pytest.approx(classes()[device_class][key] * classes()[device_class]["f_w"])


def test_cores_limit_what_fast_memory_delivers_and_wide_codes_take_less_of_them():
    board = replace(PLAIN, device_class="arm-sbc", bandwidth_gbs=34.0, constants={}, processor={"a76": (4, 2.4)})
    share, cores = classes()["arm-sbc"]["f_w"], cores_gbs(board.processor)
    assert cores == pytest.approx(4 * 2.4 * core_kinds()["a76"].bytes_per_clock)
    for bits, each in ((4.0, 1.0), (8.0, 1.4)):
        limit = each * cores / 34.0
        assert constants_of(board, bits=bits).f_w == pytest.approx((share**-2.5 + limit**-2.5) ** (-1 / 2.5))
    one = replace(board, processor={"a76": (1, 2.4)})
    assert constants_of(one).f_w == pytest.approx(cores / 4 / 34.0, rel=0.1)
    assert constants_of(one).f_kv < constants_of(board).f_kv


def test_gpus_read_experts_more_slowly_and_the_band_says_so():
    some = replace(LLAMA, ffn_bytes=2e9, prefill_weight_bytes=17e9)
    assert some.experts and not LLAMA.experts and not replace(some, ffn_bytes=0.0).experts
    figures = {"clock_ghz": 1.5}
    for device_class, cores, slower in (("cuda-consumer", 4, True), ("cuda-consumer", 4000, False),
                                        ("radeon", 4, False), ("x86-desktop", 4, False)):
        device = replace(PLAIN, device_class=device_class, constants={}, figures=figures, cores=cores)
        dense, chosen = estimate(device, LLAMA), estimate(device, some)
        assert (chosen.terms["weights"] > 1.2 * dense.terms["weights"]) == slower, "few multiprocessors limit it"
        assert slower or chosen.terms["weights"] == pytest.approx(dense.terms["weights"], rel=1e-3)
        assert chosen.error == (dense.error if device_class == "x86-desktop" else max(dense.error, 0.155))
    seen = replace(PLAIN, device_class="radeon", constants={}, figures={}, effective_gbs=30.0)
    assert constants_of(seen, experts=True).f_w == constants_of(seen).f_w == pytest.approx(30 / 42)
    assert "mixtures of experts differ more" in constants_of(seen, experts=True).error_source
    fitted = replace(seen, measured="2026-05-01T12:00:00", constants={"f_w": 0.8, "t0_ms": 1.0})
    assert constants_of(fitted, experts=True) == constants_of(fitted)
    known = replace(fitted, constants={"f_w": 0.8})
    plain, routed, recurrent = (constants_of(known, experts=experts, recurrent=recurrent).t0_ms
                                for experts, recurrent in ((False, True), (True, False), (True, True)))
    table = classes()["radeon"]
    assert routed == pytest.approx(plain + table["experts_ms"])
    assert recurrent == pytest.approx(routed + table["recurrent_ms"])
    shared = {table["experts_ms"] for table in classes().values() if "experts_ms" in table}
    assert shared == {classes()["cuda-consumer"]["experts_ms"], table["experts_ms"]}


def test_barriers_of_threads_are_those_of_other_programs():
    server = replace(PLAIN, device_class="x86-server", constants={}, processor={"zen4": (96, 3.0)})
    table, other = classes()["x86-server"], constants_of(server)
    own = constants_of(replace(server, runtime="edgeinfer"))
    assert other.t0_ms == pytest.approx(table["t0_ms"] + 96 * table["thread_ms"]) and own.t0_ms == table["t0_ms"]
    assert "without the barriers of its threads, which are known of llama.cpp alone" in own.error_source
    known = replace(server, constants={"t0_ms": 1.5})
    assert constants_of(known).t0_ms == 1.5
    assert "barriers" not in constants_of(replace(known, runtime="edgeinfer")).error_source


def test_generations_have_constants_of_their_own():
    table = classes()["cuda-consumer"]
    gpu = replace(PLAIN, device_class="cuda-datacentre", constants={}, figures={})
    assert constants_of(gpu).t0_ms == classes()["cuda-datacentre"]["t0_ms"]
    assert constants_of(replace(gpu, family="turing")).t0_ms == table["families"]["turing"]["t0_ms"]
    clock = replace(PLAIN, device_class="apple-gpu", constants={}, figures={"clock_ghz": 2.8})
    apple = classes()["apple-gpu"]
    assert constants_of(clock).t0_ms == pytest.approx(apple["t0_ms"] * 0.5 ** apple["t0_power"])
    kinds = [constants_of(replace(PLAIN, device_class="x86-laptop", constants={}, isa=isa)).mfu
             for isa in ("avx2", "avx512vnni", "generic")]
    families = classes()["x86-desktop"]["families"]
    assert kinds == [families["avx2"]["mfu"], families["avx512vnni"]["mfu"], classes()["x86-laptop"]["mfu"]]
