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

from edgeinfer.converters import GgufTokenizer, read_gguf_tokenizer
from edgeinfer.converters.gguf_words import WORDS
from edgeinfer.errors import TokenizerError
from edgeinfer.text import ChatTemplate, Tokenizer
from tests.checkpoints import SENTENCES
from tests.vocabularies import (
    P,
    bpe_metadata,
    cases,
    llama3_ranks,
    qwen2_files,
    read_metadata,
    sentencepiece_metadata,
    small_bpe,
    small_sentencepiece,
)  # fmt: skip

TEXTS = [
    "", " ", "  ", " a", *SENTENCES, "two  spaces\n\n\nlines\t tab \r\n", "日本語のテキスト。",
    "🦙🚀 👨‍👩‍👧", "naïve Ünï",
    "12345 l'été 'LL we'Ve", "e\u0301 combining", "\x00\x01", "<s> </s> <unk>", "x=[1,22,333]; // №½",
]  # fmt: skip
Shared = Callable[[str], Path]


def read(metadata: dict[str, Any]) -> GgufTokenizer:
    found = read_gguf_tokenizer(metadata, "m.gguf")
    assert found is not None
    return found


def opened(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer as a bundle's, behind which nothing knows of GGUF."""
    for name, content in read(metadata).files.items():
        (folder / name).write_bytes(content)
    return Tokenizer.open(folder)


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
            assert tokenizer.encode(text, add_bos=False) == library.encode(text).ids, text
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
        assert tokenizer.encode(text, add_bos=False) == processor.encode(text)
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
    """The table in a SentencePiece model, which is by far its longest field: behind its tag and length of 3 bytes."""
    length = int.from_bytes(model[(at := model.index(b"nmt_nfkc\x12") + 9) : at + 3], "little")
    length = (length & 0x7F) | (length >> 8 & 0x7F) << 7 | (length >> 16) << 14
    return model[at + 3 : at + 3 + length]


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
        assert tokenizer.encode(text, add_bos=False, parse_special=True) == library.encode(text).ids
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


# -- names of pre-tokenizers -------------------------------------------------------------------------------------------

SPLITS = {
    "gpt-2": "Don|'t| 12345|  | x|=|é|!|\n\n", "llama-bpe": "Don|'t| |123|45|  | x|=é|!\n\n",
    "qwen2": "Don|'t| |1|2|3|4|5|  | x|=é|!\n\n", "starcoder": "Don|'t| |1|2|3|4|5|  | x|=|é|!|\n\n",
    "falcon": "Don|'|t| |123|45|  | x|=|é|!|\n\n", "default": "Don|'|t| |123|45|  | x|=|é|!|\n\n",
    "deepseek-v3": "Don|'t| |123|45|  | x|=|é|!\n\n", "deepseek-llm": "Don|'|t| |12345|  | x|=|é|!|\n|\n",
    "deepseek-coder": "Don|'|t| |1|2|3|4|5|  | x|=|é|!|\n|\n", "tekken": "Don|'t| |1|2|3|4|5|  | x|=é|!\n\n",
    "gpt-4o": "Don't| |123|45|  | x|=é|!\n\n", "bloom": "Don't| 12345|  | x=é|!\n\n",
    "qwen35": "Don|'t| |1|2|3|4|5|  | x|=é|!\n\n",
}


@pytest.mark.parametrize("name", SPLITS)
def test_how_families_cut_words(name: str) -> None:
    from tokenizers import Tokenizer as Library

    document = read(bpe_metadata(*small_bpe(), name)).files["tokenizer.json"]
    library, text = Library.from_buffer(document), "Don't 12345   x=é!\n\n"
    assert library.pre_tokenizer is not None
    parts = [text[a:b] for _, (a, b) in library.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(parts) == SPLITS[name]


def test_numbers_are_counted_from_the_right_in_one_go() -> None:
    """The family's own expression needs time with the square of a number's length."""
    from tokenizers import Regex, pre_tokenizers

    def splits(*patterns: str) -> Any:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])

    ours, own = splits(*WORDS["tiny_aya"].splits[:2]), splits(r"\d{1,3}(?=(?:\d{3})*\b)")
    rng = random.Random(1)
    alphabet = [*"0123456789", *"ab_ .,-\n\u0663\uff14\u00b2\u00e9\u4e2d\u0301", "12", "1234567", "x1"]
    for _ in range(5000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(20)))
        assert ours.pre_tokenize_str(text) == own.pre_tokenize_str(text), text
    for text in ("7" * 1_000_000, "7" * 1_000_000 + "a"):
        assert ours.pre_tokenize_str(text)[0][0] == ("7" if text[-1] == "7" else text)


def test_every_name_opens(tmp_path: Path) -> None:
    from edgeinfer.converters.gguf_words import WORDS

    vocab, merges = small_bpe()
    for name in WORDS:
        if name != "gemma4":
            tokenizer = opened(bpe_metadata(vocab, merges, name), tmp_path)
            assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS), name
    assert len(WORDS) > 60


@pytest.mark.parametrize(("name", "near"), [("llama4-bpe", "llama-bpe"), ("Qwen2", "qwen2"), ("x", "llama-bpe, qwen2")])
def test_unknown_names_are_refused(name: str, near: str) -> None:
    with pytest.raises(TokenizerError, match=rf"m\.gguf has the pre-tokenizer '{name}' .*near it are .*{near}"):
        read(bpe_metadata(*small_bpe(), name))


def test_the_beginning_is_presumed_by_the_name(tmp_path: Path) -> None:
    more = {"bos_token_id": 300, "eos_token_id": 301}
    for name, first in (("llama-bpe", [300]), ("qwen2", [])):
        tokenizer = opened(bpe_metadata(*small_bpe(), name, ["<s>", "<e>"], **more), tmp_path)
        assert tokenizer.encode("a")[:-1] == first
        assert tokenizer.encode("a", add_bos=True)[0] == 300
    assert opened(bpe_metadata(*small_bpe(), "llama-bpe"), tmp_path).encode("a")[:-1] == []
    found = read(bpe_metadata(*small_bpe(), "qwen2", add_bos_token=True))
    assert found.remarks == ("m.gguf wants its bos token added to texts but names none; none is added.",)
    found = read({key: value for key, value in bpe_metadata(*small_bpe(), "").items() if not key.endswith(".pre")})
    assert found.remarks[0].startswith("m.gguf does not say how its text is cut into words (tokenizer.ggml.pre)")


# -- ends of texts and chat templates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "keys", "ends"),
    [
        (["<|eot_id|>", "<|eom_id|>", "<|begin|>"], {"eos_token_id": 302}, [300, 301, 302]),
        (["<|return|>", "<|call|>", "<|end|>"], {}, [300, 301]),
        (["<|end|>", "<|x|>", "<turn|>"], {"eot_token_id": 301}, [300, 301, 302]),
        (["</s>", "<|tool_response>", "<x>"], {"eos_token_ids": [302, 301], "padding_token_id": 2**32 - 1}, [301, 302]),
        (["</s>", "<x>", "<|file_sep|>"], {"eom_token_id": np.uint32(301)}, [300, 301, 302]),
    ],
)
def test_all_ends_are_found(texts: list[str], keys: dict[str, Any], ends: list[int], tmp_path: Path) -> None:
    metadata = bpe_metadata(*small_bpe(), "qwen2", texts, **keys)
    assert list(read(metadata).end_ids) == ends and opened(metadata, tmp_path).eos_ids == set(ends)


def test_an_end_that_is_typed_as_text_is_special_nevertheless(tmp_path: Path) -> None:
    metadata = bpe_metadata(*small_bpe(), "qwen2", ["<end_of_turn>", "</s>"])
    metadata[P + "token_type"][-2:] = [1, 1]
    tokenizer = opened(metadata, tmp_path)
    assert tokenizer.eos_ids == {300} and tokenizer.encode("<end_of_turn>", parse_special=True) == [300]


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


# -- vocabularies that contradict themselves ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "rwkv"}, r"a tokenizer of the kind 'rwkv' \(tokenizer.ggml.model\).* known are gpt2, llama"),
        ({"model": ["x"]}, r"a tokenizer of the kind \['x'\]"),
        ({"tokens": []}, r"it has no tokens \(tokenizer.ggml.tokens\); download the file again"),
        ({"tokens": None}, "it has no tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is a str instead of an array"),
        ({"tokens": range(5)}, "tokenizer.ggml.tokens is a range instead of an array"),
        ({"tokens": ["a", 7]}, "token 1 is 7, which is no text in UTF-8"),
        ({"tokens": ["a", b"\xff"]}, r"token 1 is b'\\xff', which is no text in UTF-8"),
        ({"tokens": ["a", "b", "a"]}, "it has the token 'a' twice, as 0 and as 2"),
        ({"token_type": [1, 1]}, "it has 3 tokens but 2 types of tokens"),
        ({"token_type": [1, 1, 7]}, "token 2 has the type 7, but types are 0 to 6"),
        ({"token_type": [1, 1, [1]]}, r"token 2 has the type \[1\]"),
        ({"merges": None}, r"m.gguf has a BPE vocabulary without merges \(tokenizer.ggml.merges\)"),
        ({"merges": ["a b", "ab"]}, "merge 1 is 'ab', which is no pair of pieces"),
        ({"merges": ["a b", 5]}, "merge 1 is 5, which is no pair of pieces"),
        ({"merges": ["b a"]}, r"merge 0 \('b a'\) needs the piece 'ba', which is no token"),
        ({"bos_token_id": 3}, "tokenizer.ggml.bos_token_id is 3, but its ids are 0 to 2"),
        ({"eos_token_id": -2}, "tokenizer.ggml.eos_token_id is -2"),
        ({"eot_token_id": "x"}, "tokenizer.ggml.eot_token_id is 'x'"),
        ({"eos_token_ids": 1}, "tokenizer.ggml.eos_token_ids is a int instead of an array"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes' instead of true or false"),
        ({"tokens": ["a", "b", "ab\ud800"], "merges": []}, r"token 2 is 'ab\\ud800', which is no text in UTF-8"),
        ({"eos_token_id": np.array([1, 2])}, r"tokenizer.ggml.eos_token_id is array\(\[1, 2\]\)"),
        ({"add_eos_token": np.array([1, 2])}, r"tokenizer.ggml.add_eos_token is array\(\[1, 2\]\) instead"),
        ({"model": "llama"}, "it has no token for what is unknown"),
        ({"model": "llama", "unknown_token_id": 0}, r"it has no scores \(tokenizer.ggml.scores\)"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0]}, "it has 3 tokens but 1 scores"),
        ({"model": "t5", "unknown_token_id": 0, "scores": [0.0, 1.0, np.nan]}, "the score of token 2 is nan"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0, 1.0, "x"]}, "its scores are no numbers"),
        ({"model": "llama", "unknown_token_id": 0, "scores": ["0", "1", "2"]}, "its scores are no numbers"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0, 1.0, 1e300]}, r"the score of token 2 is 1e\+300"),
        ({"merges": ["#version a"]}, r"merge 0 \('#version a'\) needs the piece '#version', which is no token"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0] * 3, "token_type": [1, 6, 1]},
         r"its byte tokens are not the 256 that there are \('<0x00>'\)"),
        ({"model": "t5", "unknown_token_id": 0, "scores": [0.0] * 3, "precompiled_charsmap": ["x"]},
         "is no array of bytes"),
        ({"model": "t5", "unknown_token_id": 0, "scores": [0.0] * 3, "precompiled_charsmap": [4, 0, 0, 0, 255]},
         "points outside of itself"),
    ],
)  # fmt: skip
def test_contradictions_are_one_sentence(change: dict[str, Any], sentence: str) -> None:
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1],
                "merges": ["a b"]} | change
    with pytest.raises(TokenizerError, match=sentence) as caught:
        read({P + key: value for key, value in metadata.items()})
    assert "m.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_merges_that_look_like_a_comment(tmp_path: Path) -> None:
    """The first line of merges.txt, which the library passes over wherever it stands, is none here."""
    metadata = bpe_metadata(*small_bpe(), "gpt-2", ["#version", "#versiona"])
    metadata[P + "token_type"][-2:] = [1, 1]
    metadata[P + "merges"] += ["#version a"]
    assert ["#version", "a"] in json.loads(read(metadata).files["tokenizer.json"])["model"]["merges"]
    tokenizer = opened(metadata, tmp_path)
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)


def test_tokens_behind_unused_ones_are_read(tmp_path: Path) -> None:
    """Unused tokens leave gaps among the ids, so that there are fewer tokens than ids."""
    metadata, unused = bpe_metadata(*small_bpe(), "gpt-2"), [f"<unused{i}>" for i in range(99)]
    metadata[P + "tokens"][:0] = unused
    metadata[P + "token_type"][:0] = [5] * 99
    tokenizer = opened(metadata, tmp_path)
    assert tokenizer.vocab_size == len(metadata[P + "tokens"])
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)
    assert tokenizer.token_text(50) == "" and max(tokenizer.encode(SENTENCES[0])) > 300


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


@pytest.mark.parametrize("name", ["gpt-2", "mpt", "llama-spm", "phi-3", "llama-bpe", "qwen2"])
def test_cases_of_llama_cpp(shared_data: Shared, tmp_path: Path, name: str) -> None:
    pairs = cases(shared_data("tokenizers/gguf-vocab"), name)
    tokenizer = opened(real(shared_data, name), tmp_path)
    assert len(pairs) == 47
    for text, ids in pairs:
        assert tokenizer.encode(text, add_bos=False) == ids, repr(text)
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
        assert min(times) < 1
