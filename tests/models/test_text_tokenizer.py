"""Encoding and decoding, against the libraries, llama.cpp's vocabulary cases, and damaged files."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import EdgeInferError, RequestError, TokenizerError
from edgeinfer.models import demo_path
from edgeinfer.text import Tokenizer
from tests.helpers.vocabularies import cases, llama3_ranks

TEXTS = [
    "", " ", "  ", "a", " a", "Once upon a time, there was a fox.", "two  spaces\n\nlines\t tab", "日本語のテキスト。",
    "🦙🚀 family 👨‍👩‍👧", "naïve café Ünï", "a\u00a0b", "l'été 123 4567", "e\u0301 combining", "'s 'LL we'Ve",
    "\x00\x01", "<s> </s> <unk>",
]  # fmt: skip
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Shared = Callable[[str], Path]


def write(directory: Path, **files: Any) -> Path:
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A tiny byte-level BPE tokenizer with chat tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    tokenizer.enable_truncation(4)  # files made for training have this; a prompt must arrive whole
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return write(tmp_path, tokenizer_config={"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}})


@pytest.fixture
def sentencepiece_model(tmp_path: Path) -> Path:
    """A tiny SentencePiece BPE model with byte fallback, alone in its directory."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Once upon a time there was a fox and a hen."] * 20), model_writer=model,
        model_type="bpe", vocab_size=300, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=9,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    return tmp_path


def check_cases(tokenizer: Tokenizer, shared_data: Shared, name: str) -> None:
    pairs = cases(shared_data("tokenizers/gguf-vocab"), name)
    assert len(pairs) > 40
    for text, ids in pairs:
        assert tokenizer.encode(text, add_bos=False, leading_space=True) == ids, repr(text)
        if name != "qwen2":  # it normalises to NFC, so that combining characters change
            assert tokenizer.decode(ids) == text


def test_byte_level_round_trip(byte_level: Path) -> None:
    tokenizer = Tokenizer.open(byte_level)
    begin, end = tokenizer.encode("<|begin|><|end|>", parse_special=True)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (begin, {end})
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == begin and begin not in ids[1:]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("much longer than four tokens")) > 5
    assert tokenizer.vocab_size == tokenizer.encode("<think>", add_bos=False)[0] + 1


@pytest.mark.parametrize("name", ["models/stories260K-hf", "models/fables-5m-relu", "tokenizers/llama2",
                                  "tokenizers/qwen2", "demo"])
def test_text_that_goes_on_gets_no_leading_space(name: str, shared_data: Shared) -> None:
    tokenizer = Tokenizer.open(demo_path() if name == "demo" else shared_data(name))
    begin = tokenizer.encode("It is")
    for text in (" good", "land", " a  <s> b", "."):
        ids = [*begin, *tokenizer.encode(text, add_bos=False)]
        assert tokenizer.decode(ids) == f"It is{text}"
    assert [*begin, *tokenizer.encode(" good", add_bos=False)] == tokenizer.encode("It is good")


def test_behind_a_special_token_text_is_as_the_file_says() -> None:
    tokenizer = Tokenizer.open(demo_path())
    space = tokenizer.encode("the", add_bos=False, leading_space=True)
    [end] = tokenizer.encode("</s>", add_bos=False, parse_special=True)
    behind = tokenizer.encode("</s>the", add_bos=False, parse_special=True)
    assert behind == tokenizer.encode("</s>the", add_bos=False, parse_special=True, leading_space=True) == [end, *space]
    both = tokenizer.encode("the</s>the", add_bos=False, parse_special=True)
    assert both == [*tokenizer.encode("the", add_bos=False), end, *space]


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("flags", [{}, {"special": False}, {"lstrip": True}, {"rstrip": True}, {"single_word": True},
                                   {"special": False, "lstrip": True}, {"normalized": True},
                                   {"normalized": True, "special": False, "lstrip": True}], ids=str)
@pytest.mark.parametrize("scheme", ["Prepend", "first", "always"])
def test_added_tokens_in_text_that_goes_on(flags: dict[str, bool], scheme: str, tmp_path: Path) -> None:
    """The two halves of a text have the ids of the whole, whatever an added token takes of the spaces around it."""
    file = json.loads((demo_path() / "tokenizer.json").read_text(encoding="utf-8"))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    file["added_tokens"].append({**plain, "id": max(file["model"]["vocab"].values()) + 1, "content": "<x>", **flags})
    if scheme != "Prepend":
        file["normalizer"] = None
        file["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    tokenizer = Tokenizer.open(write(tmp_path, tokenizer=file))
    for special in (True, False):
        begin = tokenizer.encode("The fox", parse_special=special)
        for text in (" and<x>the crow", " and <x> the crow", "s<x>", "<x>the", " <x>the", " ab<x>cd <x> e", " and"):
            both = [*begin, *tokenizer.encode(text, add_bos=False, parse_special=special)]
            assert both == tokenizer.encode(f"The fox{text}", parse_special=special), (special, text)


def test_special_tokens_in_text_are_text_unless_asked_for(byte_level: Path) -> None:
    tokenizer = Tokenizer.open(byte_level)
    begin, end = tokenizer.bos_id, min(tokenizer.eos_ids)
    assert end not in tokenizer.encode("a<|end|>")
    assert tokenizer.decode(tokenizer.encode("a<|end|>")) == "a<|end|>"
    assert tokenizer.encode("<|begin|>a<|end|>", parse_special=True) == [begin, *tokenizer.encode("a", False), end]
    assert tokenizer.encode("<|begin|>a", add_bos=True, parse_special=True).count(begin or 0) == 1
    assert tokenizer.encode("<|begin|>a", parse_special=False)[0] == begin
    ids = tokenizer.encode("<|begin|>a<think>b<|end|>", parse_special=True)
    assert tokenizer.decode(ids) == "a<think>b"  # a token that is added but not special is text
    assert tokenizer.decode(ids, skip_special=False) == "<|begin|>a<think>b<|end|>"
    assert tokenizer.token_text(end) == "<|end|>"


def test_who_decides_about_bos(byte_level: Path) -> None:
    begin = Tokenizer.open(byte_level).bos_id
    write(byte_level, tokenizer_config={"add_bos_token": False})
    tokenizer = Tokenizer.open(byte_level)
    assert tokenizer.encode("a")[0] != begin
    with pytest.raises(TokenizerError, match="no beginning-of-text token; leave add_bos out"):
        tokenizer.encode("a", add_bos=True)
    write(byte_level, tokenizer_config={"add_bos_token": False, "bos_token": "<|begin|>"})
    assert Tokenizer.open(byte_level).encode("a", add_bos=True)[0] == begin
    write(byte_level, tokenizer_config={}, generation_config={"bos_token_id": begin})
    assert Tokenizer.open(byte_level).bos_id == begin


def test_all_ends_of_text_are_found(byte_level: Path) -> None:
    end = min(Tokenizer.open(byte_level).eos_ids)
    write(byte_level, generation_config={"eos_token_id": [7, 8]}, special_tokens_map={"eos_token": "<|begin|>"})
    tokenizer = Tokenizer.open(byte_level, config={"eos_token_id": 9})
    assert tokenizer.eos_ids == {7, 8, 9, end, tokenizer.bos_id}


def test_odd_ids(byte_level: Path) -> None:
    tokenizer = Tokenizer.open(byte_level)
    assert tokenizer.decode([tokenizer.vocab_size, 2**40]) == ""
    assert tokenizer.token_text(10**6) == ""
    with pytest.raises(RequestError, match=r"Token id -1 is negative; ids are from 0 to \d+"):
        tokenizer.decode([-1])


def test_odd_texts(byte_level: Path) -> None:
    tokenizer = Tokenizer.open(byte_level)
    with pytest.raises(RequestError, match=r"half of a surrogate pair \(U\+D800 at character 1\)"):
        tokenizer.encode("a\ud800")
    with pytest.raises(RequestError, match="The text is a bytes; it must be a string"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]


def test_sentencepiece_alone(sentencepiece_model: Path) -> None:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model / "tokenizer.model"))
    tokenizer = Tokenizer.open(sentencepiece_model)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *library.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text == library.decode(library.encode(text))
    assert 2 not in tokenizer.encode("a</s>")
    assert tokenizer.token_text(3 + 0x41) == "A" and tokenizer.token_text(1) == "<s>"


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_with_tokens_in_the_text(sentencepiece_model: Path, legacy: bool) -> None:
    added = {"1": {"content": "<s>", "special": True}, "900": {"content": "<|x|>", "special": True, "rstrip": True}}
    write(sentencepiece_model, tokenizer_config={"added_tokens_decoder": added, "legacy": legacy})
    write(sentencepiece_model, added_tokens={"<think>": 901})
    tokenizer = Tokenizer.open(sentencepiece_model)
    fox = tokenizer.encode("fox", add_bos=False, leading_space=True)
    behind = tokenizer.encode("<s>a<think>fox", parse_special=True)
    assert behind[0] == 1 and 901 in behind and tokenizer.vocab_size == 902
    assert (behind[behind.index(901) + 1 :] == fox) is legacy
    assert tokenizer.decode(behind) == ("a<think> fox" if legacy else "a<think>fox")
    assert tokenizer.encode("<s>fox", parse_special=True) == [1, *fox]
    assert 901 in tokenizer.encode("a<think>") and 900 not in tokenizer.encode("a<|x|>")
    stripped = tokenizer.encode("a<|x|>  fox", parse_special=True)
    assert tokenizer.decode(stripped, skip_special=False).startswith("<s>" + " a<|x|>" + " " * legacy + "fox")


@pytest.mark.parametrize("model", ["fables-5m-relu", "fables-5m-silu", "fables-draft"])
def test_both_files_of_the_fables_models_agree(shared_data: Shared, tmp_path: Path, model: str) -> None:
    source = shared_data(f"models/{model}")
    both = Tokenizer.open(source)
    for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, tmp_path / name)
    alone = Tokenizer.open(tmp_path)
    assert (both.bos_id, both.eos_ids, both.vocab_size) == (alone.bos_id, alone.eos_ids, alone.vocab_size)
    book = next(shared_data("text/held_out").glob("*.txt")).read_text(encoding="utf-8")[:20000]
    for text in [*TEXTS, book]:
        ids = both.encode(text)
        assert ids == alone.encode(text)
        assert both.decode(ids) == alone.decode(ids) == text
    assert all(both.token_text(i) == alone.token_text(i) for i in range(both.vocab_size))


@pytest.mark.parametrize("model", ["stories260K-hf", "babyllama-tok361-hf", "fables-5m-relu"])
def test_tokenizer_json_as_its_library(shared_data: Shared, model: str) -> None:
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(shared_data(f"models/{model}/tokenizer.json")))
    tokenizer = Tokenizer.open(shared_data(f"models/{model}"))
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_bos=False, parse_special=True, leading_space=True) == ids
        assert tokenizer.encode("x" + text, parse_special=True) == library.encode("x" + text).ids
        assert tokenizer.decode(ids) == library.decode(ids)


def test_golden_prompts(shared_data: Shared) -> None:
    golden = json.loads(shared_data("models/golden.json").read_text(encoding="utf-8"))
    for model, record in golden.items():
        tokenizer = Tokenizer.open(shared_data(f"models/{model}"))
        for case in record["cases"]:
            assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]


def test_llama2_cases(shared_data: Shared) -> None:
    check_cases(Tokenizer.open(shared_data("tokenizers/llama2")), shared_data, "llama-spm")


@pytest.mark.parametrize(("folder", "kind", "name"), [("gpt2", "GPT2", "gpt-2"), ("qwen2", "Qwen2", "qwen2")])
def test_vocab_and_merges_cases(shared_data: Shared, tmp_path: Path, folder: str, kind: str, name: str) -> None:
    for file in shared_data(f"tokenizers/{folder}").iterdir():
        shutil.copy(file, tmp_path / file.name)
    if folder == "gpt2":
        write(tmp_path, tokenizer_config={"tokenizer_class": f"{kind}Tokenizer", "eos_token": "<|endoftext|>"})
    tokenizer = Tokenizer.open(tmp_path)
    check_cases(tokenizer, shared_data, name)
    assert tokenizer.encode("a")[0] == tokenizer.encode("a", add_bos=False)[0]
    if folder == "qwen2":
        assert tokenizer.encode("<|im_start|>", parse_special=True) == [151644]


def test_llama3_cases(shared_data: Shared, tmp_path: Path) -> None:
    from tokenizers import Regex, Tokenizer as Library, decoders, models, pre_tokenizers  # noqa: I001

    vocab, merges = llama3_ranks(shared_data("tokenizers/llama3/tokenizer.model"))
    library = Library(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    check_cases(Tokenizer.open(tmp_path), shared_data, "llama-bpe")


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("tokenizer.json", b"", "is not a usable tokenizer"),
        ("tokenizer.json", b"[1]", "is not a usable tokenizer"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "decodes text"),
        ("tokenizer.model", b"", "is empty; copy or download it again"),
        ("tokenizer.model", b"\x0a\x07broken", "is not a SentencePiece model; copy or download it again"),
        ("tokenizer.model", b"\x1a\x02\x18\x00", "is not a SentencePiece model"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "holds tiktoken ranks, not a SentencePiece model; put"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"[]", "holds a JSON list, not an object"),
        ("tokenizer_config.json", b"\xff\xfe", "is not UTF-8 text"),
        ("tokenizer_config.json", b"[" * 100_000, "is not valid JSON"),
        ("generation_config.json", b'{"eos_token_id": "2"}', "eos_token_id holds '2', which is not a token id"),
        ("tokenizer_config.json", b'{"bos_token": "<none>"}', "names the bos_token '<none>', which the tokenizer"),
    ],
)  # fmt: skip
def test_damaged_files(byte_level: Path, name: str, data: bytes, sentence: str) -> None:
    if name == "tokenizer.model":
        (byte_level / "tokenizer.json").unlink()
    (byte_level / name).write_bytes(data)
    with pytest.raises(TokenizerError, match=sentence) as caught:
        Tokenizer.open(byte_level)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("added", "sentence"),
    [
        ([], "."),
        ([1], "added_tokens_decoder is not a table"),
        ({"x": {}}, "added_tokens_decoder is not a table"),
        ({"5": {"content": ""}}, "added token 5 has no text"),
    ],
)
def test_damaged_added_tokens(sentencepiece_model: Path, added: Any, sentence: str) -> None:
    write(sentencepiece_model, tokenizer_config={"added_tokens_decoder": added})
    if not added:
        assert Tokenizer.open(sentencepiece_model).vocab_size
        return
    with pytest.raises(TokenizerError, match=sentence):
        Tokenizer.open(sentencepiece_model)


def test_damaged_older_added_tokens(sentencepiece_model: Path) -> None:
    write(sentencepiece_model, added_tokens={"<x>": "7"})
    with pytest.raises(TokenizerError, match="gives token '<x>' the id '7'"):
        Tokenizer.open(sentencepiece_model)


def test_damaged_vocab_and_merges(tmp_path: Path) -> None:
    write(tmp_path, vocab={"a": 0, "b": 1, "ab": 2})
    merges = tmp_path / "merges.txt"
    merges.write_text("#version: 0.2\na b\n")
    with pytest.raises(TokenizerError, match="names the tokenizer_class ''; only Qwen2Tokenizer and GPT2Tokenizer"):
        Tokenizer.open(tmp_path)
    write(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    assert Tokenizer.open(tmp_path).encode("ab") == [2]
    merges.write_text("a b c\n")
    with pytest.raises(TokenizerError, match="has the line 'a b c', which is not a pair of tokens"):
        Tokenizer.open(tmp_path)
    merges.write_text("a x\n")
    with pytest.raises(TokenizerError, match=r"vocab\.json is not a usable tokenizer"):
        Tokenizer.open(tmp_path)
    merges.write_text("a b\n")
    added = {"9": {"content": "<x>", "special": True}}
    write(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": added})
    with pytest.raises(TokenizerError, match=r"gives token '<x>' the id 9, but vocab\.json leaves 3 for it"):
        Tokenizer.open(tmp_path)


@pytest.mark.slow
def test_missing_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer \(tokenizer\.json, tokenizer\.model, or vocab\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a file"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").rmdir()
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(512_000_001)  # sparse: nothing is written
    with pytest.raises(EdgeInferError, match="is larger than the limit of 512000000 bytes"):
        Tokenizer.open(tmp_path)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("edgeinfer.text.files.open_plain", refuse)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read \(Permission denied\)"):
        Tokenizer.open(tmp_path)


def test_only_the_needed_library_is_imported(byte_level: Path) -> None:
    code = (
        "import sys\nfrom edgeinfer.text import Tokenizer\n"
        "heavy = {'tokenizers', 'sentencepiece', 'jinja2', 'numpy', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        f"Tokenizer.open({str(byte_level)!r})\nprint(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["[]", "['tokenizers']"]
