"""Tokenizers from GGUF metadata against the libraries and llama.cpp's cases; vocabularies against themselves."""

from __future__ import annotations

import json
import random
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import read_gguf_tokenizer
from edgeinfer.errors import TokenizerError
from edgeinfer.text import ChatTemplate, Tokenizer
from tests.helpers import machine_speed
from tests.helpers.checkpoints import SENTENCES
from tests.helpers.vocabularies import (
    TEXTS,
    P,
    bpe_metadata,
    cases,
    llama3_ranks,
    opened,
    qwen2_files,
    read,
    read_metadata,
    sentencepiece_metadata,
    small_bpe,
    small_sentencepiece,
)  # fmt: skip

Shared = Callable[[str], Path]


# -- small vocabularies of each kind -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe() -> dict[str, Any]:
    special = ["<|begin|>", "<|im_end|>", "<|endoftext|>"]
    found = bpe_metadata(*small_bpe(), "gpt-2", special, bos_token_id=300, eos_token_id=302, add_bos_token=True)
    found[P + "tokens"] += ["   ", "[PAD304]", ""]
    found[P + "token_type"] += [4, 4, 1]
    return found


@pytest.fixture(scope="module")
def spm() -> tuple[Any, dict[str, Any]]:
    processor, _ = small_sentencepiece(
        model_type="bpe", vocab_size=350, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False)
    return processor, sentencepiece_metadata(processor, "llama", bos_token_id=1)


def test_byte_level_bpe(bpe: dict[str, Any], tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    vocab, merges = small_bpe()
    library = Library(models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = opened(bpe, tmp_path)
    for text in TEXTS:
        if "   " not in text:
            assert tokenizer.encode(text, add_bos=False, leading_space=True) == library.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (300, {301, 302}) == (read(bpe).bos_id, set(read(bpe).end_ids))
    assert tokenizer.encode("a")[0] == 300 and read(bpe).n_tokens == 306
    assert tokenizer.encode("a<|im_end|>", parse_special=True)[-1] == 301 and 301 not in tokenizer.encode("<|im_end|>")
    assert 303 in tokenizer.encode("a   b"), "user-defined tokens are taken wherever they stand"
    assert 304 not in tokenizer.encode("[PAD304]", parse_special=True) and tokenizer.decode([304, 305]) == ""


def test_arrays_of_numpy_and_texts_in_bytes(bpe: dict[str, Any]) -> None:
    arrays = bpe | {P + "token_type": np.array(bpe[P + "token_type"], np.int32),
                    P + "tokens": np.array([text.encode() for text in bpe[P + "tokens"]], object),
                    P + "bos_token_id": np.uint32(300), P + "add_bos_token": np.bool_(True)}
    assert read(arrays) == read(bpe)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe(spm: tuple[Any, dict[str, Any]], tmp_path: Path, prefix: bool) -> None:
    processor, _ = small_sentencepiece(
        model_type="bpe", vocab_size=350, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=prefix)
    metadata = sentencepiece_metadata(processor, "llama", bos_token_id=1, add_space_prefix=prefix)
    tokenizer = opened(metadata, tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *processor.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a</s>", parse_special=True)[-1] == 2 and 2 not in tokenizer.encode("a</s>")
    assert tokenizer.encode("<unk>", parse_special=True) == [1, 0] and 0 not in tokenizer.encode("<unk>")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


def test_user_defined_pieces_as_sentencepiece_has_them(tmp_path: Path) -> None:
    """Gemma's: runs of spaces and line breaks, in a tokenizer that puts no space of its own before a text."""
    processor, _ = small_sentencepiece(
        model_type="bpe", vocab_size=350, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=False, user_defined_symbols=["\u2581\u2581", "\n\n", "<b>"])
    tokenizer = opened(sentencepiece_metadata(processor, "llama", (3, 4, 5), add_space_prefix=False), tmp_path)
    for text in [*TEXTS, "a  b\n\n<b>c   d", "   \n\n\n"]:
        assert tokenizer.encode(text, add_bos=False, leading_space=True) == processor.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert processor.encode("  ") == [3]


@pytest.mark.parametrize("prefix", [True, False])
def test_spaces_that_are_two_tokens(spm: tuple[Any, dict[str, Any]], tmp_path: Path, prefix: bool) -> None:
    """One that is user-defined, and a piece with marks, which SentencePiece would take for the same."""
    _, metadata = spm
    n = len(metadata[P + "tokens"])
    more = {P + "tokens": [*metadata[P + "tokens"], "\u2581\u2581", "  "], P + "add_space_prefix": prefix,
            P + "token_type": [*metadata[P + "token_type"], 1, 4], P + "scores": [*metadata[P + "scores"], -9.0, -9.0]}
    tokenizer = opened(metadata | more, tmp_path)
    assert tokenizer.encode("a  b").count(n + 1) == 1 and n not in tokenizer.encode("a  b")


def test_what_stands_behind_user_defined_tokens_begins_a_text(spm: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    processor, metadata = spm
    n = len(metadata[P + "tokens"])
    metadata = metadata | {P + "tokens": [*metadata[P + "tokens"], "<|tool|>", "<|end|>"],
                           P + "token_type": [*metadata[P + "token_type"], 4, 3],
                           P + "scores": [*metadata[P + "scores"], -9.0, -9.0]}
    tokenizer = opened(metadata, tmp_path)
    assert tokenizer.encode("the<|tool|>fox") == [1, *processor.encode("the"), n, *processor.encode("fox")]
    behind = tokenizer.encode("<|end|>\nfox", parse_special=True)
    assert behind[1:] == [n + 1, *processor.encode("\nfox")] and tokenizer.eos_ids == {2, n + 1}
    phi = opened(metadata | {"general.architecture": "phi3"}, tmp_path)
    assert phi.encode("<|end|>\nfox", parse_special=True)[1:] == [n + 1, *processor.encode("fox")]


def test_without_types_bytes_and_special_tokens_are_known_by_their_names(
    spm: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    processor, metadata = spm
    kept = ("model", "tokens", "scores")
    tokenizer = opened({P + key: metadata[P + key] for key in kept}, tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *processor.encode(text)]
    assert tokenizer.eos_ids == {2}


def test_unigram_with_its_table_of_replacements(tmp_path: Path) -> None:
    processor, model = small_sentencepiece(
        model_type="unigram", vocab_size=120, normalization_rule_name="nmt_nfkc", bos_id=-1, character_coverage=1.0)
    metadata = sentencepiece_metadata(processor, "t5", remove_extra_whitespaces=True, add_space_prefix=True,
                                      precompiled_charsmap=np.frombuffer(charsmap_of(model), np.int8))
    tokenizer = opened(metadata, tmp_path)
    for text in [*TEXTS, "ﬁne ＡＢＣ \u3000 ①"]:
        assert tokenizer.encode(text) == processor.encode(text)
    assert tokenizer.bos_id is None and tokenizer.eos_ids == {processor.eos_id()}
    assert json.loads(read(metadata).files["tokenizer_config.json"])["add_eos_token"] is True


def charsmap_of(model: bytes) -> bytes:
    """The table in a SentencePiece model, which is by far its longest field: after its tag and length of 3 bytes."""
    length = int.from_bytes(model[(at := model.index(b"nmt_nfkc\x12") + 9) : at + 3], "little")
    length = (length & 0x7F) | (length >> 8 & 0x7F) << 7 | (length >> 16) << 14
    return model[at + 3 : at + 3 + length]


@pytest.mark.slow
def test_tables_of_replacements_that_lead_out_of_themselves_are_refused(tmp_path: Path) -> None:
    processor, model = small_sentencepiece(
        model_type="unigram", vocab_size=120, normalization_rule_name="nmt_nfkc", bos_id=-1, character_coverage=1.0)
    table, outcomes = charsmap_of(model), {True: 0, False: 0}
    for case in range(60):
        dice, damaged = random.Random(case), bytearray(table)
        for _ in range(3):
            damaged[dice.randrange(len(table) if case % 2 else 4000)] = dice.randrange(256)
        metadata = sentencepiece_metadata(processor, "t5", precompiled_charsmap=list(damaged))
        try:
            tokenizer = opened(metadata, tmp_path)
        except TokenizerError as error:
            assert "(precompiled_charsmap) points outside" in str(error) or "is not a SentencePiece" in str(error)
            outcomes[False] += "points outside" in str(error)
            continue
        outcomes[True] += 1
        for text in TEXTS:
            tokenizer.encode(text)
    assert outcomes[True] and outcomes[False]


def test_wordpiece(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    library.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=special, show_progress=False))
    pieces = sorted(library.get_vocab(), key=library.get_vocab().__getitem__)
    tokens = [text if text in special else text[2:] if text.startswith("##") else f"\u2581{text}" for text in pieces]
    metadata = {P + "model": "bert", P + "tokens": tokens, P + "token_type": [3] * 5 + [1] * (len(tokens) - 5),
                P + "unknown_token_id": 1, P + "cls_token_id": 2, P + "seperator_token_id": 3}
    tokenizer = opened(metadata, tmp_path)
    for text in [*TEXTS, "The OLD king, (daughters) Éa!", "[MASK] fox"]:
        assert tokenizer.encode(text, add_bos=False, parse_special=True, leading_space=True) == library.encode(text).ids
    assert tokenizer.encode("a")[0] == 2 and tokenizer.decode(tokenizer.encode("The old Fox")) == "the old fox"
    with pytest.raises(TokenizerError, match="WordPiece and has no token for unknown words"):
        read({key: value for key, value in metadata.items() if "unknown" not in key} | {
            P + "token_type": [1] * len(tokens)})


def test_bpe_over_marked_spaces(tmp_path: Path) -> None:
    """Gemma 4's."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\n",
              "ab", "\u2581ab", "\n\n"]
    metadata = {P + "model": "gemma4", P + "tokens": tokens, P + "token_type": [3] * 3 + [2] + [6] * 256 + [1] * 7,
                P + "merges": ["a b", "\u2581 ab", "\n \n"], P + "bos_token_id": 2, P + "eos_token_id": 1,
                P + "add_bos_token": False}
    tokenizer = opened(metadata, tmp_path)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab ab\n\n")] == ["<bos>", "ab", " ab", "\n\n"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é", add_bos=False) == [4 + 0xC3, 4 + 0xA9] and tokenizer.eos_ids == {1}


def test_chat_templates(bpe: dict[str, Any], tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    hi = [{"role": "user", "content": "x"}]
    opened(bpe | {"tokenizer.chat_template": template}, tmp_path)
    found = ChatTemplate.open(tmp_path)
    assert found is not None and found.render(hi) == "<|begin|>x<|endoftext|>"
    opened(bpe | {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": "tools",
                  "tokenizer.chat_templates": ["tool_use"]}, tmp_path)
    found = ChatTemplate.open(tmp_path)
    assert found is not None
    assert (found.render(hi), found.render(hi, tools=[{}])) == ("<|begin|>x<|endoftext|>", "tools")
    opened(bpe, tmp_path)
    assert ChatTemplate.open(tmp_path) is None
    with pytest.raises(TokenizerError, match="its chat template 'default' is a int instead of text"):
        read(bpe | {"tokenizer.chat_template": 7})


def test_no_tokenizer() -> None:
    assert read_gguf_tokenizer({}, "m.gguf") is None
    assert read_gguf_tokenizer({P + "model": "none"}, "m.gguf") is None


# -- real vocabularies -------------------------------------------------------------------------------------------------


def real(shared_data: Shared, name: str) -> dict[str, Any]:
    if name == "llama-bpe":
        vocab, merges = llama3_ranks(shared_data("tokenizers/llama3/tokenizer.model"))
        return bpe_metadata(vocab, merges, name, ["<|begin_of_text|>", "<|eot_id|>"], bos_token_id=len(vocab))
    if name == "qwen2":
        return qwen2_files(shared_data("tokenizers/qwen2"))
    return read_metadata(shared_data(f"tokenizers/gguf-vocab/ggml-vocab-{name}.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-2", "mpt", "llama-spm", "phi-3", "llama-bpe", "qwen2"])
def test_cases_of_llama_cpp(shared_data: Shared, tmp_path: Path, name: str) -> None:
    pairs = cases(shared_data("tokenizers/gguf-vocab"), name)
    tokenizer = opened(real(shared_data, name), tmp_path)
    assert len(pairs) == 47
    for text, ids in pairs:
        assert tokenizer.encode(text, add_bos=False, leading_space=True) == ids, repr(text)
        assert tokenizer.decode(ids) == text
    text = many_languages(shared_data)
    assert len(text.encode()) > 1_000_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def many_languages(shared_data: Shared) -> str:
    """A megabyte: Japanese, English, and words in letters of all alphabets, with their marks, digits and signs."""
    dice, books = random.Random(0), shared_data("text/books")
    letters = [chr(code) for code in range(0x21, 0x2FA1D) if unicodedata.category(chr(code))[0] in "LMNPS"]
    letters.remove("\u2581")  # which is how SentencePiece writes a space
    start = [dice.randrange(len(letters) - 60) for _ in range(25_000)]
    words = ["".join(letters[at + dice.randrange(60)] for _ in range(dice.randrange(1, 9))) for at in start]
    parts = [(books / name).read_text(encoding="utf-8")[:n] for name, n in (
        ("wagahai_ja.txt", 120_000), ("war_and_peace_pg2600.txt", 300_000))]
    return "\n".join([*parts, " ".join(words)])


@pytest.mark.parametrize("model", ["stories260K-hf", "fables-5m-silu"])
def test_files_of_the_same_model_agree(shared_data: Shared, tmp_path: Path, model: str) -> None:
    metadata = read_metadata(shared_data(f"gguf/{model}-Q4_0.gguf"))
    tokenizer, other = opened(metadata, tmp_path), Tokenizer.open(shared_data(f"models/{model}"))
    assert tokenizer.bos_id == other.bos_id == 1 and tokenizer.eos_ids == {2} < other.eos_ids, "a file names one"
    assert tokenizer.vocab_size == other.vocab_size
    text = (shared_data("text/books") / "tinyshakespeare.txt").read_text()[:100_000]
    for part in [*TEXTS, text]:
        if not part.startswith(" "):  # stories260K's tokenizer.json puts no second space there; GGUF cannot say so
            assert tokenizer.encode(part) == other.encode(part)


@pytest.mark.timing
def test_a_large_vocabulary_takes_a_second_at_most() -> None:
    """150,000 tokens and as many merges, and 150,000 pieces with scores."""
    vocab, merges = small_bpe()
    letters = [piece for piece in vocab if len(piece) == 1 and not piece.isascii()][:150]
    pairs = [(left, right) for left in letters for right in letters]
    merges += pairs + [("".join(pair), letter) for letter in letters[:6] for pair in pairs]
    tokens = vocab | {left + right: len(vocab) + i for i, (left, right) in enumerate(merges[-7 * len(pairs):])}
    assert len(tokens) > 150_000
    scores = [-float(i) for i in range(len(tokens))]
    many = bpe_metadata(tokens, merges, "qwen2", scores=scores, unknown_token_id=0)
    for metadata in (many, many | {P + "model": "llama"}):
        times = []
        for _ in range(3):
            began = time.process_time()
            read(metadata)
            times.append(time.process_time() - began)
        assert min(times) < machine_speed.slowness()
