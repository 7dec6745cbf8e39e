"""A draft model beside a model: which one may draft, what both need together, and texts that it does not change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import engine
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.errors import BudgetError, EdgeInferError, RequestError, TokenizerError, UsageError
from edgeinfer.llm.api import LLM
from edgeinfer.memory_planner import alternatives, draft_config, draft_memory_of, resolve, to_request
from edgeinfer.runtime import SelfDraftSession, planner_of
from edgeinfer.text import Tokenizer
from tests.helpers.bundles import alter_header
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import write_gguf
from tests.helpers.sessions import TINY, write_model
from tests.helpers.vocabularies import bpe_metadata

TARGET = replace(TINY, vocab_size=300)
SMALLER = replace(TARGET, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, head_dim=6)
OPTIONS: dict[str, Any] = {"ctx": 128, "threads": 1, "prefill_chunk": 32}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one that may draft for it."""
    directory = tmp_path_factory.mktemp("pair")
    return write_model(directory / "model", TARGET), write_model(directory / "draft", SMALLER)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens are verified in each forward pass, whatever it costs."""
    monkeypatch.setattr(engine, "Speculation", partial(engine.Speculation, fixed=True))


def outcome(llm: LLM, drafter: str = "", **options: Any) -> list[tuple]:
    done = llm.complete("What was she?", **{"max_tokens": 30, "seed": 4, "logprobs": 1, **options})
    assert not drafter or (done.speculation and done.speculation.drafter == drafter and done.speculation.drafted > 9)
    return [(choice.token_ids, choice.finish_reason, choice.logprobs) for choice in done.choices]


@pytest.mark.parametrize("kind", ["draft", "self"])
def test_texts_and_probabilities_are_those_without_draft_tokens(pair: tuple[Path, Path], always: None,
                                                                kind: str) -> None:
    """Greedy, sampled and penalised, one sample and three; after each request all blocks are free again."""
    model, draft = pair
    requests: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.2, "n": 3}, {"repetition_penalty": 1.3, "temperature": 0.4, "n": 2},
        {"logit_bias": {5: 3.0}, "presence_penalty": 1.0}, {"stop": ["e"], "temperature": 2.0, "n": 3}]
    with LLM(model, max_sequences=3, speculate="off", **OPTIONS) as plain:
        expected = [outcome(plain, **request) for request in requests]
    with LLM(model, max_sequences=3, speculate=kind, draft=draft, **OPTIONS) as llm:
        assert llm.draft and isinstance(llm.draft, SelfDraftSession) == (kind == "self")
        for request, text in zip(requests, expected, strict=True):
            assert outcome(llm, kind, **request) == text
        assert llm.session.kv.pool.n_free == llm.plan.kv_blocks
    assert llm.draft.executor._closed


def test_a_model_as_draft_of_itself_is_always_right(pair: tuple[Path, Path], always: None,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens are verified by the same logits, and all of them stay."""
    monkeypatch.setattr("edgeinfer.bundle.weights_identity", lambda tensors: object())
    with LLM(pair[0], draft=pair[0], speculate="draft", draft_tokens=3, **OPTIONS) as llm:
        done = llm.complete("What was she?", max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
        assert done.speculation and done.speculation.drafter == "draft"
        assert done.speculation.accepted == done.speculation.drafted


@pytest.mark.parametrize(("model", "draft", "least"), [
    ("fables-5m-silu", "fables-draft", 0.5),
    ("babyllama-tok361-hf", "babyllama-tok105-as361-hf", 0.8),
    ("babyllama-tok105-as361-hf", "babyllama-tok361-hf", 0.8),
])  # fmt: skip
def test_trained_pairs(shared_data: Callable[[str], Path], tmp_path: Path, always: None, model: str, draft: str,
                       least: float) -> None:
    """The same texts at each number of draft tokens, of which most are right; greedy, and sampled with the same
    numbers.
    """
    for name in (model, draft):
        convert(shared_data(f"models/{name}"), tmp_path / name, weights="f16")
    requests: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "n": 3}]
    options: dict[str, Any] = {"ctx": 200, "threads": 1, "max_sequences": 3}
    with LLM(tmp_path / model, speculate="off", **options) as plain:
        expected = [outcome(plain, max_tokens=40, **request) for request in requests]
    right = drafted = 0
    with LLM(tmp_path / model, draft=tmp_path / draft, draft_tokens=7, **options) as llm:
        for proposals in (2, 7):
            for request, text in zip(requests, expected, strict=True):
                assert outcome(llm, "draft", max_tokens=40, draft_tokens=proposals, **request) == text
        for seed in range(4):
            done = llm.complete("The fox", max_tokens=40, draft_tokens=1, seed=seed).speculation
            assert done
            right, drafted = right + done.accepted, drafted + done.drafted
    assert right >= least * drafted


def test_what_may_not_draft_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model, draft = pair
    shutil.copytree(model, tmp_path / "copy")
    alter_header(tmp_path / "copy", lambda data: data.update(source="a copy"))
    short = write_model(tmp_path / "short", replace(SMALLER, max_position_embeddings=64))
    refused: list[tuple[dict[str, Any], type[EdgeInferError], str]] = [
        ({"draft": tmp_path / "copy"}, RequestError,
         "is the model itself, whose draft tokens cost as much as they save; "),
        ({"draft": short}, RequestError, "has a context of 64 tokens, and the run one of 128; run with --ctx 64, or"),
        ({"speculate": "draft"}, UsageError, "speculate is 'draft', and no draft model is given; give one with draft"),
        ({"draft": 5}, UsageError, "draft"),
        ({"draft": Recipe(), "speculate": "draft"}, UsageError, "draft is the recipe fuse_input, by which a model"),
    ]
    for options, kind, message in refused:
        with pytest.raises(kind, match=message):
            LLM(model, **{**OPTIONS, **options})
    with LLM(model, draft=draft, speculate="lookup", **OPTIONS) as llm:
        assert llm.draft is None  # nothing is opened that was not asked for
        for kind, how in (("draft", "with draft=MODEL"), ("self", "with speculate='self'")):
            with pytest.raises(RequestError, match=f"speculate is '{kind}', and the model was not opened.*{how}"):
                llm.generate("a", speculate=kind)


@pytest.mark.parametrize(("part", "change", "said"), [
    ("model", lambda data: data["model"]["vocab"].update({"!": data["model"]["vocab"]["\""],
                                                          "\"": data["model"]["vocab"]["!"]}), "of their tokens, "),
    ("added", lambda data: data["added_tokens"].append(
        {"id": 300, "content": "<|new|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}), "of their added tokens, 300 is missing in the one and"),
    ("normalizer", lambda data: data.update(normalizer={"type": "Lowercase"}), "their normalisers differ"),
    ("pre", lambda data: data["pre_tokenizer"].update(add_prefix_space=True),
     "of their pre-tokenisers, 'add_prefix_space' is False in the one and True in"),
    ("decoder", lambda data: data.update(post_processor=None, version="1.0", truncation=None), ""),
])  # fmt: skip
def test_tokenizers_are_compared_by_content(pair: tuple[Path, Path], tmp_path: Path, part: str,
                                            change: Callable[[dict], object], said: str) -> None:
    """The parts that produce a text's ids are compared; surrounding parts and decoders are not."""
    model = pair[0]
    data = json.loads((model / "tokenizer.json").read_text())
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data, indent=3))
    own, other = Tokenizer.open(model), Tokenizer.open(tmp_path)
    assert own.difference(other).startswith(said) and bool(said) == bool(own.difference(other)) == bool(
        other.difference(own))


def test_a_draft_with_another_tokenizer_is_refused(pair: tuple[Path, Path], shared_data: Callable[[str], Path]) -> None:
    stories = shared_data("models/stories260K-hf")
    with pytest.raises(TokenizerError, match=r"has another tokenizer than the model: of their tokens, .* in the "
                                             r"other\. Give a draft with the same one\."):
        LLM(pair[0], draft=stories, **OPTIONS)


@pytest.mark.slow
def test_plan_refuses_the_drafts_that_a_run_refuses(tmp_path: Path) -> None:
    """With the same sentence, and before checkpoints and GGUF files are converted."""
    model, draft, mute = (make_checkpoint(tmp_path / name, tokenizer=name != "mute", seed=i, vocab_size=300)
                          for i, name in enumerate(("model", "draft", "mute")))
    other = make_checkpoint(tmp_path / "other", seed=3, vocab_size=300)
    words = json.loads((model / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    fields = bpe_metadata(vocab, words["model"]["merges"], "gpt-2", bos_token_id=1, eos_token_id=2)
    first, last = min(vocab, key=vocab.__getitem__), max(vocab, key=vocab.__getitem__)
    words["model"]["vocab"] = {**vocab, first: vocab[last], last: vocab[first]}
    (other / "tokenizer.json").write_text(json.dumps(words))
    files = {name: tmp_path / f"{name}.gguf" for name in ("model", "draft", "other")}
    for name, path in files.items():
        tokens = fields["tokenizer.ggml.tokens"]
        own = [*tokens[:2], "!!!", *tokens[3:]] if name == "other" else tokens
        write_gguf(path, tmp_path / name, "F16", {**fields, "tokenizer.ggml.tokens": own})
    a_bundle = write_model(tmp_path / "bundle", replace(SMALLER, vocab_size=300))
    pairs = [(model, draft, ""), (model, other, "of their tokens"), (model, mute, "the draft has none"),
             (mute, model, "the model has none"), (model, model, "is the model itself"),
             (files["model"], files["draft"], ""), (files["model"], files["other"], "of their tokens"),
             (files["model"], files["model"], "is the model itself"), (a_bundle, other, "of their "),
             (model, files["other"], "of their ")]
    for large, small, said in pairs:
        planned = edgeinfer("plan", large, "--draft", small, "-c", "64")
        assert planned.code == bool(said), (large, small, planned.err)
        try:
            with LLM(large, draft=small, ctx=64, threads=1):
                found = ""
        except EdgeInferError as error:
            found = str(error)
        assert said in found and bool(said) == bool(found), (large, small, found)
        assert planned.err == (f"edgeinfer: {found}\n" if found else "")


def test_a_config_without_weights_has_no_tokenizer_to_compare(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=False, vocab_size=300)
    for path in source.glob("*.safetensors"):
        path.unlink()
    assert edgeinfer("plan", source, "--draft", pair[1], "-c", "64").code == 0


def test_kinds_of_tokenizer_files_are_compared_by_what_they_do(shared_data: Callable[[str], Path],
                                                               tmp_path: Path) -> None:
    fables, stories = (shared_data(f"models/{name}") for name in ("fables-draft", "stories260K-hf"))
    for source in (fables, stories):
        (tmp_path / source.name).mkdir()
        shutil.copy(source / "tokenizer.model", tmp_path / source.name)
    own, pieces, others = (Tokenizer.open(path) for path in (fables, tmp_path / fables.name, tmp_path / stories.name))
    assert own.difference(pieces) == pieces.difference(own) == pieces.difference(pieces) == ""
    assert own.difference(others).startswith("of their tokens, ") and pieces.difference(others).startswith("of their p")


def test_a_draft_is_planned_beside_the_model(pair: tuple[Path, Path]) -> None:
    """Region by region as its own session takes them; for as many samples as the model has."""
    model, draft = pair
    with LLM(model, draft=draft, max_sequences=3, **OPTIONS) as llm:
        assert llm.draft
        own = {f"draft_{region.name}": region.nbytes for region in llm.draft.plan.regions if region.name != "python"}
        assert own == {region.name: region.nbytes for region in llm.plan.regions if region.name.startswith("draft_")}
        assert llm.draft.config.max_sequences == llm.draft.config.outputs == 3 and llm.draft.config.ctx == 128
        assert llm.draft.executor.pool is llm.session.executor.pool
        total, more = llm.plan.total_bytes, sum(own.values())
    with LLM(model, draft=draft, max_sequences=3, budget=total, **OPTIONS):
        pass
    with pytest.raises(BudgetError, match="It fits with no --draft, or with ") as caught:
        LLM(model, draft=draft, max_sequences=3, budget=total - more // 2, **OPTIONS)
    first = caught.value.alternatives[0]
    assert first.options == {"draft": "none"} and first.total_bytes == total - more


def test_alternatives_have_room_for_the_draft(pair: tuple[Path, Path]) -> None:
    """Shorter contexts, and streamed layers where the model alone is too much."""
    with Bundle.open(pair[0]) as bundle, Bundle.open(pair[1]) as other:
        planner = planner_of(bundle)
        planner.draft_memory = draft_memory_of(planner_of(other))
        config = resolve(RuntimeConfig(ctx=1024, threads=1, max_sequences=2), bundle.config)
        least = planner.alone().plan(planner.plan(to_request(config)).request).total_bytes
        found = list(alternatives(planner, replace(config), least, lambda types: planner.graph))
        assert found and all(option.total_bytes <= least for option in found)
        ctx = next(option.options["ctx"] for option in found if list(option.options) == ["ctx"])
        plan = planner.plan(to_request(replace(config, ctx=int(ctx))))
        assert any(region.name == "draft_kv" for region in plan.regions) and plan.total_bytes <= least
        assert draft_config(plan, least).ctx == ctx


def test_the_commands_take_a_draft(pair: tuple[Path, Path]) -> None:
    model, draft = pair
    common = ("-c", 128, "--draft", draft)
    planned = edgeinfer("plan", model, "--json", *common).json
    names = [region["name"] for region in planned["regions"]]
    assert "draft_weights" in names and "draft_python" not in names
    refused = edgeinfer("plan", model, "--json", *common, "--budget", f"{planned['total_bytes'] - 20_000}B")
    assert refused.code == 3 and refused.json["alternatives"][0]["options"] == {"draft": "none"}
    done = edgeinfer("run", model, "What was she?", "--json", "-n", 4, *common).json
    assert done["planned_bytes"] == planned["total_bytes"]
    own = edgeinfer("plan", model, "--json", "-c", 128, "--speculate", "self").json
    assert [region["reason"].partition(":")[0] for region in own["regions"] if region["name"] == "draft_logits"] == [
        "draft tokens of 1 of 2 layers"]
    missing = edgeinfer("plan", model, "--speculate", "draft")
    assert missing.code == 2 and missing.sentence.startswith("speculate is 'draft', and no draft model is given")
    for command in (("run", model, "a"), ("plan", model), ("plan", model, "--device", "cuda")):
        failed = edgeinfer(*command, "--draft", model)
        assert failed.code == 1 and failed.sentence.startswith(f"The draft {model} is the model itself")


@pytest.mark.usefixtures("no_variables")
def test_who_draft_tokens_is_said_once(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that exclude each other are refused by both commands; variables give way to flags."""
    model, draft = pair
    run, plan = ("run", model, "a", "-n", 4, "-c", 128, "--json"), ("plan", model, "-c", 128, "--json")
    for flags, said in (
        (("--speculate", "lookup", "--draft", draft), "--speculate lookup uses no draft model; leave --draft "),
        (("--speculate", "off", "--draft", draft), "--speculate off uses no draft model; leave --draft "),
        (("--beams", 2, "--draft", draft), "--draft needs speculative decoding, which beam search does not "),
        (("--beams", 2, "--speculate", "self"), "--speculate self and --beams exclude each other"),
    ):
        for command in (run, plan):
            failed = edgeinfer(*command, *flags)
            assert failed.code == 2 and failed.sentence.startswith(said)

    def drafter(*flags: Any) -> str | None:
        done, planned = edgeinfer(*run, *flags).json, edgeinfer(*plan, *flags, "-n", 4).json
        assert done["planned_bytes"] == planned["total_bytes"]
        return done["speculation"] and done["speculation"]["drafter"]

    monkeypatch.setenv("EDGEINFER_DRAFT", str(draft))
    assert drafter() == "draft" and drafter("--speculate", "lookup") == "lookup"
    monkeypatch.setenv("EDGEINFER_SPECULATE", "draft")
    assert drafter("--beams", 2) is None and drafter("--speculate", "off") is None
    monkeypatch.delenv("EDGEINFER_DRAFT")
    monkeypatch.setenv("EDGEINFER_SPECULATE", "off")
    assert drafter("--draft", draft) == "draft"
