"""`plan`, `estimate` and `recommend` from Python: the commands' reports as frozen objects."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from edgeinfer import EdgeInferError, estimate, plan, recommend
from tests.helpers.command_line import ROOT, edgeinfer


@pytest.mark.parametrize("machine", ["m4 16gb", "rtx 4090", "rpi5 4gb"])
def test_objects_are_what_the_commands_report(machine: str) -> None:
    asked = ("llama-3.1-8b", "--machine", machine, "--ctx", 2048, "--json")
    out, found = edgeinfer("plan", *asked).json, plan("llama-3.1-8b", machine, ctx=2048)
    for name in ("fits", "mode", "ctx", "total_bytes", "budget_bytes", "max_ctx", "device"):
        assert getattr(found, name) == out[name], name
    assert [dataclasses.asdict(region) for region in found.regions] == out["regions"]
    assert found.decode_tok_per_s == out["estimate"]["decode_tok_per_s"]
    out = edgeinfer("estimate", *asked, "-p", 1000, "-n", 100).json
    speed = estimate("llama-3.1-8b", machine, ctx=2048, prompt=1000, answer=100)
    for name in ("decode_tok_per_s", "low", "high", "ttft_ms", "prefill_tok_per_s", "program", "unit", "fits", "basis"):
        assert getattr(speed, name) == out[name], name
    assert (speed.tpot_ms, speed.total_ms) == (out["answer"]["tpot_ms"], out["answer"]["total_ms"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        speed.low = 0.0  # type: ignore[misc]


def test_recommendations() -> None:
    out = edgeinfer("recommend", "--machine", "m4 pro 48gb", "--for", "code", "--min-speed", 20, "--json").json
    found = recommend("m4 pro 48gb", use="code", min_speed=20)
    assert [one.model for one in found] == [row["model"] for row in out["models"]] and len(found) > 5
    assert found[0].decode_tok_per_s == out["models"][0]["decode_tok_per_s"]


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: plan("llama-3.1-8b", "rtx 4099"), "There is no device 'rtx 4099'"),
    (lambda: plan("llama-3.1-8b", unit="gpu"), "unit, runtime and storage select among the facts about a device"),
    (lambda: plan("llama-3.1-8b", "m4", budget="much"), "much"),
    (lambda: estimate("llama-3.1-8b", "m4", prompt=0), "prompt is 0; it must be from 1 to 16777216 tokens."),
    (lambda: estimate("llama-3.1-8b", "m4", ctx=100, prompt=500), "prompt 500 does not fit a context of 100 tokens"),
    (lambda: estimate("llama-3.1-8b", "m4", prompt=1.5), "prompt is 1.5; it must be an integer, from 1 to 16777216"),
    (lambda: estimate("llama-3.1-8b", "m4", answer=True), "answer is True; it must be an integer"),
    (lambda: estimate("llama-3.1-8b", "m4", ctx=512, prompt=512, answer=1), "prompt 512 leaves no room for an answer"),
    (lambda: estimate(3, "m4"), "model is 3; it must be"),  # type: ignore[arg-type]
    (lambda: plan("llama-3.1-8b", "m4", ctx="4k"), "ctx is '4k'; it must be an integer, from 1"),  # type: ignore[arg-type]
    (lambda: plan("llama-3.1-8b", 4), "machine is 4; it must be"),  # type: ignore[arg-type]
    (lambda: plan("llama-3.1-8b", "m4", unit="tpu"), "unit is 'tpu'; choose one of cpu, gpu, npu."),
    (lambda: plan("llama-3.1-8b", "m4", weights="q99"), "weights is 'q99'; choose one of"),
    (lambda: plan("llama-3.1-8b", "rtx4090", storage="nvme"), "storage nvme has no effect on a card"),
    (lambda: recommend("m4", min_speed=float("inf")), "min_speed is inf; it must be a finite number above 0."),
    (lambda: recommend("m4", ctx=0), "ctx is 0; it must be from 1 to 16777216 tokens."),
    (lambda: estimate("llama-3.1-8b", "m4", kv=None), "kv is None; choose one of int8, f16, f32."),  # type: ignore[arg-type]
    (lambda: estimate("llama-3.1-8b", ""), "machine is ''; it must be text that is not empty."),
    (lambda: recommend("m4", use="music"), "use is 'music'; choose one of chat, code, rag."),
    (lambda: recommend("m4", min_speed=0), "min_speed is 0; it must be a finite number above 0."),
])
def test_what_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(EdgeInferError, match=sentence):
        call()


def test_nothing_heavy_is_imported() -> None:
    code = ("import sys\nfrom edgeinfer import estimate, plan, recommend\n"
            "assert not {'numpy', 'numba', 'llvmlite'} & set(sys.modules)\n"
            "estimate('qwen3-8b', 'm4 16gb'), plan('qwen3-8b', 'm4 16gb'), recommend('m4 16gb')\n"
            "assert not {'numba', 'llvmlite'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
