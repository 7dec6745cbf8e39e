"""Tokenizers that a stranger has changed: converting accepts what running opens, and nothing else, in one sentence."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.errors import CheckpointError, TokenizerError
from edgeinfer.llm.api import LLM
from edgeinfer.models.resolve import _file_stamps
from edgeinfer.text import ChatTemplate, Tokenizer
from edgeinfer.text.libraries import held_back_stderr, library_errors
from tests.helpers.checkpoints import SENTENCES, make_checkpoint

TEXTS = ("a", "", "Once there was", "<s>x</s><|end|>", "\x02", "\u65e5\u672c \U0001f98ax", " " * 50, "e\u0301", "\r\n")
CASES = 140
VALUES = (None, True, 0, -1, 2**32, 1.5, "", "a", "<nope>", [], {}, ["<x>"], {"type": "x"}, "[", [[0]],
          {"id": "<none>", "ids": [999_999], "tokens": ["<none>"]})
UNKNOWN = {"SpecialToken": {"id": "<nobody>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
PARTS: dict[str, tuple[Any, ...]] = {
    "post_processor": (
        {"type": "TemplateProcessing", "single": [UNKNOWN, TEXT], "pair": [TEXT, TEXT], "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["[SEP]", 9999], "cls": ["[CLS]", 99_999]},
        {"type": "Sequence", "processors": []},
    ),
    "normalizer": (
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "Prepend", "prepend": ""},
        {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, {"type": "NFC"},
    ),
    "pre_tokenizer": (
        {"type": "FixedLength", "length": 0}, {"type": "Digits", "individual_digits": True},
        {"type": "Split", "pattern": {"Regex": "*"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
    ),
    "decoder": (None, {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True},
                {"type": "Strip", "content": " ", "start": 2**70, "stop": 0}),
    "model": (
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"},
        {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False},
        {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]], "byte_fallback": False},
        {"type": "BPE", "vocab": {}, "merges": []},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "zz"},
        {"type": "BPE", "vocab": {"a": 2**32 - 1, "b": 5, "ab": 7}, "merges": ["a b"]},
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tokenizers") / "hf", hidden_size=16, intermediate_size=16,
                           num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of what a document holds, the first of each long list."""
    items = list(value.items())[:12] if isinstance(value, dict) else []
    items += enumerate(value[:3]) if isinstance(value, list) else []
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def mutated(document: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """A part replaced by another kind, or one to three values anywhere changed or left out."""
    document = deepcopy(document)
    if dice.random() < 0.5:
        part = dice.choice(sorted(PARTS))
        document[part] = dice.choice(PARTS[part])
        return document
    for _ in range(dice.randint(1, 3)):
        *path, last = dice.choice(list(places(document)))
        holder: Any = document
        for key in path:
            holder = holder[key]
        if dice.random() < 0.3:
            del holder[last]
        else:
            holder[last] = dice.choice(VALUES)
    return document


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Some bytes changed, cut out or put in, or the end cut off."""
    data, at = bytearray(content), dice.randrange(len(content))
    how = dice.randrange(4)
    if how == 0:
        data[at] = dice.randrange(256)
    elif how == 1:
        del data[at : at + dice.randrange(1, 40)]
    elif how == 2:
        data[at:at] = dice.randbytes(dice.randrange(1, 20))
    else:
        del data[at:]
    return bytes(data)


def sentencepiece_model() -> bytes:
    """A SentencePiece model with byte fallback, trained on a few sentences."""
    from sentencepiece import SentencePieceTrainer

    writer = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=writer, vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )
    return writer.getvalue()


def use(folder: Path, bundle: Bundle) -> None:
    """Open and use tokenizer and template as a run does."""
    tokenizer = Tokenizer.of_model(folder, bundle.files, bundle.config)
    assert tokenizer is not None
    ChatTemplate.open(folder)
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text, parse_special=True))


def accepted(source: Path, target: Path) -> bool:
    """Convert; where it is accepted, use the outcome, and where not, see that running could not have opened it."""
    try:
        convert(source, target)
    except TokenizerError as error:
        assert str(source) in str(error) and "partial" not in str(error) and "\n" not in str(error)
        assert not target.exists()
        with pytest.raises(TokenizerError):
            Tokenizer.open(source)
        return False
    with Bundle.open(target) as bundle:
        use(target, bundle)
    shutil.rmtree(target)
    return True


@pytest.mark.slow
def test_what_converts_also_runs(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    original = (source / "tokenizer.json").read_bytes()
    outcomes: Counter[bool] = Counter()
    try:
        for case in range(CASES):
            document = mutated(json.loads(original), random.Random(case))
            (source / "tokenizer.json").write_text(json.dumps(document))
            outcomes[accepted(source, tmp_path / "bundle")] += 1
    finally:
        (source / "tokenizer.json").write_bytes(original)
    assert outcomes[True] > 20 and outcomes[False] > 50
    assert capfd.readouterr().err == ""


def test_sentencepiece_models_that_convert_also_run(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = sentencepiece_model()
    capfd.readouterr()  # the trainer's report
    folder = shutil.copytree(source, tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    outcomes: Counter[bool] = Counter()
    for case in range(40):
        (folder / "tokenizer.model").write_bytes(damaged(model, random.Random(case)) if case else model)
        outcomes[accepted(folder, tmp_path / "bundle")] += 1
    assert outcomes[True] and outcomes[False] > 20
    assert capfd.readouterr().err == ""


def test_a_panic_of_the_library_is_one_sentence(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["post_processor"] = PARTS["post_processor"][0]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    for refused in (lambda: Tokenizer.open(folder), lambda: convert(folder, tmp_path / "bundle")):
        with pytest.raises(TokenizerError, match=r"hf/tokenizer.json is not a usable tokenizer \(.*\); copy or downl"):
            refused()
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds a JSON list, not an object"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is neither text nor a list of named"),
        ("chat_template.jinja", "x" * 1_000_001, "chat_template.jinja is larger than the limit of 1000000 bytes"),
        ("added_tokens.json", "{}", ""),
    ],
)
def test_the_files_beside_a_tokenizer_are_opened_too(
    source: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    (folder / name).write_text(content)
    if message:
        with pytest.raises(TokenizerError, match=message):
            convert(folder, tmp_path / "bundle")
        return
    convert(folder, tmp_path / "bundle")
    assert (tmp_path / "bundle" / name).is_file()


def test_tokens_added_in_a_file_of_their_own_travel(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    (folder / "added_tokens.json").write_text('{"<extra>": 512}')
    convert(folder, tmp_path / "bundle")
    assert Tokenizer.open(tmp_path / "bundle").encode("<extra>", parse_special=True)[-1] == 512


def test_vocab_without_merges_is_refused(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(TokenizerError, match=r"hf holds no tokenizer \(tokenizer.json, tokenizer.model, or vocab.json"):
        convert(folder, tmp_path / "bundle")


# -- what libraries say ------------------------------------------------------------------------------------------------


def test_faults_of_a_library_and_our_own(tmp_path: Path) -> None:
    class Panic(BaseException):
        pass

    says = r"^x is not a usable tokenizer \(why\); copy or download it again\.$"
    with pytest.raises(TokenizerError, match=says), library_errors(Path("x")):
        raise Panic("why.\nBacktrace")
    for kind in (KeyboardInterrupt, TokenizerError):
        with pytest.raises(kind), library_errors(Path("x")):
            raise kind


@pytest.mark.parametrize("memory", [True, False])
def test_what_others_say_meanwhile_is_passed_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    if not memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    with held_back_stderr():
        os.write(2, b"heard\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "heard\n"
    with pytest.raises(TokenizerError), held_back_stderr():
        os.write(2, b"panicked\n")
        raise TokenizerError
    print("later", file=sys.stderr, flush=True)
    assert capfd.readouterr().err == "later\n"


def test_a_closed_standard_error_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: int) -> int:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(os, "dup", closed)
    with held_back_stderr():
        pass


def test_a_chat_template_that_cannot_be_compiled_is_not_converted(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    (source / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        convert(source, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_further_chat_templates_travel(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    (source / "chat_template.jinja").write_text("plain")
    folder = source / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{% if %}")
    (folder / "notes.txt").write_text("x")
    before = _file_stamps(source)
    with pytest.raises(TokenizerError, match=r"hf/additional_chat_templates/tool_use\.jinja"):
        convert(source, tmp_path / "bundle")
    (folder / "tool_use.jinja").write_text("with {{ tools | length }}")
    assert _file_stamps(source) != before, "a conversion in the cache is used on where only such a file changes"
    convert(source, tmp_path / "bundle")
    with LLM(tmp_path / "bundle", ctx=64) as llm:
        assert llm.chat_template is not None
        hi = [{"role": "user", "content": "x"}]
        assert (llm.chat_template.render(hi), llm.chat_template.render(hi, tools=[{}])) == ("plain", "with 1")
    (folder / "tool_use.jinja").unlink()
    (folder / "tool_use.jinja").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja is a link to /etc/passwd"):
        convert(source, tmp_path / "again")


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.x.jinja", "special_tokens_map.json",
                                  "added_tokens.json"])
def test_a_text_that_the_bundle_does_not_list_is_refused(tmp_path: Path, name: str) -> None:
    convert(make_checkpoint(tmp_path / "hf"), tmp_path / "bundle")
    (tmp_path / "bundle" / name).write_text("{}")
    with pytest.raises(TokenizerError, match=f"holds {name}, which the bundle does not list"):
        LLM(tmp_path / "bundle", ctx=64)
