"""Commands with --device, on onnxruntime's CPU provider."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.backends import PROVIDERS
from edgeinfer.backends.onnx import devices, driver
from tests.helpers.command_line import edgeinfer
from tests.helpers.fake_gpu import Driver, Management

pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
PROMPT = "Once upon a time"


def test_run(no_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("run", "demo", PROMPT, "-n", "8", "--temp", "0", "-c", "128", "-t", "1", "--json")
    ours, theirs = edgeinfer(*given).json, edgeinfer(*given, "--device", "onnx-cpu").json
    assert theirs["text"] == ours["text"] and theirs["isa"] == "onnxruntime CPUExecutionProvider"
    assert theirs["kv"] == "f32" and ours["kv"] == "int8"
    assert edgeinfer(*given, "--device", "onnx-cpu", "--kv", "f16").json["kv"] == "f16"
    monkeypatch.setenv("EDGEINFER_KV", "int8")
    assert edgeinfer(*given, "--device", "onnx-cpu").json["kv"] == "f32"
    told = edgeinfer(*given[:-1], "--device", "onnx-cpu", "--kv", "int8")
    assert told.code == 2 and told.sentence.startswith("--kv int8 is not available on device onnx-cpu")
    assert edgeinfer(*given[:-1], "--device", "cuda").sentence.startswith("onnxruntime ")


def test_eval_on_one_device_against_the_other(no_variables: None, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_text("Once upon a time, there was a little girl named Lily. She loved to play outside in "
                                "the park. One day, she went to the park to play with her friends. " * 2)
    given = ("eval", "demo", "--text", tmp_path / "t", "-c", "64", "-t", "1", "--device", "onnx-cpu", "--json")
    report = edgeinfer(*given, "--reference", "demo").json
    assert 0 < report["kld_mean"] <= 1e-3
    same = edgeinfer(*given, "--reference", "demo", "--reference-device", "onnx-cpu").json
    assert same["kld_mean"] < 1e-12
    monkeypatch.setitem(devices.PROVIDERS, "onnx-cpu", PROVIDERS["onnx-cpu"]._replace(kv=("f16",)))  # as cuda's
    assert edgeinfer(*given, "--reference", "demo", "--reference-device", "onnx-cpu").json["kld_mean"] < 1e-12
    told = edgeinfer(*given[:-1], "--reference-device", "onnx-cpu")
    assert told.code == 2 and told.sentence.startswith("--reference-device onnx-cpu requires --reference")


@pytest.mark.slow
def test_bench(no_variables: None) -> None:
    given = ("bench", "demo", "-p", "16", "-n", "4", "-r", "1", "-t", "1", "--device", "onnx-cpu")
    out = edgeinfer(*given, "--json").json
    assert [row["test"] for row in out["rows"]] == ["pp16", "tg4"] and out["device"] == "onnx-cpu"
    assert out["rows"][1]["bytes_per_token"] > 3e6 and out["device_bytes"] == 0 and out["kv"] == "f32"
    told = edgeinfer(*given, "--profile")
    assert told.code == 2 and told.sentence.startswith("--profile measures edgeinfer's own kernels, and --device")


def test_plan(no_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan predicts the memory of run, and for cuda that of both sides, without a GPU."""
    given = ("demo", "-c", "128", "-t", "1", "--device", "onnx-cpu", "--samples", "1")
    planned = edgeinfer("plan", *given, "--json").json
    ran = edgeinfer("run", given[0], PROMPT, "-n", "2", "--json", *given[1:]).json
    assert planned["total_bytes"] == ran["planned_bytes"] and planned["fits"] and planned["device_bytes"] == 0
    assert planned["max_ctx"] == 1024 and planned["max_sequences"] == 64
    auto = edgeinfer("plan", *given[:-3], "auto", "--json")
    assert "Device auto took cpu, our own kernels, because" in auto.err and auto.json["device"] is None
    small = edgeinfer("plan", "demo", "--device", "onnx-cpu", "--budget", "114MB", "-t", "1")
    assert small.code == 3 and "layers are not streamed on device onnx-cpu" in small.err
    seven = ("plan", "llama-2-7b", "--weights", "q4", "--device", "cuda", "--samples", "8")
    out = edgeinfer(*seven, "--json").json
    kinds = {region["name"]: region["kind"] for region in out["regions"]}
    on_device = [name for name in kinds if kinds[name] == "device"]
    assert on_device == ["weights", "kv", "arena", "steps", "context"]
    assert out["device_budget_bytes"] is None and out["max_sequences"] is None and out["kv"] == "f16"
    assert next(r["bytes"] for r in out["regions"] if r["name"] == "kv") == (8 * 17 + 1) * 256 * 524288
    monkeypatch.setattr(driver, "load_driver", Driver)
    monkeypatch.setattr(driver, "load_management", Management)
    out = edgeinfer(*seven, "--json")
    assert out.code == 3 and out.json["device_budget_bytes"] == 11_000_000_000 and out.json["max_sequences"] == 2
    fits, fewer = out.json["alternatives"]
    assert 1024 <= fits["options"]["ctx"] < 2048 and fewer["options"] == {"samples": 2}
    assert "of the GPU's memory" in json.dumps(out.json["error"])
    assert "GPU      " in edgeinfer(*seven).out
    told = edgeinfer("plan", "demo", "--device", "cuda", "--kv", "f32")
    assert told.code == 2 and "attention in f32 does not exist there" in told.sentence


@pytest.mark.parametrize(("options", "copied"), [
    (("--weights", "q4", "--samples", "2"), 0), (("--weights", "q4", "--samples", "32"), 0),
    (("--weights", "int8", "--samples", "2"), 0), (("--weights", "q4", "--speculate", "off"), 11008 * 4096 * 2),
    (("--weights", "q4", "--group-size", "64"), 32000 * 4096 * 2),
    (("--weights", "q4", "--group-size", "64", "--speculate", "off"), 11008 * 4096 * 2),
    (("--weights", "int8", "--group-size", "128", "--speculate", "off"), 11008 * 4096 * 2),
    (("--weights", "q4", "--group-size", "64", "--speculate", "off", "--prefill-chunk", "16"), 0),
    (("--weights", "q4", "--group-size", "64", "--speculate", "off", "--samples", "6"), 32000 * 4096 * 2),
], ids=str)
def test_the_plan_has_the_matrix_that_matmuls_write_out(options: tuple[str, ...], copied: int) -> None:
    """As f16, where CUDA's fast products do not take it and there are too many tokens for the others; of the head,
    in 8 bits, only where draft tokens are verified or sequences are many."""
    report = edgeinfer("plan", "llama-2-7b", "--device", "cuda", *options, "--json").json
    arena = {region["name"]: region for region in report["regions"]}["arena"]
    assert ("and a matrix as f16 for its matmul" in arena["reason"]) == bool(copied)
    assert arena["bytes"] - copied < 60_000_000
    if copied:
        assert arena["bytes"] > copied
