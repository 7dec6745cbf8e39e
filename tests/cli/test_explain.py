"""`edgeinfer estimate --explain`: calculations that practitioners work by hand, and formulas that give the estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeinfer.graph import builtin_shapes
from tests.helpers.command_line import edgeinfer

BOARD = """title = "A board"
device_class = "local"
memory_bytes = 34359738368
bandwidth_gbs = 42.0
effective_gbs = 42.0
cores = 4
isa = "neon_dotprod"
constants = { f_w = 1.0, f_kv = 1.0, t0_ms = 0.0 }
"""
NEURAL_UNIT = """title = "A neural unit whose peak is not published"
device_class = "npu"
memory_bytes = 17179869184
bandwidth_gbs = 76.8
cores = 1
isa = "npu"
"""


def lines(*asked: object) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    out = edgeinfer("estimate", *asked, "--explain", "--json").json
    return out, {(line["group"], line["name"]): line for line in out["explain"]}


def test_what_people_compute_in_their_heads() -> None:
    """Llama-2-7B at 4 bits, its KV cache in int8 at 8K, and 58 GB/s over both; the scores of a prompt of 1024."""
    _, found = lines("llama-2-7b", "--machine", "phone-lpddr5x-8533", "--ctx", 8192, "-p", 1024)
    hand = "By hand, without scales"
    assert found[hand, "weights"]["value"] == pytest.approx(3.5, rel=0.04)  # of 7 G weights
    assert found[hand, "KV"]["value"] == 2 and found[hand, "KV"]["unit"] == "GiB"
    assert found[hand, "tokens/s"]["value"] == pytest.approx(58 / 5.5, rel=0.01) == pytest.approx(10.5, rel=0.01)
    scores = found["Bytes of a token", "prompt scores"], found["Bytes of a token", "averaged"]
    assert [line["value"] for line in scores] == [64, 2] and {line["unit"] for line in scores} == {"MiB"}


def test_a_sparse_model_by_hand(tmp_path: Path) -> None:
    """A 7B model in int8 at 42 GB/s: what is always read, a fifth of the FFN, and the e from which on it loses."""
    board = tmp_path / "board.toml"
    board.write_text(BOARD)
    out, found = lines("llama-2-7b", "--machine", board, "--weights", "int8", "--ctx", 1)
    assert out["decode_empty_tok_per_s"] == pytest.approx(42 / 7.02, rel=0.01)
    sparse = found["Techniques, tokens/s", "sparse FFN"]
    assert "2.42 GB / 42 GB/s + 0.92 GB / (42 GB/s x e)" in sparse["formula"] and "e below 0.2;" in sparse["formula"]
    assert sparse["value"] == pytest.approx(1 / (2.42 / 42 + 0.92 / 42), rel=0.01)
    assert pytest.approx(out["decode_tok_per_s"], rel=0.01) == 1 / (2.42 / 42 + 0.92 / (42 * 0.2))  # the e of no gain


def test_a_probed_machine_reads_beside_its_prompts(tmp_path: Path) -> None:
    """The formulas, with unpacking as a second limit and a part of each reading that prompts do not hide, as given."""
    board = tmp_path / "probed.toml"
    more = "int8_peak_gops = 800.0\n[constants]\nf_w = 0.9\nmfu = 0.7\nfew_rows = 0.5\nunhidden = 0.25\n"
    board.write_text(BOARD[:BOARD.index("constants")] + more + "[figures]\nunpacked_gbs_q4 = 50.0\n")
    out, found = lines("llama-2-7b", "--machine", board, "--ctx", 4096)
    assert found["Time of a token", "tokens/s"]["value"] == pytest.approx(out["decode_tok_per_s"])
    assert found["Time of a prompt", "first word"]["value"] == pytest.approx(out["ttft_ms"])
    matrices = found["Time of a prompt", "matrices"]
    assert matrices["formula"].endswith(" G/s) + 0.25 of each reading of the weights")
    weights = out["weight_bytes_read"] / 1e9
    share = 0.9 / (1 + (42 / 50) ** 4) ** 0.25
    assert found["Time of a token", "weights"]["value"] == pytest.approx(1000 * weights / 42 / share, rel=0.01)
    arithmetic = 13.2e9 * 512 / 0.7 / 800e6
    assert matrices["value"] == pytest.approx(arithmetic + 2 * 0.25 * 1000 * weights / 42 / share, rel=0.02)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma-3-4b", "qwen3.5-4b", "llama-3.1-8b"])
def test_the_formulas_give_the_estimate(name: str) -> None:
    out, found = lines(name, "--machine", "m4 max 64gb", "--ctx", 4096)
    assert found["Time of a token", "tokens/s"]["value"] == pytest.approx(out["decode_tok_per_s"])
    assert found["Time of a prompt", "first word"]["value"] == pytest.approx(out["ttft_ms"])
    assert found["Bytes of a token", "weights"]["value"] == pytest.approx(out["weight_bytes_read"] / 1e9)
    for part in ("attention", "FFN"):
        assert "memory is the limit in decoding, arithmetic is in a prompt" in found["Limits", part]["formula"]
    assert 0 < found["Limits", "MBU"]["value"] < 100 and 0 < found["Limits", "MFU"]["value"] < 100


def test_it_fits_the_terminal_and_a_device_without_a_peak(tmp_path: Path) -> None:
    shown = edgeinfer("estimate", "llama-3.1-8b", "--machine", "m4", "--unit", "gpu", "--explain").out
    assert max(map(len, shown.splitlines())) <= 80 and "ridge point" in shown
    (tmp_path / "unit.toml").write_text(NEURAL_UNIT, encoding="utf-8")
    shown = edgeinfer("estimate", "llama-3.1-8b", "--machine", tmp_path / "unit.toml", "--explain").out
    assert "MBU" in shown and "ridge point" not in shown
    assert edgeinfer("estimate", "llama-3.1-8b", "--machine", "m4", "--json").json["explain"] is None
    done = edgeinfer("estimate", "llama-3.1-8b", "--all-devices", "--explain")
    assert done.code == 2 and "--explain has no effect with --all-devices" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_shapes())
def test_every_shape_is_explained(name: str) -> None:
    out, found = lines(name, "--machine", "m3 ultra 512gb")
    assert found["Time of a token", "tokens/s"]["value"] == pytest.approx(out["decode_tok_per_s"])


@pytest.mark.parametrize(("machine", "limit"), [("m4 16gb", "memory"), ("rpi5 4gb", "storage")])
def test_the_limit_is_said_first(machine: str, limit: str) -> None:
    shown = edgeinfer("estimate", "qwen3-8b", "--machine", machine, "--explain").out.splitlines()
    assert shown[2].startswith(f"limits     {limit} is the limit in decoding, arithmetic is in a prompt of 512")
