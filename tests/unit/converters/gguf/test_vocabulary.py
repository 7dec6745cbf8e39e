"""Vocabulary of a GGUF file: splitting of words, tokens at the start and end of texts; contradictions in it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters.gguf.words import WORDS
from edgeinfer.errors import TokenizerError
from tests.helpers.checkpoints import SENTENCES
from tests.helpers.vocabularies import TEXTS, P, bpe_metadata, opened, read, small_bpe  # fmt: skip

SPLITS = {
    "gpt-2": "Don|'t| 12345|  | x|=|é|!|\n\n", "llama-bpe": "Don|'t| |123|45|  | x|=é|!\n\n",
    "qwen2": "Don|'t| |1|2|3|4|5|  | x|=é|!\n\n", "starcoder": "Don|'t| |1|2|3|4|5|  | x|=|é|!|\n\n",
    "falcon": "Don|'|t| |123|45|  | x|=|é|!|\n\n", "default": "Don|'|t| |123|45|  | x|=|é|!|\n\n",
    "deepseek-v3": "Don|'t| |123|45|  | x|=|é|!\n\n", "deepseek-llm": "Don|'|t| |12345|  | x|=|é|!|\n|\n",
    "deepseek-coder": "Don|'|t| |1|2|3|4|5|  | x|=|é|!|\n|\n", "tekken": "Don|'t| |1|2|3|4|5|  | x|=é|!\n\n",
    "gpt-4o": "Don't| |123|45|  | x|=é|!\n\n", "bloom": "Don't| 12345|  | x=é|!\n\n",
    "qwen35": "Don|'t| |1|2|3|4|5|  | x|=é|!\n\n", "kimi-k2": "Don't| |123|45|  | x|=é|!\n\n",
}


@pytest.mark.parametrize("name", SPLITS)
def test_how_families_cut_words(name: str) -> None:
    from tokenizers import Tokenizer as Library

    document = read(bpe_metadata(*small_bpe(), name)).files["tokenizer.json"]
    library, text = Library.from_buffer(document), "Don't 12345   x=é!\n\n"
    assert library.pre_tokenizer is not None
    parts = [text[a:b] for _, (a, b) in library.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(parts) == SPLITS[name]


def test_kimi_cuts_before_and_after_han_characters() -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_buffer(read(bpe_metadata(*small_bpe(), "kimi-k2")).files["tokenizer.json"])
    text = "\u4f60\u597dworld \u4e16HelloWorld, \u30ab\u30bf Ab\u4f60c"
    assert library.pre_tokenizer is not None
    assert [text[a:b] for _, (a, b) in library.pre_tokenizer.pre_tokenize_str(text)] == [
        "\u4f60\u597d", "world", " ", "\u4e16", "Hello", "World", ",", " \u30ab\u30bf", " Ab", "\u4f60", "c"]


@pytest.mark.slow
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
    from edgeinfer.converters.gguf.words import WORDS

    vocab, merges = small_bpe()
    for name in WORDS:
        if name != "gemma4":
            tokenizer = opened(bpe_metadata(vocab, merges, name), tmp_path)
            assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS), name
    assert len(WORDS) > 60


@pytest.mark.parametrize(("name", "near"), [("llama4-bpe", "llama-bpe"), ("Qwen2", "qwen2"), ("x", "llama-bpe, qwen2")])
def test_unknown_names_are_refused(name: str, near: str) -> None:
    with pytest.raises(TokenizerError, match=rf"m\.gguf has the pre-tokenizer '{name}' .*similar names are .*{near}"):
        read(bpe_metadata(*small_bpe(), name))


def test_the_beginning_is_presumed_by_the_name(tmp_path: Path) -> None:
    more = {"bos_token_id": 300, "eos_token_id": 301}
    for name, first in (("llama-bpe", [300]), ("qwen2", [])):
        tokenizer = opened(bpe_metadata(*small_bpe(), name, ["<s>", "<e>"], **more), tmp_path)
        assert tokenizer.encode("a")[:-1] == first
        assert tokenizer.encode("a", add_bos=True)[0] == 300
    assert opened(bpe_metadata(*small_bpe(), "llama-bpe"), tmp_path).encode("a")[:-1] == []
    found = read(bpe_metadata(*small_bpe(), "qwen2", add_bos_token=True))
    assert found.remarks == ("m.gguf asks for a bos token around texts but names none; none is added.",)
    found = read({key: value for key, value in bpe_metadata(*small_bpe(), "").items() if not key.endswith(".pre")})
    assert found.remarks[0].startswith("m.gguf does not say how text is split into words (tokenizer.ggml.pre)")


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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "rwkv"}, r"a tokenizer of the kind 'rwkv' \(tokenizer.ggml.model\).* known are gpt2, llama"),
        ({"model": ["x"]}, r"a tokenizer of the kind \['x'\]"),
        ({"tokens": []}, r"it has no tokens \(tokenizer.ggml.tokens\); download the file again"),
        ({"tokens": None}, "it has no tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is a str instead of an array"),
        ({"tokens": range(5)}, "tokenizer.ggml.tokens is a range instead of an array"),
        ({"tokens": ["a", 7]}, "token 1 is 7, which is not valid UTF-8"),
        ({"tokens": ["a", b"\xff"]}, r"token 1 is b'\\xff', which is not valid UTF-8"),
        ({"tokens": ["a", "b", "a"]}, "it has the token 'a' twice, as 0 and as 2"),
        ({"token_type": [1, 1]}, "it has 3 tokens but 2 types of tokens"),
        ({"token_type": [1, 1, 7]}, "token 2 has the type 7, but types are 0 to 6"),
        ({"token_type": [1, 1, [1]]}, r"token 2 has the type \[1\]"),
        ({"merges": None}, r"m.gguf has a BPE vocabulary but no merges \(tokenizer.ggml.merges\)"),
        ({"merges": ["a b", "ab"]}, "merge 1 is 'ab', which is not a pair of pieces"),
        ({"merges": ["a b", 5]}, "merge 1 is 5, which is not a pair of pieces"),
        ({"merges": ["b a"]}, r"merge 0 \('b a'\) needs the piece 'ba', which is not a token"),
        ({"bos_token_id": 3}, "tokenizer.ggml.bos_token_id is 3, but its ids are 0 to 2"),
        ({"eos_token_id": -2}, "tokenizer.ggml.eos_token_id is -2"),
        ({"eot_token_id": "x"}, "tokenizer.ggml.eot_token_id is 'x'"),
        ({"eos_token_ids": 1}, "tokenizer.ggml.eos_token_ids is a int instead of an array"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes' instead of true or false"),
        ({"tokens": ["a", "b", "ab\ud800"], "merges": []}, r"token 2 is 'ab\\ud800', which is not valid UTF-8"),
        ({"eos_token_id": np.array([1, 2])}, r"tokenizer.ggml.eos_token_id is array\(\[1, 2\]\)"),
        ({"add_eos_token": np.array([1, 2])}, r"tokenizer.ggml.add_eos_token is array\(\[1, 2\]\) instead"),
        ({"model": "llama"}, "it has no token for unknown text"),
        ({"model": "llama", "unknown_token_id": 0}, r"it has no scores \(tokenizer.ggml.scores\)"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0]}, "it has 3 tokens but 1 scores"),
        ({"model": "t5", "unknown_token_id": 0, "scores": [0.0, 1.0, np.nan]}, "the score of token 2 is nan"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0, 1.0, "x"]}, "its scores are not numbers"),
        ({"model": "llama", "unknown_token_id": 0, "scores": ["0", "1", "2"]}, "its scores are not numbers"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0, 1.0, 1e300]}, r"the score of token 2 is 1e\+300"),
        ({"merges": ["#version a"]}, r"merge 0 \('#version a'\) needs the piece '#version', which is not a token"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0] * 3, "token_type": [1, 6, 1]},
         r"its byte tokens are not the 256 that there are \('<0x00>'\)"),
        ({"model": "t5", "unknown_token_id": 0, "scores": [0.0] * 3, "precompiled_charsmap": ["x"]},
         "is not an array of bytes"),
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
