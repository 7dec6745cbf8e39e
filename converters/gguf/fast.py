"""A tokenizer.json from a GGUF file's vocabulary: byte-level BPE, BPE over marked spaces (Gemma 4), and WordPiece."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import TokenizerError
from edgeinfer.graph import PreTokenizer

from .vocabulary import CONTROL, PREFIX, UNUSED, USER_DEFINED, Vocabulary, damaged, flag, items

_MARK = "\u2581"
_LONGEST_WORD = 100
"""Characters from which on WordPiece takes a word for unknown, in all of BERT's tokenizers."""


def bpe_json(metadata: Mapping[str, Any], vocabulary: Vocabulary, words: PreTokenizer, add_bos: bool, add_eos: bool
             ) -> bytes:
    """Return the tokenizer.json of a BPE vocabulary; raises `TokenizerError` if merges and tokens disagree."""
    vocab = {text: i for text, i in vocabulary.ids.items() if vocabulary.types[i] != UNUSED}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": not words.byte_level,
        "ignore_merges": words.ignore_merges, "vocab": vocab, "merges": _merges(metadata, vocab, vocabulary.source),
    }
    normalizer, decoder = None, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    if not words.byte_level:
        model |= {"unk_token": vocabulary.text("unk"), "fuse_unk": True}
        normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
        decoder = {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": _MARK}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]}
    front = [vocabulary.named["bos"]] if add_bos else []
    back = [vocabulary.named["eos"]] if add_eos else []
    return _document(vocabulary, model, normalizer, words.steps(), decoder, front, back)


def wordpiece_json(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> bytes:
    """Return the tokenizer.json of a WordPiece vocabulary.

    GGUF marks the pieces that begin a word, where BERT marks those that continue; so does this file, which is why the
    words get their mark before they are looked up.
    """
    named = vocabulary.named
    if "unk" not in named:
        raise damaged(vocabulary.source, "it is WordPiece and has no token for unknown words")
    lowercase = flag(metadata, "normalizer.lowercase", True, vocabulary.source)
    model = {"type": "WordPiece", "unk_token": vocabulary.text("unk"), "continuing_subword_prefix": "",
             "max_input_chars_per_word": _LONGEST_WORD, "vocab": vocabulary.ids}
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": lowercase,
                  "strip_accents": flag(metadata, "normalizer.strip_accents", lowercase, vocabulary.source)}
    marks = {"type": "Metaspace", "replacement": _MARK, "prepend_scheme": "always", "split": False}
    end = named.get("sep", named.get("eos"))
    return _document(vocabulary, model, normalizer, [{"type": "BertPreTokenizer"}, marks], marks,
                     [named["bos"]] if "bos" in named else [], [] if end is None else [end])


def _document(
    vocabulary: Vocabulary, model: dict[str, Any], normalizer: dict[str, Any] | None, steps: list[dict[str, Any]],
    decoder: dict[str, Any], front: list[int], back: list[int],
) -> bytes:
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": vocabulary.types[i] == CONTROL}
        for i, text in vocabulary.of_type(CONTROL, USER_DEFINED)]
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if steps else None,
        "post_processor": _template(vocabulary, front, back), "decoder": decoder, "model": model}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _template(vocabulary: Vocabulary, front: list[int], back: list[int]) -> dict[str, Any] | None:
    """Return the post-processor that puts tokens around a text."""
    if not front and not back:
        return None

    def special(token_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": 0}}

    around = {vocabulary.tokens[i]: {"id": vocabulary.tokens[i], "ids": [i], "tokens": [vocabulary.tokens[i]]}
              for i in (*front, *back)}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    before, after = [special(i) for i in front], [special(i) for i in back]
    return {"type": "TemplateProcessing", "single": [*before, texts[0], *after],
            "pair": [*before, texts[0], *after, texts[1], *after], "special_tokens": around}


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], source: str) -> list[str] | list[tuple[str, str]]:
    """Return the merges as lines of two pieces, or as pairs where lines would not tell the pieces apart."""
    lines = items(metadata, "merges", source)
    if lines is None:
        raise TokenizerError(f"{source} has a BPE vocabulary but no merges ({PREFIX}merges), which say how its pieces "
                             "are made; use a file that a newer converter wrote.")
    return lines if _are_lines(lines, vocab) else [_pair(line, rank, vocab, source) for rank, line in enumerate(lines)]


def _are_lines(lines: list[Any], vocab: Mapping[str, int]) -> bool:
    """Return whether each is two tokens that make a third, with the only space between; there are some 300,000."""
    for line in lines:
        if type(line) is not str or line.startswith("#version"):  # which begins a file of merges: passed over there
            return False
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab or " " in right:
            return False
    return True


def _pair(line: Any, rank: int, vocab: Mapping[str, int], source: str) -> tuple[str, str]:
    at = line.find(" ", 1) if isinstance(line, str) else -1
    if at < 0:
        raise damaged(source, f"merge {rank} is {line!r:.60}, which is not a pair of pieces")
    left, right = line[:at], line[at + 1 :]
    missing = next((piece for piece in (left, right, left + right) if piece not in vocab), None)
    if missing is not None:
        raise damaged(source, f"merge {rank} ({line!r:.60}) needs the piece {missing!r:.60}, which is not a token")
    return left, right
