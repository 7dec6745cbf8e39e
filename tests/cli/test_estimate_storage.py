"""`edgeinfer estimate --storage`, `--budget` and `--sparsity`: layers, experts and zero rows left in storage."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgeinfer as library
from edgeinfer.devices import equipped, load_profile, profiles, storages
from tests.helpers.command_line import edgeinfer

MACHINE = ("--machine", "Raspberry Pi 5 8GB")


def estimated(*asked: object) -> dict:
    done = edgeinfer("estimate", *asked, "--json")
    assert done.code == 0, done.err
    return done.json


def test_streamed_layers_take_the_time_of_the_storage() -> None:
    """The bytes that a token reads in order, over GB/s, as far as computing does not hide them."""
    found = {kind: estimated("qwen3-14b", *MACHINE, "--storage", kind) for kind in ("sd", "usb3", "nvme")}
    for kind, out in found.items():
        storage = out["storage"]
        assert out["mode"] == "streamed" and 0 < storage["streamed_layers"] <= storage["layers"]
        assert storage["read_ms"] == pytest.approx(storage["read_bytes"] / storage["sequential_gbs"] / 1e6)
        token = 1000 / out["decode_empty_tok_per_s"]
        assert token == pytest.approx(storage["read_ms"], rel=0.01) if kind != "nvme" else token >= storage["read_ms"]
        assert out["low"] < out["decode_tok_per_s"] * (1 - storage["spread"]) < out["decode_tok_per_s"] < out["high"]
    assert found["sd"]["decode_tok_per_s"] < found["usb3"]["decode_tok_per_s"] < found["nvme"]["decode_tok_per_s"]
    assert found["sd"]["ttft_ms"] > 1.5 * found["nvme"]["ttft_ms"]  # each pass over the prompt reads them too
    assert found["nvme"]["storage"]["sequential_gbs"] == 0.837  # the slot of the board, not what the SSD could


def test_the_answer_is_in_the_first_three_lines() -> None:
    shown = edgeinfer("estimate", "qwen3-14b", *MACHINE, "--storage", "sd").out.splitlines()
    assert shown[2].startswith("decode     0.0") and max(map(len, shown)) <= 80
    assert any("of 40 layers are streamed" in line for line in shown)


def test_experts_by_hit_rate() -> None:
    out = estimated("qwen3-30b-a3b", *MACHINE, "--storage", "nvme")
    experts, planned = out["storage"]["experts"], edgeinfer(
        "plan", "qwen3-30b-a3b", *MACHINE, "--storage", "nvme", "--threads", 1, "--json").json
    assert out["mode"] == "experts from flash" and experts["kept"] < experts["total"]
    assert experts["alike"]["hit_rate"] < experts["skewed"]["hit_rate"] < 1
    assert experts["alike"]["decode_tok_per_s"] == pytest.approx(out["decode_tok_per_s"])
    routing = planned["from_storage"]["routing"]
    assert routing["skewed"]["hit_rate"] == experts["skewed"]["hit_rate"]
    assert planned["estimate"]["decode_tok_per_s"] == pytest.approx(out["decode_tok_per_s"])


def test_a_budget_is_what_a_run_may_take() -> None:
    """As `bench --budget` sets it; a model that fits the device is then streamed."""
    whole, half = (estimated("llama-2-7b", *MACHINE, "--storage", "nvme", *more) for more in ((), ("--budget", "3GiB")))
    assert whole["mode"] == "resident" and not whole["storage"]["read_bytes"] and half["mode"] == "streamed"
    assert half["budget_bytes"] == 3 << 30 >= half["total_bytes"]
    shown = " ".join(edgeinfer("estimate", "llama-2-7b", *MACHINE, "--storage", "nvme").out.split())
    assert "all weights fit in memory, so nothing is read while it answers; to load" in shown
    less = edgeinfer("estimate", "llama-2-7b", *MACHINE, "--budget", "300MiB").out
    assert "of which the run may take 315 MB" in " ".join(less.split())


def test_skipping_zero_rows_pays_where_they_are_few_enough() -> None:
    many = estimated("llama-2-7b", *MACHINE, "--sparsity", 0.9, "--rows", "64KiB")["skipping"]
    none = estimated("llama-2-7b", *MACHINE, "--sparsity", 0.1, "--rows", "64")["skipping"]
    assert (many["verdict"], none["verdict"]) == ("pays", "does not pay")
    assert many["low"] < many["decode_tok_per_s"] < many["high"] and many["low"] > many["dense_tok_per_s"]
    assert many["pays_from"] == pytest.approx(1 - many["efficiency"])
    assert many["pays_from_low"] < many["pays_from"] < many["pays_from_high"]
    close = estimated("llama-2-7b", *MACHINE, "--sparsity", 0.48, "--rows", "4KiB")["skipping"]
    assert close["verdict"] == "may pay" and close["row_bytes"] == 4096
    stored = estimated("llama-2-7b", *MACHINE, "--sparsity", 0.9, "--storage", "ufs4", "--budget", "2GiB")["skipping"]
    assert stored["from_storage"] and stored["decode_tok_per_s"] > stored["dense_tok_per_s"]
    assert stored["pays_from"] is None
    loses = estimated("llama-2-7b", *MACHINE, "--sparsity", 0.9, "--storage", "hdd", "--budget", "2GiB")["skipping"]
    assert loses["verdict"] == "does not pay"  # ten thousands of places on a disk


def test_skipping_on_every_device() -> None:
    done = edgeinfer("estimate", "llama-2-7b", "--sparsity", 0.8, "--rows", "4KiB", "--all-devices")
    lines = done.out.splitlines()
    assert lines[0].startswith("80% zeros in rows of 4.1 kB: pays on ") and max(map(len, lines)) <= 80
    assert any(line.startswith("rpi5 ") for line in lines) and any(line.startswith("rtx4090 ") for line in lines)


@pytest.mark.parametrize(("asked", "sentence"), [
    (["--storage", "nmve"], "There is no storage 'nmve'; did you mean nvme?"),
    (["--storage", "floppy"], "There is no storage 'floppy'; choose one of nvme, "),
    (["--sparsity", "1.2"], "--sparsity is 1.2; it is the share of zeros, from 0 to below 1"),
    (["--sparsity", "-1"], "--sparsity is -1; it is the share of zeros"),
    (["--rows", "4KiB"], "--rows 4KiB requires --sparsity SHARE"),
    (["--sparsity", "0.8", "--rows", "0"], "--rows is '0'; give a size from 1 byte to 1GiB, such as 4KiB"),
    (["--sparsity", "0.8", "--rows", "wide"], "--rows is 'wide'; give a size from 1 byte"),
    (["--budget", "much"], "--budget: Size 'much' cannot be read; write a number and a unit"),
])
def test_what_cannot_be_is_refused(asked: list[str], sentence: str) -> None:
    done = edgeinfer("estimate", "llama-2-7b", *MACHINE, *asked)
    assert done.code == 2 and sentence in done.sentence and not done.out


def test_storage_belongs_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("plan", "estimate"):
        sentence = edgeinfer(command, "llama-2-7b", "--storage", "nvme").sentence
        assert sentence == "--storage nvme replaces the storage of a device; add --machine NAME (local is this one)."
    with pytest.raises(library.EdgeInferError, match="name a machine"):
        library.plan("llama-2-7b", storage="nvme")


def test_from_python() -> None:
    slow, fast = (library.estimate("qwen3-14b", "rpi5 8gb", storage=kind) for kind in ("sd", "nvme"))
    assert slow.decode_tok_per_s < 0.1 * fast.decode_tok_per_s
    assert library.plan("qwen3-14b", "rpi5 8gb", storage="sd").decode_tok_per_s == pytest.approx(slow.decode_tok_per_s)


def test_every_device_has_figures_for_scattered_reads_and_storage() -> None:
    for profile in profiles().values():
        found = equipped(profile)
        assert found.storage_random and found.memory_random and found.storage_sequential_gbs
        assert found.storage_random.points[0][1] <= found.storage_sequential_gbs * 1.001
        assert found.memory_random.points[-1][1] <= found.bandwidth_gbs


def test_a_probed_machine_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "probed.toml"
    path.write_text('title = "A"\ndevice_class = "local"\nmemory_bytes = 8000000000\nbandwidth_gbs = 40.0\ncores = 2\n'
                    'isa = "avx2"\nmeasured = "2026-11-01T00:00:00"\nstorage_sequential_gbs = 1.5\n')
    profile = load_profile(path)
    assert equipped(profile) == profile and profile.storage_random is None
    named = equipped(profile, "sd")
    assert named.storage_sequential_gbs == storages()["sd"].sequential_gbs and named.storage_random
