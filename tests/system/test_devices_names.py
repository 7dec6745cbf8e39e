"""Names of devices as people type them: those that must find their device and its memory, and those that must not."""

from __future__ import annotations

import pytest

from edgeinfer.devices import load_profile, profiles, served
from edgeinfer.errors import UsageError
from tests.helpers.command_line import edgeinfer

MEANT = {
    "rpi4": "pi 4, Raspberry Pi 4B 4GB, raspberry pi 4 model b, RPI-4, Raspberry Pi 400",
    "rpi5": "Raspberry Pi 5 8GB, raspberrypi5, pi5, rpi 5, Raspberry Pi 5 (16 GB), Pi 5 model "
        "B 4 GB RAM, Raspberry Pi 500",
    "rk3588": "Orange Pi 5, orange pi 5 plus 16GB, Rock 5B, RK3588 CPU, Rockchip RK3588",
    "rk3588-npu": "RK3588 NPU, rk3588-npu 8gb",
    "orion-o6": "Radxa Orion O6, orion o6 32gb",
    "n100": "Intel N100, n100 mini 16GB",
    "n150": "N150",
    "m1": "Apple M1, M1 8GB, MacBook Air M1, m1 macbook air 8 gb, Mac mini M1 16GB, M1 GPU",
    "m1-max": 'M1 Max 64GB, macbook pro 16" m1 max',
    "m2": "M2, macbook air 13-inch m2 24gb",
    "m2-pro": "M2 Pro 16GB",
    "m2-ultra": "Mac Studio M2 Ultra 192GB",
    "m2-pro-cpu": "M2 Pro CPU",
    "m3-max": "M3 Max, M3 Max 128GB",
    "m4": "M4 mini 16GB, Mac mini M4, M4 mac mini 16 GB 512GB SSD, iMac M4 24GB, iPad Pro M4 8GB",
    "m4-pro": "M4 Pro, MacBook Pro M4 Pro 24GB, m4 pro mini 64gb",
    "m4-max": "m4max, MacBook Pro M4 Max 128GB",
    "m3-ultra": "M3 Ultra 512 GB",
    "m5": "M5",
    "m5-pro": "M5 Pro",
    "gb10": "DGX Spark, NVIDIA DGX Spark 128GB, gb10",
    "orin-nano": "Jetson Orin Nano, orin nano 8gb",
    "orin-nano-super": "Jetson Orin Nano Super, Orin Nano Super Developer Kit",
    "orin-nx": "Orin NX 16GB",
    "agx-orin": "Jetson AGX Orin 64GB, agx orin",
    "sd8g2": "Snapdragon 8 Gen 2, Galaxy S23 Ultra 12GB",
    "sd8g3": "8 Gen 3, Snapdragon 8 Gen 3, snapdragon8gen3, OnePlus 12 16GB",
    "sd8g3-npu": "Snapdragon 8 Gen 3 NPU",
    "sd8elite": "8 Gen 4, 8 Elite, Snapdragon 8 Elite, Galaxy S25",
    "x-elite": "Snapdragon X Elite, x elite 32GB",
    "rtx3090": "3090, RTX 3090 24GB, GeForce RTX 3090",
    "rtx4060-ti": "RTX 4060 Ti 16GB, 4060ti, rtx4060ti 8gb",
    "rtx4070-ti-super": "RTX 4070 Ti Super",
    "rtx4090": "4090, NVIDIA RTX 4090, nvidia geforce rtx 4090 24 GB, RTX4090 GPU",
    "rtx5090": "rtx 5090",
    "rx7900-xtx": "Radeon RX 7900 XTX, 7900xtx, AMD 7900 XTX 24GB",
    "rx7600": "RX7600",
    "a100": "A100, A100 80GB, NVIDIA A100 SXM",
    "h100": "H100 SXM",
    "h100-pcie": "H100 PCIe 80GB",
    "h200": "H200 141GB",
    "l40s": "NVIDIA L40S",
    "l4": "NVIDIA L4 24GB",
    "a10": "A10, NVIDIA A10",
    "strix-halo": "Strix Halo 128GB, Ryzen AI Max+ 395, AMD Ryzen AI Max 395 64GB",
    "ryzen-8840u": "Ryzen 7 8840U, 7840U 32GB, AMD Ryzen 7 7840U",
    "ryzen-8840u-igpu": "Radeon 780M",
    "lnl-258v": "Core Ultra 7 258V, Intel Core Ultra 7 258V 32GB",
    "lnl-258v-igpu": "Arc 140V",
    "i9-13900k": "i9-13900K, Intel Core i9 13900K, 13900k",
    "i7-8550u": "Intel Core i7-8550U",
    "graviton3": "AWS Graviton3",
    "desktop-ddr4-3200": "DDR4",
    "desktop-ddr5-5600": "desktop ddr5 64GB",
}
MEMORY = {
    "Raspberry Pi 5 8GB": 8, "M4 mini 16GB": 16, "pi 5 4 GB ram": 4, "M4 mac mini 16 GB 512GB SSD": 16, "M1 8g": 8,
    "M2 24GiB": 24, "RTX 4060 Ti 8GB": 8, "NVIDIA DGX Spark 128GB": 128, "Strix Halo 64GB": 64, "DDR5 48GB": 48,
    "OnePlus 12 12 GB": 12, "Raspberry Pi 5": 16, "M4": 32,
}
OTHERS = """rtx 4080, 4080, RTX 4060, rtx 4070 ti, RTX 4090 laptop, rtx 4090d, 4090 ti, rtx 3090 ti, rtx 3080, rtx 5080,
rx 4090, RX 7900 XT, rx 7800 xt, rx 7600 xt, Raspberry Pi 3, Raspberry Pi Zero 2, Raspberry Pi 6, rpi 55,
Pi, Orange Pi 4, Orange Pi 3, Rock 4, RK3566, RK3568, M6, M4 Ultra, M40, M14, M3 Max 30c, A1000, RTX
A100, H20, L40, GB200, GB300, Orin, Jetson Xavier NX, Jetson Thor, Snapdragon 8 Gen 1, 8 Gen 5, 8s Gen
4, 8s Gen 3, 7 Gen 3, Snapdragon X Plus, 8 Elite Gen 5, N97, N200, i9-14900K, i9-13900, i7-8650U, Core Ultra
7 155H, Ryzen 7 8840HS, Ryzen 9 7945HX, Graviton2, Graviton4, DDR3, DDR4-2400, Galaxy S24, Galaxy S26,
OnePlus 13, Strix Point, Mac mini, MacBook Pro, 16GB, GPU""".replace("\n", " ").split(", ")
PAIRS = [(typed, name) for name, names in MEANT.items() for typed in names.split(", ")]


@pytest.mark.parametrize(("typed", "name"), PAIRS)
def test_a_name_as_typed_finds_its_device(typed: str, name: str) -> None:
    assert load_profile(typed).name == name
    assert load_profile(f"  {typed.upper()} ").name == load_profile(typed.lower().replace(" ", "-")).name == name


@pytest.mark.parametrize("typed", OTHERS)
def test_another_device_is_not_answered_with_a_known_one(typed: str) -> None:
    with pytest.raises(UsageError, match=r"^There is no device"):
        load_profile(typed)


def test_enough_names_were_tried() -> None:
    assert len(PAIRS) >= 100 and len(OTHERS) >= 60
    for profile in profiles().values():  # and whatever the tables call it
        for text in (profile.name, profile.title, *profile.aliases):
            assert load_profile(text).name == profile.name


@pytest.mark.parametrize(("typed", "gib"), MEMORY.items())
def test_a_stated_memory_is_the_budget(typed: str, gib: int) -> None:
    found = load_profile(typed)
    assert found.memory_bytes == gib << 30
    report = edgeinfer("plan", "llama-2-7b", "--machine", typed, "--json").json
    key = "device_budget_bytes" if served(found) else "budget_bytes"
    assert report[key] == found.usable_bytes and report["device"] == found.name


@pytest.mark.parametrize(("typed", "sentence"), [
    ("Raspberry Pi 5 12GB", "Raspberry Pi 5 (rpi5) exists with 1, 2, 4, 8 or 16 GB, not with 12 GB; leave the"),
    ("A100 40GB", "exists with 80 GB, not with 40 GB"), ("M4 64GB", "exists with 8, 16, 24 or 32 GB, not with 64 GB"),
    ("desktop ddr4 1TB", "has at most 128 GB, not with 1024 GB"),
    ("rtx 4090 48 GB", "exists with 24 GB, not with 48 GB"),
])
def test_a_memory_that_does_not_exist_is_refused_with_those_that_do(typed: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_profile(typed)
    assert sentence in str(caught.value)


def test_capacities_fit_the_profile() -> None:
    for profile in profiles().values():
        assert not profile.memory_gib or max(profile.memory_gib) == profile.memory_bytes >> 30
        assert list(profile.memory_gib) == sorted(set(profile.memory_gib))


def test_neighbours_are_named_as_others() -> None:
    for typed, sentence in (
        ("rtx 4080", "the names next to it, 'rtx4090', 'rtx5090' or 'rtx3090', are other devices'"),
        ("rtz 4090", "did you mean 'rtx4090'?"), ("orange pi", "did you mean 'rk3588'?"),
    ):
        with pytest.raises(UsageError) as caught:
            load_profile(typed)
        assert sentence in str(caught.value)
