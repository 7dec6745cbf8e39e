"""Runs by onnxruntime: what a plan holds, what is refused by name, and lowered models that are kept."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import OnnxRunner, provider_of
from edgeinfer.backends.onnx import stored
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.errors import BudgetError, DestinationError, UsageError
from edgeinfer.memory_planner import DEVICE, Region
from edgeinfer.registry import recipe_with
from edgeinfer.runner.pruning import Schedule
from tests.helpers.onnx_models import difference, expected
from tests.helpers.sessions import tokens, write_model
from tests.models.test_onnx_runner import F32, runner


@pytest.mark.parametrize(("options", "said"), [
    ({"kv": "int8"}, "--kv int8 is not available on device onnx-cpu: onnxruntime's int8 KV has constant scales"),
    ({"lazy": Schedule.parse("keep=0.5")}, "--lazy is not available on device onnx-cpu"),
    ({"state_memory": 1 << 20}, "--state-memory is not available on device onnx-cpu"),
    ({"mlock": True}, "--mlock is not available"), ({"mmap": False}, "--no-mmap is not available"),
    ({"recipe": recipe_with(attention="eps:0.01")},
     "has no pass attention:eps=0.01: leave it out, or run with --device"),
    ({"recipe": recipe_with(sparse="predict")}, "has no pass sparse:mode=predict"),
    ({"recipe": recipe_with(head="screened")}, "has no pass head:mode=screened"),
])
def test_what_it_cannot_do_is_refused_by_name(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said), runner(write_model(tmp_path), **options):
        pass


def test_exact_passes_are_what_it_does_anyway(tmp_path: Path) -> None:
    with runner(write_model(tmp_path), recipe=recipe_with(sparse="exact", head="exact")) as opened:
        assert opened.config.recipe == Recipe(())


def test_a_plan_beyond_the_budget(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with runner(path, ctx=1024) as opened:
        need = opened.plan.total_bytes
        assert opened.plan.region("kv").nbytes == sum(slab.nbytes for slab in opened.slabs._kept)
    with pytest.raises(BudgetError, match=r"not streamed on device onnx-cpu\. It fits with --ctx") as caught, \
            runner(path, ctx=1024, budget_bytes=need - 1000):
        pass
    (fits,) = caught.value.alternatives
    with runner(path, ctx=fits.options["ctx"], budget_bytes=need - 1000):  # type: ignore[attr-defined]
        pass


def test_a_plan_beyond_the_budget_offers_fewer_samples(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with runner(path, ctx=1024, max_sequences=6) as opened:
        need, slot = opened.plan.total_bytes, opened.plan.region("kv").nbytes // 6
    asked: dict[str, Any] = {"ctx": 1024, "budget_bytes": need - 2 * slot}
    with pytest.raises(BudgetError, match=r"It fits with --ctx \d+, or with --samples [34]; otherwise run") as caught, \
            runner(path, max_sequences=6, **asked):
        pass
    fewer = caught.value.alternatives[1]
    with runner(path, max_sequences=fewer.options["samples"], **asked) as opened:  # type: ignore[attr-defined]
        assert opened.plan.total_bytes <= fewer.total_bytes <= need - 2 * slot  # type: ignore[attr-defined]
    with pytest.raises(BudgetError), \
            runner(path, max_sequences=fewer.options["samples"] + 1, **asked):  # type: ignore[attr-defined]
        pass


def test_a_driver_that_stops_telling_ends_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the GPU is asked for after the text."""
    answers = iter([9_000_000, 7_000_000])

    def free() -> int:
        if (found := next(answers, None)) is None:
            raise UsageError("NVIDIA's driver does not say how much memory is free; see nvidia-smi.")
        return found

    monkeypatch.setattr("edgeinfer.backends.onnx.runner.gpu_free_bytes", free)
    with runner(write_model(tmp_path)) as opened:
        assert opened.device_used_bytes is None, "it has no device beside this process"
        opened._free = free()
        opened.plan = replace(opened.plan, regions=(Region("kv", 3_000_000, "", DEVICE),))
        assert opened.device_used_bytes == 2_000_000
        assert opened.device_used_bytes is None


def test_a_lowered_model_is_made_once_and_again_where_it_was_written_to(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    path, ids, told = write_model(tmp_path), tokens(7), list[str]()
    bundle, provider = Bundle.open(path), provider_of("onnx-cpu")
    assert provider

    def opened() -> np.ndarray:
        own = OnnxRunner(Bundle.open(path), RuntimeConfig(threads=1, ctx=32, kv="f32"), provider,
                         lambda done, total, name: told.append(name))
        row = own.prefill(own.new_sequence(), ids).copy()
        own.close()
        return row

    want = expected(bundle, ids)[-1]
    assert difference(opened(), want) < F32 and told
    told.clear()
    assert difference(opened(), want) < F32 and not told
    (data,) = (tmp_path / "cache" / "onnx").glob("*/*.data")
    stored = data.read_bytes()
    for damaged in (stored[:-5], bytes([stored[0] ^ 64]) + stored[1:]):
        told.clear()
        data.write_bytes(damaged)
        assert difference(opened(), want) < F32 and told
    if hasattr(os, "mkfifo"):
        (done := data.with_name("done")).unlink()
        os.mkfifo(done)
        assert difference(opened(), want) < F32 and done.is_file()
    (tmp_path / "no").write_text("")
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "no"))
    with pytest.raises(DestinationError, match=r"The cache .* cannot be written: .*set EDGEINFER_CACHE to another"):
        opened()


@pytest.mark.parametrize("name", ["lowering.py", "rope.py", "layouts.py", "llama.py"])
def test_a_lowered_model_belongs_to_the_sources_that_made_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE's tables, an architecture and a layout of weights are defined outside of the lowering itself."""
    read, now = Path.read_bytes, stored.lowering_sources.__wrapped__()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == name else b""))
    assert stored.lowering_sources.__wrapped__() != now
