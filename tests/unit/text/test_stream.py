"""Streaming detokenisation: the pieces join to the decoded text and no piece splits a character."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeinfer.errors import TokenizerError
from edgeinfer.text import StreamDecoder, Tokenizer

Shared = Callable[[str], Path]
SAMPLES = [
    "日本語のテキスト、ひらがな。",
    "🦙👨‍👩‍👧‍👦🇯🇵 emoji",
    " leading space",
    "plain text.",
    "naïve Ünï ½ €",
    "\n\n \t",
]


def save_llama_like(directory: Path, decoder_steps: list[object] | None = None) -> Tokenizer:
    """A tokenizer of characters and byte-fallback pieces, with a leading space as Llama 2's."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers

    words = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581\u2581",
        "a",
        "b",
        "\u2581a",
        "é",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("\u2581", "\u2581"), ("\u2581", "a")]
    library = Library(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    library.add_special_tokens(["<s>"])
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(decoder_steps or steps)
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer.open(directory)


def save_byte_level(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|日本 end|>"])
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer.open(directory)


@pytest.fixture(params=["llama", "byte_level", "fables-5m-relu", "stories260K-hf", "llama2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param in ("llama", "byte_level"):
        return save_llama_like(tmp_path) if request.param == "llama" else save_byte_level(tmp_path)
    find: Shared = request.getfixturevalue("shared_data")
    return Tokenizer.open(
        find(f"tokenizers/{request.param}" if request.param == "llama2" else f"models/{request.param}")
    )


def stream_all(stream: StreamDecoder, ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


def test_pieces_of_text_join_to_it_without_broken_characters(tokenizer: Tokenizer) -> None:
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_bos=False, leading_space=True)
        pieces = stream_all(tokenizer.stream(), ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert pieces[-1] == "" and not any("\ufffd" in piece for piece in pieces)


def test_any_ids_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    """Random ids make broken characters, lone bytes, special tokens and many leading spaces."""
    rng = random.Random(1)
    space = tokenizer.encode("  ", add_bos=False, leading_space=True)
    for _ in range(300):
        ids = [rng.randrange(min(tokenizer.vocab_size + 2, 600)) for _ in range(rng.randrange(1, 40))]
        ids = rng.choice([[], space, space * 2]) + ids
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip_special=skip)
            assert "".join(stream_all(tokenizer.stream(skip_special=skip), ids)) == whole


def test_random_bytes_stream_as_python_decodes_them(tmp_path: Path) -> None:
    tokenizer = save_llama_like(tmp_path)
    rng = random.Random(2)
    for _ in range(500):
        data = bytes(rng.choice([rng.randrange(256), 0xE3, 0x81, 0xF0, 0x9F]) for _ in range(rng.randrange(12)))
        pieces = stream_all(tokenizer.stream(), [2 + byte for byte in data])
        assert "".join(pieces) == data.decode("utf-8", "replace").removeprefix(" ")


def test_a_continuation_joins_its_prompt(tokenizer: Tokenizer) -> None:
    text = "a b  日本 語🦙 c d"
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        prompt, rest = ids[:cut], ids[cut:]
        before = "".join(stream_all(tokenizer.stream(), prompt)[:-1])  # a character cut in two goes to the rest
        assert before + "".join(stream_all(tokenizer.stream(prompt), rest)) == text


def test_broken_characters_show_as_soon_as_they_cannot_become_valid(tmp_path: Path) -> None:
    tokenizer = save_llama_like(tmp_path)
    byte = {value: 2 + value for value in range(256)}
    stream = tokenizer.stream()
    assert [stream.push(byte[value]) for value in (0xE6, 0x97, 0xA5)] == ["", "", "日"]
    assert [stream.push(byte[value]) for value in (0xE6, 0x97, 0x41)] == ["", "", "\ufffdA"]
    assert stream.push(byte[0xFF]) == "\ufffd"
    assert (stream.push(byte[0xF0]), stream.flush(), stream.flush()) == ("", "\ufffd", "")
    assert stream.push(byte[0x42]) == "B"


def test_one_leading_space_is_the_tokenizers_own(tmp_path: Path) -> None:
    tokenizer = save_llama_like(tmp_path)
    for text in ("a", " a", "  a", " ", "", "   "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([1, *ids]) == text
    one, two, a = 258, 259, 262
    assert tokenizer.token_text(one) + tokenizer.token_text(two) + tokenizer.token_text(a) == "    a"
    assert tokenizer.decode([one, a]) == " a" and tokenizer.decode([two, a]) == "  a"
    assert tokenizer.stream([a]).push(a) == " a"


def test_added_tokens_of_byte_level_vocabularies_are_plain_text(tmp_path: Path) -> None:
    tokenizer = save_byte_level(tmp_path)
    assert tokenizer.decode([256], skip_special=False) == "<|日本 end|>"
    assert tokenizer.encode("<|日本 end|>", parse_special=True) == [256]


def test_metaspace_decoders_are_read(tmp_path: Path) -> None:
    from tokenizers import decoders

    tokenizer = save_llama_like(tmp_path, [decoders.Metaspace("\u2581", "always")])
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"
    tokenizer = save_llama_like(tmp_path, [decoders.Metaspace("\u2581", "never")])
    assert tokenizer.decode(tokenizer.encode("a a")) == " a a"


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    from tokenizers import decoders

    with pytest.raises(TokenizerError, match="decodes text with 'WordPiece', which edgeinfer does not know; it knows"):
        save_llama_like(tmp_path, [decoders.WordPiece()])
    with pytest.raises(TokenizerError, match="decodes text with 'Strip'"):
        save_llama_like(tmp_path, [decoders.Strip(" ", 0, 1)])


@pytest.mark.parametrize("n_spaces", [0, 1, 3])
def test_the_end_of_a_prompt_says_all_that_its_tokens_do(n_spaces: int) -> None:
    """Of a long prompt only the last bytes are read: also invalid ones, and tokens without any."""
    rng = random.Random(n_spaces)
    characters = [b"a", b" ", "\u00e9".encode(), "\u20ac".encode(), "\U0001f600".encode(), b"\xff", b""]
    for _ in range(2000):
        text = b"".join(rng.choices(characters, k=rng.randrange(12)))
        table, ids = [b""], list[int]()
        while text:
            n = rng.randrange(5)
            table.append(text[:n])
            ids.append(len(table) - 1)
            text = text[n:]
        rest = [len(table) + i for i in range(4)]
        table += [rng.choice(characters)[rng.randrange(3):] for _ in rest]
        whole = StreamDecoder(table.__getitem__, n_spaces)
        for token in ids:
            whole.push(token)
        begun = StreamDecoder(table.__getitem__, n_spaces, ids)
        assert stream_all(begun, rest) == stream_all(whole, rest)
