"""Heads for further tokens (MTP): their logits, texts that they draft for, their part of a bundle and of a plan."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import edgeinfer.engine as engine
from edgeinfer import LLM
from edgeinfer.bundle import DRAFT_HEAD_FILE, Bundle, read_draft_head
from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.engine import DraftHead, Generation, Speculation, Times
from edgeinfer.errors import BudgetError, BundleError, CancelledError, CheckpointError, RequestError
from edgeinfer.graph import ExpertsConfig
from edgeinfer.runner import DECODE, Cancellation, Segment
from edgeinfer.runtime import DraftHeadPlan, DraftHeadSession, HiddenRows, Session
from tests.helpers import golden_cases
from tests.helpers.command_line import edgeinfer
from tests.helpers.draft_heads import head_rows, text, with_head
from tests.helpers.drafts import SETTINGS, Written
from tests.helpers.sessions import HYBRID, TINY, free_blocks, session, tokens, write_model
from tests.models import test_latent

CTX = 320
EXPERTS = ExpertsConfig(7, 3, 24, shared_size=40)
CONFIGS = {"dense": HYBRID, "experts": replace(HYBRID, model_type="qwen3_5_moe_text", experts=EXPERTS),
           "by-key-head": replace(HYBRID, model_type="qwen3_next", experts=EXPERTS),
           "grouped": replace(TINY, model_type="glm4_moe", head_norm=True, experts=test_latent.MODEL.experts),
           "latent": test_latent.MODEL, "latent-v3": replace(test_latent.PLAIN, model_type="deepseek_v3")}
FEW = {"logit_bias": {token: 60.0 for token in (7, 8)}, "temperature": 1.0, "ignore_eos": True}
"""Two tokens that are about as likely: draft tokens of a random head are right now and then."""


@contextmanager
def opened(path: Path, **options: object) -> Iterator[tuple[Session, DraftHeadSession]]:
    """A session and the head that drafts for it, in one plan."""
    bundle, config = Bundle.open(path), RuntimeConfig(**{  # type: ignore[arg-type]
        "ctx": CTX, "threads": 1, "prefill_chunk": 32, "max_sequences": 4, "draft_tokens": 7, **options})
    head = DraftHeadPlan.of_bundle(bundle)
    own = Session(bundle, config, beside=head.beside)
    ahead = head.open(own)
    try:
        yield own, ahead
    finally:
        ahead.close()
        own.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mtp"), HYBRID)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens are verified in each forward pass, whatever it costs."""
    monkeypatch.setattr(engine, "Speculation", partial(engine.Speculation, fixed=True))


# -- logits ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize(("name", "chunk"), [
    ("qwen3-5", 1), ("qwen3-5", 5), ("qwen3-5", 32), ("qwen3-5-wrapped", 5), ("qwen3-5-equal-heads", 5),
    ("qwen3-5-moe", 1), ("qwen3-5-moe", 32), ("qwen3-5-moe-wrapped", 5), ("qwen3-next", 5), ("glm4-moe-lite", 1),
    ("glm4-moe-lite", 32), ("glm4-moe-lite-halves", 5), ("deepseek-v3", 5),
    ("glm4-moe", 5), ("glm4-moe-plain", 32)])
def test_logits_are_those_of_the_equations(tmp_path: Path, name: str, chunk: int) -> None:
    """From a checkpoint, after a prompt in chunks, of the next token and of those that are drafted after it; of a text
    model inside one that sees, whose embedding is the head, too."""
    case = with_head(golden_cases.load(name))
    source = golden_cases.write_checkpoint(case, tmp_path / "model")
    report = convert(source, tmp_path / "bundle", weights="f32")
    assert not any("predict further tokens" in remark for remark in report.remarks)
    ids = tokens(23)
    with opened(tmp_path / "bundle", ctx=64, kv="f32", prefill_chunk=chunk) as (own, head):
        c, sequence, given = own.model, own.new_sequence(), [np.zeros((1, own.model.hidden_size), np.float32)]
        with patch.object(head, "take", lambda segments, take=head.take: (
                given.append(HiddenRows(own).rows(0, len(segments[0].ids))), take(segments))):
            own.prefill(sequence, ids[:-1])
        words, tensors = ids, text(case)
        table = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).astype(np.float64)
        for offset in range(4):
            expected = head_rows(c, tensors, np.concatenate(given), words)
            logits = expected[-1] @ table.T
            found, _ = head.ahead([sequence], words[-1:], [0], offset, 3 - offset)
            assert np.abs(found[0] - logits).max() < 1e-5 * np.abs(logits).max()
            words, given = [*words, int(found[0].argmax())], [*given, expected[-1:]]
        own.truncate(sequence, len(sequence))


def test_what_it_drafts_depends_on_the_text_alone(path: Path) -> None:
    """After accepted and rejected draft tokens, in forks and beside other texts: as after reading the text at once."""
    with opened(path) as (own, head):
        drafter, text = DraftHead(own, head), Written(own, tokens(40), 0, **FEW)
        for round_ in range(4):
            checked = [text.tokens[-1], *tokens(5, seed=round_)]
            own.forward([Segment(text.sequence, checked, range(6), DECODE)])
            own.truncate(text.sequence, len(text.tokens) + round_)
            text.tokens += checked[1 : 2 + round_]
        fork = Written(own, tokens(9), 1, **FEW)
        whole = Written(own, text.tokens, 0, **FEW)
        whole.sampler, copy = text.sampler, Written(own, tokens(3), 2, **FEW)
        copy.tokens, copy.sampler, copy.sequence = text.tokens, text.sampler, own.fork(text.sequence)
        expected = drafter.propose([whole], 5)[0]
        assert drafter.propose([fork, text, copy], 5)[1:] == [expected, expected]


def test_of_large_vocabularies_the_first_words_are_drafted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as (own, head):
        text = Written(own, tokens(20), 0, temperature=0)
        logits = head.ahead([text.sequence], text.tokens[-1:], [0], 0, 0)[0].copy()
        assert head.vocab_size == logits.shape[1] == 99
    monkeypatch.setattr("edgeinfer.graph.build.DRAFT_WORDS", 41)
    with opened(path) as (own, head):
        text = Written(own, [98, *tokens(20)], 0, temperature=0)
        own.release(text.sequence)
        text = Written(own, tokens(20), 0, temperature=0)
        found = head.ahead([text.sequence], text.tokens[-1:], [0], 0, 0)[0]
        assert head.vocab_size == found.shape[1] == 41
        assert found.tobytes() == logits[:, :41].tobytes()
        assert max(DraftHead(own, head).propose([text], 7)[0]) < 41


# -- texts -------------------------------------------------------------------------------------------------------------


def outcome(llm: LLM, drafter: str = "", **options: Any) -> list[tuple]:
    done = llm.complete(tokens(50), **{"max_tokens": 40, "seed": 4, "logprobs": 1, "ignore_eos": True, **options})
    assert not drafter or (done.speculation and done.speculation.drafter == drafter and done.speculation.drafted > 9)
    return [(choice.token_ids, choice.finish_reason, choice.logprobs) for choice in done.choices]


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "dense"])
def test_texts_of_every_family(family: str, always: None, tmp_path: Path) -> None:
    path = write_model(tmp_path, CONFIGS[family])
    options: dict[str, Any] = {"ctx": 128, "threads": 1, "prefill_chunk": 16, "max_sequences": 2}
    with LLM(path, speculate="off", **options) as plain:
        expected = outcome(plain, **FEW)
    with LLM(path, speculate="mtp", draft_tokens=7, **options) as llm:
        for n in (1, 3, 7):
            assert outcome(llm, "mtp", draft_tokens=n, **FEW) == expected
        done = llm.complete(tokens(50), max_tokens=60, seed=1, **FEW).speculation
        assert done and 0 < done.accepted < done.drafted
        assert llm.session.kv.pool.n_available == llm.plan.kv_blocks
        assert 0 < (path / DRAFT_HEAD_FILE).stat().st_size - llm.plan.region("draft_weights").nbytes < 8192


REQUESTS: list[dict[str, Any]] = [{"temperature": 0}, FEW, {**FEW, "n": 3}, {"repetition_penalty": 1.3, "n": 2}]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("words", [99, 41])
def test_texts_and_probabilities_are_those_without_draft_tokens(path: Path, always: None, words: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 to 7 draft tokens; some of them are right, and all blocks are free again."""
    monkeypatch.setattr("edgeinfer.graph.build.DRAFT_WORDS", words)
    options: dict[str, Any] = {"ctx": 128, "threads": 1, "prefill_chunk": 16, "max_sequences": 3}
    with LLM(path, speculate="off", **options) as plain:
        expected = [outcome(plain, **request) for request in REQUESTS]
    with LLM(path, speculate="mtp", draft_tokens=7, **options) as llm:
        assert isinstance(llm.draft, DraftHeadSession)
        for n in range(1, 8):
            for request, text in zip(REQUESTS, expected, strict=True):
                assert outcome(llm, "mtp", draft_tokens=n, **request) == text
        done = llm.complete(tokens(50), max_tokens=60, seed=1, **FEW).speculation
        assert done and 0 < done.accepted < done.drafted
        assert outcome(llm, speculate="off", **REQUESTS[0]) == expected[0]
        assert outcome(llm, speculate="lookup", **REQUESTS[0]) == expected[0]
        assert llm.session.kv.pool.n_available == llm.plan.kv_blocks


def test_requests_at_once(path: Path, always: None) -> None:
    prompts = [tokens(n, n) for n in (5, 60, 33, 17)]
    options: dict[str, Any] = {"ctx": 128, "threads": 2, "prefill_chunk": 16, "max_sequences": 4}

    def texts(llm: LLM) -> list[list[int]]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda prompt: list(llm.complete(
                prompt, max_tokens=30, seed=len(prompt), **FEW).token_ids), prompts))

    with LLM(path, speculate="off", **options) as plain:
        expected = texts(plain)
    with LLM(path, speculate="mtp", draft_tokens=3, **options) as llm:
        assert texts(llm) == expected == texts(llm)  # the second time with cached prefixes


@pytest.mark.parametrize(("what", "at"), [("draft", 0), ("draft", 1), ("draft", 2), ("draft", 3), ("verify", 0),
                                          ("verify", 1), ("verify", 2)])
def test_a_cancelled_pass_leaves_the_sequences_as_they_were(path: Path, what: str, at: int) -> None:
    """Wherever it ends: before or behind the rows in front of the head, or while these are followed."""
    with opened(path) as (own, head):
        text, cancel, left = Written(own, tokens(31), 0, **FEW), Cancellation(), [at]
        held, free = (list(text.sequence.tokens), list(text.sequence.blocks)), free_blocks(own)

        def until(run: Any, *arguments: Any, **named: Any) -> Any:
            if not left[0]:
                cancel.cancel()
            left[0] -= 1
            return run(*arguments, **named)

        runs = own.executor.run, head.executor.run
        own.executor.run, head.executor.run = (partial(until, run) for run in runs)  # type: ignore[method-assign]
        drafter, checked = DraftHead(own, head), [text.tokens[-1], 3, 4]
        with pytest.raises(CancelledError):
            if what == "draft":
                drafter.propose([text], 2, cancel)
            else:
                own.forward([Segment(text.sequence, checked, range(3), DECODE)], cancel)
        own.executor.run, head.executor.run = runs  # type: ignore[method-assign]
        assert held == (text.sequence.tokens, text.sequence.blocks) and free_blocks(own) == free
        whole = Written(own, text.tokens, 0, **FEW)
        assert drafter.propose([text], 4) == drafter.propose([whole], 4)


def test_saved_sequences_draft_and_belong_to_sessions_with_a_head(path: Path, tmp_path: Path) -> None:
    with opened(path) as (own, _):
        text = Written(own, tokens(40), 0, **FEW)
        own.save(text.sequence, tmp_path / "cache")
        loaded = own.load(tmp_path / "cache")
        pairs = [own.decode([one], text.tokens[-1:])[0].tobytes() for one in (loaded, text.sequence)]
        assert pairs[0] == pairs[1]
        own.cache_prefix(text.sequence)
        assert own.save_prefixes(tmp_path / "prefixes")
    for load, name in ((Session.load, "cache"), (Session.load_prefixes, "prefixes")):
        with session(path, ctx=CTX) as alone, pytest.raises(BundleError, match="--ctx, --speculate or inst"):
            load(alone, tmp_path / name)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting(path: Path, settings: dict[str, Any]) -> None:
    """Beside a model without a head, whose text is the same."""
    def text(runner: Session, head: DraftHeadSession | None) -> Any:
        speculation = Speculation(DraftHead(runner, head), Times(), 4, runner.config.outputs, fixed=True) \
            if head else None
        config = GenerationConfig(max_tokens=30, seed=3, **settings)
        return engine.run_alone(Generation(runner, None, tokens(20), config, (), speculation), runner).token_ids

    with session(path, ctx=CTX) as alone, opened(path) as (own, head):
        assert text(own, head) == text(alone, None)


# -- plan and bundle ---------------------------------------------------------------------------------------------------


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
        assert head.beside.plan(streamed) is streamed
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
