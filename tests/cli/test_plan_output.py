"""Output of `edgeinfer plan` and `edgeinfer estimate` for people: tables, bars, remarks, within 80 columns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.command_line import edgeinfer

GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
}  # fmt: skip
"""Of openai/gpt-oss-20b."""


def test_what_people_see(tmp_path: Path) -> None:
    done = edgeinfer("plan", "llama-3.1-8b", "--machine", "rpi5", "--budget", "5GB", "--ctx", 8192)
    lines = done.out.splitlines()
    assert done.code == 0
    assert lines[0].startswith("It fits, with 9 layers read from storage: 4.94 GB of 5.00 GB; ")
    assert lines[1].endswith("s (edgeinfer, CPU)")
    assert lines[2].startswith("llama-3.1-8b: 8.03 B parameters, built-in shape, as meta-llama/Llama-3.1-8B")
    assert any(line.startswith("r  resident") and "private" in line for line in lines)
    bar = next(line for line in lines if line.startswith("["))
    assert len(bar) == 64 and bar.count("r") > 40 and "K" in bar
    assert any(line.strip().startswith("=") and line.endswith("budget 5.00 GB") for line in lines)
    assert any(line.startswith("budget   5.00 GB (--budget): ") and line.endswith(" left") for line in lines)
    assert any(line.startswith("fits: weights q4, group size 64, ctx ") for line in lines)
    done = edgeinfer("plan", "llama-3.1-8b", "--machine", "rtx4060-ti", "--ctx", 131072, "--kv", "int8", "--budget",
                     "6GB")
    assert done.code == 3 and done.out.startswith("It does not fit: 1") and " of 6.00 GB; " in done.out
    assert done.sentence.startswith("The run needs 1")
    assert " GB, and the budget is 6.00 GB. It fits with --ctx " in done.sentence
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    shape = edgeinfer("plan", tmp_path, "--machine", "m1-max", "--budget", "64GiB", "--ctx", 32768)
    assert shape.code == 0
    assert " left\n" in shape.out and "context  at most 131072 tokens fit" in shape.out


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("model", ["demo", "llama-3.1-405b", "qwen3-30b-a3b", "gemma-3-27b", "gemma-4-e2b"])
def test_lines_fit_a_terminal(model: str) -> None:
    """80 columns, whatever the model; only the model's name and origin may need more."""
    for budget in ("1MB", "40GB"):
        out = edgeinfer("plan", model, "--machine", "rpi5", "--budget", budget, "--ctx", 1024).out
        assert all(line.startswith(f"{model}: ") for line in out.splitlines() if len(line) > 80)
        assert out.isascii()
    out = edgeinfer("estimate", model, "--machine", "rpi5", "--ctx", 1024).out
    assert not [line for line in out.splitlines() if len(line) > 80]


def test_slow_speeds_keep_their_digits() -> None:
    shown = edgeinfer("estimate", "llama-3.1-405b", "--machine", "rpi5 16gb").out
    assert re.search(r"decode     0\.00\d\d tokens/s at 4096 tokens", shown)


def test_a_devices_memory_is_a_budget_with_a_remark() -> None:

    def notes(*options: str) -> list[str]:
        return list(edgeinfer("plan", "demo", "--json", *options).json["notes"])

    remark = ("The budget is the memory of Raspberry Pi 5, 4 GB, less 1.07 GB for the system; --budget sets another. "
              "The name states no memory, so this is the smallest common version; it is sold with 1, 2, 4, 8, 16 GB")
    assert any(note.startswith(remark) for note in notes("--machine", "rpi5"))
    assert not any(note.startswith(remark) for note in notes("--machine", "rpi5", "--budget", "1GB"))
    assert not any(note.startswith(remark) for note in notes())


def test_an_estimate_of_other_threads_says_so() -> None:
    def said(*options: str) -> bool:
        notes = edgeinfer("plan", "demo", "--json", *options).json["notes"]
        return "The speed is that of 4 threads on rpi5, not of 2." in notes

    assert said("--machine", "rpi5", "--threads", "2")
    assert not said("--machine", "rpi5", "--threads", "4") and not said("--machine", "rpi5")
    assert "threads on" not in edgeinfer("plan", "demo", "--machine", "rtx4090").out
