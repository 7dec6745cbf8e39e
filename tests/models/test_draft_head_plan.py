"""Heads for further tokens (MTP) in a plan, a bundle and a checkpoint: sizes, damage, and what is refused by name."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer import LLM
from edgeinfer.bundle import DRAFT_HEAD_FILE, Bundle, read_draft_head
from edgeinfer.converters import convert
from edgeinfer.engine import DraftHead
from edgeinfer.errors import BudgetError, BundleError, CheckpointError, RequestError
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runtime import DraftHeadPlan
from tests.helpers import golden_cases
from tests.helpers.command_line import edgeinfer
from tests.helpers.draft_heads import with_head
from tests.helpers.drafts import Written
from tests.helpers.sessions import HYBRID, TINY, session, tokens, write_model
from tests.models.test_draft_head import CONFIGS, CTX, FEW, opened


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mtp"), HYBRID)


def test_it_is_planned_with_reasons_and_within_the_budget(path: Path) -> None:
    plain = {"ctx": CTX, "max_sequences": 4, "prefill_chunk": 32, "draft_tokens": 7}
    with opened(path) as (own, head), session(path, **plain) as alone:
        regions = {region.name: region for region in own.plan.regions if region.name.startswith("draft_")}
        assert sorted(regions) == ["draft_activations", "draft_logits", "draft_rows", "draft_scratch", "draft_tables",
                                   "draft_weights"]
        assert all(region.reason.startswith("head that drafts: ") for region in regions.values())
        file = (path / DRAFT_HEAD_FILE).stat().st_size
        assert 0 < file - regions["draft_weights"].nbytes < 4096
        assert len(own.plan.kv_layers) == 2 and len(alone.plan.kv_layers) == 1
        assert own.plan.region("kv").nbytes - alone.plan.region("kv").nbytes == own.plan.kv_layers[3].nbytes
        held = sum(len(memory) for name, memory in head.executor.regions.items()
                   if memory is not own.executor.regions.get(name))
        kept = regions["draft_rows"].nbytes + regions["draft_tables"].nbytes
        assert held + kept == sum(region.nbytes for region in regions.values())
    least: dict[str, Any] = {"state_memory": 0}  # no checkpoints that the planner would give up first
    with opened(path, **least) as (own, _):
        least["budget_bytes"] = own.plan.total_bytes - 1000
    with pytest.raises(BudgetError, match="It fits with --speculate off"), opened(path, **least):
        pass


def test_rows_that_are_kept_stay_within_the_plan(path: Path) -> None:
    with opened(path) as (own, head):
        texts = [Written(own, tokens(50 + i), i, **FEW) for i in range(4)]
        own.forward([Segment(text.sequence, [*text.tokens[-1:], *tokens(7)], range(8), DECODE) for text in texts[:2]])
        kept = sum(rows.nbytes for _, rows in head._kept.values())
        assert 0 < kept <= own.plan.region("draft_rows").nbytes


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("family", CONFIGS)
def test_weights_in_memory_and_checked_kernels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither copies of all weights nor the comparison with NumPy changes what it drafts."""
    found, path = [], write_model(tmp_path, CONFIGS[family])
    for options, check in (({}, "0"), ({"mmap": False}, "0"), ({}, "1")):
        monkeypatch.setenv("EDGEINFER_CHECK", check)
        with opened(path, **options) as (own, head):
            found.append(DraftHead(own, head).propose([Written(own, tokens(20), 0, **FEW)], 4))
    assert found[0] == found[1] == found[2]


def test_a_model_whose_weights_are_read_from_storage_does_not_draft(path: Path) -> None:
    with opened(path) as (own, _):
        head = DraftHeadPlan.of_bundle(own.bundle)
        streamed = replace(own.plan, parts=(("layers.0.qkv",),))
        assert head.draft_memory.plan(streamed) is streamed
        own.plan = streamed
        with pytest.raises(RequestError, match="read from storage, where its head for further tokens does not draft"):
            head.open(own)


def test_a_refused_run_is_not_told_to_stream_beside_its_head(tmp_path: Path) -> None:
    """The run that is offered instead can be had."""
    model = write_model(tmp_path, replace(TINY, model_type="glm4_moe", hidden_size=256, num_hidden_layers=8))
    options: dict[str, Any] = {"threads": 1, "max_sequences": 1}
    with LLM(model, speculate="off", ctx=16, kv="f32", **options) as llm:
        limit = llm.plan.total_bytes - llm.plan.region("weights").nbytes // 4
    with pytest.raises(BudgetError, match=r"with --speculate off --ctx [0-9]+ and 8 layers streamed") as caught:
        LLM(model, speculate="mtp", kv="f32", budget=limit, **options)
    offer = caught.value.alternatives[-1].options  # type: ignore[attr-defined]
    with LLM(model, speculate=offer["speculate"], ctx=offer["ctx"], kv="f32", budget=limit, **options) as llm:
        assert len(llm.plan.parts) == offer["streamed_layers"]


def test_models_without_a_head_are_refused_by_name(tmp_path: Path, path: Path) -> None:
    model = write_model(tmp_path, TINY)
    with pytest.raises(RequestError, match=f"{model} has no head for further tokens .*Use --speculate lookup"):
        LLM(model, speculate="mtp", ctx=64)
    with LLM(path, ctx=64) as llm, pytest.raises(RequestError, match="speculate is 'mtp', and the model was not opened "
                                                                     "for that; open it with speculate='mtp'"):
        llm.complete([1, 2], speculate="mtp", max_tokens=2)


def test_a_plan_has_the_same_regions_and_refusals(path: Path, tmp_path: Path) -> None:
    options = ("--speculate", "mtp", "--ctx", "256", "--threads", "1", "--json")
    planned = edgeinfer("plan", str(path), *options).json
    with LLM(path, speculate="mtp", ctx=256, threads=1, max_sequences=1) as llm:
        assert planned["total_bytes"] == llm.plan.total_bytes
        assert "draft_weights" in {region["name"] for region in planned["regions"]}
    for model, words in ((str(write_model(tmp_path, TINY)), "has no head for further tokens"),
                         ("qwen2.5-0.5b", "is known once it is converted")):
        refused = edgeinfer("plan", model, *options)
        assert refused.code == 1 and words in refused.json["error"]["message"]


@pytest.mark.parametrize(("change", "message"), [
    (lambda about: about["types"].popitem(), "is not that of a qwen3_5_text model; make it again"),
    (lambda about: about["types"].update({"layers.3.o": ["q9", 32, "tile16"]}), "states no usable types"),
    (lambda about: about.update(types=[1]), "states no usable types"),
    (lambda about: about["types"].update({"layers.3.o": ["int8", 32, "tile16"]}), "layers.3.o has shape"),
    (lambda about: about.update(weights="0"), "was made for other weights"),
])
def test_damaged_parts_are_refused(path: Path, tmp_path: Path, change: Any, message: str) -> None:
    from edgeinfer.bundle.arrays import open_arrays, pack_arrays

    copy = shutil.copytree(path, tmp_path / "copy")
    about, arrays = open_arrays(copy / DRAFT_HEAD_FILE)
    change(about)
    content = b"".join(pack_arrays(about, {name: np.array(array) for name, array in arrays.items()}))
    (copy / DRAFT_HEAD_FILE).write_bytes(content)
    bundle = Bundle.open(path)
    bundle.path = copy
    with pytest.raises(BundleError, match=message):
        read_draft_head(bundle)


def test_norms_that_are_not_numbers_are_refused(path: Path, tmp_path: Path) -> None:
    from edgeinfer.bundle.arrays import open_arrays, pack_arrays

    copy = shutil.copytree(path, tmp_path / "copy")
    about, arrays = open_arrays(copy / DRAFT_HEAD_FILE)
    changed = {name: np.array(array) for name, array in arrays.items()}
    changed["layers.3.norm"].view(np.float32)[3] = np.nan
    (copy / DRAFT_HEAD_FILE).write_bytes(b"".join(pack_arrays(about, changed)))
    bundle = Bundle.open(path)
    bundle.path = copy
    with pytest.raises(BundleError, match=r"layers\.3\.norm has values that are not finite"):
        read_draft_head(bundle)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("name", "tensor", "shape"), [
    ("qwen3-5", "mtp.fc.weight", ()), ("qwen3-5", "mtp.layers.0.mlp.up_proj.weight", ()),
    ("qwen3-5-moe", "mtp.layers.0.mlp.experts.4.up_proj.weight", ()), ("qwen3-5-moe", "mtp.norm.weight", (4,)),
    ("glm4-moe-lite", "model.layers.3.eh_proj.weight", (120, 60)),
    ("deepseek-v3", "model.layers.3.shared_head.norm.weight", ())])
def test_a_checkpoint_with_a_part_of_a_head_is_taken_without(tmp_path: Path, name: str, tensor: str,
                                                             shape: tuple[int, ...]) -> None:
    """The report says which tensor is missing or does not fit, and a run which drafters there are."""
    case = with_head(golden_cases.load(name))
    del case.tensors[tensor]
    if shape:
        case.tensors[tensor] = np.ones(shape, np.float16)
    report = convert(golden_cases.write_checkpoint(case, tmp_path / "model"), tmp_path / "bundle")
    words = rf"the tensor {tensor} has shape \[{shape[0]}.*, but config.json needs \[" if shape else \
        f"there is no tensor {tensor}"
    assert any(re.search(rf"tensors of layers that predict further tokens \(.* MB\) are left out: {words}", remark)
               for remark in report.remarks)
    with Bundle.open(tmp_path / "bundle") as bundle:
        assert not bundle.parts
        with pytest.raises(RequestError, match=r"has no head for further tokens .*Use --speculate lookup"):
            DraftHeadPlan.of_bundle(bundle)


@pytest.mark.parametrize(("value", "weights"), [(np.nan, "f32"), (np.inf, "q4"), (7e4, "f16")])
def test_values_that_are_refused_have_the_names_of_the_checkpoint(tmp_path: Path, value: float, weights: str) -> None:
    case, name = with_head(golden_cases.load("qwen3-5-moe-wrapped")), "mtp.fc.weight"
    case.tensors[name] = case.tensors[name].astype(np.float32)
    case.tensors[name][2, 3] = value
    source = golden_cases.write_checkpoint(case, tmp_path / "model")
    with pytest.raises(CheckpointError, match=f"^The tensor {name} has "):
        convert(source, tmp_path / "bundle", weights=weights)


def test_quantised_and_reported(tmp_path: Path) -> None:
    """Of the type that is asked for, and in the conversion's report; texts are those of a bundle without the part."""
    case = with_head(golden_cases.load("qwen3-5"))
    source = golden_cases.write_checkpoint(case, tmp_path / "model")
    report = convert(source, tmp_path / "bundle", weights="q4")
    assert {"layers.4.of_embedding", "layers.4.norm"} <= {tensor.name for tensor in report.tensors}
    with Bundle.open(tmp_path / "bundle") as bundle:
        graph = read_draft_head(bundle)
        assert graph and graph.types["layers.4.gate_up"].dtype == "q4"
        bundle.verify()
    with opened(tmp_path / "bundle", ctx=64) as (own, head):
        text = Written(own, tokens(20), 0)
        assert len(DraftHead(own, head).propose([text], 3)[0]) == 3
