"""Vocabularies as GGUF metadata: read from files, made of other forms, trained small; and llama.cpp's cases of them."""

from __future__ import annotations

import base64
import io
import json
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeinfer.converters import GgufTokenizer, read_gguf_tokenizer
from edgeinfer.text import Tokenizer
from tests.helpers.checkpoints import SENTENCES

P = "tokenizer.ggml."
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def cases(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    """The cases of llama.cpp's vocabulary tests: texts and ids."""
    inputs, outputs = (folder / f"ggml-vocab-{name}.gguf.{end}" for end in ("inp", "out"))
    texts = inputs.read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    ids = [[int(word) for word in line.split()] for line in outputs.read_text().split("\n")]
    assert len(texts) <= len(ids) <= len(texts) + 2
    return list(zip(texts, ids, strict=False))


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file that is known to be whole."""
    data, at = path.read_bytes(), 24

    def number(form: str) -> Any:
        nonlocal at
        at += struct.calcsize(form)
        return struct.unpack_from(f"<{form}", data, at - struct.calcsize(form))[0]

    def text() -> str:
        nonlocal at
        length = number("Q")
        at += length
        return data[at - length : at].decode()

    def value(kind: int) -> Any:
        nonlocal at
        if kind == 8:
            return text()
        if kind != 9:
            return number(_SCALARS[kind])
        kind, count = number("I"), number("Q")
        if kind == 8:
            return [text() for _ in range(count)]
        size = count * struct.calcsize(_SCALARS[kind])
        at += size
        return array(_SCALARS[kind], data[at - size : at])

    assert data[:4] == b"GGUF"
    return {text(): value(number("I")) for _ in range(struct.unpack_from("<Q", data, 16)[0])}


def bpe_metadata(
    vocab: dict[str, int], merges: Sequence[tuple[str, str]], pre: str, special: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """Metadata of a byte-level BPE vocabulary; `special` are further control tokens."""
    tokens = [*sorted(vocab, key=vocab.__getitem__), *special]
    types = [1] * len(vocab) + [3] * len(special)
    return {P + "model": "gpt2", P + "pre": pre, P + "tokens": tokens, P + "token_type": types,
            P + "merges": [" ".join(pair) for pair in merges], **{P + key: item for key, item in more.items()}}


def llama3_ranks(path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a file of tiktoken ranks, as converters make them."""
    lines = path.read_bytes().split(b"\n")
    ranks = {base64.b64decode(word): int(rank) for word, rank in (line.split() for line in lines if line)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    text = {word: "".join(names[byte] for byte in word) for word in ranks}
    merges = []
    for word in sorted(ranks, key=ranks.__getitem__):
        splits = [(word[:i], word[i:]) for i in range(1, len(word)) if word[:i] in ranks and word[i:] in ranks]
        merges += [(text[a], text[b]) for a, b in sorted(splits, key=lambda ab: (ranks[ab[0]], ranks[ab[1]]))]
    return {text[w]: r for w, r in ranks.items()}, merges


def qwen2_files(folder: Path) -> dict[str, Any]:
    """Metadata of a folder with vocab.json, merges.txt and tokenizer_config.json."""
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = [token["content"] for _, token in sorted(settings["added_tokens_decoder"].items(), key=lambda x: int(x[0]))]
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    return bpe_metadata(vocab, merges, "qwen2", added, eos_token_id=len(vocab))  # type: ignore[arg-type]


def small_bpe(texts: Sequence[str] = SENTENCES, size: int = 300) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level BPE vocabulary trained on a few texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    assert len(model["vocab"]) == size
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def small_sentencepiece(**options: Any) -> tuple[Any, bytes]:
    """A SentencePiece model trained on a few sentences: its processor and the file."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    writer = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5), model_writer=writer, hard_vocab_limit=False, minloglevel=2, **options)
    return SentencePieceProcessor(model_proto=writer.getvalue()), writer.getvalue()


def sentencepiece_metadata(
    processor: Any, model: str, user_defined: Sequence[int] = (), **more: Any
) -> dict[str, Any]:
    """Metadata of a SentencePiece model, as converters write them: user-defined tokens have spaces for marks."""
    p, pieces = processor, range(processor.get_piece_size())

    def kind(i: int) -> int:
        flags = (p.is_unknown(i), p.is_control(i), i in user_defined, p.is_unused(i), p.is_byte(i))
        return 2 + flags.index(True) if any(flags) else 1

    texts = [p.id_to_piece(i).replace(*("\u2581", " ") if kind(i) == 4 else ("", "")) for i in pieces]
    return {
        P + "model": model, P + "tokens": texts, P + "token_type": [kind(i) for i in pieces],
        P + "scores": [p.get_score(i) for i in pieces],
        P + "unknown_token_id": p.unk_id(), P + "eos_token_id": p.eos_id(),
        **{P + key: item for key, item in more.items()}}


TEXTS = [
    "", " ", "  ", " a", *SENTENCES, "two  spaces\n\n\nlines\t tab \r\n", "日本語のテキスト。",
    "🦙🚀 👨‍👩‍👧", "naïve Ünï",
    "12345 l'été 'LL we'Ve", "e\u0301 combining", "\x00\x01", "<s> </s> <unk>", "x=[1,22,333]; // №½",
]  # fmt: skip


def read(metadata: dict[str, Any]) -> GgufTokenizer:
    found = read_gguf_tokenizer(metadata, "m.gguf")
    assert found is not None
    return found


def opened(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer as a bundle's, behind which nothing knows of GGUF."""
    for name, content in read(metadata).files.items():
        (folder / name).write_bytes(content)
    return Tokenizer.open(folder)
