"""A tokenizer.model from a GGUF file's vocabulary: pieces with scores, as SentencePiece itself would have stored them.

Such vocabularies come from SentencePiece models, so SentencePiece reads them at once and merges by score as it did when
the model was trained; a tokenizer.json would need every split of every piece as a merge.

The file is a protocol buffer, written here by hand: sentencepiece_model.proto of google/sentencepiece has the numbers
of the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.graph import gguf_of

from .vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, damaged, flag, items, scores_of

_UNIGRAM, _BPE = 1, 2
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _VOCAB_SIZE, _BYTE_FALLBACK = 3, 4, 35
_IDS, _PIECE_NAMES = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}, {"unk": 45, "bos": 46, "eos": 47, "pad": 48}
_NAME, _CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE_SPACES = 1, 2, 3, 4, 5
_NOWHERE = "<no such token>"
_LEAF, _HAS_LEAF = 1 << 31, 1 << 8


def sentencepiece_model(metadata: Mapping[str, Any], vocabulary: Vocabulary, unigram: bool) -> bytes:
    """Return the tokenizer.model of a vocabulary with scores; raises `TokenizerError` if it is damaged."""
    source, named = vocabulary.source, vocabulary.named
    if "unk" not in named:
        raise damaged(source, "it has no token for unknown text")
    scores = scores_of(metadata, len(vocabulary.tokens), source)
    byte_fallback = _byte_fallback(vocabulary)
    trainer = _number(_MODEL_TYPE, _UNIGRAM if unigram else _BPE) + _number(_VOCAB_SIZE, len(vocabulary.tokens))
    trainer += _number(_BYTE_FALLBACK, int(byte_fallback))
    for role, field in _IDS.items():
        trainer += _number(field, named.get(role, -1))
        trainer += _bytes(_PIECE_NAMES[role], (vocabulary.text(role) or _NOWHERE).encode())
    charsmap = _charsmap(metadata, source) if unigram else b""
    normalizer = _bytes(_NAME, b"user_defined" if charsmap else b"identity") + _bytes(_CHARSMAP, charsmap)
    normalizer += _number(_DUMMY_PREFIX, int(flag(metadata, "add_space_prefix", True, source)))
    normalizer += _number(_EXTRA_SPACES, int(flag(metadata, "remove_extra_whitespaces", False, source)))
    normalizer += _number(_ESCAPE_SPACES, 1)
    return b"".join((*_pieces(vocabulary, scores), _bytes(_TRAINER, trainer), _bytes(_NORMALIZER, normalizer)))


def added_tokens(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    """Return the tokens that are cut out of a text before SentencePiece sees it, as tokenizer_config.json has them.

    Control tokens are, without being named here; the unknown one is where special tokens of a text count as such.

    User-defined pieces are known to SentencePiece too; but where a text begins with a space of the tokenizer's own, so
    does the text after such a token, and that only a cut does.
    """
    unknown = vocabulary.named["unk"]
    added: dict[str, dict[str, Any]] = {str(unknown): {"content": vocabulary.tokens[unknown], "special": True}}
    cut = flag(metadata, "add_space_prefix", True, vocabulary.source)
    added |= {str(i): {"content": text, "special": False} for i, text in vocabulary.of_type(USER_DEFINED)
              if cut or " " in _marked(text, vocabulary)}
    gguf = gguf_of(metadata.get("general.architecture"))
    if gguf and gguf.strips:
        kept = {vocabulary.text("unk"), vocabulary.text("bos"), "<|endoftext|>"}
        for i, text in vocabulary.of_type(CONTROL, USER_DEFINED):
            added[str(i)] = {"content": text, "special": vocabulary.types[i] == CONTROL, "rstrip": text not in kept}
    return added


def _pieces(vocabulary: Vocabulary, scores: NDArray[np.float32]) -> Iterator[bytes]:
    """Yield the stored pieces."""
    stored, unknown = scores.tobytes(), vocabulary.named["unk"]
    kinds = [bytes((0x18, kind)) for kind in range(7)]
    for i, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        data = (_marked(text, vocabulary) if kind == USER_DEFINED else text).encode()
        body = b"\x0a" + _varint(len(data)) + data + b"\x15" + stored[4 * i : 4 * i + 4]
        body += kinds[UNKNOWN if i == unknown else kind]
        yield b"\x0a" + _varint(len(body)) + body


def _marked(text: str, vocabulary: Vocabulary) -> str:
    """Return a user-defined piece with its spaces as marks, as texts have them there, unless that is another piece."""
    marked = text.replace(" ", "\u2581")
    return text if marked in vocabulary.ids else marked


def _byte_fallback(vocabulary: Vocabulary) -> bool:
    """Return whether bytes are tokens; then all of them are."""
    pieces = {text for _, text in vocabulary.of_type(BYTE)}
    if pieces and pieces != (wanted := {f"<0x{byte:02X}>" for byte in range(256)}):
        missing = sorted(wanted - pieces) or sorted(pieces - wanted)
        raise damaged(vocabulary.source, f"its byte tokens are not the 256 that there are ({missing[0]!r:.60})")
    return bool(pieces)


def _charsmap(metadata: Mapping[str, Any], source: str) -> bytes:
    """Return the compiled table of replacements, in which no way may lead out of it: SentencePiece trusts it.

    It is a double array over the bytes of texts (Darts-clone): 4 bytes of length, units of 32 bits, then texts that end
    with a zero byte. A unit has a base from which its children are found by the next byte; a leaf says where the
    replacement begins.
    """
    values = items(metadata, "precompiled_charsmap", source)
    if not values:
        return b""
    try:
        data = np.asarray(values).astype(np.uint8).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise damaged(source, "its table of replacements (precompiled_charsmap) is not an array of bytes") from None
    length = int.from_bytes(data[:4], "little")
    if not 0 < length < len(data) - 4 or length % 4 or data[-1] or not _inside(
            np.frombuffer(data, "<u4", length // 4, 4).astype(np.int64), len(data) - 4 - length):
        raise damaged(source, "its table of replacements (precompiled_charsmap) points outside of itself")
    return data


def _inside(units: NDArray[np.int64], n_texts: int) -> bool:
    """Return whether no unit of a double array has children outside of it, and no leaf a text outside of the texts."""
    base = np.arange(units.size) ^ ((units >> 10) << ((units & (1 << 9)) >> 6))
    inner = (units & _LEAF) == 0
    if (base[inner] | 0xFF).max(initial=0) >= units.size:
        return False
    leaves = units[base[inner & ((units & _HAS_LEAF) != 0)]]
    return bool((leaves & (_LEAF - 1)).max(initial=0) < n_texts)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    return bytes((value & 0x7F | 0x80,)) + _varint(value >> 7)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & (1 << 64) - 1)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


