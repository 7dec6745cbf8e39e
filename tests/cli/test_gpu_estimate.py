"""Speeds of GPUs from published figures: by hand, for several sequences, as commands say them, and beside a run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer import demo
from edgeinfer.backends import PROVIDERS
from edgeinfer.bench import Measurement
from edgeinfer.cli.reports import bench_prediction, on_gpu, plan_device, prediction
from edgeinfer.cli.reports.nodes import FIELDS as NODE_FIELDS
from edgeinfer.cli.reports.plan import JSON_FIELDS
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.devices import SERVED, Traffic, classes, estimate, gpu_profile, load_profile, profiles, served
from edgeinfer.errors import UsageError
from edgeinfer.llm.executors import executor_on
from edgeinfer.models.describe import describe
from tests.cli.test_prediction import completion, row
from tests.helpers.command_line import edgeinfer

TRAFFIC = Traffic(weight_bytes=4e9, layers=32, operations=13e9, head_operations=0.3e9, kv_bytes=5e5, kv_values=2.5e5,
                  parameters=6.7e9, pure_kv_bits=16)
BUNDLE = Path(str(demo.__file__)).parent / "bundle"
SEVEN = ("estimate", "llama-2-7b", "--machine", "h200", "--json")


def test_steps_by_hand() -> None:
    """Weights are read once, keys and values of each sequence; from some number on products take longer."""
    gpu, table = served(load_profile("h200")), classes()[SERVED]
    assert gpu
    for sequences in (1, 8, 32, 512):
        reading = 4e9 / (table["f_w"] * 4800e9)
        matmuls = sequences * 13e9 / (table["mfu"] * 989e12)
        weights = math.hypot(reading, matmuls) if sequences > 1 else reading
        seconds = (table["t0_ms"] + table["token_ms"] + sequences * table["sequence_ms"]) / 1e3 + weights + \
            sequences * 5e5 * 1000 / (table["f_kv"] * 4800e9)
        found = estimate(gpu, TRAFFIC, 1000, sequences=sequences)
        assert found.decode_tok_per_s == pytest.approx(sequences / seconds)
        assert found.bytes_per_token == pytest.approx(4e9 / sequences + 5e8)
        assert found.ceiling_tok_per_s == pytest.approx(4800e9 / (3.35e9 / sequences + 5e8))
    assert matmuls > reading
    with pytest.raises(UsageError, match="0 sequences cannot decode; it must be 1 or more"):
        estimate(gpu, TRAFFIC, sequences=0)


def test_prompts_go_by_the_throughput_of_f16() -> None:
    gpu, table = served(load_profile("h100")), classes()[SERVED]
    assert gpu
    found = estimate(gpu, TRAFFIC, prompt=4096).terms["prefill_matrices"]
    assert found == pytest.approx(1e3 * (12.7e9 * 4096 + 0.3e9) / (table["mfu"] * 989e12))


@pytest.mark.parametrize(("name", "profile"), [
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"), ("NVIDIA A10", "a10"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090-laptop"), (
        "NVIDIA A100-SXM4-40GB", "a100-40"),
    ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA GB10", None), ("Raspberry Pi 5", None)])
def test_names_of_the_driver(name: str, profile: str | None) -> None:
    found = gpu_profile(name)
    assert (found and found.name) == profile
    assert found is None or found.device_class == SERVED


def test_which_devices_are_served() -> None:
    known = {name for name, profile in profiles().items() if served(profile)}
    assert {"h200", "h100", "h100-pcie", "a100", "l40s", "l4", "a10", "rtx4090"} <= known
    assert not known & {"rpi5", "m1", "strix-halo", "gb10", "agx-orin"}


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_shapes_that_are_to_be_measured() -> None:
    """7B on an H200: the goal of 400 tokens/s for one sequence lies within the band, and below the bound. 32 sequences
    are in the band of what an H100 reached, which has less bandwidth (docs/measurements/gpu.md)."""
    one, many = edgeinfer(*SEVEN, "-c", 1).json, edgeinfer(*SEVEN, "-c", 1, "--samples", 32).json
    assert one["low"] < 400 < one["high"] < 1160 < one["ceiling_tok_per_s"]
    assert many["low"] < 3540 < many["decode_tok_per_s"]
    assert many["sequences"] == 32 and many["basis"] == "class cuda-onnxruntime"
    assert (one["kv"], one["program"], one["unit"]) == ("f16", "edgeinfer with onnxruntime", "gpu")
    assert "edgeinfer has been measured on an H100 and an H200 alone" in one["remark"]
    assert many["device_bytes"] > one["device_bytes"] > one["weight_bytes"] and one["fits"]
    full = ("--samples", 56, "-c", 4096)
    assert edgeinfer(*SEVEN, *full).json["fits"] and not edgeinfer(*SEVEN, *full, "--machine", "h100").json["fits"]


@pytest.mark.parametrize("more", [("--kv", "int8"), ("--attention", "top:64"), ("--lazy", "keep=0.5")])
def test_what_a_gpu_refuses_is_another_programs_speed(more: tuple[str, ...]) -> None:
    out = edgeinfer(*SEVEN, *more).json
    assert out["program"] == "llama.cpp" and "not of edgeinfer, which does not run this there: " in out["remark"]


def test_samples_of_an_estimate() -> None:
    given = ("estimate", "tinyllama-1.1b", "--machine", "rpi5", "--json")
    assert edgeinfer(*given, "--samples", 2).json["decode_tok_per_s"] > edgeinfer(*given).json["decode_tok_per_s"]
    told = edgeinfer(*given, "--samples", 65)
    assert told.code == 2 and told.sentence == "--samples is 65; it must be from 1 to 64."
    assert "tokens/s of 32 sequences at" in " ".join(edgeinfer(*SEVEN[:-1], "--samples", 32).out.split())


def test_plans_say_the_same() -> None:
    given = ("-c", 1024, "--samples", 32, "--json")
    speed = edgeinfer(*SEVEN, *given[:-1]).json
    planned = edgeinfer("plan", *SEVEN[1:-1], *given).json
    assert planned["estimate"]["decode_tok_per_s"] == pytest.approx(speed["decode_tok_per_s"])
    assert planned["estimate"]["sequences"] == 32 and speed["remark"] in planned["notes"]


def test_the_plan_of_a_run_on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
    config = RuntimeConfig(ctx=64, max_sequences=4, recipe=Recipe(()))
    model = describe("demo", recipe=Recipe(()))

    def on(device: str) -> Any:
        return plan_device.planned_on(executor_on(PROVIDERS[device], model.graph, config), model)

    assert on("cuda")["estimate"] is on("cuda")["fits"] is None
    monkeypatch.setattr(plan_device, "gpu_here", lambda: gpu_profile("NVIDIA H200"))
    found = on("cuda")
    assert found["estimate"]["device"] == "h200" and found["estimate"]["sequences"] == 4
    assert "edgeinfer has been measured on an H100 and an H200 alone" in found["notes"][-1]
    there = on("onnx-cpu")
    of_others = {"models", "error", "types", *NODE_FIELDS}  # with --all-devices, --compare, --nodes
    assert there["estimate"] is None and not set(JSON_FIELDS["plan"]) - of_others - set(there)


# -- beside a run ------------------------------------------------------------------------------------------------------


def test_the_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.backends.read_gpu", lambda: SimpleNamespace(name="NVIDIA L4"), raising=False)
    found = on_gpu.gpu_here()
    assert found and found.name == "l4"

    def absent() -> None:
        raise UsageError("There is no NVIDIA driver.")

    monkeypatch.setattr("edgeinfer.backends.read_gpu", absent, raising=False)
    assert on_gpu.gpu_here() is None


def test_measured_beside_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one sequence and of several; readings of this machine's memory are left out, and nothing is learned."""
    monkeypatch.setattr(prediction, "gpu_here", lambda: gpu_profile("NVIDIA H200"))
    config = RuntimeConfig(kv="f16", ctx=64, recipe=Recipe(()))
    assert prediction.make_predictor(BUNDLE, config, 1, "onnxruntime CPUExecutionProvider", 0, "onnx-cpu") is None
    predictor = prediction.make_predictor(BUNDLE, config, 1, "onnxruntime", 0, "cuda")
    assert predictor and predictor.on_gpu and not predictor.teaches
    alone: Any = prediction.run_estimate(predictor, completion())
    assert alone["basis"] == "class cuda-onnxruntime" and alone["decode"]["measured"] > 0
    done = completion()
    several: Any = prediction.run_estimate(predictor, completion(choices=done.choices * 3, tok_per_s=600.0))
    assert several["decode"]["measured"] == pytest.approx(600)
    assert several["decode"]["t_per_s"] > 2 * alone["decode"]["t_per_s"]
    tests: Any = bench_prediction.bench_estimate(predictor, Measurement((row("tg", 8, 0, 20.0),), (30.0,), (600.0,)))
    assert tests["rows"][0]["at_the_moment"] is None and tests["rows"][0]["t_per_s"] > 0
